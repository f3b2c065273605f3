"""Divides a restart into consecutive parts: the waterfall of the terminal and the HTML report."""

from __future__ import annotations

from restart_trace.schema import PHASES

from .phases import START_ORDER
from .results import FailureTimes, PhaseStats, StartStats

# What happens outside of the training's processes, between the moments that a supervisor records.
OUTSIDE = ("detect", "stop", "relaunch", "launcher")
UNNAMED = "unattributed"
# What a reader of a restart cannot know by the names of these parts.
MEANINGS = {
    "detect": "until a supervisor noticed the failure",
    "stop": "until all ranks had ended",
    "relaunch": "until a supervisor started the command again",
    "launcher": "until a rank's process began, in a launcher, a scheduler, a container",
    UNNAMED: "work of the program that no record covers",
    "library_call": "a library's call that hooks cannot break down",
}
_LOAD = START_ORDER.index("load")
ORDER = (*OUTSIDE, *START_ORDER[:_LOAD], *PHASES["load"], *START_ORDER[_LOAD + 1 :], UNNAMED)


def parts_of(start: StartStats) -> dict[str, float]:
    """Part -> seconds on the critical rank, in their order; they add up to the whole start.

    Of a restart whose failure a supervisor recorded that is `restart_s`, and `launcher` is the time from the relaunch
    until the critical rank's process began; of any other start it is the time from process start to first step. The
    load is shown by its own phases. `first_step` is that of the critical rank, and what the last rank took for its own
    afterwards. `unattributed` is the rest, that of the load too. Where processes were there before the failure, the
    critical rank's own phases begin with its abort or its fork, and count from there instead of what the supervisor
    recorded meanwhile.
    """
    failure, own_s = start.failure, start.wall.at_critical_s if start.wall else None
    after_s = start.after_critical_s or 0.0
    parts: dict[str, float] = {}
    if own_s is not None and failure and start.restart_s is not None:
        parts = outside(failure, start.restart_s - own_s - after_s, was_there=was_there(start))
    in_last_step_s = min(after_s, start.last_first_step_s or 0.0)
    rest = after_s - in_last_step_s + ((start.unattributed.at_critical_s if start.unattributed else None) or 0.0)
    for phase in start.phases:
        if phase.name == "caught_up" or not phase.time.at_critical_s:
            continue
        own = (
            _parts_of_load(phase) if phase.name == "load" and phase.details else {phase.name: phase.time.at_critical_s}
        )
        rest += phase.time.at_critical_s - sum(own.values())
        parts |= own
    if in_last_step_s:
        parts["first_step"] = parts.get("first_step", 0.0) + in_last_step_s
    return parts | {UNNAMED: rest}


def was_there(start: StartStats) -> bool:
    """Whether processes were there before their start, an in-process restart: then lost ranks do not wait for them."""
    return any(phase.name == "abort" for phase in start.phases)


def outside(failure: FailureTimes, began_s: float, *, cut: bool = False, was_there: bool = False) -> dict[str, float]:
    """Part of OUTSIDE -> seconds, from the failure until a process began `began_s` after it; they add up to that.

    `launcher` may be negative: by the 10 ms to which the kernel tells when a process began; by more if clocks differ.
    With `cut` no part is: what the supervisor recorded too late for its place does not count. Nor does it with
    `was_there`, of an in-process restart: what a rank does itself begins at once. Then only `launcher` may be
    negative: a rank may see the failure before its launcher does.
    """
    parts: dict[str, float] = {}
    before = 0.0
    moments = (failure.detected_s, failure.stopped_s, failure.relaunched_s, began_s)
    for name, moment in zip(OUTSIDE, moments, strict=True):
        if moment is not None:
            until = min(max(moment, before), max(began_s, 0.0)) if cut or was_there else moment
            parts[name], before = until - before, until
    if was_there and began_s < 0:
        parts[OUTSIDE[-1]] += began_s
    return parts


def _parts_of_load(load: PhaseStats) -> dict[str, float]:
    """Phases of a load on the critical rank. Threads may be in several at once: that time is not the longer ones'."""
    parts = {detail.name: took for detail in load.details if (took := detail.time.at_critical_s)}
    twice = max(0.0, sum(parts.values()) - (load.time.at_critical_s or 0.0))
    for name in sorted(parts, key=lambda name: parts[name], reverse=True):
        of_longer = min(parts[name], twice)
        parts[name] -= of_longer
        twice -= of_longer
    return parts
