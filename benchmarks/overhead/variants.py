"""What is compared: three ways of each operation, one of them a repetition of the first as the control.

save, load    Checkpointer.save and load as training calls them, without and with a trace
write, read   the files of one rank: plain torch.save and torch.load, and the torch engine without a trace
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.state import SavableState, config_for
from restart_trace.clock import now_ns
from restart_trace.probes import make_probe
from restart_trace.process import RankIdentity, rank_fields
from restart_trace.recorder import Recorder, untraced_operation, untraced_recorder
from restart_trace.sink import JsonlSink

if TYPE_CHECKING:
    from megatron.checkpointing.engines.base import SavedCheckpoint


class MeteredRecorder(Recorder):
    """Recorder that sums the time spent in making and writing records, in `spent_ns`."""

    spent_ns = 0

    def write(self, record_type: str, **fields: Any) -> None:
        start = now_ns()
        super().write(record_type, **fields)
        self.spent_ns += now_ns() - start

    def sample(self) -> tuple[int, dict[str, float]] | None:
        start = now_ns()
        sample = super().sample()
        self.spent_ns += now_ns() - start
        return sample


class Variants:
    """Carries out the variants of one rank. Each leaves its files in a directory that the caller removes."""

    def __init__(self, state: SavableState, trace_file: Path) -> None:
        from megatron.checkpointing.state.collect import Progress

        self._engine = state.engine
        self._state = state
        self._files = state.context.checkpoint_engine
        self._progress = Progress(iteration=1)
        place, control = state.context.place, state.context.control
        layout, at = place.layout, place.at
        identity = RankIdentity(
            control.rank, control.world_size, control.rank, (at.tp, at.pp, at.dp), (layout.tp, layout.pp, layout.dp)
        )
        process = rank_fields(identity, os.environ, run_id="overhead", cycle=0)
        self.recorder = MeteredRecorder(JsonlSink(trace_file), process, make_probe(control.rank))

    def run(self, family: str, variant: str, directory: Path) -> Callable[[], None]:
        """The function to be timed, with all that is not to be timed done."""
        if family in ("save", "load"):
            return self._checkpoint(family, directory, traced=variant == "traced")
        if family == "write":
            return self._write(directory, plain=variant != "engine")
        return self._read(directory / "global_step1", plain=variant != "engine")

    def _checkpoint(self, family: str, directory: Path, *, traced: bool) -> Callable[[], None]:
        checkpointer = self._state.checkpointer(
            config=config_for(self._state.context.config, directory),
            recorder=self.recorder if traced else untraced_recorder(),
        )
        if family == "save":
            return lambda: checkpointer.save(self._engine, self._progress)

        def load() -> None:
            if checkpointer.load(self._engine) is None:
                raise FileNotFoundError(f"{directory}: no checkpoint to load")

        return load

    def _write(self, directory: Path, *, plain: bool) -> Callable[[], None]:
        from megatron.checkpointing.state.collect import collect_state

        ctx = self._state.context
        sizes = (ctx.vocab_size, ctx.padded_vocab_size)
        files = collect_state(self._engine, ctx.place, ctx.config, sizes, self._progress)
        if not plain:
            return lambda: self._engine_save(files, directory)
        return lambda: plain_save(files, directory)

    def _engine_save(self, files: Any, directory: Path) -> None:
        self._files.save(files, directory, untraced_operation())

    def _read(self, directory: Path, *, plain: bool) -> Callable[[], None]:
        from megatron.checkpointing.engines.base import SavedCheckpoint
        from megatron.checkpointing.state.collect import live_state
        from megatron.checkpointing.store.manifest import Manifest

        names = [file.name for file in live_state(self._engine, self._state.context.place, True, False)]
        if plain:
            return lambda: plain_load(names, directory)
        checkpoint = SavedCheckpoint(directory, Manifest.of(directory).files)
        return lambda: self._engine_load(names, checkpoint)

    def _engine_load(self, names: list[str], checkpoint: SavedCheckpoint) -> None:
        self._files.load(names, checkpoint, untraced_operation())


def plain_save(files: Any, directory: Path) -> None:
    """What DeepSpeed 0.19 does per file, and an fsync: clone the weights, which are views, and torch.save."""
    import torch
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

    for file in files:
        state = clone_tensors_for_torch_save(file.state) if file.name.startswith("layer_") else file.state
        with (directory / file.name).open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())


def plain_load(names: list[str], directory: Path) -> None:
    """What DeepSpeed 0.19 does per file: no checksum is verified and any class is unpickled."""
    import torch

    states = [torch.load(directory / name, map_location="cpu", weights_only=False) for name in names]
    states.clear()
