"""Checks which rules for a valid run a sweep violates. docs/rules.md lists the rules; a test compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...common.sweep_files import FAILED, NO_FAULT, REPLAY, STORAGE
from ..common.problems import NOTE
from .groups import NO_ENGINE
from .read import CellResult, Sweep, read_json
from .samples import Measured

_OF_THE_MACHINE = ("processors", "kernel", "python", "memory_bytes", "usable_processors")


def violations(sweep: Sweep, measured: list[Measured]) -> list[str]:
    """Sentences, each beginning with the name of its rule; empty if the run is valid."""
    return [f"{name}: {found}" for name, check in RULES.items() for found in check(sweep, measured)]


def _complete(sweep: Sweep, measured: list[Measured]) -> Iterator[str]:
    for one in sweep.cells:
        if one.result is None:
            yield f"{one.cell.name} has no result; resume the sweep"
        elif one.result["status"] == FAILED:
            yield f"{one.cell.name} failed: {one.result['reason']}"


def _traces(sweep: Sweep, measured: list[Measured]) -> Iterator[str]:
    for one in measured:
        if one.report is not None:
            for problem in one.report.problems:
                if problem.severity != NOTE:
                    yield f"{one.cell.cell.name}: {problem.kind}: {problem.message}"


def _one_machine(sweep: Sweep, measured: list[Measured]) -> Iterator[str]:
    if not sweep.sessions:
        yield "nothing is recorded of the machine"
        return
    first = _machine(sweep.sessions[0])
    for number, session in enumerate(sweep.sessions[1:], start=2):
        differing = [name for name, value in _machine(session).items() if value != first[name]]
        if differing:
            yield f"start {number} differs from the first in {', '.join(differing)}"


def _machine(session: dict[str, Any]) -> dict[str, Any]:
    facts = {name: session["machine"].get(name) for name in _OF_THE_MACHINE}
    return facts | {"filesystem": session["filesystem"], "versions": session["versions"], "program": session["program"]}


def _durable(sweep: Sweep, measured: list[Measured]) -> Iterator[str]:
    for one in measured:
        if one.report is not None and one.cell.cell.engine != NO_ENGINE:
            unsafe = [str(value) for value in one.report.facts.durability if value != "fsync"]
            if unsafe:
                yield f"{one.cell.cell.name} saved with --checkpoint-durability {', '.join(unsafe)}"


def _verified(sweep: Sweep, measured: list[Measured]) -> Iterator[str]:
    for one in measured:
        cell = one.cell.cell
        if cell.settings.get("operations") == "save":
            continue  # nothing was loaded
        if cell.mode == "replay" and cell.engine != NO_ENGINE:
            if not read_json(one.cell.directory / REPLAY)["engines"][cell.engine]["verified"]:
                yield f"{cell.name}: no load was compared with what was saved"
        elif cell.mode != STORAGE and cell.fault != NO_FAULT and not one.facts["verified"]:
            yield f"{cell.name}: what was restored is not what was saved"


def _storage(sweep: Sweep, measured: list[Measured]) -> Iterator[str]:
    of_storage = {_allocation(one.cell) for one in measured if one.cell.cell.mode == STORAGE}
    others = {_allocation(one.cell) for one in measured} - of_storage
    if of_storage and others:
        which = ", ".join(sorted(other or "what was measured without --allocation" for other in others))
        yield f"the storage itself was not measured in {which}, but in another allocation (nodes x GPUs)"
    there = {one.cell.cell.repeat for one in measured if one.cell.cell.mode == STORAGE}
    for repeat in range(1, sweep.repeats + 1):
        if repeat not in there:
            yield f"the storage itself was not measured in repeat {repeat}"


def _planned(sweep: Sweep, measured: list[Measured]) -> Iterator[str]:
    for one in sweep.cells:
        if one.cell.mode != STORAGE and one.cell.plan_name not in sweep.plans:
            yield f"{one.cell.name}: there is no plan {one.cell.plan_name} of its checkpoint"


def _in_order(sweep: Sweep, measured: list[Measured]) -> Iterator[str]:
    begun: dict[str | None, float] = {}  # the cell ahead in the same allocation: cells that are compared share one
    for one in sweep.cells:
        if one.result is not None:
            began, allocation = one.result["began_unix_s"], _allocation(one)
            if began < begun.get(allocation, began):
                yield f"{one.cell.name} was measured before the cell ahead of it"
            begun[allocation] = began


def _allocation(cell: CellResult) -> str | None:
    """NODESxGPUS of the job of --allocation that measured a cell; None if it measured all cells."""
    return None if cell.result is None else cell.result.get("allocation")


RULES: dict[str, Callable[[Sweep, list[Measured]], Iterator[str]]] = {
    "complete": _complete,
    "traces": _traces,
    "one machine": _one_machine,
    "durable": _durable,
    "verified": _verified,
    "storage": _storage,
    "planned": _planned,
    "in order": _in_order,
}
