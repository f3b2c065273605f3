"""Injection points: stages of a training that are recognised in the trace of rank 0 as it is written."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from restart_trace.reading import RecordContext
from restart_trace.schema import RANK_FILE_PATTERN

from .launch import DrillError, Launch

POLL_S = 0.0005  # some stages last a millisecond
LONGEST_DELAY_S = 2.0  # of random:SEED, after the first iteration that follows a commit

# Stages of a step, a save, a load or a start. Each but the last begins when a certain record is in the trace:
# `stage_begun_by`.
STAGES = (
    "mid-step",
    "mid-save-write",
    "mid-save-before-commit",
    "mid-save-commit",
    "after-commit",
    "mid-load",
    "mid-startup",
    "mid-return",
)
MID_RETURN = "mid-return"  # the last rank was killed, and the others return
RESTART_STAGES = ("mid-load", "mid-startup")  # the first start has nothing to lose, so a later one is used


@dataclass(frozen=True)
class InjectionPoint:
    """The value of --at: a stage, the end of an iteration, or a random time."""

    text: str
    stage: str | None = None
    iteration: int | None = None
    seed: int | None = None

    @property
    def during_restart(self) -> bool:
        """Whether the fault is injected while a restart loads a checkpoint or starts up."""
        return self.stage in RESTART_STAGES


AFTER_COMMIT = InjectionPoint("after-commit", stage="after-commit")


def parse_injection_point(text: str) -> InjectionPoint:
    """Raises ValueError, which lists the valid values."""
    if text in STAGES:
        return InjectionPoint(text, stage=text)
    name, _, number = text.partition(":")
    if name == "iteration" and number.isdigit():
        return InjectionPoint(text, iteration=int(number))
    if name == "random" and number.isdigit():
        return InjectionPoint(text, seed=int(number))
    raise ValueError(f"{text}: not an injection point; use one of {', '.join(STAGES)}, iteration:N, random:SEED")


class Tail:
    """Follows a trace file while it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._context = RecordContext()

    def new_records(self) -> list[dict[str, Any]]:
        """Records whose lines were finished since the last call, completed by their context."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            added = file.read()
        finished = added[: added.rfind(b"\n") + 1]
        self._position += len(finished)
        return [self._context.complete(json.loads(line)) for line in finished.splitlines()]


class TraceTail(Tail):
    """Follows the trace file of one rank in one cycle."""

    def __init__(self, trace_dir: Path, cycle: int, rank: int = 0) -> None:
        super().__init__(trace_dir / RANK_FILE_PATTERN.format(rank=rank, cycle=cycle))


def stage_begun_by(record: dict[str, Any]) -> str | None:
    """The stage of STAGES that a rank enters when it writes `record`; None if the record begins no stage."""
    kind, operation, phase = record["type"], record.get("operation"), record.get("phase")
    if kind == "iteration":
        return "mid-step"
    if kind == "operation_begin" and operation == "load":
        return "mid-load"
    if kind == "operation_end" and operation == "save" and record["outcome"] == "ok":
        return "after-commit"
    if kind != "span":
        return None
    if operation == "startup" and phase == "imports":
        return "mid-startup"
    return {
        ("save", "collect", None): "mid-save-write",
        ("save", "barrier", None): "mid-save-before-commit",
        ("save", "commit", "manifest"): "mid-save-commit",
    }.get((operation, phase, record.get("detail")))


def wait_for(point: InjectionPoint, launch: Launch, trace_dir: Path, cycle: int, commits: int, limit_s: float) -> int:
    """Wait until this cycle reaches `point`. Returns the newest iteration that rank 0 had finished by then, or 0.

    Unless it is in a restart, `point` counts only after this cycle has committed `commits` checkpoints.
    Raises DrillError if the command ends or `limit_s` passes first.
    """
    finished = 0
    wanted = "checkpoint" if commits == 1 else f"checkpoint number {commits}"

    def why() -> str:
        if point.during_restart or commits <= 0 or not finished:
            return ""
        return f". No {wanted} was committed, and a fault is injected only after that: save more often"

    for record in _records(point.text, launch, trace_dir, cycle, limit_s, why):
        launch.find_ranks(trace_dir, cycle)
        if record["type"] == "iteration":
            finished = record["step"]
        stage = stage_begun_by(record)
        if point.iteration is not None and finished >= point.iteration:
            if commits > 0:
                raise DrillError(
                    f"--at {point.text}: no {wanted} was committed before; save more often, or choose a later one"
                )
            return finished
        commits -= stage == "after-commit"
        if commits > 0 and not point.during_restart:
            continue
        if stage is not None and stage == ("mid-step" if point.stage == MID_RETURN else point.stage):
            if stage == "mid-step":
                time.sleep((record["end_ns"] - record["start_ns"]) / 2e9)
            return finished
        if point.seed is not None and stage == "mid-step":
            time.sleep(random.Random(point.seed + cycle).uniform(0.0, LONGEST_DELAY_S))
            return finished
    raise AssertionError("unreachable")


def wait_for_span(phase: str, launch: Launch, trace_dir: Path, cycle: int, limit_s: float) -> None:
    """Wait until rank 0 has recorded a span of this phase in this cycle. Raises DrillError as `wait_for` does."""
    for record in _records(phase, launch, trace_dir, cycle, limit_s, str):
        if record["type"] == "span" and record["phase"] == phase:
            return


def _records(
    wanted: str, launch: Launch, trace_dir: Path, cycle: int, limit_s: float, why: Callable[[], str]
) -> Iterator[dict[str, Any]]:
    """Records of rank 0 as they are written. `why` is called on failure; it explains why `wanted` was not reached."""
    tail = TraceTail(trace_dir, cycle)
    deadline = time.monotonic() + limit_s
    while True:
        ended = launch.exit_code is not None  # read before the trace, so that no record of an ended launch is missed
        yield from tail.new_records()
        if ended:
            raise DrillError(
                f"the command ended with exit code {launch.exit_code} before the injection point {wanted}; "
                f"see its log, or choose one that it reaches{why()}"
            )
        if time.monotonic() > deadline:
            raise DrillError(
                f"the injection point {wanted} was not reached within {limit_s:g} s; raise --time-limit{why()}"
            )
        time.sleep(POLL_S)
