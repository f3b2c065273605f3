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

from megatron.checkpointing.store.bucket import ObjectStoreError
from megatron.config import ConfigError
from megatron.config.uris import Location, ObjectUri, location_of
from restart_trace.command_line import CommandParser

from . import command as commands
from .checkpoints import checkpoints_at
from .drill import run_drill
from .facts import facts_of
from .faults import DAMAGE, DISK_FULL, FAULTS, proxy_fault, refusal, store_endpoint
from .full_disk import GIB
from .injection_points import STAGES, InjectionPoint, parse_injection_point
from .launch import DrillError
from .output import analysed, describe, table
from .plan import LAUNCH, RELAUNCH, SUPERVISORS, TORCHRUN, Injection, Plan, planned_injections, say
from .preset import expanded, preset_of
from .reference import Reference, run_reference, stored_reference
from .verify import TOLERANCES, repeated, repetition_table

VERIFIED, NOT_VERIFIED, COULD_NOT_RUN = 0, 1, 2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_EXAMPLE = """examples:
  %(prog)s --fault sigkill-all --at mid-save-write --cycles 2 --out runs/drill -- tiny_tp2_pp2_dp2
  %(prog)s --fault exception --at random:7 --supervisor torchrun --out runs/drill -- \\
      torchrun --nproc-per-node 8 pretrain_gpt.py ...

exit status: 0 all cycles were verified, 1 at least one was not, 2 the drill could not be carried out
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="restart-drill",
        description="Inject a fault into a training, let it restart, and verify that only time was lost.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("--fault", required=True, choices=FAULTS, help="the fault to inject: docs/restart_drill.md")
    parser.add_argument(
        "--at",
        required=True,
        type=_injection_point,
        metavar="WHEN",
        help=f"injection point: {', '.join(STAGES)}, iteration:N or random:SEED",
    )
    parser.add_argument("--cycles", type=int, default=1, help="number of times that the fault is injected (default: 1)")
    parser.add_argument(
        "--supervisor", choices=SUPERVISORS, default=RELAUNCH,
        help="what restarts the ranks: the drill launches the job again (relaunch, the default); torchrun's agent "
        "restarts them in place; megatron.launch does so or, with --nodes-command, restarts them on the remaining "
        "nodes and spares",
    )  # fmt: skip
    add_run_options(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="check these options and the preset's name; start and write nothing"
    )
    parser.add_argument("--checkpoint-engine", metavar="E", help="engine of the training (default: from its command)")
    add_persist_interval(parser)
    parser.add_argument("--cold-cache", action="store_true", help="drop the page cache before each relaunch")
    for name, what in (("tp", "tensor-parallel"), ("pp", "pipeline-parallel"), ("dp", "data-parallel")):
        help_ = f"{what} size of the launches after the first fault (default: unchanged)"
        parser.add_argument(f"--resume-{name}", type=_size, metavar="N", help=help_)
    parser.add_argument(
        "--no-reference", action="store_true",
        help="skip the reference run; compare the losses of iterations that several launches trained",
    )  # fmt: skip
    parser.add_argument(
        "--until-caught-up", action="store_true",
        help="end the last launch once it has trained the lost iterations again, not at the end of the training",
    )  # fmt: skip
    parser.add_argument(
        "--no-analysis", action="store_true",
        help="verify, but leave out report.json and all durations; for environments without polars",
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
    """Options that the drill and the matrix of drills share."""
    parser.add_argument("--out", type=Path, required=True, help="new directory for all output")
    parser.add_argument(
        "--checkpoints", type=_place, metavar="DIR",
        help="directory or s3://BUCKET/PREFIX for the checkpoints, on the storage to be tested (default: below --out)",
    )  # fmt: skip
    parser.add_argument("--disk-limit", type=float, default=4.0, metavar="GIB",
                        help="largest file system that disk-full may fill (default: 4)")  # fmt: skip
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="S",
                        help="seconds for each launch and each injection point (default: 300)")  # fmt: skip
    parser.add_argument("--hang-limit", type=float, default=30.0, metavar="S",
                        help="seconds without an iteration that count as a hang (default: %(default)g)")  # fmt: skip
    parser.add_argument(
        "--reference", type=Path, metavar="DIR",
        help="--out of an earlier drill or matrix; its reference run is used instead of a new one",
    )  # fmt: skip
    parser.add_argument(
        "--nodes-command", metavar="PROGRAM",
        help="for --supervisor launch: a program that injects faults into nodes and undoes them; it reads lines such "
        "as `lose NODE`, see docs/restart_drill.md",
    )  # fmt: skip
    parser.add_argument(
        "--node", type=_nodes, default=(-1,), metavar="N[,N...]",
        help="indices of the training nodes that the fault is injected into, from 0, several at the same time "
        "(default: -1, the last node)",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="do not show the output of the job")
    parser.add_argument(
        "command",
        nargs="+",
        help="after --: the training command, without --save and --load, or a preset such as tiny_tp2_pp2_dp2",
    )


def add_persist_interval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--persist-interval", type=_size, metavar="N",
        help="engine memory: save every N-th checkpoint to storage, too (default: from the command)",
    )  # fmt: skip


def nodes_refusal(args: argparse.Namespace, supervisors: Sequence[str]) -> str | None:
    """Why the options for nodes do not fit the supervisors; None if they do."""
    if LAUNCH not in supervisors and args.nodes_command is not None:
        return f"--nodes-command {args.nodes_command}: only faults of nodes use it; add --supervisor launch"
    return None


def _place(text: str) -> Location:
    try:
        place = location_of("--checkpoints", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return place.absolute() if isinstance(place, Path) else place


def check_out(parser: argparse.ArgumentParser, out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"--out {out}: already exists; give a new directory")


def _injection_point(text: str) -> InjectionPoint:
    try:
        return parse_injection_point(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _nodes(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(number) for number in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be node numbers separated by commas") from None


def _size(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


def _refusal(args: argparse.Namespace) -> str | None:
    """Why this combination of options is refused; None if it is valid."""
    on_nodes = args.nodes_command is not None
    found = nodes_refusal(args, (args.supervisor,)) or refusal(args.fault, args.at, args.supervisor, on_nodes=on_nodes)
    if found is not None:
        return found
    in_bucket = isinstance(args.checkpoints, ObjectUri)
    if in_bucket and args.fault == DISK_FULL:
        return (
            f"--fault disk-full --checkpoints {args.checkpoints}: object storage has no disk to fill; give a directory"
        )
    if proxy_fault(args.fault) is not None and not in_bucket:
        return f"--fault {args.fault}: a fault of object storage; give --checkpoints s3://BUCKET/PREFIX"
    if in_bucket and args.cold_cache:
        return (
            f"--cold-cache --checkpoints {args.checkpoints}: a load fetches from the store, whose caches cannot be "
            "dropped; remove --cold-cache"
        )
    new_layout = sizes_of(args).given
    if args.reference is not None and args.no_reference:
        return f"--reference {args.reference} with --no-reference: give only one of them"
    if args.until_caught_up and not args.no_reference and args.reference is None:
        return (
            "--until-caught-up: the reference run would train to its end, though few iterations are compared with it; "
            "add --no-reference or --reference DIR"
        )
    if args.fault in DAMAGE and args.at.during_restart and args.cycles > 1:
        return (
            f"--fault {args.fault} --at {args.at.text} --cycles {args.cycles}: nothing is saved between such "
            "faults, so no complete checkpoint would be left; use --cycles 1"
        )
    if args.supervisor == LAUNCH and (new_layout or args.cold_cache):
        return (
            "--supervisor launch with --resume-tp, --resume-pp, --resume-dp or --cold-cache: the agents restart the "
            "same ranks, and at once; use --supervisor relaunch"
        )
    if args.supervisor == TORCHRUN and new_layout:
        return (
            "--supervisor torchrun with --resume-tp, --resume-pp or --resume-dp: the agent restarts the same ranks; "
            "use --supervisor relaunch"
        )
    if args.supervisor == TORCHRUN and args.cold_cache:
        return (
            "--supervisor torchrun --cold-cache: the agent restarts the ranks at once, so there is no time to drop the "
            "page cache; use --supervisor relaunch"
        )
    return None


def sizes_of(args: argparse.Namespace) -> commands.Sizes:
    return commands.Sizes(args.resume_tp, args.resume_pp, args.resume_dp)


def plan_of(args: argparse.Namespace, training: list[str]) -> Plan:
    """The plan of a command line. Raises DrillError, before anything is launched, if it cannot be carried out."""
    base = base_plan(args, training)
    if not checkpoints_at(base.checkpoints).is_empty():
        new = "directory" if isinstance(base.checkpoints, Path) else "prefix"
        raise DrillError(f"--checkpoints {base.checkpoints}: is not empty; give a new {new}")
    injections = planned_injections(args.fault, args.at, args.cycles, args.supervisor)
    where = base.checkpoints, base.trace_dir
    command = commands.completed(training, *where, args.checkpoint_engine, args.persist_interval)
    command = commands.supervised(
        command, args.supervisor, len(injections), base.hang_limit_s, on_nodes=base.on_nodes
    )  # fmt: skip
    if args.supervisor != RELAUNCH and args.fault == "sigterm" and "--exit-signal-handler" in command:
        raise DrillError(
            f"--fault sigterm --supervisor {args.supervisor}: with --exit-signal-handler the ranks save and end with "
            "0, so the launcher restarts nothing; use --supervisor relaunch, or remove the flag"
        )
    if proxy_fault(args.fault) is not None:
        command = commands.with_deadline(command)
        store_endpoint()
    sizes = sizes_of(args)
    resumed = commands.on_layout(command, sizes) if sizes.given else command
    return replace(
        base, command=command, resumed_command=resumed, injections=injections, supervisor=args.supervisor,
        cold_cache=args.cold_cache, to_the_end=not args.until_caught_up, **saves(command, base.on_nodes),
    )  # fmt: skip


def saves(command: list[str], on_nodes: bool) -> dict[str, Any]:
    """The fields of a Plan that describe saves. Raises DrillError for flags that the training would refuse."""
    found = commands.saves_of(command, on_nodes=on_nodes)
    return {
        "saves_in_memory": found.in_memory, "save_interval": found.interval, "saves_until_stored": found.until_stored,
    }  # fmt: skip


def base_plan(args: argparse.Namespace, training: list[str]) -> Plan:
    """The plan that the options of `add_run_options` give, without injections."""
    out = args.out.absolute()
    return Plan(
        command=training,
        resumed_command=training,
        injections=(),
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
    """Relative tolerances of losses: on another layout, and of a repeated iteration on the same one.

    If the command does not show its flags, bf16 is assumed.
    """
    config = commands.configuration(command)
    tolerance = TOLERANCES["bf16" if config is None else config.model.params_dtype]
    if commands.repeats_exactly(command):
        return tolerance, 0.0
    say(f"this training need not repeat its losses bit for bit (--deterministic off): compared within {tolerance:g}")
    return tolerance, tolerance


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    catch_stop_signals()
    try:
        if args.dry_run:
            preset_of(args.command)
            return VERIFIED
        training = expanded(args.command)
        plan = plan_of(args, training)
        reference = None if args.reference is None else stored_reference(args.reference, training)
        injections: list[Injection] = []
        run_drill(plan, say, injections)
        if reference is None and not args.no_reference:
            say("the reference run: the same training without a fault")
            reference = run_reference(plan, training, args.checkpoint_engine, args.persist_interval)
        content = _report(plan, injections, reference, analysis=not args.no_analysis)
    except (DrillError, ObjectStoreError, OSError) as error:
        say(f"error: {error}")
        return COULD_NOT_RUN
    for cycle in content["cycles"]:
        for line in cycle["different"][:10]:
            say(f"cycle {cycle['cycle']}: {line}")
    return VERIFIED if all(cycle["verified"] for cycle in content["cycles"]) else NOT_VERIFIED


def _report(plan: Plan, injections: list[Injection], reference: Reference | None, *, analysis: bool) -> dict[str, Any]:
    """Write drill.json and, with `analysis`, report.json; print the table. Returns the content of drill.json."""
    cycles = facts_of(plan.trace_dir)
    report = None
    if analysis:
        report = analysed(plan.trace_dir)
        (plan.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    content = describe(injections, plan.supervisor, report, cycles, reference, *tolerances_of(plan.command))
    (plan.out / "drill.json").write_text(json.dumps(content, indent=1) + "\n")
    if reference is None and plan.command == plan.resumed_command and commands.repeats_exactly(plan.command):
        print(repetition_table(repeated(cycles)), end="\n\n")
    print(table(content))
    return content


def catch_stop_signals() -> None:
    """Let these signals end the drill as an error does: with no process left."""
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # what is to be ignored (nohup) stays so
            signal.signal(signum, _stop)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    for further in STOP_SIGNALS:
        signal.signal(further, signal.SIG_IGN)  # cleanup must not be interrupted
    raise DrillError(f"stopped by signal {signal.Signals(signum).name}")
