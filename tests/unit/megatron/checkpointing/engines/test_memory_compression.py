"""Engine `memory` with compressed copies: the package that they need, and tensors of every type."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState
from megatron.checkpointing.engines.errors import EngineUnavailableError
from megatron.checkpointing.engines.memory.engine import MemoryEngine, why_training_waited
from megatron.fileio import compressed_blocks
from megatron.peers.client import Sent, ask
from megatron.peers.memory_slots import VARIABLE
from restart_trace.recorder import untraced_operation
from tests.unit.megatron.checkpointing.engines.lazy_helpers import BLOCK
from tests.unit.megatron.checkpointing.engines.test_memory_engine import NAME, launcher  # noqa: F401
from tests.unit.megatron.fileio.test_compressed_blocks import DTYPES
from tests.unit.megatron.peers.conftest import in_a_launch  # noqa: F401
from tests.unit.megatron.peers.test_copies import KEY, Host, two  # noqa: F401


def test_compressed_copies_need_their_package(
    launcher: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = MemoryEngine(EngineOptions(compress_copies=True))
    mine.check_can_save()
    monkeypatch.setattr(compressed_blocks, "is_available", lambda: False)
    with pytest.raises(EngineUnavailableError, match="^--replica-compression zstd: package zstandard is not installed"):
        mine.check_can_save()
    mine.close()


def every_type(step: int) -> list[FileState]:
    """Tensors of every type that can be stored, with any bits; one that is not contiguous, an empty one."""
    generator = torch.Generator().manual_seed(step)
    tensors: dict[str, torch.Tensor] = {
        "empty": torch.zeros(0, 3),
        "other": torch.randn(99, 40, generator=generator).t()[:, ::3],
    }
    for dtype in (*DTYPES, torch.bool):
        drawn = torch.randint(0, 2 if dtype is torch.bool else 256, (1021 * dtype.itemsize,), generator=generator)
        tensors[str(dtype)] = drawn.to(torch.uint8).view(dtype)
    tensors["weights"] = torch.randn(700_001, generator=generator).to(torch.bfloat16)
    return [FileState(NAME, tensors)]


def test_compressed_copies_of_every_type_come_back_to_the_bit(
    two: tuple[Host, Host],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = two
    op, options = untraced_operation(), EngineOptions(peer_timeout_s=300.0, io_block_bytes=BLOCK)
    record = {"layout": {"tp": 1, "pp": 1, "dp": 2}, "place": {"tp": 0, "pp": 0, "dp": 0}, "save": "s1", "step": 1}
    ask(other.peer, 300.0, ask="reserve", copies=[(KEY, 4_000_000)])
    with monkeypatch.context() as patch:
        for name, value in one.variables.items():
            patch.setenv(name, value)
        mine = MemoryEngine(replace(options, compress_copies=True))
        mine.share_with([other.peer])
        pending = mine.begin_memory_save(every_type(1), record, None, op)
        pending.release_state()
        pending.wait()
        patch.delenv(VARIABLE)  # a rank of another launcher, which has nothing yet
        spare = MemoryEngine(options)
        found = spare.fetch_copy("s1", KEY, other.peer, op)
    size = found.record["file"]["num_bytes"]
    assert sum(length for length, _ in found.record["file"]["widths"]) == size
    assert [width for _, width in found.record["file"]["widths"]] == [1, 8, 4, 2, 1]
    (loaded,) = spare.load([NAME], found.checkpoint, op).values()
    (expected,) = every_type(1)
    for name, tensor in expected.state.items():
        bits = [one.contiguous().view(-1).view(torch.uint8) for one in (loaded[name], tensor)]
        assert loaded[name].dtype == tensor.dtype and torch.equal(*bits), name
    for each in (mine, spare):
        each.close()


def test_the_time_of_compressed_copies_follows_from_what_is_sent() -> None:
    """Two ranks send 1 MB each over 1 MB/s, which is idle for 0.5 s of a step: four steps, or three if compressed."""
    figures = {"at_once_bytes": 1, "idle_s": 0.5, "longest_idle_s": 0.2, "bytes_per_s": 1e6}
    for compressed, steps in (({}, 4), ({"wire_bytes": 750_000, "processor_s": 0.1}, 3)):
        sent = Sent(1_000_000, [], figures, compressed)
        (text,) = why_training_waited(sent, 2, 2, None)
        assert f"--save-interval {steps} would fit" in text
