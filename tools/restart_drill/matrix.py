"""Every fault at every moment under both supervisors and with several engines, in as few launches as that takes.

    python -m tools.restart_drill.matrix --out runs/matrix                       # all that makes sense
    python -m tools.restart_drill.matrix --out runs/sample --sample 8 --seed 1   # eight cells of it, drawn by the seed

Cells of one supervisor and engine are strikes on one course of launches: what a strike leaves is the next one's start.
All cells share one reference run, since neither supervisor nor engine may change a loss. The last launch of a course is
ended once it has caught up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.checkpointing.object_storage import ObjectStoreError
from megatron.config.uris import ObjectUri, Place, below
from restart_trace.command_line import CommandParser

from ..common.escaping import markdown as escaped
from ..common.formatting import count, number, plural
from ..common.tables import markdown_table
from . import command as commands
from .checkpoints import checkpoints_at
from .cli import (
    COULD_NOT_RUN,
    NOT_VERIFIED,
    VERIFIED,
    add_persist_interval,
    add_run_options,
    base_plan,
    catch_stop_signals,
    check_out,
    nodes_refusal,
    saves,
    tolerances_of,
)
from .drill import run_drill
from .facts import facts_of
from .faults import DAMAGE, DISK_FULL, FAULTS, STORAGE_FAULTS, of_storage, refusal
from .launch import DrillError
from .moments import STAGES, parse_moment
from .nodes import TAKES_A_SPARE
from .output import analysed, describe
from .plan import RELAUNCH, SUPERVISORS, TORCHRUN, Intent, Plan, Strike, first, say
from .preset import expanded
from .reference import Reference, run_reference, stored_reference

ENGINES = ("torch", "lazy")
MOMENTS = (*STAGES, "random:1")  # iteration:N is mid-step at a given iteration
# Faults whose moment matters little: the disk fills up before a save or in one; damage is done when all is over, and of
# the two kinds one is enough everywhere; on CPUs a device error is an exception.
_SOME_MOMENTS = {
    "disk-full": ("mid-step", "mid-save-write"),
    "truncate": ("mid-save-write", "after-commit"),
    "sigkill-launcher": ("mid-step", "mid-save-write", "mid-save-commit", "mid-load"),
    "device-error": ("mid-step", "mid-save-write", "mid-load"),
    "link-slow": ("mid-step", "mid-save-write", "mid-load", "mid-startup"),
    "disk-slow": ("mid-step", "mid-save-write", "mid-load"),
    **dict.fromkeys(STORAGE_FAULTS, ("mid-save-write", "mid-load")),
}
STRIKES = 10  # of one course
_PRESET, _RANKS = "tiny_tp2_pp2_dp2", commands.Sizes(1, 1, 2)
_VERDICTS = {True: "verified", False: "NOT VERIFIED", None: "did not run"}


@dataclass(frozen=True)
class Cell:
    supervisor: str
    engine: str
    fault: str
    moment: str


@dataclass
class Result:
    """What came of a cell; `verified` is None if it could not be carried out, for the reason in `wrong`."""

    cell: Cell
    verified: bool | None
    wrong: str = ""
    restart_s: float | None = None
    accounted: float | None = None
    lost_steps: int | None = None


def cells(
    supervisors: tuple[str, ...],
    engines: tuple[str, ...],
    checkpoints: Place | None,
    faults: tuple[str, ...] = FAULTS,
    moments: tuple[str, ...] = MOMENTS,
    *,
    on_nodes: bool = False,
) -> list[Cell]:
    """All combinations of these that make sense; `on_nodes`: as `refusal`.

    Left out, besides what `refusal` names: disk-full without a file system for it; faults of a store without one; and
    damage in a restart, which is the same as damage after any kill, except that no second checkpoint may be there.
    """
    found = []
    for supervisor in supervisors:
        for engine in engines:
            for fault in faults:
                for moment in map(parse_moment, moments):
                    left_out = moment.text not in _SOME_MOMENTS.get(fault, MOMENTS)
                    left_out |= fault in DAMAGE and moment.strikes_a_restart
                    left_out |= fault == DISK_FULL and not isinstance(checkpoints, Path)
                    left_out |= fault in STORAGE_FAULTS and not isinstance(checkpoints, ObjectUri)
                    if not left_out and refusal(fault, moment, supervisor, on_nodes=on_nodes) is None:
                        found.append(Cell(supervisor, engine, fault, moment.text))
    return found


def courses(chosen: list[Cell], spares: int = 1) -> list[list[Cell]]:
    """Cells that strike one course of launches, in its order. A course loses as many nodes as there are spares."""
    found: dict[tuple[str, str], list[list[Cell]]] = {}
    for cell in chosen:
        mine = found.setdefault((cell.supervisor, cell.engine), [[]])
        lost = sum(other.fault in TAKES_A_SPARE for other in mine[-1])
        if len(mine[-1]) == STRIKES or (cell.fault in TAKES_A_SPARE and lost == spares):
            mine.append([])
        mine[-1].append(cell)
    return [course for of_both in found.values() for course in of_both]


def strikes_of(course: list[Cell]) -> tuple[Intent, ...]:
    """The strikes of a course; one that strikes a restart needs one before it."""
    intents = tuple(Intent(cell.fault, parse_moment(cell.moment)) for cell in course)
    needs_one = intents[0].moment.strikes_a_restart
    return (first(course[0].supervisor), *intents) if needs_one else intents


def run_course(base: Plan, number: int, course: list[Cell], reference: Reference) -> list[Result]:
    """Strike with all cells of `course`. After an error the cells from there on are another course's."""
    out = base.out / f"course_{number:03d}"
    strikes = strikes_of(course)
    fills_disk = any(cell.fault == DISK_FULL for cell in course)
    there = fills_disk or not isinstance(base.checkpoints, Path)
    checkpoints = below(base.checkpoints, out.name) if there else out / "checkpoints"
    engine, supervisor = course[0].engine, course[0].supervisor
    command = commands.completed(base.command, checkpoints, out / "trace", engine, base.persist_interval)
    command = commands.supervised(command, supervisor, len(strikes), base.hang_limit_s, on_nodes=base.on_nodes)
    if any(of_storage(cell.fault) for cell in course):
        command = commands.with_deadline(command)
    plan = replace(
        base, command=command, resumed_command=command, strikes=strikes, supervisor=supervisor, out=out,
        checkpoints=checkpoints, to_the_end=False, **saves(command, base.on_nodes),
    )  # fmt: skip
    done: list[Strike] = []
    error: str | None = None
    try:
        run_drill(plan, say, done)
    except DrillError as exc:
        error = str(exc)
        say(f"error: {error}")
        if str(exc).startswith("stopped by signal"):
            raise
    content = content_of(plan, done, reference)
    told = content["cycles"][len(strikes) - len(course) :]
    results = [_result(cell, entry) for cell, entry in zip(course, told, strict=False)]
    if error is None:
        if all(result.verified for result in results):
            checkpoints_at(checkpoints).remove()
        return results
    # What came after the last strike failed.
    if results and (len(results) == len(course) or not results[-1].verified):
        return [*results[:-1], Result(results[-1].cell, None, error)]
    return [*results, Result(course[len(results)], None, error)]


