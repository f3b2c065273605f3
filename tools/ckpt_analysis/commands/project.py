"""`project`: projects the costs of measured runs to other scales, layouts, phases, and to copies in other nodes'
memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from restart_trace.schema import TIERS

from ...common.cli import OK
from ..common.errors import CouldNotRunError
from .common import add_format, open_run, read_analysis, read_report, read_saves, write_document

if TYPE_CHECKING:
    from ..report import Report

HELP = "project measured runs: to many nodes, to another layout, with other phases, with copies in memory"
EXAMPLES = """\
  %(prog)s $trace --nodes 8..1024 --mtbf-hours 50000
      the best interval by Young, by Daly and exactly, and what is left of training time
  %(prog)s $trace --nodes 512 --mtbf-hours 10000,50000 --interval-steps 50,100,500
      the intervals in question beside the best
  %(prog)s disk.json --engine lazy --nodes 64 --mtbf-hours 20000 --step-seconds 8 --restart-seconds 400
      saves as `ckpt-replay --limit-bytes none --output disk.json` measured them, without a training
  %(prog)s --nodes 128 --mtbf-hours 20000 --blocked-seconds 2 --durable-seconds 60 --restart-seconds 400 \\
      --step-seconds 8 --checkpoint-bytes 1e12
      no run: all numbers given
  %(prog)s runs/2_ranks runs/4_ranks runs/8_ranks --ranks 64 --tp 8 --checkpoint-bytes 35e6 --checkpoint-files 128
      what saves, loads and restarts of another layout would take, learnt from these; it says what is extrapolated
  %(prog)s runs/*/trace --plan plan.json --hosts 8 --cores 512 --write-GBps 20 --read-GBps 40
      the same of a layout that `ckpt-plan --format json > plan.json` planned, on other hosts and storage
  %(prog)s $trace --what-if imports=0.5 --what-if read_bandwidth=2
      restarts of a run with imports in half the time and reads at twice the bandwidth, along the critical path
  %(prog)s $trace --what-if write_bandwidth=2 --what-if serialize=0.5
      its saves, blocked and durable, with writes at twice the bandwidth and serialization in half the time
  %(prog)s runs/memory --tier peer --nodes 1..1024 --mtbf-hours 16000 --interval-steps 1
      saves in memory at every step: goodput over failure rates, with the restarts from peers' memory
  %(prog)s runs/memory runs/lazy --failures-per-day 1,2,4,8,16
      goodput over failure rates: a curve for each tier that restarts of these runs read from
  %(prog)s --placement group --nodes 16..1024 --replicas 2 --lost-nodes 2,3
      checkpoints in the memory of other nodes: how likely a copy of each part survives the loss of nodes

Every number that is not given is the median of the run, and the output says which is which.
"""
_DURATIONS = {
    "--step-seconds": "seconds of one training step",
    "--blocked-seconds": "seconds that a save blocks training",
    "--durable-seconds": "seconds from the start of a save until its checkpoint counts",
    "--restart-seconds": "seconds from a failure to the end of the first step after it",
    "--checkpoint-bytes": "bytes of a checkpoint, all ranks together",
}
_AT_SCALE = ("nodes", "mtbf_hours", "interval_steps", "tier", *(flag[2:].replace("-", "_") for flag in _DURATIONS))
_PLACE = (
    "ranks",
    "tp",
    "hosts",
    "cores",
    "plan",
    "engine",
    "checkpoint_bytes",
    "checkpoint_files",
    "write_GBps",
    "read_GBps",
)
# Projection -> its flags. The first projection whose first flag is given is computed.
_QUESTIONS = {
    "--placement": ("placement", "nodes", "replicas", "lost_nodes"),
    "--ranks": ("ranks", "logdirs", "what_if", *_PLACE),
    "--plan": ("plan", "logdirs", "what_if", *_PLACE),
    "--what-if": ("what_if", "logdirs"),
    "--failures-per-day": (
        "failures_per_day",
        "logdirs",
        "engine",
        "interval_steps",
        "tier",
        "step_seconds",
        "blocked_seconds",
        "durable_seconds",
    ),
    "--nodes": ("nodes", "logdirs", "engine", *_AT_SCALE),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    from ..project.replicas import PLACEMENTS

    help_ = (
        "measured runs: one for --nodes, or the JSON of a replay (default: all numbers are given); several for "
        "--ranks, --failures-per-day"
    )
    parser.add_argument("logdirs", metavar="LOGDIR", type=Path, nargs="*", help=help_)
    parser.add_argument("--nodes", metavar="N", help="numbers of nodes: 8,64 or 8..1024 (doubling)")
    help_ = "mean hours between failures of one node: 10000,50000"
    parser.add_argument("--mtbf-hours", metavar="H", help=help_)
    parser.add_argument("--interval-steps", metavar="K", help="steps between saves to project too: 100,500 or 50..800")
    help_ = "failures of the whole job a day: 1,4,16; one curve for each tier of each run"
    parser.add_argument("--failures-per-day", metavar="F", help=help_)
    help_ = "restarts that read from there alone, where a run with --checkpoint-engine memory has several kinds"
    parser.add_argument("--tier", choices=TIERS, help=help_)
    for flag, what in _DURATIONS.items():
        parser.add_argument(flag, metavar="X", type=float, help=f"{what} (default: measured)")
    _add_place(parser.add_argument_group("another layout, learnt from runs of several sizes"))
    help_ = "phase and what its time is multiplied with, or read_bandwidth, write_bandwidth and its factor; repeatable"
    parser.add_argument("--what-if", metavar="NAME=X", action="append", help=help_)
    copies = parser.add_argument_group("checkpoints in the memory of other nodes")
    help_ = "where a node's copies are: nodes in groups, in one ring, or groups and a ring of the rest"
    copies.add_argument("--placement", choices=PLACEMENTS, help=help_)
    copies.add_argument("--replicas", metavar="M", help="copies of each part, the node's own among them: 2 or 2,3")
    copies.add_argument("--lost-nodes", metavar="K", help="nodes lost at once: 2,3 or 1..8")
    add_format(parser)


def _add_place(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ranks", metavar="N", type=float, help="ranks of the layout")
    group.add_argument("--tp", metavar="N", type=float, help="its tensor-parallel size (default: as the traces)")
    group.add_argument("--hosts", metavar="N", type=float, help="hosts that they run on (default: as the traces)")
    group.add_argument(
        "--cores", metavar="N", type=float, help="cores of all hosts (default: as many each as the traces)"
    )
    group.add_argument("--checkpoint-files", metavar="N", type=float, help="files of a checkpoint")
    help_ = "what `ckpt-plan --format json` wrote, for --ranks, --tp, --checkpoint-bytes and --checkpoint-files"
    group.add_argument("--plan", metavar="FILE", type=Path, help=help_)
    group.add_argument(
        "--engine", metavar="NAME", help="checkpoint engine that the runs have; needed if they have several"
    )
    group.add_argument(
        "--write-GBps", metavar="X", type=float, help="the most that the storage writes, all ranks together"
    )
    group.add_argument(
        "--read-GBps", metavar="X", type=float, help="the most that the storage reads, all ranks together"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compute the projection that the flags ask for. Returns the exit status."""
    given = {name: value for name, value in vars(arguments).items() if value not in (None, [])}
    asked = next((flag for flag, names in _QUESTIONS.items() if names[0] in given), "--nodes")
    for flag, names in _QUESTIONS.items():
        for name in names:
            if name in given and name not in _QUESTIONS[asked]:
                word = f"--{name.replace('_', '-')} {given[name]}" if name != "logdirs" else f"LOGDIR {given[name][0]}"
                raise CouldNotRunError(f"{word}: goes with {flag}, not with {asked}; leave one out")
    answers = {
        "--placement": _copies, "--what-if": _what_if, "--nodes": _intervals, "--failures-per-day": _recoveries,
    }  # fmt: skip
    answers.get(asked, _twin)(arguments)
    return OK


def _intervals(arguments: argparse.Namespace) -> None:
    """The best intervals between saves, and the goodput."""
    from ..project.inputs import Given, gather
    from ..project.projection import project
    from ..project.ranges import parse_positives
    from ..render.projection import document

    nodes = _counts(arguments, "--nodes")
    hours = parse_positives("--mtbf-hours", _given(arguments, "--mtbf-hours"))
    steps = _counts(arguments, "--interval-steps") if arguments.interval_steps else []
    if arguments.engine is not None and not arguments.logdirs:
        raise CouldNotRunError(f"--engine {arguments.engine}: chooses among the saves of a run; give a LOGDIR")
    report = _of_one_engine(read_saves(_only(arguments), arguments), arguments.engine) if arguments.logdirs else None
    given = Given(
        blocked_s=arguments.blocked_seconds,
        durable_s=arguments.durable_seconds,
        restart_s=arguments.restart_seconds,
        step_s=arguments.step_seconds,
        checkpoint_bytes=arguments.checkpoint_bytes,
        tier=arguments.tier,
    )
    projection = project(gather(report, given), nodes, hours, steps)
    write_document(arguments, document(projection))


def _recoveries(arguments: argparse.Namespace) -> None:
    """Effective training time over failure rates, with measured restarts."""
    from ..project.inputs import Given
    from ..project.ranges import parse_positives
    from ..project.recovery import curves
    from ..render.recovery import document

    rates = parse_positives("--failures-per-day", arguments.failures_per_day)
    steps = _counts(arguments, "--interval-steps") if arguments.interval_steps else [None]
    if len(steps) > 1:
        raise CouldNotRunError(
            f"--interval-steps {arguments.interval_steps}: --failures-per-day takes one; give one number"
        )
    if not arguments.logdirs:
        raise CouldNotRunError("LOGDIR is missing: --failures-per-day starts from restarts that were measured")
    given = Given(
        blocked_s=arguments.blocked_seconds,
        durable_s=arguments.durable_seconds,
        step_s=arguments.step_seconds,
        tier=arguments.tier,
    )
    reports = [_of_one_engine(read_report(directory, arguments), arguments.engine) for directory in arguments.logdirs]
    found = curves(reports, given, rates, steps[0])
    write_document(arguments, document(found))


def _twin(arguments: argparse.Namespace) -> None:
    """Saves, loads and restarts of another layout, learnt from the given runs."""
    from ..project.deployment import asked_deployment, ceilings
    from ..project.drills import drill_of
    from ..project.twin import predict
    from ..project.what_if import parse_factors
    from ..render.twin import document

    factors = parse_factors(arguments.what_if or [])
    if not arguments.logdirs:
        raise CouldNotRunError("LOGDIR is missing: give runs of at least 3 different numbers of ranks")
    runs = [open_run(directory, arguments) for directory in arguments.logdirs]
    drills = [drill_of(run.trace, run.analysis) for run in runs]
    deployment, engine = asked_deployment(arguments, drills)
    prediction = predict(drills, deployment, engine, ceilings(arguments), factors)
    write_document(arguments, document(prediction))


def _what_if(arguments: argparse.Namespace) -> None:
    """Restarts and saves of a run with changed phases."""
    from ..project.what_if import parse_factors, what_if
    from ..render.what_if import document

    factors = parse_factors(arguments.what_if)
    if not arguments.logdirs:
        raise CouldNotRunError("LOGDIR is missing: --what-if asks of a measured run")
    found = what_if(read_analysis(_only(arguments), arguments), factors)
    write_document(arguments, document(found, factors))


def _copies(arguments: argparse.Namespace) -> None:
    """Probability that a copy of each part survives a loss of nodes."""
    from ..project.replicas import survivals
    from ..render.survival import document

    nodes, replicas, lost = (_counts(arguments, flag) for flag in ("--nodes", "--replicas", "--lost-nodes"))
    found = [row for copies in replicas for row in survivals(arguments.placement, nodes, copies, lost)]
    write_document(arguments, document(found))


def _of_one_engine(report: Report, engine: str | None) -> Report:
    """The run, or its part of `engine`: saves with several engines are no repeats of each other.

    Raises CouldNotRunError if it has several engines and none was chosen, or not the chosen one.
    """
    from ..compare.variants import engines_of, of_engine

    engines = list(dict.fromkeys(engines_of(report).values()))
    if engine is not None and engine not in engines:
        raise CouldNotRunError(f"--engine {engine}: {report.directory} has {', '.join(engines)}")
    if len(engines) == 1:
        return report
    if engine is None:
        raise CouldNotRunError(
            f"{report.directory}: has several engines, {', '.join(engines)}, which are no repeats of each other; "
            "choose one with --engine, or give a run that has one"
        )
    return of_engine(report, engine)


def _only(arguments: argparse.Namespace) -> Path:
    """The one run. Raises CouldNotRunError if several are given."""
    if len(arguments.logdirs) > 1:
        raise CouldNotRunError(
            f"LOGDIR {arguments.logdirs[1]}: only --ranks, --plan and --failures-per-day take several runs; give one"
        )
    return arguments.logdirs[0]


def _counts(arguments: argparse.Namespace, flag: str) -> list[int]:
    from ..project.ranges import parse_counts

    return parse_counts(flag, _given(arguments, flag))


def _given(arguments: argparse.Namespace, flag: str) -> str:
    """The text given for `flag`. Raises CouldNotRunError if there is none."""
    text = getattr(arguments, flag[2:].replace("-", "_"))
    if text is None:
        raise CouldNotRunError(f"{flag} is missing: `ckpt-analysis project --help` has examples")
    return text
