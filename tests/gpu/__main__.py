"""Runs the parts of the GPU tier: `bash tests/gpu/run.sh`. Imports the standard library only until a part runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from restart_trace.command_line import CommandParser
from tests.gpu.ladder import BUDGET_S, RESERVE_S, Limits, ladder, run_parts
from tests.gpu.parts import LADDERS, LIMIT_S, NEEDS_TWO_DEVICES, PARTS, ROOT, Part, Setting, part_named
from tests.gpu.runner import LEFT_OUT, PASSED, TierError, device_problem

OK, NOT_PASSED, COULD_NOT_RUN = 0, 1, 2
_EPILOG = """\
examples:
  bash tests/gpu/run.sh --dry-run
  bash tests/gpu/run.sh --ladder 1 --bundle runs/bundle --out results
  bash tests/gpu/run.sh --out results machine resume-lazy
  bash tests/gpu/run.sh --rehearse --ladder 2

exit status: 0 all parts passed, 1 one did not or was not run, 2 could not run
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = CommandParser(
        "bash tests/gpu/run.sh",
        description="Run what only a machine with a CUDA GPU can show, in parts of nine minutes at most.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="parts to run, in this order (default: all that --dry-run lists)"
    )
    parser.add_argument(
        "--ladder", type=int, choices=sorted(LADDERS), help="run the parts of this ladder, within --budget"
    )
    parser.add_argument(
        "--budget", type=float, metavar="S",
        help=f"seconds after which the ladder has ended, whatever ran (default: {BUDGET_S:.0f}; with --rehearse none)",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="list ladders, parts, times and commands; run nothing")
    parser.add_argument(
        "--rehearse", action="store_true", help="the same commands on CPUs with small sizes; its figures mean nothing"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="small files of all parts; a part that is run again replaces its own (default: runs/gpu_tier)",
    )  # fmt: skip
    parser.add_argument(
        "--archive", type=Path, metavar="FILE", help="all of OUT, packed anew after each part (default: OUT.tar.gz)"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR",
        help="where checkpoints and data go, in a directory gpu_tier_work that is removed after each part; 40 GB must "
        "be free (default: beside OUT)",
    )  # fmt: skip
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="wheels that tests/gpu/bundle.sh has made, for the part install"
    )
    arguments = parser.parse_args(argv)
    known = {part.name for part in PARTS}
    for name in arguments.parts:
        if name not in known:
            parser.error(f"{name}: no such part; there are {', '.join(part.name for part in PARTS)}")
    if arguments.ladder is not None and arguments.parts:
        parser.error(f"--ladder {arguments.ladder}: has its own parts; drop it, or {' '.join(arguments.parts)}")
    if arguments.budget is not None and arguments.ladder is None:
        parser.error(f"--budget {arguments.budget:g}: is that of a ladder; give --ladder, or drop it")
    if arguments.budget is not None and not arguments.budget > RESERVE_S:
        parser.error(f"--budget {arguments.budget:g}: the last {RESERVE_S:.0f} s end and pack; give more")
    if arguments.bundle is not None and not list(arguments.bundle.glob("*.whl")):
        parser.error(f"--bundle {arguments.bundle}: there is no wheel; tests/gpu/bundle.sh makes it")
    return arguments


def setting_of(arguments: argparse.Namespace) -> Setting:
    default = ROOT / "runs" / ("gpu_tier_rehearsal" if arguments.rehearse else "gpu_tier")
    out = (arguments.out or default).absolute()
    return Setting(
        rehearsal=arguments.rehearse,
        out=out,
        work=(arguments.work or out.parent).absolute() / "gpu_tier_work",
        archive=(arguments.archive or out.with_name(f"{out.name}.tar.gz")).absolute(),
        bundle=arguments.bundle and arguments.bundle.absolute(),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    began = time.monotonic()
    arguments = parse_arguments(argv)
    setting = setting_of(arguments)
    if arguments.ladder is not None:
        chosen = ladder(arguments.ladder, setting.rehearsal)
    else:
        chosen = [part_named(name) for name in arguments.parts] or list(PARTS)
    if arguments.dry_run:
        with contextlib.suppress(BrokenPipeError):
            print("\n".join(_listing(setting, chosen)))
        return OK
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what a part started is ended
    budget_s = arguments.budget or (None if setting.rehearsal or arguments.ladder is None else BUDGET_S)
    try:
        problem = None
        if arguments.ladder is None and any(part.needs_device for part in chosen):
            problem = device_problem(setting)
        if problem is not None:
            raise TierError(problem)
        outcomes = run_parts(chosen, setting, Limits(began, budget_s) if budget_s else None, arguments.ladder)
    except (TierError, OSError) as exc:
        print(f"run.sh: {exc}", file=sys.stderr)
        return COULD_NOT_RUN
    print((setting.out / "overview.md").read_text())
    return OK if set(outcomes) <= {PASSED, LEFT_OUT} else NOT_PASSED


def _listing(setting: Setting, chosen: Sequence[Part]) -> list[str]:
    lines = [f"{'part':<22} {'expected':>9}  what it shows"]
    chosen_names = {part.name for part in chosen}
    listed: set[str] = set()
    for number, names in LADDERS.items():
        mine = [name for name in names if name in chosen_names]
        listed |= set(mine)
        if mine:
            lines += ["", f"ladder {number}: bash tests/gpu/run.sh --ladder {number} --bundle DIR", *map(_line, mine)]
            lines.append(_sum(f"ladder {number}", mine))
            lines[-1] += f", estimated; all is ended at {_minutes(BUDGET_S)}" if len(mine) == len(names) else ""
    others = [part.name for part in chosen if part.name not in listed]
    if others:
        lines += ["", "another time: bash tests/gpu/run.sh PART ...", *map(_line, others), _sum("these", others)]
        lines[-1] += f", estimated; a part is ended after {LIMIT_S / 60:.0f} min"
    lines += ["", "in no part, since they need two devices:", *(f"  {what}" for what in NEEDS_TWO_DEVICES)]
    for part in chosen:
        lines += ["", f"# {part.name}", *(step.shown() for step in part.steps(setting))]
    return lines


def _line(name: str) -> str:
    part = part_named(name)
    return f"{name:<22} {_minutes(part.expected_s):>9}  {part.shows}"


def _sum(what: str, names: Sequence[str]) -> str:
    return f"{what:<22} {_minutes(sum(part_named(name).expected_s for name in names)):>9}  in all"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
