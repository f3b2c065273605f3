"""The command line of the restart drill."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from megatron.checkpointing.object_storage import ObjectStoreError
from megatron.config import ConfigError
from megatron.config.uris import ObjectUri, Place, place_of
from restart_trace.command_line import CommandParser

from . import command as commands
from .checkpoints import checkpoints_at
from .drill import run_drill
from .facts import facts_of
from .faults import DAMAGE, DISK_FULL, FAULTS, of_storage, refusal, store_endpoint
from .full_disk import GIB
from .launch import DrillError
from .moments import STAGES, Moment, parse_moment
from .output import analysed, describe, table
from .plan import LAUNCH, RELAUNCH, SUPERVISORS, TORCHRUN, Plan, Strike, intended, say
from .preset import expanded
from .reference import Reference, run_reference, stored_reference
from .verify import TOLERANCES, repeated, repetition_table

VERIFIED, NOT_VERIFIED, COULD_NOT_RUN = 0, 1, 2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_EXAMPLE = """examples:
  %(prog)s --fault sigkill-all --at mid-save-write --cycles 2 --out runs/drill -- tiny_tp2_pp2_dp2
  %(prog)s --fault exception --at random:7 --supervisor torchrun --out runs/drill -- \\
      torchrun --nproc-per-node 8 pretrain_gpt.py ...

