"""The client against a real server, straight and through a proxy that drops, delays, refuses and falsifies."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from botocore.loaders import JSONFileLoader

from megatron.fileio.checksums import crc32
from megatron.fileio.files import DamagedFileError
from megatron.fileio.objects.errors import ObjectMissingError, ObjectStoreError
from megatron.fileio.objects.parts import MIB, download_requests, range_bytes, range_requests, upload_requests
from megatron.fileio.objects.s3 import Bucket
from tests.faults.injection import Fault, Traced, run_traced
from tests.object_storage import BUCKET, FaultProxy, ImpatientBucket, Request, Server, Session, environment_of, serving
from tools.restart_drill.storage_proxy import BUCKET_REGION

pytestmark = pytest.mark.slow  # an S3 server is started

LARGE = os.urandom(3 * MIB) * 6  # three parts


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


@pytest.fixture
def bucket(server: Server) -> Iterator[Bucket]:
    with environment_of(server.environment()):
        yield Bucket(BUCKET, threads=2)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(LARGE)
    return path


def once(method: str, part: str, what: str, times: int = 1) -> Callable[[Request], str | None]:
    """`what` befalls the first `times` requests of that method whose path has `part` in it."""
    left = iter([None] * times)
    lock = threading.Lock()

    def fault(request: Request) -> str | None:
        with lock:
            if request.method == method and part in request.path and next(left, what) is None:
                return what
        return None

    return fault


def test_botocores_descriptions_are_read_once(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them takes 0.15 s of a processor, and a start makes several clients."""
    read: list[str] = []
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda self, path: read.append(path))
    assert list(Bucket(bucket.name).with_deadline(60.0).list("none/")) == [] == read


@pytest.mark.parametrize("effect", ["ECONNRESET", "ETIMEDOUT", "short"])
def test_a_connection_that_is_lost_within_an_answer_is_another_attempt(server: Server, effect: str) -> None:
    content = LARGE[:MIB]
    with environment_of(server.environment()):
        Bucket(BUCKET).create("lost/one", content)
        unused = Bucket(BUCKET)  # its connections are made by those that are forked

    def get() -> tuple[bool, int]:
        return unused.get("lost/one", MIB)[0] == content, unused.traffic.retries

    def run(fault: Fault | None) -> Traced:
        return run_traced(get, lambda path: False, fault, sockets=True)

    received = run(None).calls.count("receive")
    assert received > 3
    retried = 0
    for number in range(1, received + 1):
        found = run(Fault("receive", number, effect))
        assert found.raised is None, f"{number}, {found.hit}: {found.raised}"
        assert found.result[0]
        retried += found.result[1]
    assert (retried > 0) == (effect != "short")


def test_conditional_writes(bucket: Bucket) -> None:
    first = bucket.create("c/one", b"first")
    assert first and bucket.create("c/one", b"second") is None and bucket.get("c/one", 10) == (b"first", first)
    assert bucket.create("c/one", b"first") == first  # as after a request whose answer was lost
    second = bucket.replace("c/one", b"second", first)
    assert second and bucket.replace("c/one", b"third", first) is None and bucket.get("c/one", 10)[0] == b"second"
    assert bucket.replace("c/none", b"x", first) is None
    with pytest.raises(ObjectMissingError, match=f"s3://{BUCKET}/c/none is not there"):
        bucket.get("c/none", 10)
    with pytest.raises(ObjectStoreError, match="has 6 bytes, more than 5"):
        bucket.get("c/one", 5)


@pytest.mark.parametrize("content", [b"", b"small", LARGE], ids=["empty", "small", "parts"])
def test_there_and_back(bucket: Bucket, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "from").write_bytes(content)
    uploaded = bucket.upload_file(tmp_path / "from", "f/file")
    assert bucket.traffic.requests == upload_requests(len(content))  # as ckpt-plan counts them
    assert uploaded.crc32 == crc32(content) and bucket.head("f/file").num_bytes == len(content)
    before = bucket.traffic.requests
    assert bucket.download_file("f/file", tmp_path / "to", len(content), uploaded.etag) == uploaded.crc32
    assert bucket.traffic.requests - before == download_requests(len(content))
    assert (tmp_path / "to").read_bytes() == content
    assert bucket.unfinished_uploads("f/") == []


