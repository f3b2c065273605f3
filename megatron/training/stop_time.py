"""The time that a stop at a signal takes, compared with what the launcher leaves before it kills the ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from megatron.config import Config
from megatron.processes.parent_process import GRACE_S, SHUTDOWN_TIMEOUT_VARIABLE, shutdown_timeout_s

logger = logging.getLogger(__name__)


class StopTime:
    """Tells once if a stop takes longer than what is left of the ranks after a signal: MEGATRON_SHUTDOWN_TIMEOUT.

    restart-launch sets it to its --shutdown-timeout. Where it is not set, the launcher leaves 30 s by default:
    torchrun, DeepSpeed's, Slurm (KillWait).
    """

    def __init__(self, config: Config, env: Mapping[str, str]) -> None:
        given = shutdown_timeout_s(env)
        self._grace_s = GRACE_S if given is None else given
        self._grace_is_known = given is not None
        self._told = not config.training.stops_at or config.checkpoint.save is None or config.parallel.rank != 0

    def compare(self, iteration_s: float, save_s: float | None, *, asynchronous: bool) -> None:
        """`iteration_s`, `save_s`: seconds that the last ones took, the save until it was committed; None: not known.

        The signal may come when an iteration begins. With an asynchronous engine a save may begin with it, which the
        one of the stop waits for.
        """
        if self._told or save_s is None:
            return
        needed = (max(iteration_s, save_s) if asynchronous else iteration_s) + save_s
        if needed <= self._grace_s:
            return
        self._told = True
        if self._grace_is_known:
            killed = (
                f"the ranks are killed {self._grace_s:g} s after the signal ({SHUTDOWN_TIMEOUT_VARIABLE}, which "
                "restart-launch sets to its --shutdown-timeout); allow more"
            )
        else:
            killed = (
                f"launchers kill the ranks {self._grace_s:g} s after the signal by default; have the launcher or the "
                f"scheduler allow more, and name the seconds in {SHUTDOWN_TIMEOUT_VARIABLE}"
            )
        logger.warning(
            "--exit-signal-handler: a stop takes %.3g s, since an iteration takes %.3g s and a save %.3g s, and %s; "
            "otherwise a signal loses the work since the last save",
            needed,
            iteration_s,
            save_s,
            killed,
        )
