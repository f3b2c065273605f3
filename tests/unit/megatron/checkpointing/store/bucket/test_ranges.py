"""What a rank reads of objects when it loads onto another layout: the bytes that it needs, and few requests."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpointing.engines.base import PlacedTensor
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.reshard.reading import Reading
from megatron.checkpointing.reshard.targets import Transfer
from megatron.fileio.objects.parts import MIB
from megatron.fileio.objects.ranges import ObjectFile
from megatron.fileio.objects.s3 import Bucket
from restart_trace.recorder import untraced_operation
from tests.object_storage import BUCKET

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("here")]  # an S3 server is started
_FILE = Path("/on/no/disk")


def transfer(starts: list[int], length: int) -> Transfer:
    source = np.array(starts)
    target = torch.zeros(len(starts) * length, dtype=torch.uint8)
    held = PlacedTensor(_FILE, "t", torch.uint8, 0, {})
    return Transfer(held, target, source, np.arange(len(starts)) * length, np.full(len(starts), length))


def test_only_the_extents_are_asked_for() -> None:
    bucket, content = Bucket(BUCKET), os.urandom(20 * MIB)
    etag = bucket.put("ranges/file", content)
    starts = [1001, 1001 + 5000, 6 * MIB, 7 * MIB + 3, 19 * MIB]  # the first two are near, the next two in one cell
    moved = transfer(starts, 3000)

    def opened(path: Path) -> ObjectFile:
        assert path == _FILE
        return ObjectFile(bucket, "ranges/file", etag, len(content), "file", untraced_operation())

    reading = Reading([moved], {_FILE: len(content)}, "auto", 3, ranged=opened)
    before = bucket.traffic.requests
    assert reading.run({0: reading.share()}, 0, untraced_operation()) == []
    assert bucket.traffic.requests - before == 3
    assert reading.bytes_read == (5000 + 3000) + (MIB + 3 + 3000) + 3000
    expected = b"".join(content[start : start + 3000] for start in starts)
    assert bytes(moved.target.numpy()) == expected

    bucket.put("ranges/file", content)  # the same bytes, and the same object
    assert reading.run({0: reading.share()}, 0, untraced_operation()) == []
    bucket.put("ranges/file", content[::-1])
    with pytest.raises(CheckpointDamagedError, match=f"s3://{BUCKET}/ranges/file was replaced"):
        reading.run({0: reading.share()}, 0, untraced_operation())