@pytest.mark.usefixtures("bucket")
def test_more_keys_than_one_answer_holds() -> None:
    bucket, keys = Bucket(BUCKET, listed=2), [f"many/{i}" for i in range(5)]
    for key in keys:
        bucket.put(key, b"")
    assert [info.key for info in bucket.list("many/")] == keys
    bucket.delete(keys)
    assert list(bucket.list("many/")) == []


def test_an_object_that_was_replaced_or_removed_is_damage(bucket: Bucket, large: Path, tmp_path: Path) -> None:
    uploaded = bucket.upload_file(large, "r/file")
    bucket.put("r/file", bytes(len(LARGE)))
    with pytest.raises(DamagedFileError, match="r/file was replaced"):
        bucket.download_file("r/file", tmp_path / "a", len(LARGE), uploaded.etag)
    bucket.delete(["r/file"])
    with pytest.raises(DamagedFileError, match="r/file is missing"):
        bucket.download_file("r/file", tmp_path / "b", len(LARGE), uploaded.etag)


def test_a_long_range_goes_on_where_it_was_cut_off(server: Server) -> None:
    """The proxy cuts each answer in half; what is left of a range is asked for until that is less than a part."""
    content = os.urandom(40 * MIB)
    with FaultProxy(server).running() as proxy, environment_of(proxy.environment()):
        bucket = Bucket(BUCKET)
        etag = bucket.put("f/long", content)
        begun = len(proxy.seen)
        proxy.fault = lambda request: "truncate" if len(proxy.seen) - begun <= 3 else None
        into = bytearray(len(content) - 1)
        bucket.read_range("f/long", etag, 1, memoryview(into))
        assert into == content[1:]
        assert len(proxy.seen) - begun == 4
        assert bucket.traffic.retries == 1, "20 and 10 of 40 MiB were kept, 5 of 10 were not"


