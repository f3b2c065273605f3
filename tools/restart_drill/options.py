"""The options of the drill: which faults or stops, into which training, and which of them make no sense together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.checkpointing import builtin_engines, check_engine_name
from megatron.config import ConfigError
from megatron.config.uris import URI_FORM, Location, ObjectUri, location_of
from restart_trace.command_line import CommandParser

from .faults import DAMAGE, FAULTS, STORAGE_FAULTS, place_refusal, refusal, store_endpoint
from .injection_points import STAGES, parse_injection_point
from .launch import DrillError
from .matrix import INJECTION_POINTS
from .plan import BY_FORK, LAUNCH, RELAUNCH, SUPERVISORS, TORCHRUN
from .soak.schedule import LEFT_OUT, possible_faults
from .soak.stops import Stop, parse_stop

# The selections of faults and stops, by the option that chooses each.
ONE, MATRIX, SOAK, STOPS = "--fault", "--matrix", "--soak", "--stops"
PRESET = "tiny_tp2_pp2_dp2"
ENGINES = {MATRIX: ("torch", "lazy"), SOAK: tuple(name for name in builtin_engines() if name not in LEFT_OUT)}
ENGINES_ON_NODES = ("torch", "lazy", "memory")  # of a soak
_HANG_LIMITS_S = {ONE: 30.0, MATRIX: 5.0, SOAK: 3.0}
_HANG_LIMIT_ON_NODES_S = 15.0  # of a soak; it is also the deadline of a rendezvous
_ON_DISK = (ONE, MATRIX, SOAK)

_EXAMPLE = """examples:
  %(prog)s --fault sigkill-all --at mid-save-write --cycles 2 --out runs/drill -- tiny_tp2_pp2_dp2
  %(prog)s --fault exception --at random:7 --supervisor torchrun --out runs/drill -- \\
      torchrun --nproc-per-node 8 pretrain_gpt.py ...
  %(prog)s --matrix --sample 12 --engines lazy --out runs/matrix -- 7b_tp4_pp2
  %(prog)s --soak --minutes 10 --out runs/soak
  %(prog)s --stops 200 --minutes 90 --out runs/stops

A soak continues with the engines that are not finished if an earlier call with the same options wrote --out.

