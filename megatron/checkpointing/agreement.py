"""Steps that all ranks take collectively: an error on one rank is raised on all of them, with the same message."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from megatron.checkpointing.engines.errors import (
    CheckpointDamagedError,
    CheckpointError,
    EngineUnavailableError,
    UnknownEngineError,
)
from megatron.config import ConfigError
from megatron.fileio.objects.errors import ObjectStoreError
from megatron.parallel.control_plane import ControlPlane
from megatron.parallel.lost_peers import comes_from_another_rank, text_of
from restart_trace.recorder import Operation
from restart_trace.under_way import RANKS, UnderWay

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CheckpointRejectedError(CheckpointDamagedError):
    """At least one rank found the checkpoint damaged; another checkpoint may be loaded.

    `args`: what each rank found.
    """

    def __str__(self) -> str:
        return "; ".join(self.args)


class FailedAloneError(RuntimeError):
    """This rank failed where others waited for it, outside of an agreement: its process has to end."""


class RankFailedError(CheckpointError):
    """A rank failed in an agreement by an error that is not of its input: another start may go well."""

    exit_code = 1


class _NotAnsweredError(RankFailedError):
    """Another rank did not answer a rank: where that one, or a third, tells what is wrong, this says nothing more."""


@contextlib.contextmanager
def exchanging(control: ControlPlane, what: str) -> Iterator[None]:
    """The body is a collective of torch, in which others wait for this rank until its process ends.

    It must be no part of an agreement, since those never come to one. Raises FailedAloneError in place of an Exception
    that is this rank's own, and has told the ranks that wait for it in an agreement.
    """
    try:
        with UnderWay(RANKS, what):
            yield
    except Exception as exc:
        if comes_from_another_rank(exc):
            raise
        logger.exception("rank %d: the %s failed", control.rank, what)
        failure = f"the {what} failed: {text_of(exc)}"
        control.give_up(failure)
        raise FailedAloneError(f"rank {control.rank}: {failure}") from exc


def run_on_all_ranks(
    control: ControlPlane,
    op: Operation,
    work: Callable[[], Any],
    conclude: Callable[[list[Any]], Any] = list,
    *,
    phase: str | None = None,
) -> Any:
    """Run `work()` on every rank, then `conclude(results by rank)` on rank 0; all ranks return its result.

    If any rank raises, all ranks raise the same: CheckpointRejectedError for CheckpointDamagedError or OSError, any
    other CheckpointError as it is, a CheckpointError that names the rank for what else is wrong with its input, and
    RankFailedError, which names rank and exception, for anything else. Waits for the slowest rank. `phase`: of `op`,
    which the time of `work` belongs to; None: `work` records its phases itself.
    """
    return _agreed(control, op, work, phase, conclude, control.broadcast)


def run_on_rank_0(control: ControlPlane, op: Operation, work: Callable[[], T], *, phase: str | None = None) -> T:
    """The result of `work()`, which rank 0 alone runs, on all ranks; all raise as `run_on_all_ranks`."""
    mine, cause = _attempt(work, 0, op, phase) if control.rank == 0 else (None, None)
    with op.span("barrier"):
        verdict = control.broadcast(mine)
    if isinstance(verdict, CheckpointError):
        raise verdict from cause
    return verdict


def run_and_scatter(
    control: ControlPlane, op: Operation, work: Callable[[], Any], conclude: Callable[[list[Any]], Sequence[Any]]
) -> Any:
    """As `run_on_all_ranks`, but `conclude` returns a result for each rank, and each rank gets its own only."""

    def scatter(verdict: Any) -> Any:
        error = isinstance(verdict, CheckpointError)
        return control.scatter([verdict] * control.world_size if error else verdict)

    return _agreed(control, op, work, None, conclude, scatter)


def _agreed(
    control: ControlPlane,
    op: Operation,
    work: Callable[[], Any],
    phase: str | None,
    conclude: Callable[[list[Any]], Any],
    distribute: Callable[[Any], Any],
) -> Any:
    """As `run_on_all_ranks`; `distribute` sends rank 0's result, or the error, to the ranks.

    An error that ends the run precedes a damaged checkpoint, and one of a rank itself that of a rank without an answer.
    """
    mine, cause = _attempt(work, control.rank, op, phase)
    with op.span("barrier"):
        gathered = control.gather(mine)
    verdict = None
    if gathered is not None:
        errors = [item for item in gathered if isinstance(item, CheckpointError)]
        refusals = [error for error in errors if not isinstance(error, CheckpointRejectedError)]
        if refusals:
            verdict = min(refusals, key=lambda error: isinstance(error, _NotAnsweredError))
        elif errors:
            verdict = CheckpointRejectedError(*(why for error in errors for why in error.args))
        else:
            verdict, _ = _attempt(lambda: conclude(list(gathered)), 0, op, None)
    with op.span("barrier"):
        verdict = distribute(verdict)
    if isinstance(verdict, CheckpointError):
        raise verdict from cause
    return verdict


def _attempt(work: Callable[[], Any], rank: int, op: Operation, phase: str | None) -> tuple[Any, Exception | None]:
    """The result of `work`, or the CheckpointError to raise on all ranks; and the exception that caused it."""
    try:
        with op.span(phase) if phase is not None else contextlib.nullcontext():
            return work(), None
    except CheckpointRejectedError as exc:
        return exc, exc
    except (CheckpointDamagedError, OSError) as exc:
        return CheckpointRejectedError(f"rank {rank}: {exc}"), exc
    except CheckpointError as exc:
        return exc, exc
    except Exception as exc:  # any error: the other ranks wait for an answer
        logger.exception("rank %d: a step of the load failed", rank)
        of_input = isinstance(exc, (ConfigError, EngineUnavailableError, UnknownEngineError, ObjectStoreError))
        of_another_rank = comes_from_another_rank(exc)
        kind = CheckpointError if of_input else _NotAnsweredError if of_another_rank else RankFailedError
        return kind(f"rank {rank}: {type(exc).__name__}: {exc}"), exc
