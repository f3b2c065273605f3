"""The command of the drill: one fault, the matrix, a soak, or stops."""

from __future__ import annotations

import argparse
import os
import random
import shlex
from collections.abc import Callable
from dataclasses import replace

from megatron.checkpointing import ObjectStoreError

from ..common.formatting import plural
from ..common.stopping import StoppedBySignal, stop_on_signals
from . import command as commands
from . import dry_run
from .drill import in_turn, run_drill
from .full_disk import GIB
from .launch import DrillError
from .matrix import Cell, cells, run_matrix, sequences
from .options import MATRIX, ONE, PRESET, SOAK, STOPS, parse_arguments
from .output import report
from .own_shm import enter_own_shm
from .plan import RELAUNCH, Injection, Plan, PlannedInjection, planned_injections, say
from .preset import expanded, hosts_of_job, preset_of, small, use_settings
from .reference import run_reference, stored_reference
from .soak.engine_soak import SoakOptions
from .soak.result import Goal
from .soak.soak import claim, goals, run_soak
from .soak.stop_soak import run_stops

VERIFIED, NOT_VERIFIED, COULD_NOT_RUN = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    """The exit status. A caller with an `argv` of its own is not replaced to get a private /dev/shm."""
    args = parse_arguments(argv)
    own_shm = argv is None and args.selection in (SOAK, STOPS) and not args.dry_run and enter_own_shm()
    stop_on_signals()
    run: dict[str, Callable[[], bool]] = {
        ONE: lambda: _one(args),
        MATRIX: lambda: _matrix(args),
        SOAK: lambda: _soak(args, own_shm=own_shm),
        STOPS: lambda: _stops(args, own_shm=own_shm),
    }
    try:
        use_settings(args.config, args.command, on_nodes=args.nodes_command is not None)
        if args.dry_run:
            return _dry_run(args)
        return VERIFIED if run[args.selection]() else NOT_VERIFIED
    except StoppedBySignal as stopped:
        say(f"error: stopped by signal {stopped}")
    except (DrillError, ObjectStoreError, OSError) as error:
        say(f"error: {error}")
    return COULD_NOT_RUN


def base_plan(args: argparse.Namespace, training: list[str]) -> Plan:
    """The plan that the options give, without faults."""
    out = args.out.absolute()
    return Plan(
        command=training,
        resumed_command=training,
        supervisor=RELAUNCH,
        out=out,
        checkpoints=out / "checkpoints" if args.checkpoints is None else args.checkpoints,
        limit_s=args.time_limit,
        hang_limit_s=args.hang_limit,
        echo=not args.quiet,
        disk_limit_bytes=int(args.disk_limit * GIB),
        persist_interval=args.persist_interval,
        nodes_command=tuple(shlex.split(args.nodes_command or "")),
        nodes=args.node,
    )


def plan_of(args: argparse.Namespace, training: list[str], planned: tuple[PlannedInjection, ...]) -> Plan:
    """The plan of these injections. Raises DrillError, before anything is launched, if it cannot be carried out."""
    plan = replace(
        base_plan(args, training), faults=tuple(one.fault for one in planned), restarts=len(planned),
        supervisor=args.supervisor, cold_cache=args.cold_cache, to_the_end=not args.until_caught_up,
    )  # fmt: skip
    sizes = commands.Sizes(args.resume_tp, args.resume_pp, args.resume_dp)
    plan = commands.with_commands(plan, training, args.checkpoint_engine, sizes=sizes)
    if args.supervisor != RELAUNCH and args.fault == "sigterm" and "--exit-signal-handler" in plan.command:
        raise DrillError(
            f"--fault sigterm --supervisor {args.supervisor}: with --exit-signal-handler the ranks save and end with "
            "0, so the launcher restarts nothing; use --supervisor relaunch, or remove the flag"
        )
    return plan