exit status: 0 all was verified, 1 something was lost, left behind or different, 2 the drill could not be carried out
"""


class _Options:
    """Adds the options of selections to a parser, and knows which selections each of them belongs to."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self._of: dict[str, tuple[str, ...]] = {}  # dest -> its selections

    def add(self, of: tuple[str, ...], name: str, help_: str, **details: Any) -> None:
        self._of[self._parser.add_argument(name, help=f"{', '.join(of)}: {help_}", **details).dest] = of

    def foreign(self, args: argparse.Namespace) -> str | None:
        """Why an option that was given has no meaning for the selection; None if all have one."""
        for dest, of in self._of.items():
            value = getattr(args, dest)
            if args.selection not in of and value != self._parser.get_default(dest):
                shown = "" if value is True else f" {_shown(value)}"
                name = f"--{dest.replace('_', '-')}"
                return f"{name}{shown}: has no meaning for {args.selection}; remove one of the two"
        return None


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options, with `selection` and its defaults. Exits with 2 if they make no sense together."""
    parser = CommandParser(
        prog="restart-drill",
        description="Inject faults into a training, or stop it, let it restart, and verify that only time was lost.",
        epilog=_EXAMPLE,
    )
    options = _Options(parser)
    _add_selections(parser)
    _add_common(parser, options)
    _add_of_one(options)
    _add_of_many(options)
    args = parser.parse_args(argv)
    args.selection = _selected(args)
    wrong = options.foreign(args) or _refusal(args)
    if wrong is not None:
        parser.error(wrong)
    return args


def _add_selections(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(ONE, choices=FAULTS, help="inject this fault: docs/restart_drill.md")
    which.add_argument(MATRIX, action="store_true", help="inject every fault at every point, as far as it makes sense")
    which.add_argument(SOAK, action="store_true", help="inject faults in random order: is anything left, or growing?")
    which.add_argument(STOPS, type=_size, metavar="N", help="stop the job N times by signals, under every launcher")


def _add_common(parser: argparse.ArgumentParser, options: _Options) -> None:
    parser.add_argument("--out", type=Path, required=True, help="new directory for all output")
    parser.add_argument("--time-limit", type=_positive, default=300.0, metavar="S",
                        help="seconds for each launch and each injection point (default: 300)")  # fmt: skip
    options.add(
        _ON_DISK, "--checkpoints",
        f"directory or {URI_FORM} for the checkpoints, on the storage to be tested (default: below --out)",
        type=_place, metavar="DIR",
    )  # fmt: skip
    options.add(_ON_DISK, "--disk-limit", "largest file system that disk-full may fill", type=_positive, default=4.0,
                metavar="GIB")  # fmt: skip
    limits = ", ".join(f"{limit:g} with {selection}" for selection, limit in _HANG_LIMITS_S.items())
    options.add(
        _ON_DISK, "--hang-limit",
        f"seconds without an iteration that count as a hang (default: {limits}, {_HANG_LIMIT_ON_NODES_S:g} on nodes)",
        type=_positive, metavar="S",
    )  # fmt: skip
    options.add(
        _ON_DISK, "--nodes-command",
        "a program that injects faults into nodes and undoes them; it reads lines such as `lose NODE`, see "
        "docs/restart_drill.md; not --soak: with --supervisor launch", metavar="PROGRAM",
    )  # fmt: skip
    parser.add_argument("--config", metavar="FILE",
                        help="settings of the preset, lines NAME = VALUE; the environment overrides it: "
                        "docs/cluster.md")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true",
                        help="check the options, show what would be injected; start and write nothing")  # fmt: skip
    parser.add_argument(
        "command", nargs="*",
        help=f"after --: the training command, without --save and --load, or a preset such as {PRESET}",
    )  # fmt: skip


def _add_of_one(options: _Options) -> None:
    of = (ONE,)
    options.add(of, "--at", f"injection point: {', '.join(STAGES)}, iteration:N or random:SEED",
                metavar="WHEN")  # fmt: skip
    options.add(of, "--cycles", "number of times that the fault is injected (default: 1)", type=int, default=1)
    options.add(
        (ONE, SOAK), "--supervisor",
        "what restarts the ranks: the drill launches the job again (relaunch, the default of a fault); torchrun's "
        "agent restarts them in place; megatron.launch does so (launch, the default of a soak) or, with "
        "--nodes-command, restarts them on the remaining nodes and spares; with in-process those that live start again "
        "in their processes", choices=SUPERVISORS,
    )  # fmt: skip
    options.add(of, "--checkpoint-engine", "engine of the training (default: from its command)", metavar="E")
    options.add(of, "--cold-cache", "drop the page cache before each relaunch", action="store_true")
    for name, what in (("tp", "tensor-parallel"), ("pp", "pipeline-parallel"), ("dp", "data-parallel")):
        options.add(of, f"--resume-{name}", f"{what} size of the launches after the first fault (default: unchanged)",
                    type=_size, metavar="N")  # fmt: skip
    options.add(
        of, "--no-reference", "skip the reference run; compare the losses of iterations that several launches trained",
        action="store_true",
    )  # fmt: skip
    options.add(
        of, "--until-caught-up",
        "end the last launch once it has trained the lost iterations again, not at the end of the training",
        action="store_true",
    )  # fmt: skip
    options.add(
        of, "--no-analysis",
        "verify, but leave out report.json and all durations; for environments without polars", action="store_true",
    )  # fmt: skip
    of_both = (ONE, MATRIX)
    options.add(
        of_both, "--reference",
        "--out of an earlier drill or matrix; its reference run is used instead of a new one", type=Path, metavar="DIR",
    )  # fmt: skip
    options.add(
        of_both, "--node",
        "with --nodes-command: indices of the training nodes that the fault is injected into, from 0, several at the "
        "same time (default: -1, the last node)", type=_nodes, metavar="N[,N...]",
    )  # fmt: skip
    options.add(of_both, "--quiet", "do not show the output of the job", action="store_true")
    options.add(of_both, "--persist-interval",
                "engine memory: save every N-th checkpoint to storage, too (default: from the command)",
                type=_size, metavar="N")  # fmt: skip


def _add_of_many(options: _Options) -> None:
    options.add((MATRIX, SOAK, STOPS), "--seed", "decides what is drawn at random", type=int, default=1)
    options.add((MATRIX, SOAK), "--faults", "separated by commas (default: all that the other options allow)",
                type=_words)  # fmt: skip
    options.add((MATRIX, SOAK), "--engines", "separated by commas (default: see docs/restart_drill.md)",
                type=_words)  # fmt: skip
    options.add(
        (MATRIX,), "--supervisors", f"separated by commas (default: {RELAUNCH},{TORCHRUN})", type=_words,
        default=(RELAUNCH, TORCHRUN),
    )  # fmt: skip
    options.add((MATRIX,), "--injection-points", "separated by commas (default: all)", type=_words,
                default=INJECTION_POINTS)  # fmt: skip
    options.add((MATRIX,), "--sample", "only N cells, drawn at random (default: all)", type=_size, metavar="N")
    options.add(
        (MATRIX, SOAK), "--spares",
        "with --nodes-command: number of spare nodes in HOSTFILE; one launch of a matrix loses at most so many (1 by "
        "default), an engine of a soak one less", type=int, metavar="N",
    )  # fmt: skip
    options.add((SOAK, STOPS), "--minutes", "approximate duration of a soak; no stop begins later", type=_positive)
    options.add((SOAK,), "--saves", "minimum over all engines (default without --minutes: 200)", type=_size)
    options.add((SOAK,), "--restarts", "over all engines (default without --minutes: 50)", type=_size)
    options.add(
        (SOAK,),
        "--memory-limit",
        "allowed growth of memory: of a process, and of the ranks of a host together",
        type=_positive,
        default=32.0,
        metavar="MIB",
    )
    options.add((STOPS,), "--stop", "this one, or several in turn, as the result shows it (default: drawn with --seed)",
                type=_stop, action="append", default=[], metavar="STOP")  # fmt: skip


# Values


def _place(text: str) -> Location:
    try:
        place = location_of("--checkpoints", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return place.absolute() if isinstance(place, Path) else place


def _stop(text: str) -> Stop:
    try:
        return parse_stop(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _nodes(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(number) for number in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be node numbers separated by commas") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _size(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of more than 0")
    return value


# The selection, its defaults, and what it refuses


def _selected(args: argparse.Namespace) -> str:
    chosen = {ONE: args.fault, MATRIX: args.matrix, SOAK: args.soak, STOPS: args.stops}
    return next(selection for selection, value in chosen.items() if value)


def _refusal(args: argparse.Namespace) -> str | None:
    """Why the options are refused; None, with the defaults of their selection set, if they are valid."""
    on_nodes = args.nodes_command is not None
    for name, value in (("--node", args.node), ("--spares", args.spares)):
        if value is not None and not on_nodes:
            return f"{name} {_shown(value)}: has no effect without --nodes-command; remove it, or give that, too"
    args.node = (-1,) if args.node is None else args.node
    if args.supervisor is None and args.selection in (ONE, SOAK):
        args.supervisor = RELAUNCH if args.selection == ONE else LAUNCH
    if args.selection == SOAK:
        args.hang_limit = args.hang_limit or (_HANG_LIMIT_ON_NODES_S if on_nodes else _HANG_LIMITS_S[SOAK])
    else:
        args.hang_limit = args.hang_limit or _HANG_LIMITS_S.get(args.selection)
        if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
            return f"--out {args.out}: already exists; give a new directory"
    if args.engines is None and args.selection in ENGINES:
        args.engines = ENGINES[args.selection]
        if args.selection == SOAK and on_nodes:
            args.engines = ENGINES_ON_NODES
    for engine in args.engines or ():
        try:
            check_engine_name(engine)
        except ValueError as error:
            return f"--engines: {error}"
    refusals = {ONE: _refusal_of_one, MATRIX: _refusal_of_matrix, SOAK: _refusal_of_soak}
    return refusals[args.selection](args) if args.selection in refusals else None


def _nodes_refusal(args: argparse.Namespace, supervisors: Sequence[str]) -> str | None:
    if LAUNCH not in supervisors and args.nodes_command is not None:
        return f"--nodes-command {args.nodes_command}: only faults of nodes use it; add --supervisor launch"
    return None


def _refusal_of_one(args: argparse.Namespace) -> str | None:
    if args.at is None or not args.command:
        return "the following arguments are required: --at WHEN and, after --, the training command"
    if args.cycles < 1:
        return f"--cycles {args.cycles}: must be at least 1"
    if args.reference is not None and args.no_reference:
        return f"--reference {args.reference} with --no-reference: give only one of them"
    if args.until_caught_up and not args.no_reference and args.reference is None:
        return (
            "--until-caught-up: the reference run would train to its end, though few iterations are compared with it; "
            "add --no-reference or --reference DIR"
        )
    if args.supervisor != RELAUNCH and (args.cold_cache or args.resume_tp or args.resume_pp or args.resume_dp):
        return (
            f"--supervisor {args.supervisor} with --resume-tp, --resume-pp, --resume-dp or --cold-cache: it restarts "
            "the same ranks, and at once; use --supervisor relaunch"
        )
    found = _nodes_refusal(args, (args.supervisor,)) or _refusal_of_place(args)
    if found is not None:
        return found
    try:
        args.at = parse_injection_point(args.at)
    except ValueError as error:
        return f"--at {error}"
    if args.fault in DAMAGE and args.at.during_restart and args.cycles > 1:
        return (
            f"--fault {args.fault} --at {args.at.text} --cycles {args.cycles}: nothing is saved between such "
            "faults, so no complete checkpoint would be left; use --cycles 1"
        )
    return refusal(args.fault, args.at, args.supervisor, on_nodes=args.nodes_command is not None)


def _refusal_of_place(args: argparse.Namespace) -> str | None:
    in_bucket = isinstance(args.checkpoints, ObjectUri)
    # By default they are in a directory.
    refused = place_refusal(args.fault, args.checkpoints or args.out) or _endpoint_refusal(args, (args.fault,))
    if refused is not None:
        return refused
    if in_bucket and args.cold_cache:
        return (
            f"--cold-cache --checkpoints {args.checkpoints}: a load fetches from the store, whose caches cannot be "
            "dropped; remove --cold-cache"
        )
    return None


def _endpoint_refusal(args: argparse.Namespace, faults: Sequence[str]) -> str | None:
    """Why no fault can be injected into object storage; None if it can, or none is to be."""
    if not isinstance(args.checkpoints, ObjectUri) or not set(faults) & set(STORAGE_FAULTS):
        return None
    try:
        store_endpoint(args.checkpoints.store)
    except DrillError as error:
        return str(error)
    return None


def _refusal_of_matrix(args: argparse.Namespace) -> str | None:
    args.faults = args.faults or tuple(FAULTS)
    args.spares = 1 if args.spares is None else args.spares
    for name, valid in (
        ("supervisors", SUPERVISORS),
        ("faults", tuple(FAULTS)),
        ("injection_points", INJECTION_POINTS),
    ):
        given = getattr(args, name)
        if not set(given) <= set(valid):
            return f"--{name.replace('_', '-')} {','.join(given)}: choose from {', '.join(valid)}"
    if args.nodes_command is not None and len(args.supervisors) > 1:
        return (
            f"--supervisors {','.join(args.supervisors)}: with --nodes-command the training command is one that only "
            "launch can supervise; give --supervisors launch"
        )
    return _nodes_refusal(args, args.supervisors) or _endpoint_refusal(args, args.faults)


def _refusal_of_soak(args: argparse.Namespace) -> str | None:
    if args.supervisor not in BY_FORK:
        return f"--supervisor {args.supervisor}: a soak needs megatron.launch: use {' or '.join(BY_FORK)}"
    if args.nodes_command is not None and args.supervisor != LAUNCH:
        return f"--supervisor {args.supervisor} with --nodes-command: leave out one of them"
    possible = possible_faults(on_nodes=args.nodes_command is not None, fills_disk=args.checkpoints is not None)
    args.faults = args.faults or possible
    args.spares = args.spares or 0
    if args.minutes is not None and (args.saves is not None or args.restarts is not None):
        return f"--minutes {args.minutes:g}: sets the duration; remove it, or --saves and --restarts"
    if args.restarts is not None and args.restarts < len(args.engines):
        return f"--restarts {args.restarts}: must be at least 1 for each of the {len(args.engines)} engines"
    if not set(args.faults) <= set(possible):
        return f"--faults {','.join(args.faults)}: these options allow {', '.join(possible)}"
    if args.nodes_command is not None and args.spares < 2:
        return (
            f"--spares {args.spares}: must be at least 2: one for nodes whose links are cut, the others for lost nodes"
        )
    if args.nodes_command is not None and args.checkpoints is not None:
        return f"--checkpoints {args.checkpoints}: disk-full cannot be injected on nodes; remove it, or --nodes-command"
    if isinstance(args.checkpoints, ObjectUri):
        return f"--checkpoints {args.checkpoints}: a soak fills a disk, and object storage has none; give a directory"
    return None