def test_ranges_are_long_where_there_are_many() -> None:
    sizes = (0, 1, 512 * MIB - 1, 512 * MIB, 1024 * MIB - 1, 1024 * MIB, 10**12)
    assert [range_bytes(size) // MIB for size in sizes] == [8, 8, 8, 16, 16, 32, 32]
    assert [range_requests(size) for size in sizes[:6]] == [0, 1, 64, 32, 64, 32]


@pytest.mark.parametrize(
    ("method", "part", "what"),
    [
        ("PUT", "partNumber=2", "drop"),
        ("PUT", "partNumber=2", "500"),
        ("PUT", "partNumber=2", "503"),
        ("POST", "uploads", "503"),
        ("POST", "uploadId", "500"),
        ("GET", "/f/", "drop"),
        ("GET", "/f/", "truncate"),
        ("GET", "/f/", "503"),
    ],
)
def test_what_passes_is_tried_again(
    server: Server, large: Path, tmp_path: Path, method: str, part: str, what: str
) -> None:
    with FaultProxy(server, once(method, part, what)).running() as proxy, environment_of(proxy.environment()):
        bucket = Bucket(BUCKET, threads=2)
        uploaded = bucket.upload_file(large, "f/tried")
        assert bucket.download_file("f/tried", tmp_path / "to", len(LARGE), uploaded.etag) == crc32(LARGE)
        assert bucket.traffic.retries == 1 and bucket.traffic.throttled == (what == "503")
        assert bucket.traffic.requests == len(proxy.seen)
        assert bucket.unfinished_uploads("f/") == []


def test_an_answer_that_was_lost_after_the_write(server: Server, large: Path) -> None:
    """The upload was finished, and the manifest written: the second request of each finds that out."""
    lost = once("POST", "uploadId", "answer")
    with FaultProxy(server, lost).running() as proxy, environment_of(proxy.environment()):
        bucket = Bucket(BUCKET)
        assert bucket.upload_file(large, "f/lost").crc32 == crc32(LARGE)
        proxy.fault = once("PUT", "f/manifest", "answer")
        assert bucket.create("f/manifest", b"mine") is not None
        assert bucket.traffic.retries == 2


@pytest.mark.parametrize(
    ("what", "wait_s", "told"),
    [
        ("delay", 2, "writing part 2 .* did not succeed within 2 s .*no answer from the store"),
        # An attempt that a slow machine cuts short is not answered; the first or another is.
        ("503", 5, r"writing part 2 .* within 5 s \(\d+ attempts, \d+ of them answered 'slow down'\): "),
        ("403", 120, "permission denied; the credentials need s3:GetObject"),
        ("etag", 120, "the store answered 400 InvalidPart"),
    ],
)
def test_what_does_not_pass_is_told_and_leaves_nothing(
    server: Server, bucket: Bucket, large: Path, what: str, wait_s: float, told: str
) -> None:
    def fault(request: Request) -> str | None:
        return what if request.method == "PUT" and "partNumber=2" in request.path else None

    proxy = FaultProxy(server, fault)
    refused = pytest.raises(ObjectStoreError, match=told)
    with proxy.running(), environment_of(proxy.environment()), refused as caught:
        ImpatientBucket(2, wait_s).upload_file(large, f"never/{what}")
    assert f"s3://{BUCKET}/never/{what}" in str(caught.value)
    assert bucket.unfinished_uploads("never/") == [] and list(bucket.list("never/")) == []


def test_a_store_that_says_to_slow_down_is_given_longer(server: Server) -> None:
    """It is there: where more hosts save than it takes requests of, some wait longer than for one that is away."""
    deadline_s, begun = 3.0, list[float]()

    def fault(request: Request) -> str | None:
        begun.append(time.monotonic())
        return "503" if begun[-1] - begun[0] < 1.1 * deadline_s else None

    with FaultProxy(server, fault).running() as proxy, environment_of(proxy.environment()):
        bucket = Bucket(BUCKET, deadline_s=deadline_s)
        bucket.put("slow/object", b"content")
        assert bucket.traffic.retries == bucket.traffic.throttled == len(proxy.seen) - 1 > 0
        begun.clear()
        with pytest.raises(ObjectStoreError, match="within 1 s"):
            bucket.with_deadline(1).put("slow/object", b"content")


def test_a_request_that_may_not_take_longer_does_not_where_the_bucket_is_as_impatient(server: Server) -> None:
    with FaultProxy(server, lambda request: "503").running() as proxy, environment_of(proxy.environment()):
        bucket = Bucket(BUCKET, deadline_s=1.0)
        with pytest.raises(ObjectStoreError, match=r"within 1 s \("):
            bucket.with_deadline(1.0).put("slow/object", b"content")
        with pytest.raises(ObjectStoreError, match=r"within 2 s \("):
            bucket.with_deadline(2.0).put("slow/object", b"content")
        assert bucket.with_deadline(4.0) is bucket and bucket.traffic.throttled == len(proxy.seen)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("403", "permission denied; the credentials need s3:GetObject"),
        ("expired", "the credentials have expired or are no more valid; renew them, and AWS_SESSION_TOKEN with them"),
        ("region", f"the bucket is in region {BUCKET_REGION}; set AWS_REGION to it"),
    ],
)
def test_what_the_store_refuses_at_the_start_is_told_at_once(server: Server, what: str, told: str) -> None:
    proxy = FaultProxy(server, lambda request: what)
    with proxy.running(), environment_of(proxy.environment()), pytest.raises(ObjectStoreError) as caught:
        Bucket(BUCKET).check_reachable("p/")
    assert str(caught.value).startswith(f"s3://{BUCKET}/p/: {told}")
    assert len(proxy.seen) <= 3  # botocore asks where the bucket is, if that is the question


