"""States, and engines to save and load them with, for the tests of engine lazy."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from megatron.checkpointing.engines.base import MIB, EngineOptions, FileState, PendingSave, SavedCheckpoint, SavedFile
from megatron.checkpointing.engines.lazy import writer
from megatron.checkpointing.engines.lazy.engine import LazyEngine
from megatron.checkpointing.store.commit import collect_files
from restart_trace.recorder import untraced_operation

NAMES = ["layer_01-model_00-model_states.pt", "mp_rank_00_model_states.pt"]
BLOCK = 64 * 1024
MOST = 0.9  # of a file's pages: the kernel may take some back at any time


def files(num_bytes: int = 3 * MIB) -> list[FileState]:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(num_bytes // 8, generator=generator)
    optimizer = {"m": torch.randn(num_bytes // 8, generator=generator), "step": torch.tensor(3.0)}
    small = {"half": torch.linspace(0, 1, 7).to(torch.bfloat16), "iteration": 5}
    return [FileState(NAMES[0], {"weights": weights}), FileState(NAMES[1], {"optimizer": optimizer, **small})]


def engine(**options: Any) -> LazyEngine:
    return LazyEngine(EngineOptions(**{"io_block_bytes": BLOCK, "fsync": False} | options))


def load(directory: Path, saved: list[SavedFile], names: list[str] = NAMES, **options: Any) -> dict[str, Any]:
    return engine(**options).load(
        names, SavedCheckpoint(directory, {file.name: file for file in saved}), untraced_operation()
    )


def save_together(
    engines: Sequence[LazyEngine], states: Sequence[list[FileState]], directory: Path
) -> dict[str, SavedFile]:
    """What the ranks of these engines save into the files that they share."""
    pairs = zip(engines, states, strict=True)
    pending = [each.begin_save(mine, directory, untraced_operation()) for each, mine in pairs]
    give_places(engines, pending)
    for save in pending:
        save.release_state()
    return collect_files([save.wait() for save in pending])


def give_places(engines: Sequence[LazyEngine], pending: Sequence[PendingSave]) -> None:
    """As CheckpointWriter does over the ranks."""
    places = engines[0].place_parts([save.shared_part() for save in pending])
    for save, place in zip(pending, places, strict=True):
        save.take_place(place)


def check(found: dict[str, Any], expected: list[FileState]) -> None:
    assert list(found) == [file.name for file in expected]
    weights, rest = expected[0].state, expected[1].state
    assert torch.equal(found[NAMES[0]]["weights"], weights["weights"])
    assert torch.equal(found[NAMES[1]]["optimizer"]["m"], rest["optimizer"]["m"])
    assert torch.equal(found[NAMES[1]]["half"], rest["half"]) and found[NAMES[1]]["iteration"] == 5


@contextmanager
def losing_its_processor(thread: str) -> Iterator[None]:
    """The thread of that name does not run for 10 ms whenever it leaves a function of the writer.

    As on a busy machine, but each time: what another thread may do meanwhile, it does.
    """

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != writer.__file__ or threading.current_thread().name != thread:
            return None
        if event == "return":
            time.sleep(0.01)
        return trace

    before = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(before)  # pyright: ignore[reportArgumentType]  as pytest's own plug-ins leave it
