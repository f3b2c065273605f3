"""Steps that all ranks take together: what stops one of them stops all, at once and with the same words."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointError
from megatron.parallel.control_plane import ControlPlane
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)


class CheckpointRejectedError(CheckpointDamagedError):
    """The checkpoint is damaged, as at least one rank found: another may be loaded. `args`: what each found."""

    def __str__(self) -> str:
        return "; ".join(self.args)


def run_on_all_ranks(
    control: ControlPlane, op: Operation, work: Callable[[], Any], conclude: Callable[[list[Any]], Any] = list
) -> Any:
    """Take a step on every rank: `work()` on each, then on rank 0 `conclude(results by rank)`, which every rank gets.

    Raises the same on all ranks if any of them raised: CheckpointRejectedError for CheckpointDamagedError or OSError,
    any other CheckpointError as it is, and CheckpointError naming rank and exception for anything else. Waits for the
    slowest rank.
    """
    return _taken(control, op, work, conclude, lambda verdict: verdict, control.broadcast)


def run_and_scatter(
    control: ControlPlane, op: Operation, work: Callable[[], Any], conclude: Callable[[list[Any]], Sequence[Any]]
) -> Any:
    """As `run_on_all_ranks`, but `conclude` returns a result for each rank, and a rank hears of its own alone."""
    for_all = lambda verdict: [verdict] * control.world_size if isinstance(verdict, CheckpointError) else verdict  # noqa: E731
    return _taken(control, op, work, conclude, for_all, control.scatter)


def _taken(
    control: ControlPlane,
    op: Operation,
    work: Callable[[], Any],
    conclude: Callable[[list[Any]], Any],
    prepare: Callable[[Any], Any],
    tell: Callable[[Any], Any],
) -> Any:
    """As `run_on_all_ranks`; rank 0 has `tell` take what `prepare` makes of the result, or the error, of all."""
    mine, cause = _attempt(work, control.rank)
    with op.span("barrier"):
        gathered = control.gather(mine)
    verdict = None if gathered is None else prepare(_verdict(gathered, conclude))
    with op.span("barrier"):
        verdict = tell(verdict)
    if isinstance(verdict, CheckpointError):
        raise verdict from cause
    return verdict


def _attempt(work: Callable[[], Any], rank: int) -> tuple[Any, Exception | None]:
    """The result of `work`, or the CheckpointError to raise on all ranks; and what is behind that."""
    try:
        return work(), None
    except CheckpointRejectedError as exc:
        return exc, exc
    except (CheckpointDamagedError, OSError) as exc:
        return CheckpointRejectedError(f"rank {rank}: {exc}"), exc
    except CheckpointError as exc:
        return exc, exc
    except Exception as exc:  # any error: the other ranks wait for an answer
        logger.exception("rank %d: a step of the load failed", rank)
        return CheckpointError(f"rank {rank}: {type(exc).__name__}: {exc}"), exc


def _verdict(found: Sequence[Any], conclude: Callable[[list[Any]], Any]) -> Any:
    """On rank 0: the result or the error of all. What ends the run comes before what another checkpoint may mend."""
    errors = [item for item in found if isinstance(item, CheckpointError)]
    if not errors:
        return _attempt(lambda: conclude(list(found)), 0)[0]
    refusals = [error for error in errors if not isinstance(error, CheckpointRejectedError)]
    return refusals[0] if refusals else CheckpointRejectedError(*(why for error in errors for why in error.args))
