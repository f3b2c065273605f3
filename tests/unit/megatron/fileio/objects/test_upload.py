"""Objects that are uploaded block by block while they are made, to a real server."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from megatron.fileio.checksums import crc32
from megatron.fileio.objects.errors import ObjectStoreError
from megatron.fileio.objects.parts import MIB, PART_BYTES, streamed_part_bytes
from megatron.fileio.objects.s3 import Bucket
from megatron.fileio.objects.upload import ObjectUpload
from tests.object_storage import BUCKET, environment_of, serving

pytestmark = pytest.mark.slow  # an S3 server is started

HEADER = 4096


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with serving() as server, environment_of(server.environment()):
        yield Bucket(BUCKET, threads=2)


def blocks(num_bytes: int, block_bytes: int) -> list[tuple[int, int]]:
    """(first byte, byte after the last) of all, in no order; the header, as a save does it, at the end."""
    found = [(start, min(start + block_bytes, num_bytes)) for start in range(HEADER, num_bytes, block_bytes)]
    random.Random(1).shuffle(found)
    return [*found, (0, HEADER)]


@pytest.mark.parametrize("num_bytes", [HEADER, HEADER + 1000, HEADER + PART_BYTES, 3 * PART_BYTES - 5])
@pytest.mark.parametrize("block_bytes", [PART_BYTES, 3 * MIB, 20 * MIB])
def test_blocks_become_an_object(bucket: Bucket, num_bytes: int, block_bytes: int) -> None:
    content, key = os.urandom(num_bytes), f"streamed/{num_bytes}_{block_bytes}"
    upload = ObjectUpload(bucket, key, num_bytes, HEADER, block_bytes)
    for start, stop in blocks(num_bytes, block_bytes):
        upload.write(memoryview(content)[start:], stop - start, start)
    upload.cut_off(num_bytes)
    upload.close()
    assert upload.result is not None and upload.result.crc32 == crc32(content)
    read = bytearray(num_bytes)
    bucket.read_range(key, upload.result.etag, 0, memoryview(read))
    assert read == content
    assert bucket.unfinished_uploads("streamed/") == []


@pytest.mark.parametrize("left_out", [0, 1, 2], ids=["the header", "the first block", "the last block"])
def test_what_is_not_all_there_is_no_object(bucket: Bucket, left_out: int) -> None:
    size, content = HEADER + 2 * PART_BYTES, memoryview(bytes(PART_BYTES))
    stretches = [(0, HEADER), (HEADER, PART_BYTES), (HEADER + PART_BYTES, PART_BYTES)]
    del stretches[left_out]
    upload = ObjectUpload(bucket, "cut/off", size, HEADER, PART_BYTES)
    for start, length in stretches:
        upload.write(content, length, start)
    with pytest.raises(ObjectStoreError, match=f"s3://{BUCKET}/cut/off: its bytes from .* on were never sent"):
        upload.cut_off(size)
    upload.close()
    assert bucket.unfinished_uploads("cut/") == [] and list(bucket.list("cut/")) == []


def test_parts_are_whole_blocks_and_not_too_many() -> None:
    assert streamed_part_bytes(1 << 30, PART_BYTES) == PART_BYTES
    assert streamed_part_bytes(1 << 30, 3 * MIB) == 9 * MIB
    part = streamed_part_bytes(1 << 40, PART_BYTES)
    assert part % PART_BYTES == 0 and 1 + -(-(1 << 40) // part) <= 10_000
