"""Every fault at every injection point with several supervisors and engines, in as few launches as possible.

The cells of one supervisor and engine are faults in one sequence of launches: each restart begins with the state that
the fault before has left. All cells share one reference run, since neither supervisor nor engine may change a loss. The
last launch of a sequence is ended once it has caught up.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.config.uris import Location, below

from ..common.escaping import markdown as escaped
from ..common.formatting import count, number, plural
from ..common.tables import markdown_table
from . import command as commands
from .checkpoints import checkpoints_at
from .drill import in_turn, run_drill
from .faults import DAMAGE, FAULTS, STORAGE_FAULTS, place_refusal, refusal
from .injection_points import STAGES, parse_injection_point
from .launch import DrillError
from .nodes import TAKES_A_SPARE
from .output import analysed, content_of
from .plan import BY_FORK, Injection, Plan, PlannedInjection, injection_before_restart, say
from .reference import Reference

INJECTION_POINTS = (*STAGES, "random:1")  # iteration:N is mid-step at a given iteration
MAX_INJECTIONS = 10  # in one sequence
_VERDICTS = {True: "verified", False: "NOT VERIFIED", None: "did not run"}


@dataclass(frozen=True)
class Cell:
    supervisor: str
    engine: str
    fault: str
    injection_point: str


@dataclass
class Result:
    """The result of a cell. `verified` is None if it could not be carried out; `wrong` then has the reason."""

    cell: Cell
    verified: bool | None
    wrong: str = ""
    restart_s: float | None = None
    accounted: float | None = None
    lost_steps: int | None = None


def cells(
    supervisors: tuple[str, ...],
    engines: tuple[str, ...],
    checkpoints: Location | None,
    faults: tuple[str, ...] = tuple(FAULTS),
    points: tuple[str, ...] = INJECTION_POINTS,
    *,
    on_nodes: bool = False,
) -> list[Cell]:
    """All valid combinations of these; `on_nodes`: as for `refusal`.

    Left out besides what `refusal` and `place_refusal` name: damage during a restart, which is the same as damage after
    any kill, except that there may be no second checkpoint.
    """
    found = []
    for supervisor in supervisors:
        for engine in engines:
            for fault in faults:
                for point in map(parse_injection_point, points):
                    left_out = point.text not in (FAULTS[fault].matrix_at or INJECTION_POINTS)
                    left_out |= fault in DAMAGE and point.during_restart
                    left_out |= place_refusal(fault, checkpoints) is not None
                    if not left_out and refusal(fault, point, supervisor, on_nodes=on_nodes) is None:
                        found.append(Cell(supervisor, engine, fault, point.text))
    return found


def sequences(chosen: list[Cell], spares: int = 1, nodes: int = 1) -> list[list[Cell]]:
    """The cells of each sequence of launches, in order.

    A sequence loses at most as many nodes as there are `spares`; one fault, which takes `nodes`, is always possible.
    A launcher does not retry a start that is refused after another one that was, as those are that the store fails.
    """
    losses = max(1, spares // nodes)
    found: dict[tuple[str, str], list[list[Cell]]] = {}
    for cell in chosen:
        mine = found.setdefault((cell.supervisor, cell.engine), [[]])
        lost = sum(other.fault in TAKES_A_SPARE for other in mine[-1])
        too_many = cell.fault in TAKES_A_SPARE and lost == losses
        again = mine[-1] and _refuses_a_start(mine[-1][-1]) and _refuses_a_start(cell)
        if len(mine[-1]) == MAX_INJECTIONS or too_many or again:
            mine.append([])
        mine[-1].append(cell)
    return [sequence for of_both in found.values() for sequence in of_both]


def _refuses_a_start(cell: Cell) -> bool:
    restarts = parse_injection_point(cell.injection_point).during_restart
    return cell.supervisor in BY_FORK and cell.fault in STORAGE_FAULTS and restarts


def injections_of(sequence: list[Cell]) -> tuple[PlannedInjection, ...]:
    """The injections of a sequence. If the first one is during a restart, another one comes before it."""
    planned = tuple(PlannedInjection(cell.fault, parse_injection_point(cell.injection_point)) for cell in sequence)
    return (injection_before_restart(sequence[0].supervisor), *planned) if planned[0].point.during_restart else planned


def run_sequence(base: Plan, number: int, sequence: list[Cell], reference: Reference) -> list[Result]:
    """Inject the faults of all cells of `sequence`. After an error the results end with the cell that failed."""
    out = base.out / f"sequence_{number:03d}"
    injections = injections_of(sequence)
    at_given_place = any(FAULTS[cell.fault].place is not None for cell in sequence)
    at_given_place |= not isinstance(base.checkpoints, Path)
    checkpoints = below(base.checkpoints, out.name) if at_given_place else out / "checkpoints"
    plan = replace(
        base, faults=tuple(planned.fault for planned in injections), restarts=len(injections),
        supervisor=sequence[0].supervisor, out=out, checkpoints=checkpoints, to_the_end=False,
    )  # fmt: skip
    plan = commands.with_commands(plan, base.command, sequence[0].engine)
    done: list[Injection] = []
    error: str | None = None
    try:
        run_drill(plan, in_turn(injections), done)
    except DrillError as exc:
        error = str(exc)
        say(f"error: {error}")
    try:
        verified = content_of(plan, done, reference, analysed(plan.trace_dir))["cycles"] if done else []
    except DrillError as exc:  # the analysis failed: whose cell it was is not known
        say(f"error: {exc}")
        return [Result(sequence[0], None, str(exc))]
    entries = verified[len(injections) - len(sequence) :]
    results = [_result(cell, entry) for cell, entry in zip(sequence, entries, strict=False)]
    if error is None:
        if all(result.verified for result in results):
            checkpoints_at(checkpoints).remove()
        return results
    # The launch after the last injection failed.
    if results and (len(results) == len(sequence) or not results[-1].verified):
        return [*results[:-1], Result(results[-1].cell, None, error)]
    return [*results, Result(sequence[len(results)], None, error)]


def _result(cell: Cell, entry: dict[str, Any]) -> Result:
    return Result(
        cell, entry["verified"], "; ".join(entry["different"][:3]), entry["restart_s"], entry["accounted"],
        entry["lost_steps"],
    )  # fmt: skip


def run_matrix(base: Plan, chosen: list[Cell], reference: Reference, spares: int) -> bool:
    """Run all cells; write matrix.md and matrix.json, and print the first. Returns whether all are verified."""
    begin = time.monotonic()
    results = run_cells(base, chosen, reference, spares)
    text = markdown(results, time.monotonic() - begin)
    (base.out / "matrix.md").write_text(text)
    entries = [vars(result) | {"cell": vars(result.cell)} for result in results]
    (base.out / "matrix.json").write_text(json.dumps({"cells": entries}, indent=1) + "\n")
    print(text)
    return all(result.verified for result in results)


def run_cells(base: Plan, chosen: list[Cell], reference: Reference, spares: int) -> list[Result]:
    """The results of all cells. After an error only its own cell is lost: the following ones get a new sequence."""
    results: list[Result] = []
    waiting = sequences(chosen, spares, len(base.nodes))
    number = 0
    while waiting:
        sequence = waiting.pop(0)
        first = sequence[0]
        say(f"sequence {number}: {plural(len(sequence), 'fault')}, {first.supervisor}, engine {first.engine}")
        found = run_sequence(base, number, sequence, reference)
        results += found
        if len(found) < len(sequence):
            waiting.insert(0, sequence[len(found) :])
        number += 1
    return results


def markdown(results: list[Result], elapsed_s: float) -> str:
    """The results as a table."""
    header = ("supervisor", "engine", "fault", "injection point", "restart, s", "accounted", "lost steps", "")
    rows = []
    for result in results:
        cell, wrong = result.cell, f": {result.wrong}" if result.wrong else ""
        figures = number(result.restart_s, ".2f"), number(result.accounted, ".1%"), count(result.lost_steps)
        verdict = escaped(_VERDICTS[result.verified] + wrong)
        what = cell.supervisor, cell.engine, f"`{cell.fault}`", f"`{cell.injection_point}`"
        rows.append((*what, *figures, verdict))
    good = sum(result.verified is True for result in results)
    verdict = f"{good} of {len(results)} cells verified, in {elapsed_s / 60:.1f} minutes."
    return "\n".join([*markdown_table(header, rows), "", verdict, ""])
