"""Steps that all ranks take together: what stops one of them stops all, at once and with the same words."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointError
from megatron.parallel.control_plane import ControlPlane
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)


class CheckpointRejectedError(CheckpointDamagedError):
    """The checkpoint is damaged, as at least one rank found: another may be loaded. `reasons`: what each found."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = list(reasons)


@dataclass(frozen=True)
class _Outcome:
    """What came of a step: `damage` tells against the checkpoint, `refusal` ends the run."""

    result: Any = None
    damage: tuple[str, ...] = ()
    refusal: CheckpointError | None = None


def together(
    control: ControlPlane,
    op: Operation,
    work: Callable[[], Any],
    conclude: Callable[[list[Any]], Any] = list,
) -> Any:
    """Take a step on every rank: `work()` on each, then on rank 0 `conclude(results by rank)`, which every rank gets.

    Raises the same on all ranks if any of them raised: CheckpointRejectedError for CheckpointDamagedError or OSError,
    any other CheckpointError as it is, and CheckpointError naming rank and exception for anything else. Waits for the
    slowest rank.
    """
    mine, cause = _attempt(work, control.rank)
    with op.span("barrier"):
        gathered = control.gather(mine)
    verdict = None if gathered is None else _verdict(gathered, conclude)
    with op.span("barrier"):
        verdict = control.broadcast(verdict)
    if verdict.refusal is not None:
        raise verdict.refusal from cause
    if verdict.damage:
        raise CheckpointRejectedError(verdict.damage) from cause
    return verdict.result


def _attempt(work: Callable[[], Any], rank: int) -> tuple[_Outcome, Exception | None]:
    try:
        return _Outcome(work()), None
    except (CheckpointDamagedError, OSError) as exc:
        return _Outcome(damage=(f"rank {rank}: {exc}",)), exc
    except CheckpointError as exc:
        return _Outcome(refusal=exc), exc
    except Exception as exc:  # whatever it is, the other ranks wait to hear of it
        logger.exception("rank %d: a step of the load failed", rank)
        return _Outcome(refusal=CheckpointError(f"rank {rank}: {type(exc).__name__}: {exc}")), exc


def _verdict(outcomes: Sequence[_Outcome], conclude: Callable[[list[Any]], Any]) -> _Outcome:
    """On rank 0: one outcome of all. What ends the run comes before what another checkpoint may mend."""
    for found in outcomes:
        if found.refusal is not None:
            return _Outcome(refusal=found.refusal)
    damage = tuple(what for found in outcomes for what in found.damage)
    if damage:
        return _Outcome(damage=damage)
    try:
        return _Outcome(conclude([found.result for found in outcomes]))
    except CheckpointRejectedError as exc:
        return _Outcome(damage=tuple(exc.reasons))
    except Exception as exc:
        logger.exception("rank 0: a step of the load failed")
        return _Outcome(refusal=CheckpointError(f"rank 0: {type(exc).__name__}: {exc}"))
