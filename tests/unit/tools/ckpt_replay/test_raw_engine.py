"""The bytes of states in one file for each rank, for each host, or in all; and stripes, set by a command."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState, SavedCheckpoint
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from restart_trace.recorder import untraced_operation
from tests.unit.megatron.checkpointing.engines.nests import identical
from tools.ckpt_replay.options import parse_striping
from tools.ckpt_replay.plan import RAW_ALL, RAW_HOST, RAW_RANK, ReplayError, Striping
from tools.ckpt_replay.raw_engine import RawEngine
from tools.ckpt_replay.striping import check_striping, set_striping
from tools.common.machine import filesystem_of

RANKS, OF_HOST = 5, 2
FILES = {
    RAW_RANK: [f"rank_{rank:05d}.raw" for rank in range(RANKS)],
    RAW_HOST: [f"host_{host:05d}.raw" for host in range(3)],
    RAW_ALL: ["all.raw"],
}


def states_of(rank: int) -> list[FileState]:
    """Of each rank another size; blocks of 8 KiB end within tensors."""
    seeded = torch.Generator().manual_seed(rank)  # not the one of the process, which the threads share
    weights = {
        "w": torch.randn(1000 * (rank + 1), generator=seeded),
        "odd": torch.randint(0, 255, (7,), dtype=torch.uint8, generator=seeded),
    }
    more = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "step": 7,
        "b": torch.randn(5000, generator=seeded).bfloat16(),
    }
    return [FileState(f"layer_{rank}.pt", weights), FileState(f"mp_{rank}.pt", more)]


class Ranks:
    """Threads in place of processes, which tell each other their sizes."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._sizes = [0] * RANKS
        self._barrier = threading.Barrier(RANKS)

    def engine(self, rank: int) -> RawEngine:
        def sizes_of_all(size: int) -> list[int]:
            self._sizes[rank] = size
            self._barrier.wait(60)
            return list(self._sizes)

        options = EngineOptions(rank=rank, local_world_size=OF_HOST, io_block_bytes=8192, io_threads=2)
        return RawEngine(options, self._kind, sizes_of_all)


@pytest.mark.parametrize("kind", FILES)
def test_every_rank_finds_its_state_in_the_file_that_it_shares(kind: str, tmp_path: Path) -> None:
    ranks = Ranks(kind)
    operations = [untraced_operation() for _ in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        saves = pool.map(lambda rank: ranks.engine(rank).save(states_of(rank), tmp_path, operations[rank]),
                         range(RANKS))  # fmt: skip
        saved = {file.name: file for files in saves for file in files}
    assert sorted(saved) == sorted(path.name for path in tmp_path.iterdir()) == FILES[kind]
    assert all((tmp_path / name).stat().st_size == file.num_bytes for name, file in saved.items())
    assert sum(op.bytes or 0 for op in operations) == sum(file.num_bytes for file in saved.values())
    checkpoint = SavedCheckpoint(tmp_path, saved)
    for rank in range(RANKS):
        expected = {file.name: file.state for file in states_of(rank)}
        assert identical(ranks.engine(rank).load(list(expected), checkpoint, untraced_operation()), expected)
    path = tmp_path / FILES[kind][-1]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)
    with pytest.raises(CheckpointDamagedError):
        ranks.engine(RANKS - 1).load([f"mp_{RANKS - 1}.pt"], checkpoint, untraced_operation())


def test_stripes_are_set_by_a_command_or_refused_with_the_name_of_the_file_system(tmp_path: Path) -> None:
    """No parallel file system can be had here: a program takes the place of the one that sets its stripes."""
    striping = parse_striping("8x4MiB")
    with pytest.raises(ReplayError, match=f"is on {filesystem_of(tmp_path)}, which is not known to stripe files"):
        check_striping(striping, tmp_path)
    command = "touch {directory}/{count}_{size}"
    set_striping(with_command("8x4MiB", command), tmp_path)
    set_striping(with_command("3", command), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3_1048576", "8_4194304"]
    with pytest.raises(ReplayError, match="--striping 3: ls .*absent ended with 2: "):
        set_striping(with_command("3", "ls {directory}/absent"), tmp_path)
    for wrong, message in (
        ("stripe {targets}", "only {count}, "),
        ("", "is empty"),
        ("no_such_program_x", "is no prog"),
    ):
        with pytest.raises(ReplayError, match=message):
            check_striping(with_command("3", wrong), tmp_path)


def with_command(text: str, command: str) -> Striping:
    return dataclasses.replace(parse_striping(text), command=command)
