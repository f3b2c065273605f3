"""Structured logs of torchtitan (JSON lines, a file per rank), of one rank or of several one after the other.

A span has a line for its begin and one for its end, which has its milliseconds. `checkpoint_save` is the call at every
step: only where it saves, it adds its name to the tags of the step. An asynchronous save goes on after the call.
"""

from __future__ import annotations

import json
from typing import Any

from ...model.imported_run import ImportedLoad, Range
from ..draft import Draft, reads
from ..saves import SaveDraft

PROGRAMS: tuple[str, ...] = ("torchtitan",)
LOGS = "structured logs of torchtitan"
_SAVE, _LOAD, _STEP, _EVALUATION = "checkpoint_save", "checkpoint_load", "step", "eval"


# What follows the name always matches, so that a long line is searched once.
@reads(r'^(\{.*"log_type_name": ?"\w+_end".*)$')
def _span_end(run: Draft, line: str) -> None:
    """The end of a span; one that is damaged, or lacks a number, says nothing."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return
    if not isinstance(event, dict) or not isinstance(event.get("log_type_name"), str):
        return
    rank, step, seconds = _number(event, "rank"), _number(event, "step"), _seconds(event)
    if rank is None or seconds is None:
        return
    name = event["log_type_name"].removesuffix("_end")
    if name not in (_SAVE, _LOAD, _STEP, _EVALUATION):
        run.leave_out(name)
    elif name == _LOAD:
        run.add_rank_seconds((_LOAD, None), rank, seconds)
    elif step is not None:
        of_ranks = run.add_rank_seconds((name, step), rank, seconds)
        if name == _SAVE and _SAVE in _tags(event):
            _saved(run, step, _range(of_ranks))
        elif name == _STEP:
            _stepped(run, rank, step, seconds)
            _resumed(run, step, _number(event, "relative_step"))


def _saved(run: Draft, step: int, call: Range) -> None:
    """A save was called. It first waits for the save before it, which is complete then."""
    save = run.save_of_step(str(step))
    if save is None:
        for earlier in run.saves:
            earlier.completed = True
        save = SaveDraft(step=step, tag=f"step-{step}", begun=True, scheduled=True)
        run.saves.append(save)
    save.call = call


def _stepped(run: Draft, rank: int, step: int, seconds: float) -> None:
    """A step ended, which contains its save and its evaluation; the slowest rank's time counts."""
    inside = (run.rank_seconds.get((name, step), {}).get(rank, 0.0) for name in (_SAVE, _EVALUATION))
    alone_s = max(0.0, seconds - sum(inside))
    before = run.iterations.get(step)
    run.add_iteration(str(step), step_s=max(alone_s, before.step_s if before and before.step_s else 0.0))


def _resumed(run: Draft, step: int, since_load: int | None) -> None:
    """The number of a step since the load tells which step was loaded; of 0 it is not known if anything was."""
    of_ranks = run.rank_seconds.get((_LOAD, None))
    if of_ranks and since_load is not None and step > since_load:
        run.loads[:] = [ImportedLoad(step - since_load, True, _range(of_ranks))]


def _range(of_ranks: dict[int, float]) -> Range:
    seconds = of_ranks.values()
    return Range(max(seconds), min(seconds) if len(of_ranks) > 1 else None)


def _number(event: dict[str, Any], name: str) -> int | None:
    value = event.get(name)
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _seconds(event: dict[str, Any]) -> float | None:
    value = event.get("value")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return value / 1e3 if 0 <= value < 1e15 else None


def _tags(event: dict[str, Any]) -> list[Any]:
    tags = event.get("step_tags")
    return tags if isinstance(tags, list) else []
