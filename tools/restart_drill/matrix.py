"""Every fault at every injection point with several supervisors and engines, in as few launches as possible.

    python -m tools.restart_drill.matrix --out runs/matrix                       # all valid combinations
    python -m tools.restart_drill.matrix --out runs/sample --sample 8 --seed 1   # eight of them, drawn by the seed

The cells of one supervisor and engine are faults in one sequence of launches: each restart begins with the state that
the fault before has left. All cells share one reference run, since neither supervisor nor engine may change a loss. The
last launch of a sequence is ended once it has caught up.
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

from megatron.checkpointing.store.bucket import ObjectStoreError
from megatron.config.uris import Location, ObjectUri, below
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
from .faults import DAMAGE, DISK_FULL, FAULTS, STORAGE_FAULTS, proxy_fault, refusal
from .injection_points import STAGES, parse_injection_point
from .launch import DrillError
from .nodes import TAKES_A_SPARE
from .output import analysed, describe
from .plan import RELAUNCH, SUPERVISORS, TORCHRUN, Injection, Plan, PlannedInjection, injection_before_restart, say
from .preset import expanded
from .reference import Reference, run_reference, stored_reference

ENGINES = ("torch", "lazy")
INJECTION_POINTS = (*STAGES, "random:1")  # iteration:N is mid-step at a given iteration
# Faults for which the injection point matters little: a disk fills up before a save or in one; files are damaged after
# all ranks have ended, and at most points one of the two kinds of damage suffices; on CPUs a device error is an
# exception.
_SELECTED_POINTS = {
    "disk-full": ("mid-step", "mid-save-write"),
    "truncate": ("mid-save-write", "after-commit"),
    "sigkill-launcher": ("mid-step", "mid-save-write", "mid-save-commit", "mid-load"),
    "device-error": ("mid-step", "mid-save-write", "mid-load"),
    "link-slow": ("mid-step", "mid-save-write", "mid-load", "mid-startup"),
    "disk-slow": ("mid-step", "mid-save-write", "mid-load"),
    **dict.fromkeys(STORAGE_FAULTS, ("mid-save-write", "mid-load")),
}
MAX_INJECTIONS = 10  # in one sequence
_PRESET, _RANKS = "tiny_tp2_pp2_dp2", commands.Sizes(1, 1, 2)
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
    faults: tuple[str, ...] = FAULTS,
    points: tuple[str, ...] = INJECTION_POINTS,
    *,
    on_nodes: bool = False,
) -> list[Cell]:
    """All valid combinations of these; `on_nodes`: as for `refusal`.

    Left out besides what `refusal` names: disk-full without a file system for it; faults of a store without a store;
    and damage during a restart, which is the same as damage after any kill, except that there may be no second
    checkpoint.
    """
    found = []
    for supervisor in supervisors:
        for engine in engines:
            for fault in faults:
                for point in map(parse_injection_point, points):
                    left_out = point.text not in _SELECTED_POINTS.get(fault, INJECTION_POINTS)
                    left_out |= fault in DAMAGE and point.during_restart
                    left_out |= fault == DISK_FULL and not isinstance(checkpoints, Path)
                    left_out |= fault in STORAGE_FAULTS and not isinstance(checkpoints, ObjectUri)
                    if not left_out and refusal(fault, point, supervisor, on_nodes=on_nodes) is None:
                        found.append(Cell(supervisor, engine, fault, point.text))
    return found


def sequences(chosen: list[Cell], spares: int = 1) -> list[list[Cell]]:
    """The cells of each sequence of launches, in order. A sequence loses at most as many nodes as there are spares."""
    found: dict[tuple[str, str], list[list[Cell]]] = {}
    for cell in chosen:
        mine = found.setdefault((cell.supervisor, cell.engine), [[]])
        lost = sum(other.fault in TAKES_A_SPARE for other in mine[-1])
        if len(mine[-1]) == MAX_INJECTIONS or (cell.fault in TAKES_A_SPARE and lost == spares):
            mine.append([])
        mine[-1].append(cell)
    return [sequence for of_both in found.values() for sequence in of_both]


def injections_of(sequence: list[Cell]) -> tuple[PlannedInjection, ...]:
    """The injections of a sequence. If the first one is during a restart, another one comes before it."""
    planned = tuple(PlannedInjection(cell.fault, parse_injection_point(cell.injection_point)) for cell in sequence)
    return (injection_before_restart(sequence[0].supervisor), *planned) if planned[0].point.during_restart else planned


def run_sequence(base: Plan, number: int, sequence: list[Cell], reference: Reference) -> list[Result]:
    """Inject the faults of all cells of `sequence`. After an error the results end with the cell that failed."""
    out = base.out / f"sequence_{number:03d}"
    injections = injections_of(sequence)
    fills_disk = any(cell.fault == DISK_FULL for cell in sequence)
    at_given_place = fills_disk or not isinstance(base.checkpoints, Path)
    checkpoints = below(base.checkpoints, out.name) if at_given_place else out / "checkpoints"
    engine, supervisor = sequence[0].engine, sequence[0].supervisor
    command = commands.completed(base.command, checkpoints, out / "trace", engine, base.persist_interval)
    command = commands.supervised(command, supervisor, len(injections), base.hang_limit_s, on_nodes=base.on_nodes)
    if any(proxy_fault(cell.fault) for cell in sequence):
        command = commands.with_deadline(command)
    plan = replace(
        base, command=command, resumed_command=command, injections=injections, supervisor=supervisor, out=out,
        checkpoints=checkpoints, to_the_end=False, **saves(command, base.on_nodes),
    )  # fmt: skip
    done: list[Injection] = []
    error: str | None = None
    try:
        run_drill(plan, say, done)
    except DrillError as exc:
        error = str(exc)
        say(f"error: {error}")
        if str(exc).startswith("stopped by signal"):
            raise
    content = content_of(plan, done, reference)
    entries = content["cycles"][len(injections) - len(sequence) :]
    results = [_result(cell, entry) for cell, entry in zip(sequence, entries, strict=False)]
    if error is None:
        if all(result.verified for result in results):
            checkpoints_at(checkpoints).remove()
        return results
    # The launch after the last injection failed.
    if results and (len(results) == len(sequence) or not results[-1].verified):
        return [*results[:-1], Result(results[-1].cell, None, error)]
    return [*results, Result(sequence[len(results)], None, error)]


def content_of(plan: Plan, done: list[Injection], reference: Reference) -> dict[str, Any]:
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
    """Run all cells. After an error only its own cell is lost: the following ones get a new sequence."""
    results: list[Result] = []
    waiting = sequences(chosen, max(1, spares // len(base.nodes)))
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


_EXAMPLE = """examples:
  %(prog)s --out runs/matrix
      every fault, injection point, supervisor and engine, on a tiny model of two ranks
  %(prog)s --out runs/matrix --sample 12 --engines lazy -- 7b_tp4_pp2

