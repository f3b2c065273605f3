"""The numbers that a projection starts from, each with where it comes from: measured in a run, or given by a flag."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from ..common.errors import CouldNotRunError
from ..report import Report

MEASURED, GIVEN = "measured", "given"


@dataclass(frozen=True)
class Input:
    """One input. `source` is "measured" or "given"; `note` says how, or by which flag."""

    name: str
    value: float
    unit: str
    source: str
    note: str


@dataclass(frozen=True)
class Given:
    """Flags that overrule measurements; None: take the measured number."""

    blocked_s: float | None = None
    durable_s: float | None = None
    restart_s: float | None = None
    step_s: float | None = None
    checkpoint_bytes: float | None = None


@dataclass(frozen=True)
class Inputs:
    """All inputs of a projection; `checkpoint_bytes` is None if it is neither measured nor given."""

    blocked_s: Input
    durable_s: Input
    restart_s: Input
    step_s: Input
    checkpoint_bytes: Input | None

    @property
    def listed(self) -> list[Input]:
        known = [self.blocked_s, self.durable_s, self.restart_s, self.step_s, self.checkpoint_bytes]
        return [entry for entry in known if entry is not None]


def gather(report: Report | None, given: Given) -> Inputs:
    """Inputs from `report` where no flag overrules it.

    Raises CouldNotRunError naming the flag, if a number is neither measured nor given, or cannot be.
    """
    blocked, num_bytes = _median_of_saves(report, "blocked_s", "blocked_s, slowest rank"), _bytes(report)
    inputs = Inputs(
        blocked_s=_one("blocked_s", "s", given.blocked_s, "--blocked-seconds", blocked),
        durable_s=_one("durable_s", "s", given.durable_s, "--durable-seconds", _durable(report)),
        restart_s=_one("restart_s", "s", given.restart_s, "--restart-seconds", _restart(report)),
        step_s=_one("step_s", "s", given.step_s, "--step-seconds", _step(report)),
        checkpoint_bytes=None
        if given.checkpoint_bytes is None and num_bytes is None
        else _one("checkpoint_bytes", "bytes", given.checkpoint_bytes, "--checkpoint-bytes", num_bytes),
    )
    if inputs.step_s.value <= 0:
        raise CouldNotRunError(f"--step-seconds {inputs.step_s.value:g}: a step must take more than 0 s")
    return inputs


def _one(name: str, unit: str, given: float | None, flag: str, measured: tuple[float, str] | None) -> Input:
    if given is not None:
        if not (math.isfinite(given) and given >= 0):
            raise CouldNotRunError(f"{flag} {given}: give a number of 0 or more")
        return Input(name, given, unit, GIVEN, flag)
    if measured is None:
        raise CouldNotRunError(f"{name} was not recorded: give it with {flag}")
    return Input(name, measured[0], unit, MEASURED, measured[1])


def _median_of_saves(report: Report | None, name: str, remark: str) -> tuple[float, str] | None:
    """Median over the complete saves of what is called `name`."""
    saves = report.complete_saves if report else []
    values = [value for save in saves if (value := getattr(save, name)) is not None]
    return (median(values), f"median of {len(values)} saves ({remark})") if values else None


def _durable(report: Report | None) -> tuple[float, str] | None:
    not_durable = "committed_s: committed, but not synchronised to storage"
    durable = _median_of_saves(report, "durable_s", "durable_s")
    return durable or _median_of_saves(report, "committed_s", not_durable)


def _restart(report: Report | None) -> tuple[float, str] | None:
    restarts = report.restarts if report else []
    whole = [start.restart_s for start in restarts if start.restart_s is not None]
    if whole:
        return median(whole), f"median of {len(whole)} restarts (restart_s, failure to first step)"
    starts = [start.wall.max_s for start in restarts if start.wall]
    if starts:
        note = "time_to_first_step_s: to notice the failure and to launch again is not in it"
        return median(starts), f"median of {len(starts)} restarts ({note})"
    return None


def _step(report: Report | None) -> tuple[float, str] | None:
    steps = [step.seconds for step in report.steps] if report else []
    if report is None or not steps:
        return None
    waits = report.imported is not None and any(save.wait for save in report.imported.saves)
    note = "; those that waited for a save's files count with the wait" if waits else ""
    return median(steps), f"median of {len(steps)} steps (slowest rank{note})"


def _bytes(report: Report | None) -> tuple[float, str] | None:
    sizes = [save.bytes for save in report.complete_saves if save.bytes] if report else []
    return (median(sizes), f"median of {len(sizes)} saves") if sizes else None
