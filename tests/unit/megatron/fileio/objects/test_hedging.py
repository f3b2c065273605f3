"""Second requests for ranges that do not come, through a proxy that lets requests hang."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from megatron.fileio.objects.errors import ObjectStoreError
from megatron.fileio.objects.hedging import Destination, GivenUpError, Hedging
from megatron.fileio.objects.s3 import Bucket
from tests.object_storage import BUCKET, FaultProxy, Request, Server, environment_of, serving

pytestmark = pytest.mark.slow  # an S3 server is started

CONTENT = os.urandom(1 << 16)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


def read(bucket: Bucket, etag: str, start: int = 0) -> bytes:
    into = bytearray(len(CONTENT) - start)
    bucket.read_range_hedged("h/file", etag, start, memoryview(into))
    return bytes(into)


def test_a_request_that_hangs_is_not_waited_for(server: Server) -> None:
    hung: list[Request] = []

    def fault(request: Request) -> str | None:
        if request.method == "GET" and len(hung) < hang:
            hung.append(request)
            return "delay"
        return None

    hang = 0
    with FaultProxy(server, fault).running() as proxy, environment_of(proxy.environment()):
        bucket = Bucket(BUCKET)  # an attempt may take 30 s
        etag = bucket.put("h/file", CONTENT)
        for _ in range(30):
            assert read(bucket, etag) == CONTENT
        hang, before = 1, bucket.hedging.hedged
        assert read(bucket, etag, 5) == CONTENT[5:]
        assert len(hung) == 1 and bucket.hedging.hedged > before and bucket.traffic.retries == 0


def test_both_fail(server: Server) -> None:
    with FaultProxy(server).running() as proxy, environment_of(proxy.environment()):
        bucket = Bucket(BUCKET)
        etag = bucket.put("h/file", CONTENT)
        for _ in range(30):
            read(bucket, etag)
        hurried = bucket.with_deadline(4)
        hurried.hedging = bucket.hedging
        proxy.fault = lambda request: "503"
        with pytest.raises(ObjectStoreError, match="h/file: reading bytes 0 to .*'slow down'"):
            read(hurried, etag)


def test_nothing_is_written_late() -> None:
    """The first request, which has lost, goes on when its memory is somebody else's."""
    hedging, go_on, refused = Hedging(), threading.Event(), threading.Event()
    calls: list[Destination] = []

    def request(destination: Destination) -> None:
        calls.append(destination)
        if len(calls) == late:
            go_on.wait()
            try:
                destination.put(0, b"first")
            except GivenUpError:
                refused.set()
                raise
        destination.put(0, b"later")

    late, into = 31, bytearray(5)
    for _ in range(30):
        hedging.fill(memoryview(into), request)
    hedging.fill(memoryview(into), request)
    assert into == b"later" and len(calls) > late and hedging.hedged >= 1
    into[:] = b"other"
    go_on.set()
    assert refused.wait(300) and into == b"other"
