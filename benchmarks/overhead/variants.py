"""What is compared: Checkpointer.save and load as training calls them, without and with a trace."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.state import SavableState, config_for
from restart_trace.clock import now_ns
from restart_trace.probes import make_probe
from restart_trace.process import RankIdentity, rank_fields
from restart_trace.recorder import Recorder, untraced_recorder
from restart_trace.sink import JsonlSink


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
        self._progress = Progress(iteration=1)
        place, control = state.context.place, state.context.control
        layout, at = place.layout, place.at
        identity = RankIdentity(
            control.rank, control.world_size, control.rank, (at.tp, at.pp, at.dp), (layout.tp, layout.pp, layout.dp)
        )
        process = rank_fields(identity, os.environ, run_id="overhead", cycle=0)
        self.recorder = MeteredRecorder(JsonlSink(trace_file), process, make_probe(control.rank))

    def run(self, operation: str, directory: Path, *, traced: bool) -> Callable[[], None]:
        """The function to be timed, with all that is not to be timed done."""
        checkpointer = self._state.checkpointer(
            config=config_for(self._state.context.config, directory),
            recorder=self.recorder if traced else untraced_recorder(),
        )
        if operation == "save":
            return lambda: checkpointer.save(self._engine, self._progress)

        def load() -> None:
            if checkpointer.load(self._engine) is None:
                raise FileNotFoundError(f"{directory}: no checkpoint to load")

        return load
