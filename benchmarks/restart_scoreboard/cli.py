"""Command line of the scoreboard."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.common.program import printed
from benchmarks.common.ranks import MeasurementError
from benchmarks.common.rounds import add_flags, check_flags, in_turn
from benchmarks.launchers.variants import DTYPES, Setting, prepare_data
from benchmarks.restart_scoreboard.contestants import CONTESTANTS, OURS
from benchmarks.restart_scoreboard.report import Result, analyse, render
from benchmarks.restart_scoreboard.training import train, undisturbed
from tools.common.cli import CHECK_FAILED, OK, make_parser, require_at_least
from tools.common.machine import machine

_ITERATIONS = 1000  # more than any training gets to
_REASON = 300  # characters

_EPILOG = f"""\
contestants:
{chr(10).join(f"  {name:18} {each.what}" for name, each in CONTESTANTS.items())}

examples:
  EXTRAS=scoreboard bash examples_deepspeed/restart_bench/setup_env.sh     the other projects' packages
  %(prog)s > scoreboard.md
      5 rounds of 4 faults for each contestant: an hour on two cores; --repeat 1 --faults 20 as long
  %(prog)s --only plain torchft fork-in-place --repeat 1 --faults 2 --format json

Run it on a machine that does nothing else.

exit status: 0 measured, 1 a contestant did not run to its end, 2 could not run
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = make_parser(
        "python -m benchmarks.restart_scoreboard",
        "Compare how several projects start one training again after the same faults at the same steps: "
        "SIGKILL of one rank and of all ranks in turn, or of an agent with its ranks, three steps after a checkpoint.",
        _EPILOG,
    )
    add_flags(parser, list(CONTESTANTS), "NAME")
    parser.add_argument("--faults", type=int, default=4, metavar="N", help="in each training (default: 4)")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="data-parallel ranks (default: 4)")
    for name, what in (("tp", "tensor"), ("pp", "pipeline")):
        parser.add_argument(
            f"--{name}", type=int, default=1, metavar="N", help=f"{what}-parallel ranks, of our trainer (default: 1)"
        )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the ranks that are killed (default: 1)")
    arguments = parser.parse_args(argv)
    check_flags(parser, arguments)
    require_at_least(parser, arguments, 1, "faults")
    require_at_least(parser, arguments, 2, "ranks")
    require_at_least(parser, arguments, 1, "tp", "pp")
    alone = [name for name in arguments.only if CONTESTANTS[name].trainer != OURS]
    if arguments.tp * arguments.pp > 1 and alone:
        parser.error(
            f"--tp {arguments.tp} --pp {arguments.pp}: {', '.join(alone)} only has data-parallel ranks here; "
            "name contestants with our trainer in --only"
        )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    results = {name: Result(not_run=CONTESTANTS[name].missing) for name in arguments.only}
    return printed("restart_scoreboard", lambda: _measured(arguments, results)) or status(results.values())


def status(results: Iterable[Result]) -> int:
    """The exit status of a measurement that has ended."""
    return CHECK_FAILED if any(result.not_run is not None for result in results) else OK


def _measured(arguments: argparse.Namespace, results: dict[str, Result]) -> str:
    before = machine()
    with tempfile.TemporaryDirectory(prefix="scoreboard_", dir=arguments.dir) as directory:
        # fp32: bf16 is slow on CPUs without AVX-512.
        setting = Setting(
            Path(directory), arguments.ranks, "torch", DTYPES[1], tp=arguments.tp, pp=arguments.pp,
            iterations=_ITERATIONS, restarts=arguments.faults,
        )  # fmt: skip
        prepare_data(setting)
        _run_interleaved(arguments, setting, results)
        references = _references(results, setting, arguments.time_limit)
    found = analyse(results, references, setting, before)
    return json.dumps(found) if arguments.format == "json" else render(found)


def _run_interleaved(arguments: argparse.Namespace, setting: Setting, results: dict[str, Result]) -> None:
    """Every round has the same faults for all contestants."""
    for number, name in in_turn(arguments.only, arguments.repeat):
        result = results[name]
        if result.not_run is not None:
            continue
        try:
            kinds = list(itertools.islice(itertools.cycle(CONTESTANTS[name].kinds), arguments.faults))
            trained = train(name, CONTESTANTS[name], setting, kinds, arguments.seed + number, arguments.time_limit)
        except MeasurementError as error:
            result.not_run = reason(str(error))
            _say(f"{name}: {error}")
            continue
        result.rounds.append(trained)
        took = " ".join(f"{fault.kind} {fault.restart_s:.2f} s" for fault in trained.faults)
        _say(f"round {number + 1} of {arguments.repeat}: {name}: {took}")


def _references(results: dict[str, Result], setting: Setting, limit_s: float) -> dict[str, dict[int, str]]:
    """Of each trainer the losses without a fault, up to the last iteration of its contestants."""
    until: dict[str, tuple[int, str]] = {}
    for name, result in results.items():
        told = [iteration for trained in result.rounds for iteration, _ in trained.losses]
        if told:
            trainer = CONTESTANTS[name].trainer
            until[trainer] = max(until.get(trainer, (0, name)), (max(told), name))
    return {
        trainer: undisturbed(name, CONTESTANTS[name], setting, last, limit_s) for trainer, (last, name) in until.items()
    }


def reason(message: str) -> str:
    """What an error "NAME: WHAT: the end of a log" says: WHAT, and the last line of the log."""
    _, _, told = message.strip().partition(": ")
    what, _, log = told.partition(": ")
    return f"{what}: {log.splitlines()[-1][-_REASON:]}" if log else what


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