def content_of(plan: Plan, done: list[Strike], reference: Reference) -> dict[str, Any]:
    if not done:
        return {"cycles": []}
    content = describe(
        done,
        plan.supervisor,
        analysed(plan.trace_dir),
        facts_of(plan.trace_dir),
        reference,
        *tolerances_of(plan.command),
    )
    (plan.out / "drill.json").write_text(json.dumps(content, indent=1) + "\n")
    return content


def _result(cell: Cell, entry: dict[str, Any]) -> Result:
    return Result(
        cell, entry["verified"], "; ".join(entry["different"][:3]), entry["restart_s"], entry["accounted"],
        entry["lost_steps"],
    )  # fmt: skip


def run_matrix(base: Plan, chosen: list[Cell], reference: Reference, spares: int) -> list[Result]:
    """All cells; an error costs its own cell only."""
    results: list[Result] = []
    waiting = courses(chosen, max(1, spares // len(base.nodes)))
    number = 0
    while waiting:
        course = waiting.pop(0)
        say(f"course {number}: {plural(len(course), 'fault')}, {course[0].supervisor}, engine {course[0].engine}")
        found = run_course(base, number, course, reference)
        results += found
        if len(found) < len(course):
            waiting.insert(0, course[len(found) :])
        number += 1
    return results


def markdown(results: list[Result], elapsed_s: float) -> str:
    """The results as a table."""
    header = ("supervisor", "engine", "fault", "moment", "restart, s", "accounted", "lost steps", "")
    rows = []
    for result in results:
        cell, wrong = result.cell, f": {result.wrong}" if result.wrong else ""
        figures = number(result.restart_s, ".2f"), number(result.accounted, ".1%"), count(result.lost_steps)
        verdict = escaped(_VERDICTS[result.verified] + wrong)
        rows.append((cell.supervisor, cell.engine, f"`{cell.fault}`", f"`{cell.moment}`", *figures, verdict))
    good = sum(result.verified is True for result in results)
    verdict = f"{good} of {len(results)} cells verified, in {elapsed_s / 60:.1f} minutes."
    return "\n".join([*markdown_table(header, rows), "", verdict, ""])


_EXAMPLE = """examples:
  %(prog)s --out runs/matrix
      every fault, injection point, supervisor and engine, on a tiny model of two ranks
  %(prog)s --out runs/matrix --sample 12 --engines lazy -- 7b_tp4_pp2

exit status: 0 every cell verified, 1 one was not, 2 it could not be carried out
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m tools.restart_drill.matrix",
        description="Drill faults x moments x supervisors x engines, and tabulate what was verified.",
        epilog=_EXAMPLE,
    )
    add_run_options(parser)
    parser.add_argument("--sample", type=int, metavar="N", help="only N cells, drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    for name, values in (("supervisors", (RELAUNCH, TORCHRUN)), ("engines", ENGINES), ("faults", FAULTS),
                         ("moments", MOMENTS)):  # fmt: skip
        parser.add_argument(f"--{name}", default=",".join(values), help="separated by commas")
    parser.add_argument(
        "--spares", type=int, default=1, metavar="N",
        help="for --supervisors launch: so many nodes one launch may lose, the spares of its HOSTFILE (default: 1)",
    )  # fmt: skip
    add_persist_interval(parser)
    parser.set_defaults(hang_limit=5.0)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv if "--" in argv else [*argv, "--", _PRESET])
    args.supervisors = tuple(args.supervisors.split(","))
    if not set(args.supervisors) <= set(SUPERVISORS):
        parser.error(f"--supervisors {','.join(args.supervisors)}: there are {', '.join(SUPERVISORS)}")
    if args.nodes_command is not None and len(args.supervisors) > 1:
        parser.error(
            f"--supervisors {','.join(args.supervisors)}: on nodes launch takes a command of its own; run it alone"
        )
    wrong = nodes_refusal(args, args.supervisors)
    if wrong is not None:
        parser.error(wrong)
    args.faults = tuple(args.faults.split(","))
    if not set(args.faults) <= set(FAULTS):
        parser.error(f"--faults {','.join(args.faults)}: there are {', '.join(FAULTS)}")
    args.moments = tuple(args.moments.split(","))
    if not set(args.moments) <= set(MOMENTS):
        parser.error(f"--moments {','.join(args.moments)}: there are {', '.join(MOMENTS)}")
    if args.sample is not None and args.sample < 1:
        parser.error(f"--sample {args.sample}: must be at least 1")
    check_out(parser, args.out)
    return args


def _training(words: list[str], on_nodes: bool) -> list[str]:
    """The command; of the tiny preset on this host one with two ranks, so that two cores are enough."""
    os.environ.setdefault("ITERS", "300")
    os.environ.setdefault("EXTRA_ARGS", "--keep-last 3")
    command = expanded(words)
    return commands.on_layout(command, _RANKS) if words == [_PRESET] and not on_nodes else command


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    catch_stop_signals()
    begin = time.monotonic()
    try:
        engines, on_nodes = tuple(args.engines.split(",")), args.nodes_command is not None
        chosen = cells(args.supervisors, engines, args.checkpoints, args.faults, args.moments, on_nodes=on_nodes)
        if args.sample is not None:
            picked = random.Random(args.seed).sample(range(len(chosen)), min(args.sample, len(chosen)))
            chosen = [chosen[i] for i in sorted(picked)]
        training = _training(args.command, on_nodes)
        base = replace(base_plan(args, training), persist_interval=args.persist_interval)
        base.out.mkdir(parents=True, exist_ok=True)
        say(f"{len(chosen)} cells")
        if args.reference is not None:
            reference = stored_reference(args.reference, training)
        else:
            say("the training without a fault, for comparison")
            reference = run_reference(base, training, None)
        results = run_matrix(base, chosen, reference, args.spares)
    except (DrillError, ObjectStoreError, OSError) as error:
        say(f"error: {error}")
        return COULD_NOT_RUN
    text = markdown(results, time.monotonic() - begin)
    (base.out / "matrix.md").write_text(text)
    told = [vars(result) | {"cell": vars(result.cell)} for result in results]
    (base.out / "matrix.json").write_text(json.dumps({"cells": told}, indent=1) + "\n")
    print(text)
    return VERIFIED if all(result.verified for result in results) else NOT_VERIFIED


if __name__ == "__main__":
    sys.exit(main())
