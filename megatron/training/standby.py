"""Standby ranks in the trainer: who asks the launcher for them, and what they do ahead besides setting up."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.fileio.host_memory import available_memory
from megatron.processes.standby import ASK_SIGNAL, launcher_to_ask

if TYPE_CHECKING:
    from megatron.training.data import DataIterators, DataRequest, SplitDatasets

logger = logging.getLogger(__name__)

_PRIVATE = ("Private_Clean:", "Private_Dirty:")


def ask_for_standby() -> None:
    """To be called after every step. Asks once, after the first one, where the launcher has --standby."""
    launcher = launcher_to_ask()
    if launcher is None:
        return
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    needed, available = ranks * private_bytes(), available_memory()
    if needed > available:
        logger.warning(
            "no standby ranks (--standby): %d of them take about %.1f GiB of host memory, and %.1f GiB are free; a "
            "restart sets its ranks up itself", ranks, needed / 2**30, available / 2**30,
        )  # fmt: skip
        return
    os.kill(launcher, ASK_SIGNAL)


def private_bytes() -> int:
    """Memory of this process that it shares with no other: about what a rank takes that is forked beside it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(_PRIVATE))


def opened_once(provider: Callable[[DataRequest], SplitDatasets]) -> Callable[[DataRequest], SplitDatasets]:
    """`provider`, which is not called again for what it was asked for last: those data sets are still open."""
    last: list[tuple[object, SplitDatasets]] = []

    def provide(request: DataRequest) -> SplitDatasets:
        asked = request.indexed_samples, request.needed_samples
        if not last or last[0][0] != asked:
            last[:] = [(asked, provider(request))]
        return last[0][1]

    return provide


def rehearse(engine: Any, data: DataIterators) -> None:
    """Evaluate one batch, which changes nothing; collective.

    The first step of a process takes longer than the next ones: memory that it shares with the launcher is copied where
    it is touched, kernels are chosen, and stages tell each other the shapes of what they send. `engine`: DeepSpeed's.
    """
    if not engine.monitor.enabled:  # which would report it as an evaluation
        engine.eval_batch(data.train)