def _dry_run(args: argparse.Namespace) -> int:
    """Check the preset's name or the command, and show what is drawn and how the goals are divided."""
    preset = preset_of(args.command)
    if args.selection == STOPS:
        lines = dry_run.of_stops(args.stops, args.stop, args.seed)
    elif args.selection == SOAK:
        lines = dry_run.of_soak(_goal_of(args), args.faults, args.seed)
    elif args.selection == MATRIX:
        lines = dry_run.of_matrix(sequences(_cells(args), args.spares, len(args.node)))
    else:
        if preset is None:
            plan_of(args, args.command, planned_injections(args.fault, args.at, args.cycles, args.supervisor))
        lines = [f"{args.fault} {args.at.text}, {plural(args.cycles, 'time')}, restarted by {args.supervisor}"]
    if args.selection != STOPS:
        lines.append(dry_run.of_limits(args.time_limit, args.hang_limit))
    print("\n".join(lines))
    return VERIFIED


def _one(args: argparse.Namespace) -> bool:
    training = expanded(args.command)
    planned = planned_injections(args.fault, args.at, args.cycles, args.supervisor)
    plan = plan_of(args, training, planned)
    reference = None if args.reference is None else stored_reference(args.reference, training)
    injections: list[Injection] = []
    run_drill(plan, in_turn(planned), injections)
    if reference is None and not args.no_reference:
        say("the reference run: the same training without a fault")
        reference = run_reference(plan, training, args.checkpoint_engine)
    return report(plan, injections, reference, analysis=not args.no_analysis)


def _cells(args: argparse.Namespace) -> list[Cell]:
    """All valid cells of these options, or --sample of them."""
    on_nodes = args.nodes_command is not None
    chosen = cells(
        args.supervisors, args.engines, args.checkpoints, args.faults, args.injection_points, on_nodes=on_nodes
    )
    if args.sample is None:
        return chosen
    picked = random.Random(args.seed).sample(range(len(chosen)), min(args.sample, len(chosen)))
    return [chosen[i] for i in sorted(picked)]


def _matrix(args: argparse.Namespace) -> bool:
    on_nodes = args.nodes_command is not None
    chosen = _cells(args)
    os.environ.setdefault("ITERS", "300")
    os.environ.setdefault("EXTRA_ARGS", "--keep-last 3")
    words = args.command or [PRESET]
    training = expanded(words)
    if words == [PRESET] and not on_nodes:
        training = commands.on_layout(training, commands.TWO_RANKS)  # so that two cores are enough
    base = base_plan(args, training)
    base.out.mkdir(parents=True, exist_ok=True)
    say(f"{len(chosen)} cells")
    if args.reference is not None:
        reference = stored_reference(args.reference, training)
    else:
        say("the reference run, without a fault")
        reference = run_reference(replace(base, persist_interval=None), training, None)
    return run_matrix(base, chosen, reference, args.spares)


def _goal_of(args: argparse.Namespace) -> dict[str, Goal]:
    """The goal of each engine of a soak."""
    divided = goals(len(args.engines), len(args.faults), args.minutes, args.saves, args.restarts)
    return dict(zip(args.engines, divided, strict=True))


def _soak(args: argparse.Namespace, *, own_shm: bool) -> bool:
    # --nodes-command may differ: that of tests/cluster has the address of the cluster.
    left_out = ("out", "nodes_command", "dry_run")
    given = {name: value for name, value in vars(args).items() if name not in left_out}
    claim(args.out, given)
    on_nodes = args.nodes_command is not None
    training = small(args.command, on_nodes=on_nodes, in_place=True)
    base = replace(base_plan(args, training), supervisor=args.supervisor)
    hosts = hosts_of_job() if on_nodes else ()
    options = SoakOptions(base, args.faults, args.seed, args.memory_limit, own_shm, hosts, args.spares)
    return run_soak(options, _goal_of(args))


def _stops(args: argparse.Namespace, *, own_shm: bool) -> bool:
    training = small(args.command, in_place=True)
    return run_stops(
        training, args.out.absolute(), args.stops, args.stop, args.minutes, args.seed, args.time_limit, own_shm=own_shm
    )
