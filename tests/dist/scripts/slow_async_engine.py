"""An asynchronous engine for tests, and pretrain_gpt.py with it: --checkpoint-engine slow-async.

SLOW_DELAY: what its thread waits for before it writes: so many seconds, or "waited": until training waits for the
    save. A JSON list: seconds per rank; a JSON object: seconds, or a list, per iteration, and none for the others.
SLOW_COPY: "begin" copies the state when the save begins; "release" (default) when it is released, as late as it may
    be, and fails the save if anything of the state differs by then from what it was when the save began.
SLOW_FAIL: JSON object from iteration to [rank, how often]: that rank's thread fails as often, then no more.
EVALUATE: evaluate between a save and the next step of the optimizer.
RAISE_AT: iteration before which training raises, on all ranks. DRAIN_S: how long such an error waits for a save.
LOSE_AT: iteration whose save the last rank gives up to agree on, as if another had taken too long.
THEN: script to run instead of pretrain_gpt.py.
"""

from __future__ import annotations

import copy
import json
import os
import re
import runpy
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.base import FileState, PendingSave, SavedFile
from megatron.checkpointing.engines.torch.engine import TorchEngine
from restart_trace.recorder import Operation
from tests.dist.hold import note_waits
from tests.dist.tiny_runs import differences

RANK = int(os.environ.get("RANK", "0"))
FAILURES: dict[str, list[int]] = json.loads(os.environ.get("SLOW_FAIL", "{}"))


WAITED = "waited"
waited_for = note_waits()


def delay(step: str) -> None:
    told = os.environ.get("SLOW_DELAY", "0")
    wanted = told if told == WAITED else json.loads(told)
    if isinstance(wanted, dict):
        wanted = wanted.get(step, 0)
    if isinstance(wanted, list):
        wanted = wanted[RANK]
    if wanted == WAITED:
        waited_for.wait()
    else:
        time.sleep(wanted)


def copied(state: Any) -> Any:
    """A copy of a nest of state that shares nothing with it. Master weights may be views that require gradients."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return type(state)((key, copied(value)) for key, value in state.items())
    if type(state) in (list, tuple):
        return type(state)(copied(item) for item in state)
    return copy.deepcopy(state)


def copied_files(files: Sequence[FileState]) -> list[FileState]:
    return [FileState(file.name, copied(file.state)) for file in files]


class _InBackground(Operation):
    """The operation as a background thread sees it: none of its spans blocks training."""

    def __init__(self, op: Operation) -> None:
        self._op = op

    def until_ns(self) -> int:
        return self._op.until_ns()

    def span(self, *args: Any, **kwargs: Any) -> Any:
        return self._op.span(*args, **kwargs | {"blocking": False})

    def add(self, *args: Any, **kwargs: Any) -> None:
        self._op.add(*args, **kwargs | {"blocking": False})


class _SlowSave(PendingSave):
    def __init__(self, engine: TorchEngine, files: Sequence[FileState], directory: Path, op: Operation) -> None:
        self._engine, self._directory, self._op = engine, directory, op
        self._step = re.findall(r"global_step(\d+)", directory.name)[0]
        self._live = files
        waited_for.clear()
        self._copied = threading.Event()
        self._saved: list[SavedFile] = []
        self._error: Exception | None = None
        with op.span("device_to_host"):
            self._copy = copied_files(files)
        if os.environ.get("SLOW_COPY") == "begin":
            self._copied.set()
        self._thread = threading.Thread(target=self._write, name="slow-writer", daemon=True)
        self._thread.start()

    def release_state(self) -> None:
        if self._copied.is_set():
            return
        with self._op.span("device_to_host"):
            late = copied_files(self._live)
        changed = differences([f.state for f in self._copy], [f.state for f in late], "state")
        if changed:
            self._error = RuntimeError(f"changed before it was released: {changed}")
        self._copy = late
        self._copied.set()

    def _write(self) -> None:
        try:
            op = _InBackground(self._op)
            with op.span("flush", "write", file="delay"):
                self._copied.wait()
                delay(self._step)
            self._fail_if_asked_to()
            self._saved = [self._engine._save_file(file, self._directory, op) for file in self._copy]
        except Exception as exc:
            self._error = exc

    def _fail_if_asked_to(self) -> None:
        rank, times = FAILURES.get(self._step, (-1, 0))
        if rank == RANK and times:
            FAILURES[self._step][1] -= 1
            raise IndexError("a broken engine")

    def wait(self) -> list[SavedFile]:
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._op.bytes = sum(file.num_bytes for file in self._saved)
        self._op.num_files = len(self._saved)
        self._op.durable = self._engine.options.fsync
        return self._saved


class SlowAsyncEngine(TorchEngine):
    """TorchEngine's files, written by a thread that takes its time."""

    name = "slow-async"
    asynchronous = True

    def begin_save(self, files: Sequence[FileState], directory: Path, op: Operation) -> PendingSave:
        return _SlowSave(self, files, directory, op)


def main() -> None:
    from megatron.checkpointing.engines import registry
    from megatron.checkpointing.save.writer import CheckpointWriter, Save
    from megatron.training import checkpoints as training_checkpoints
    from megatron.training import trainer as training

    module = "tests.dist.scripts.slow_async_engine"
    registry.ENGINES["slow-async"] = registry.EngineEntry(module, "SlowAsyncEngine", "for tests")
    if "DRAIN_S" in os.environ:
        training_checkpoints.DRAIN_AFTER_ERROR_S = float(os.environ["DRAIN_S"])
    agree = CheckpointWriter._agree_and_commit

    def giving_up(self: CheckpointWriter, save: Save, saved: list[SavedFile], stored: dict[str, Any]) -> str | None:
        if save.step == int(os.environ.get("LOSE_AT", "0")) and int(os.environ["WORLD_SIZE"]) - 1 == RANK:
            raise RuntimeError("Timed out waiting for another rank")
        return agree(self, save, saved, stored)

    CheckpointWriter._agree_and_commit = giving_up  # type: ignore[method-assign]
    train_step = training._train_step

    def failing_step(trainer: Any, loop_start: int) -> None:
        if trainer.progress.iteration + 1 == int(os.environ.get("RAISE_AT", "0")):
            raise RuntimeError("training met an error")
        if os.environ.get("EVALUATE") and trainer.saves._background.unreleased is not None:
            training._evaluate(trainer, "validation")
        train_step(trainer, loop_start)

    training._train_step = failing_step
    root = Path(__file__).resolve().parents[3]
    runpy.run_path(os.environ.get("THEN", str(root / "pretrain_gpt.py")), run_name="__main__")


if __name__ == "__main__":
    main()