def test_credentials_that_expire_during_an_upload_are_looked_for_once_more(
    server: Server, tmp_path: Path, large: Path
) -> None:
    """A file of a profile may have new ones. If it does not yet, the upload fails, and a later one finds them."""
    session, valid = Session(tmp_path / "credentials"), 1
    session.renew()

    def fault(request: Request) -> str | None:
        return "expired" if session.is_expired(request, valid) else None

    proxy = FaultProxy(server, fault)
    with proxy.running(), environment_of(session.environment(proxy)):
        bucket = Bucket(BUCKET, threads=2)
        upload = bucket.begin_upload("session/large")
        sent = [bucket.send_part("session/large", upload, 1, 0, LARGE[: 8 * MIB], threading.Event())]
        session.renew()
        valid = 2
        for number, start in ((2, 8 * MIB), (3, 16 * MIB)):
            part = LARGE[start : start + 8 * MIB]
            sent.append(bucket.send_part("session/large", upload, number, start, part, threading.Event()))
        assert bucket.finish_upload("session/large", upload, sent, len(LARGE)).crc32 == crc32(LARGE)
        assert bucket.traffic.retries == 1
        valid = 3
        with pytest.raises(ObjectStoreError, match="s3://checkpoints/session/.* expired .*; renew them"):
            bucket.upload_file(large, "session/again")
        session.renew()
        assert bucket.upload_file(large, "session/again").crc32 == crc32(LARGE)


@pytest.mark.parametrize("request_by", ["get", "head"])
@pytest.mark.parametrize(
    "written",
    ["", "[defa", "[default]\naws_access_key_id = ASIASESSION2\n", "[default]\naws_secret_access_key = se\n",
     "[default]\naws_access_key_id = ASIASESSION2\naws_secret_access_key = se\n"],
    ids=["nothing", "no section", "no secret", "no key", "no token"],
)  # fmt: skip
def test_credentials_in_a_file_that_is_being_written_are_looked_for_again(
    server: Server, tmp_path: Path, written: str, request_by: str
) -> None:
    """By the next call, whatever the store says of a part of them. An answer to HEAD says nothing but the status."""
    session, valid = Session(tmp_path / "credentials"), 1
    session.renew()

    def fault(request: Request) -> str | None:
        if "X-Amz-Security-Token" not in request.headers:
            return "unknown-key"
        return "expired" if session.is_expired(request, valid) else None

    proxy = FaultProxy(server, fault)
    with proxy.running(), environment_of(session.environment(proxy)):
        bucket = Bucket(BUCKET, threads=2)
        bucket.put("session/small", b"x")

        def ask() -> object:
            return bucket.get("session/small", 1) if request_by == "get" else bucket.head("session/small")

        ask()
        valid = 2
        session.path.write_text(written)
        for _ in range(2):
            with pytest.raises(ObjectStoreError, match="s3://checkpoints/session/small"):
                ask()
        session.renew()
        ask()


