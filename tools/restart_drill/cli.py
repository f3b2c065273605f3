"""The command line of the restart drill."""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tools.restart_drill.drill import Plan, run_drill, run_reference, say
from tools.restart_drill.faults import FAULTS
from tools.restart_drill.launch import DrillError
from tools.restart_drill.moments import STAGES, Moment, parse_moment
from tools.restart_drill.output import analysed, describe, table
from tools.restart_drill.verify import differences

VERIFIED, NOT_VERIFIED, COULD_NOT_RUN = 0, 1, 2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_EXAMPLE = """example:
  python -m tools.restart_drill --fault sigkill-all --at mid-save-write --cycles 2 --out runs/drill -- \\
      torchrun --nproc-per-node 8 pretrain_gpt.py ...

exit status: 0 every cycle verified, 1 one was not, 2 the drill could not be carried out
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="restart_drill",
        description="Strike a training job with a fault, launch it again, and prove that only time was lost.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fault", required=True, choices=FAULTS, help="what strikes")
    parser.add_argument(
        "--at",
        required=True,
        type=_moment,
        metavar="WHEN",
        help=f"{', '.join(STAGES)}, iteration:N or random:SEED",
    )
    parser.add_argument("--cycles", type=int, default=1, help="how often it strikes (1)")
    parser.add_argument(
        "--out", type=Path, required=True, help="new directory for everything that the drill leaves"
    )
    parser.add_argument(
        "--time-limit", type=float, default=300.0, help="seconds for each launch and moment (300)"
    )
    parser.add_argument(
        "--hang-limit", type=float, default=30.0, help="seconds without an iteration: a hang (30)"
    )
    parser.add_argument("--quiet", action="store_true", help="do not pass on the output of the job")
    parser.add_argument(
        "command", nargs="+", help="the training command, after --; without --save and --load"
    )
    args = parser.parse_args(argv)
    if args.cycles < 1:
        parser.error(f"--cycles {args.cycles}: must be at least 1")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"--out {args.out}: is there already; give a new directory")
    return args


def _moment(text: str) -> Moment:
    try:
        return parse_moment(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    for signum in STOP_SIGNALS:
        signal.signal(signum, _stop)
    out = args.out.absolute()
    plan = Plan(
        command=args.command,
        fault=args.fault,
        moment=args.at,
        cycles=args.cycles,
        out=out,
        limit_s=args.time_limit,
        hang_limit_s=args.hang_limit,
        echo=not args.quiet,
    )
    try:
        for name in ("logs", "reference"):
            (out / name).mkdir(parents=True)
        strikes = run_drill(plan, say)
        say("the same training without a fault, for comparison")
        found = differences(plan.trace_dir, run_reference(plan))
        content = describe(strikes, analysed(plan.trace_dir), found)
        (out / "drill.json").write_text(json.dumps(content, indent=1) + "\n")
    except (DrillError, OSError) as error:
        say(f"error: {error}")
        return COULD_NOT_RUN
    print(table(content))
    wrong = [(cycle, line) for cycle, lines in found.items() for line in lines]
    for cycle, line in wrong[:10]:
        say(f"cycle {cycle}: {line}")
    return VERIFIED if all(cycle["verified"] for cycle in content["cycles"]) and not wrong else NOT_VERIFIED


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    for further in STOP_SIGNALS:
        signal.signal(further, signal.SIG_IGN)  # the cleaning up must not be interrupted
    raise DrillError(f"stopped by signal {signal.Signals(signum).name}")
