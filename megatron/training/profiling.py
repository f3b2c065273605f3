"""--profile: torch.profiler over some steps of a launch, as upstream counts them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from megatron.config import Config

logger = logging.getLogger(__name__)
_FILE = "profile_rank_{rank:05d}_iterations_{first}-{last}.json.gz"


class StepProfiler:
    """Records the steps of --profile_steps on the ranks of --profile-ranks, and writes them as a Chrome trace.

    Of what the device does, too, where torch.profiler supports that. The file is written after the last of the steps,
    or at the end of a training that ends before; a file of the same iterations is replaced.
    """

    def __init__(self, config: Config) -> None:
        training, self._rank = config.training, config.parallel.rank
        chosen = training.profile is not None and self._rank in (training.profile_ranks or [self._rank])
        self._first, self._last = training.profiled if chosen else (0, 0)
        self._call_stacks = training.profile == "pt-full"
        self._directory = config.profile_dir
        self._step = 0
        self._profiler: Any = None
        self._iterations = (0, 0)

    def begin_step(self, iteration: int) -> None:
        """Before the iteration `iteration`, counted from 1 over all launches, and outside of its time."""
        self._step += 1
        if self._step == self._first:
            from torch.profiler import profile, supported_activities  # slow, so imported only if needed

            self._profiler = profile(activities=supported_activities(), with_stack=self._call_stacks)
            self._profiler.start()
            self._iterations = (iteration, iteration)

    def end_step(self, iteration: int) -> None:
        """After that iteration."""
        if self._profiler is not None:
            self._iterations = (self._iterations[0], iteration)
            if self._step == self._last:
                self.close()

    def close(self) -> None:
        """Write what is recorded. An error is logged: the training is worth more than its profile."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        assert self._directory is not None
        first, last = self._iterations
        path = Path(self._directory) / _FILE.format(rank=self._rank, first=first, last=last)
        beside = path.with_name(f".{path.name}")  # the profiler compresses by the end of the name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(beside))
            os.replace(beside, path)
        except OSError as error:
            logger.error("--profile: %s cannot be written: %s", path, error.strerror)
        else:
            logger.info("profile of the iterations %d to %d: %s", first, last, path)