@pytest.mark.parametrize("name", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_requests_are_signed_for_the_region_that_is_set(server: Server, name: str) -> None:
    given = {"AWS_REGION": "", "AWS_DEFAULT_REGION": ""} | {name: BUCKET_REGION}
    proxy = FaultProxy(server)
    with proxy.running(), environment_of(proxy.environment() | given):
        Bucket(BUCKET).check_reachable("p/")
    (request,) = proxy.seen
    assert f"/{BUCKET_REGION}/s3/aws4_request" in request.headers["Authorization"]


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        (["s3:GetObject"], "listing"),
        (["s3:ListBucket"], "writing"),
        (["s3:ListBucket", "s3:PutObject"], "reading"),
        (["s3:ListBucket", "s3:PutObject", "s3:GetObject"], "removing"),
        (["s3:ListBucket", "s3:PutObject", "s3:GetObject", "s3:DeleteObject"], None),
    ],
)
def test_what_the_credentials_do_not_allow_is_told(server: Server, allowed: list[str], refused: str | None) -> None:
    """The server enforces the user's policy here."""
    with server.allowing(allowed) as environment, environment_of(environment):
        bucket = Bucket(BUCKET)
        steps = {
            "listing": lambda: list(bucket.list("iam/")),
            "writing": lambda: bucket.put("iam/object", b"x"),
            "reading": lambda: bucket.get("iam/object", 10),
            "removing": lambda: bucket.delete(["iam/object"]),
        }
        for step, request in steps.items():
            if step != refused:
                request()
                continue
            with pytest.raises(
                ObjectStoreError, match=f"s3://{BUCKET}/iam/.*permission denied; the credentials need s3:"
            ):
                request()
            break


class _KnowsNothing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked += 1  # type: ignore[attr-defined]
        self.send_response(501)
        self.end_headers()
        self.wfile.write(b"<Error><Code>NotImplemented</Code></Error>")


def test_what_a_store_does_not_implement_is_not_asked_for_twice(server: Server) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _KnowsNothing) as store:
        store.asked = 0  # type: ignore[attr-defined]
        threading.Thread(target=store.serve_forever, daemon=True).start()
        told = pytest.raises(ObjectStoreError, match="the store does not know the request; use one with conditional")
        with environment_of(server.environment(store.server_address[1])), told:
            Bucket(BUCKET).unfinished_uploads("p/")
        store.shutdown()
        assert store.asked == 1  # type: ignore[attr-defined]


class _WantsMd5(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        digest = base64.b64encode(hashlib.md5(body).digest()).decode()
        self.send_response(200 if self.headers["Content-MD5"] == digest else 400)
        self.end_headers()
        self.wfile.write(b"<DeleteResult/>")


def test_stores_that_want_an_md5_of_what_is_to_be_removed_have_it(server: Server) -> None:
    """As MinIO's and JuiceFS' gateway do: they refuse the request otherwise."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _WantsMd5) as store:
        threading.Thread(target=store.serve_forever, daemon=True).start()
        with environment_of(server.environment(store.server_address[1])):
            Bucket(BUCKET).delete(["a", "b"])
        store.shutdown()


@pytest.mark.parametrize(
    ("environment", "name", "told"),
    [
        ({}, "no-such-bucket", "s3://no-such-bucket/p/: there is no bucket no-such-bucket at this endpoint; create it"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, BUCKET, "no answer from the store .*; check AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "no url"}, BUCKET, "AWS_ENDPOINT_URL is no URL"),
        ({"AWS_ACCESS_KEY_ID": ""}, BUCKET, "no usable credentials .*AWS_PROFILE"),
        ({"AWS_PROFILE": "none-such"}, BUCKET, "no usable credentials .*ProfileNotFound"),
    ],
)
def test_what_is_wrong_at_the_start(server: Server, environment: dict[str, str], name: str, told: str) -> None:
    given = server.environment() | environment
    with environment_of(given), pytest.raises(ObjectStoreError, match=told) as caught:
        # Only where nothing answers is there a deadline to wait for.
        Bucket(name, deadline_s=2 if environment else 120).check_reachable("p/")
    assert given["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


def test_a_missing_library_is_told_with_the_command_that_installs_it() -> None:
    code = (
        "import sys; sys.modules['botocore'] = None\n"
        "from megatron.fileio.objects.s3 import Bucket\n"
        "from megatron.fileio.objects.errors import ObjectStoreError\n"
        "try:\n    Bucket('b')\nexcept ObjectStoreError as exc:\n    print(exc)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "botocore is not installed" in done.stdout and "pip install botocore" in done.stdout
