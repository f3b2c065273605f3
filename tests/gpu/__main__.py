"""Runs the parts of the GPU tier: `bash tests/gpu/run.sh`. Imports the standard library only until a part runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from restart_trace.command_line import CommandParser
from tests.gpu.parts import PARTS, ROOT, Setting, part_named
from tests.gpu.runner import FAILED, TierError, device_problem, run_part, write_overview

OK, NOT_PASSED, COULD_NOT_RUN = 0, 1, 2
_EPILOG = """\
examples:
  bash tests/gpu/run.sh --dry-run
  bash tests/gpu/run.sh --out results machine resume-lazy
  bash tests/gpu/run.sh --rehearse

exit status: 0 all parts passed, 1 one did not, 2 could not run
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
    parser.add_argument("--dry-run", action="store_true", help="list parts, expected times and commands; run nothing")
    parser.add_argument(
        "--rehearse", action="store_true", help="the same commands on CPUs with small sizes; its figures mean nothing"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="small files of all parts; a part that is run again replaces its own (default: runs/gpu_tier)",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=Path, metavar="DIR",
        help="where checkpoints and data go, in a directory gpu_tier_work that is removed after each part; 55 GB must "
        "be free (default: beside OUT)",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    known = {part.name for part in PARTS}
    for name in arguments.parts:
        if name not in known:
            parser.error(f"{name}: no such part; there are {', '.join(part.name for part in PARTS)}")
    return arguments


def setting_of(arguments: argparse.Namespace) -> Setting:
    default = ROOT / "runs" / ("gpu_tier_rehearsal" if arguments.rehearse else "gpu_tier")
    out = (arguments.out or default).absolute()
    work = (arguments.work or out.parent).absolute() / "gpu_tier_work"
    return Setting(rehearsal=arguments.rehearse, out=out, work=work)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    setting = setting_of(arguments)
    chosen = [part_named(name) for name in arguments.parts] or list(PARTS)
    if arguments.dry_run:
        with contextlib.suppress(BrokenPipeError):
            print("\n".join(_listing(setting, chosen)))
        return OK
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what a part started is ended
    try:
        problem = device_problem(setting)
        if problem is not None:
            raise TierError(problem)
        outcomes = [run_part(part, setting) for part in chosen]
        overview = write_overview(setting)
    except (TierError, OSError) as exc:
        print(f"run.sh: {exc}", file=sys.stderr)
        return COULD_NOT_RUN
    print(overview)
    return NOT_PASSED if FAILED in outcomes else OK


def _listing(setting: Setting, chosen: Sequence[object]) -> list[str]:
    lines = [f"{'part':<22} {'expected':>9}  what it shows", ""]
    seconds = 0
    for part in PARTS:
        if part not in chosen:
            continue
        seconds += part.expected_s
        lines.append(f"{part.name:<22} {_minutes(part.expected_s):>9}  {part.shows}")
    lines += ["", f"{'all of these':<22} {_minutes(seconds):>9}  on one H100, estimated; a part is ended after 9 min"]
    for part in PARTS:
        if part in chosen:
            lines += ["", f"# {part.name}", *(step.shown() for step in part.steps(setting))]
    return lines


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