exit status: 0 all cells were verified, 1 at least one was not, 2 the matrix could not be carried out
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m tools.restart_drill.matrix",
        description="Run drills over faults, injection points, supervisors and engines, and tabulate the results.",
        epilog=_EXAMPLE,
    )
    add_run_options(parser)
    parser.add_argument("--sample", type=int, metavar="N", help="only N cells, drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (default: 1)")
    for name, values in (("supervisors", (RELAUNCH, TORCHRUN)), ("engines", ENGINES), ("faults", FAULTS),
                         ("injection-points", INJECTION_POINTS)):  # fmt: skip
        parser.add_argument(f"--{name}", default=",".join(values), help="separated by commas (default: %(default)s)")
    parser.add_argument(
        "--spares", type=int, default=1, metavar="N",
        help="for --supervisors launch: number of spare nodes in HOSTFILE, the most that one launch may lose "
        "(default: 1)",
    )  # fmt: skip
    add_persist_interval(parser)
    parser.set_defaults(hang_limit=5.0)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv if "--" in argv else [*argv, "--", _PRESET])
    args.supervisors = tuple(args.supervisors.split(","))
    if not set(args.supervisors) <= set(SUPERVISORS):
        parser.error(f"--supervisors {','.join(args.supervisors)}: choose from {', '.join(SUPERVISORS)}")
    if args.nodes_command is not None and len(args.supervisors) > 1:
        parser.error(
            f"--supervisors {','.join(args.supervisors)}: with --nodes-command the training command is one that only "
            "launch can supervise; give --supervisors launch"
        )
    wrong = nodes_refusal(args, args.supervisors)
    if wrong is not None:
        parser.error(wrong)
    args.faults = tuple(args.faults.split(","))
    if not set(args.faults) <= set(FAULTS):
        parser.error(f"--faults {','.join(args.faults)}: choose from {', '.join(FAULTS)}")
    args.injection_points = tuple(args.injection_points.split(","))
    if not set(args.injection_points) <= set(INJECTION_POINTS):
        parser.error(f"--injection-points {','.join(args.injection_points)}: choose from {', '.join(INJECTION_POINTS)}")
    if args.sample is not None and args.sample < 1:
        parser.error(f"--sample {args.sample}: must be at least 1")
    check_out(parser, args.out)
    return args


def _training(words: list[str], on_nodes: bool) -> list[str]:
    """The training command. On one host the tiny preset gets two ranks, so that two cores are enough."""
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
        points = args.injection_points
        chosen = cells(args.supervisors, engines, args.checkpoints, args.faults, points, on_nodes=on_nodes)
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
            say("the reference run, without a fault")
            reference = run_reference(base, training, None)
        results = run_matrix(base, chosen, reference, args.spares)
    except (DrillError, ObjectStoreError, OSError) as error:
        say(f"error: {error}")
        return COULD_NOT_RUN
    text = markdown(results, time.monotonic() - begin)
    (base.out / "matrix.md").write_text(text)
    entries = [vars(result) | {"cell": vars(result.cell)} for result in results]
    (base.out / "matrix.json").write_text(json.dumps({"cells": entries}, indent=1) + "\n")
    print(text)
    return VERIFIED if all(result.verified for result in results) else NOT_VERIFIED


if __name__ == "__main__":
    sys.exit(main())
