"""Standby ranks in the trainer: requests them from the launcher; in a standby rank, loads ahead and warms up."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config import CheckpointConfig, Config, ConfigError
from megatron.config.uris import is_uri
from megatron.fileio.host_memory import available_memory
from megatron.processes.standby import ASK_SIGNAL, LOADS_VARIABLE, launcher_to_ask
from restart_trace.recorder import untraced_recorder

if TYPE_CHECKING:
    from megatron.startup.initialize import Runtime
    from megatron.training.data import DataIterators, DataRequest, SplitDatasets

logger = logging.getLogger(__name__)

_PRIVATE = ("Private_Clean:", "Private_Dirty:")


class StandbyRanks:
    """Requests of the first rank of a host to the launcher: standby ranks after the first step and, if they load ahead,
    that they load each saved checkpoint. Other ranks send no requests.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._launcher = launcher_to_ask()
        self._asked = False
        self._saved: int | None = None

    def ask(self, saved_step: int | None) -> None:
        """Call after every step and its save. `saved_step`: step of the last checkpoint."""
        if self._launcher is None:
            return
        if not self._asked:
            if not _fit_in_memory():
                self._launcher = None
                return
            if LOADS_VARIABLE in os.environ and (why := why_not_ahead(self._config.checkpoint)):
                logger.warning("--standby-load: %s: standby ranks are set up, and a restart loads the checkpoint", why)
        elif saved_step == self._saved or LOADS_VARIABLE not in os.environ:
            return
        self._asked, self._saved = True, saved_step
        os.kill(self._launcher, ASK_SIGNAL)


def _fit_in_memory() -> bool:
    """Whether this host has memory for standby ranks; logs a warning if not."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    needed, available = ranks * private_bytes(), available_memory()
    if needed > available:
        logger.warning(
            "no standby ranks (--standby): %d of them take about %.1f GiB of host memory, and %.1f GiB are free; a "
            "restart sets its ranks up itself", ranks, needed / 2**30, available / 2**30,
        )  # fmt: skip
    return needed <= available


def of_a_restart(options: CheckpointConfig) -> CheckpointConfig:
    """`options` of the start that standby ranks are for: with --save it goes on from there, however the run began."""
    from megatron.checkpointing.preflight.first_start import later_start

    return options if options.save is None else later_start(options)


def why_not_ahead(options: CheckpointConfig) -> str | None:
    """Why no checkpoint can be loaded ahead; None if it can."""
    from megatron.checkpointing.preflight.first_start import FLAGS

    options = of_a_restart(options)
    if options.load is None:
        return "without --load nothing is loaded"
    if is_uri(options.load):
        return f"--load {options.load} is object storage"
    if options.checkpoint_engine == "memory":
        return "--checkpoint-engine memory loads from memory"
    given = next((name for name in FLAGS if getattr(options, name)), None)
    return None if given is None else f"--{given.replace('_', '-')} is given"


class LoadsAhead:
    """In a standby rank with --standby-load: restores into `engine`, DeepSpeed's, what a restart would load.

    Nothing while a restart would begin as the flags of the first start say: that begins from the initial state.

    `vocab_sizes`: the tokenizer's, and the size padded for TP. Loaded tensors may be in memory of its
    `checkpoint_engine`, which the run then continues to use.
    """

    def __init__(self, config: Config, runtime: Runtime, vocab_sizes: tuple[int, int], engine: Any) -> None:
        from megatron.checkpointing.context import Ahead, RunContext
        from megatron.checkpointing.engines.options import engine_options
        from megatron.checkpointing.engines.registry import create_engine
        from megatron.checkpointing.store.naming import RankPlace

        options = engine_options(config.checkpoint, runtime.rank, config.parallel.distributed_timeout_minutes)
        self.ahead = Ahead()
        self.checkpoint_engine = create_engine(config.checkpoint.checkpoint_engine, options)
        self._engine = engine
        self._config = config
        self._context = RunContext(
            config=dataclasses.replace(config, checkpoint=of_a_restart(config.checkpoint)),
            place=RankPlace(runtime.layout, runtime.coordinates, config.model.params_dtype),
            vocab_size=vocab_sizes[0],
            padded_vocab_size=vocab_sizes[1],
            control=runtime.control,
            recorder=untraced_recorder(),
            checkpoint_engine=self.checkpoint_engine,
            ahead=self.ahead,
        )

    def load(self) -> None:
        """Load the newest checkpoint of this run unless it is already loaded; collective.

        Problems are left to the start's own load.
        """
        from megatron.checkpointing.engines.errors import CheckpointError
        from megatron.checkpointing.load.newest import load_newest

        logging.disable()
        try:
            if self._goes_on() and load_newest(self._context, self._engine) is not None:
                self.ahead.began = True
        except CheckpointError:
            self.ahead.forget()
            self.ahead.began = True
        finally:
            logging.disable(logging.NOTSET)

    def _goes_on(self) -> bool:
        """False while a restart would begin as the flags of the first start say. Rank 0 decides; collective."""
        from megatron.checkpointing.preflight.first_start import has_first_start
        from megatron.startup.preflight import is_later_start

        goes_on = False
        if self._context.control.rank == 0:
            with contextlib.suppress(ConfigError):
                goes_on = not has_first_start(self._config.checkpoint) or is_later_start(self._config)
        return self._context.control.broadcast(goes_on)


def private_bytes() -> int:
    """Private memory of this process, bytes: an estimate of the memory of another rank forked from the launcher."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(_PRIVATE))


def opened_once(provider: Callable[[DataRequest], SplitDatasets]) -> Callable[[DataRequest], SplitDatasets]:
    """`provider` with a cache of its last result, so that the same data sets are not opened again."""
    last: list[tuple[object, SplitDatasets]] = []

    def provide(request: DataRequest) -> SplitDatasets:
        asked = request.indexed_samples, request.needed_samples
        if not last or last[0][0] != asked:
            last[:] = [(asked, provider(request))]
        return last[0][1]

    return provide


def rehearse(engine: Any, data: DataIterators) -> None:
    """Evaluate one batch, which changes nothing; collective.

    The first step of a process takes longer than later ones: pages that it shares with the launcher are copied when
    they are written, kernels are chosen, and stages exchange the shapes of what they send. `engine`: DeepSpeed's.
    """
    if not engine.monitor.enabled:  # the monitor would report it as an evaluation
        engine.eval_batch(data.train)