exit status: 0 every cycle verified, 1 one was not, 2 the drill could not be carried out
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="restart-drill",
        description="Inject a fault into a training, let it restart, and verify that nothing but time was lost.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("--fault", required=True, choices=FAULTS, help="what is injected: docs/restart_drill.md")
    parser.add_argument(
        "--at",
        required=True,
        type=_moment,
        metavar="WHEN",
        help=f"injection point: {', '.join(STAGES)}, iteration:N or random:SEED",
    )
    parser.add_argument("--cycles", type=int, default=1, help="how often it is injected")
    parser.add_argument(
        "--supervisor", choices=SUPERVISORS, default=RELAUNCH,
        help="who starts the ranks again: the drill the whole job, torchrun's agent its ranks in place, or "
        "megatron.launch, in place or, with --nodes-command, on the nodes that are left and spares",
    )  # fmt: skip
    add_run_options(parser)
    parser.add_argument("--checkpoint-engine", metavar="E", help="of the training (default: that of its command)")
    add_persist_interval(parser)
    parser.add_argument("--cold-cache", action="store_true", help="drop the page cache before each relaunch")
    for name, what in (("tp", "tensor-parallel"), ("pp", "pipeline-parallel"), ("dp", "data-parallel")):
        help_ = f"{what} size of the launches after the first fault (default: unchanged)"
        parser.add_argument(f"--resume-{name}", type=_size, metavar="N", help=help_)
    parser.add_argument(
        "--no-reference", action="store_true",
        help="no run without a fault: losses are compared between launches that did the same iterations",
    )  # fmt: skip
    parser.add_argument(
        "--until-caught-up", action="store_true",
        help="end the last launch once it has done the lost iterations again, not at the end of the training",
    )  # fmt: skip
    parser.add_argument(
        "--no-analysis", action="store_true",
        help="verify, and leave out report.json and every duration: where polars is not installed",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.cycles < 1:
        parser.error(f"--cycles {args.cycles}: must be at least 1")
    check_out(parser, args.out)
    wrong = _refusal(args)
    if wrong is not None:
        parser.error(wrong)
    return args


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Options that a matrix of drills has, too."""
    parser.add_argument("--out", type=Path, required=True, help="new directory for everything that the drill leaves")
    parser.add_argument(
        "--checkpoints", type=_place, metavar="DIR",
        help="where checkpoints go, if not below --out: on the storage that is to be drilled; s3://BUCKET/PREFIX, too",
    )  # fmt: skip
    parser.add_argument("--disk-limit", type=float, default=4.0, metavar="GIB",
                        help="largest file system that disk-full may fill")  # fmt: skip
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds for each launch and injection point")
    parser.add_argument("--hang-limit", type=float, default=30.0, help="seconds without an iteration: a hang")
    parser.add_argument(
        "--reference", type=Path, metavar="DIR",
        help="--out of a drill or a matrix whose run without a fault is to be compared with, too, instead of another",
    )  # fmt: skip
    parser.add_argument(
        "--nodes-command", metavar="PROGRAM",
        help="for --supervisor launch: loses, cuts off, slows and mends nodes; called as PROGRAM lose NODE, see "
        "docs/restart_drill.md",
    )  # fmt: skip
    parser.add_argument(
        "--node", type=_nodes, default=(-1,), metavar="N[,N...]",
        help="which of the nodes that train is harmed, from 0 (default: -1, the last); of several all at once",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="do not pass on the output of the job")
    parser.add_argument(
        "command",
        nargs="+",
        help="after --: the training command, without --save and --load, or a preset such as tiny_tp2_pp2_dp2",
    )


def add_persist_interval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--persist-interval", type=_size, metavar="N",
        help="engine memory: every N-th save goes to storage, too (default: that of the command)",
    )  # fmt: skip


def nodes_refusal(args: argparse.Namespace, supervisors: Sequence[str]) -> str | None:
    """Whether the options on nodes fit the supervisors."""
    if LAUNCH not in supervisors and args.nodes_command is not None:
        return f"--nodes-command {args.nodes_command}: only faults of nodes use it; give --supervisor launch, too"
    return None


def _place(text: str) -> Place:
    try:
        place = place_of("--checkpoints", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return place.absolute() if isinstance(place, Path) else place


def check_out(parser: argparse.ArgumentParser, out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"--out {out}: is there already; give a new directory")


def _moment(text: str) -> Moment:
    try:
        return parse_moment(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _nodes(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(number) for number in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be numbers of nodes, separated by commas") from None


def _size(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


def _refusal(args: argparse.Namespace) -> str | None:
    """Which of the options exclude each other; None if none do."""
    on_nodes = args.nodes_command is not None
    found = nodes_refusal(args, (args.supervisor,)) or refusal(args.fault, args.at, args.supervisor, on_nodes=on_nodes)
    if found is not None:
        return found
    in_bucket = isinstance(args.checkpoints, ObjectUri)
    if in_bucket and args.fault == DISK_FULL:
        return (
            f"--fault disk-full --checkpoints {args.checkpoints}: object storage has no disk of yours; give a directory"
        )
    if of_storage(args.fault) is not None and not in_bucket:
        return f"--fault {args.fault}: is of object storage; give --checkpoints s3://BUCKET/PREFIX"
    if in_bucket and args.cold_cache:
        return (
            f"--cold-cache --checkpoints {args.checkpoints}: a load fetches from the store, whose caches are its own; "
            "drop --cold-cache"
        )
    elsewhere = sizes_of(args).given
    if args.reference is not None and args.no_reference:
        return f"--reference {args.reference} with --no-reference: give one of them"
    if args.until_caught_up and not args.no_reference and args.reference is None:
        return (
            "--until-caught-up: the reference run would train to its end, and be compared with little; add "
            "--no-reference, or --reference DIR"
        )
    if args.fault in DAMAGE and args.at.strikes_a_restart and args.cycles > 1:
        return (
            f"--fault {args.fault} --at {args.at.text} --cycles {args.cycles}: nothing is saved between such "
            "faults, so no complete checkpoint would be left; use --cycles 1"
        )
    if args.supervisor == LAUNCH and (elsewhere or args.cold_cache):
        return (
            "--supervisor launch with --resume-tp, --resume-pp, --resume-dp or --cold-cache: the agents restart the "
            "ranks that they had, and at once; use --supervisor relaunch"
        )
    if args.supervisor == TORCHRUN and elsewhere:
        return (
            "--supervisor torchrun with --resume-tp, --resume-pp or --resume-dp: an agent restarts the ranks that it "
            "had; use --supervisor relaunch"
        )
    if args.supervisor == TORCHRUN and args.cold_cache:
        return (
            "--supervisor torchrun --cold-cache: the agent restarts the ranks at once, so nothing can be dropped "
            "before; use --supervisor relaunch"
        )
    return None


def sizes_of(args: argparse.Namespace) -> commands.Sizes:
    return commands.Sizes(args.resume_tp, args.resume_pp, args.resume_dp)


def plan_of(args: argparse.Namespace, training: list[str]) -> Plan:
    """The plan of a command line. Raises DrillError for what cannot be, before anything is launched."""
    base = base_plan(args, training)
    if not checkpoints_at(base.checkpoints).is_empty():
        new = "directory" if isinstance(base.checkpoints, Path) else "prefix"
        raise DrillError(f"--checkpoints {base.checkpoints}: is not empty; give a new {new}")
    strikes = intended(args.fault, args.at, args.cycles, args.supervisor)
    where = base.checkpoints, base.trace_dir
    command = commands.completed(training, *where, args.checkpoint_engine, args.persist_interval)
    command = commands.supervised(
        command, args.supervisor, len(strikes), base.hang_limit_s, on_nodes=base.on_nodes
    )  # fmt: skip
    if args.supervisor != RELAUNCH and args.fault == "sigterm" and "--exit-signal-handler" in command:
        raise DrillError(
            f"--fault sigterm --supervisor {args.supervisor}: with --exit-signal-handler the ranks save and end well, "
            "so there is nothing to restart; use --supervisor relaunch, or drop the flag"
        )
    if of_storage(args.fault) is not None:
        command = commands.with_deadline(command)
        store_endpoint()
    sizes = sizes_of(args)
    resumed = commands.on_layout(command, sizes) if sizes.given else command
    return replace(
        base, command=command, resumed_command=resumed, strikes=strikes, supervisor=args.supervisor,
        cold_cache=args.cold_cache, to_the_end=not args.until_caught_up, **saves(command, base.on_nodes),
    )  # fmt: skip


def saves(command: list[str], on_nodes: bool) -> dict[str, Any]:
    """What a Plan says of the saves of the training. Raises DrillError for flags that the training would refuse."""
    found = commands.saves_of(command, on_nodes=on_nodes)
    return {
        "keeps_saves": found.in_memory, "save_interval": found.interval, "saves_until_stored": found.until_stored,
    }  # fmt: skip


def base_plan(args: argparse.Namespace, training: list[str]) -> Plan:
    """What the options say that `add_run_options` adds."""
    out = args.out.absolute()
    return Plan(
        command=training,
        resumed_command=training,
        strikes=(),
        supervisor=RELAUNCH,
        out=out,
        checkpoints=out / "checkpoints" if args.checkpoints is None else args.checkpoints,
        limit_s=args.time_limit,
        hang_limit_s=args.hang_limit,
        echo=not args.quiet,
        disk_limit_bytes=int(args.disk_limit * GIB),
        nodes_command=tuple(shlex.split(args.nodes_command or "")),
        nodes=args.node,
    )


def tolerances_of(command: list[str]) -> tuple[float, float]:
    """How far losses may be apart on another layout, and repeated on one; for flags that cannot be seen, as in bf16."""
    config = commands.configuration(command)
    tolerance = TOLERANCES["bf16" if config is None else config.model.params_dtype]
    if commands.repeats_exactly(command):
        return tolerance, 0.0
    say(
        f"this training need not repeat its losses to the last bit (--deterministic off): compared within {tolerance:g}"
    )
    return tolerance, tolerance


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    catch_stop_signals()
    try:
        training = expanded(args.command)
        plan = plan_of(args, training)
        reference = None if args.reference is None else stored_reference(args.reference, training)
        strikes: list[Strike] = []
        run_drill(plan, say, strikes)
        if reference is None and not args.no_reference:
            say("the same training without a fault, for comparison")
            reference = run_reference(plan, training, args.checkpoint_engine, args.persist_interval)
        content = _report(plan, strikes, reference, analysis=not args.no_analysis)
    except (DrillError, ObjectStoreError, OSError) as error:
        say(f"error: {error}")
        return COULD_NOT_RUN
    for cycle in content["cycles"]:
        for line in cycle["different"][:10]:
            say(f"cycle {cycle['cycle']}: {line}")
    return VERIFIED if all(cycle["verified"] for cycle in content["cycles"]) else NOT_VERIFIED


def _report(plan: Plan, strikes: list[Strike], reference: Reference | None, *, analysis: bool) -> dict[str, Any]:
    """Write report.json (of the `analysis`, if there is to be one) and drill.json, print the table; drill.json."""
    cycles = facts_of(plan.trace_dir)
    report = None
    if analysis:
        report = analysed(plan.trace_dir)
        (plan.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    content = describe(strikes, plan.supervisor, report, cycles, reference, *tolerances_of(plan.command))
    (plan.out / "drill.json").write_text(json.dumps(content, indent=1) + "\n")
    if reference is None and plan.command == plan.resumed_command and commands.repeats_exactly(plan.command):
        print(repetition_table(repeated(cycles)), end="\n\n")
    print(table(content))
    return content


def catch_stop_signals() -> None:
    """Have these signals end the drill as an error does: with no process left."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, _stop)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    for further in STOP_SIGNALS:
        signal.signal(further, signal.SIG_IGN)  # the cleaning up must not be interrupted
    raise DrillError(f"stopped by signal {signal.Signals(signum).name}")
