"""Command line of ckpt-plan. Exit status: 0 planned, 1 a listing differs or --save has no room, 2 not planned."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config import ConfigError

from ..common.cli import CHECK_FAILED, COULD_NOT_RUN, OK, make_parser, write_stdout
from ..restart_bench.presets import LAYOUT_DEFAULT, model_names
from .step_time.devices import device_facts, device_names

if TYPE_CHECKING:
    from .compression import Rates
    from .plan import Plan
    from .presets import Planned
    from .run_needs import RunNeeds

MOST_RANKS = 1 << 16
REPORT_EVERY_S = 5.0
_OF_FILES = (
    "iteration",
    "upstream",
    "compare_listing",
    "files",
    "run",
    "tensors",
)  # of the checkpoint's files, or with them
_LAYOUT_FLAGS = {
    "--tensor-model-parallel-size": "--tp",
    "--pipeline-model-parallel-size": "--pp",
    "--zero-stage": "--zero",
}

_RUN_NUMBERS = (
    ("ranks-per-host", 8, "ranks of a host"),
    ("blocked-target", 10, "seconds for which a save may block training"),
    ("durable-target", 60, "seconds in which a save must be durable"),
)
_SHARED_FILES = "--checkpoint-files-per-node"  # of the trainer, so among the flags after --
_ASKED_WITH = {
    "ranks-per-host": ("--run", "--host-memory", "--step-time", "--compress-rate", _SHARED_FILES),
    "blocked-target": ("--run",),
    "durable-target": ("--run",),
}
_RATES = (  # of copies in host memory, or of files
    ("compress-rate", "MB/s", "MB/s that one processor compresses: `bytes` / `compress_s` in a report"),
    ("compressed-share", "SHARE", "compressed bytes over those before: `wire_bytes` or `stored_bytes` / `bytes` there"),
    ("link-rate", "MB/s", "MB/s of a host's network, or of its way to the storage"),
)
_SWITCHES = {
    "--files": "table: print every file with its size, too",
    "--run": "also print what a run needs: host memory, space and speed of the storage",
    "--all": "with --run: also the configuration where it is no default, files of a commit, and requests",
    "--tensors": "only print the bytes of the tensors, by arithmetic, without torch",
    "--host-memory": "only print the host memory that saves of engine memory take",
}
_DESCRIPTION = (
    "List every file of a checkpoint with its exact size, and the memory it needs, without a GPU and without a run."
)
_EPILOG = """\
examples:
  %(prog)s --model 70b
      the preset's checkpoint on its own layout, TP8 PP8
  %(prog)s --model 7b --tp 4 --pp 2 --dp 4 --engine lazy --files
      another layout and engine, and every file with its exact size
  %(prog)s --model 70b --engine lazy --run -- --save /scratch/70b --keep-last 2
      with the space and the throughput that the storage must have
  %(prog)s --model 1b --recompute-on 80
      whether activations must be recomputed on devices of 80 GB, and which
  %(prog)s --model 3b --tp 4 --pp 1 -- --save /scratch/run --no-save-optim
      flags of pretrain_gpt.py after -- override the preset's
  %(prog)s --dp 2 -- --num-layers 4 --hidden-size 64 ...
      without a preset: all flags of the run
  %(prog)s --model 1b --tp 1 --pp 1 --step-time h100
      time of a step, and MFU
  %(prog)s --model 3b --tp 4 --pp 1 --upstream --compare-listing listing.txt
      compare with `ls -lh` of a checkpoint of upstream Megatron-DeepSpeed

exit status: 0 planned, 1 the listing differs or --save has no room for a checkpoint (--run), 2 could not be planned.
docs/ckpt_plan.md explains the output.
"""


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(own arguments, flags of pretrain_gpt.py after --); exits with status 2 if they are wrong (argparse)."""
    own, flags = list(argv), []
    if "--" in own:
        cut = own.index("--")
        own, flags = own[:cut], own[cut + 1 :]
    return _parser().parse_args(own), flags


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("ckpt-plan", _DESCRIPTION, _EPILOG)
    help_ = f"preset of examples_deepspeed/restart_bench: {', '.join(model_names())}"
    parser.add_argument("--model", metavar="NAME", help=help_)
    parser.add_argument("--tp", type=int, metavar="N", help=f"tensor-parallel ranks ({LAYOUT_DEFAULT})")
    parser.add_argument("--pp", type=int, metavar="N", help=f"pipeline stages ({LAYOUT_DEFAULT})")
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="data-parallel replicas (default: 1)")
    parser.add_argument("--zero", type=int, default=1, metavar="STAGE", help="ZeRO stage; only 1 is supported")
    parser.add_argument(
        "--engine", metavar="NAME", help="checkpoint engine (default: that of flags after --, or torch)"
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="vocabulary size of the tokenizer, before padding (default: the preset's)",
    )
    parser.add_argument("--iteration", type=int, metavar="N", help="iteration of the save (default: the first save)")
    parser.add_argument(
        "--upstream", action="store_true", help="plan the files that upstream Megatron-DeepSpeed would write"
    )
    parser.add_argument("--compare-listing", type=Path, metavar="FILE", help="compare with the `ls -lh` lines in FILE")
    for name, help_ in _SWITCHES.items():
        parser.add_argument(name, action="store_true", help=help_)
    devices = f"DEVICE: {', '.join(device_names())}, or one of --device-facts"
    parser.add_argument(
        "--step-time", metavar="DEVICE", help=f"only print how long a step takes on a device, by a model. {devices}"
    )
    parser.add_argument("--device-facts", type=Path, metavar="FILE", help="with --step-time: JSON of devices' facts")
    parser.add_argument(
        "--recompute",
        choices=("auto", "none", "selective", "full"),
        help="with --model, unless flags say it: activations that are recomputed, as RECOMPUTE of the scripts "
        "(default: auto, for 80 GB)",
    )
    parser.add_argument(
        "--recompute-on",
        type=int,
        metavar="GB",
        help="only print which activations to recompute on devices with so much memory, and why; without torch",
    )
    for name, default, what in _RUN_NUMBERS:
        parser.add_argument(
            f"--{name}",
            type=float if "target" in name else int,
            metavar="N",
            help=f"with {', '.join(_ASKED_WITH[name])}: {what} (default: {default})",
        )
    for name, unit, what in _RATES:
        help_ = f"whether --replica-compression (with --host-memory) or --checkpoint-compression pays: {what}"
        parser.add_argument(f"--{name}", type=float, metavar=unit, help=help_)
    parser.add_argument(
        "--no-coordinator",
        action="store_true",
        help="with --run, --host-memory: the launch has no coordinator, so hosts hold no copies for each other",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="output (default: table)")
    parser.add_argument("--verbose", action="store_true", help="print time and memory of the planning to stderr")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    started = time.perf_counter()
    arguments, flags = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        planned = _configuration(arguments, flags)
        _check_engine(arguments, planned)
        _check_rates(arguments, planned)
        if planned[0].parallel.zero_stage == 3:
            raise ConfigError("--zero-stage 3: only checkpoints of ZeRO-1 shards are planned; use --zero-stage 1")
        _check_ranks(planned[1].world_size, str(planned[1]))
        if arguments.step_time is not None:
            status = _answer_step_time(planned, arguments)
        elif arguments.host_memory:
            status = _answer_host_memory(planned, arguments)
        elif arguments.recompute_on is not None:
            status = _answer_recomputation(planned, arguments)
        elif arguments.tensors or importlib.util.find_spec("torch") is None:
            status = _answer_by_arithmetic(planned, arguments)
        else:
            _check_output(arguments)
            listing = _read_listing(arguments.compare_listing)
            status = _answer(_plan(arguments, planned), listing, arguments)
    except (ValueError, OSError) as exc:  # ConfigError, TokenizerError and errors of engines are ValueErrors
        print(f"ckpt-plan: error: {_own_flags(str(exc)) if arguments.model else exc}", file=sys.stderr)
        return COULD_NOT_RUN
    if arguments.verbose:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(f"planned in {time.perf_counter() - started:.2f} s, peak memory {peak} MiB", file=sys.stderr)
    return status


def _configuration(arguments: argparse.Namespace, flags: list[str]) -> Planned:
    """Raises ConfigError, before torch is imported, for an impossible model or layout."""
    from .presets import config_from_flags, layout_of
    from .recomputation import preset_for

    if arguments.device_facts is not None and arguments.step_time is None:
        raise ConfigError(f"--device-facts {arguments.device_facts}: add --step-time DEVICE, or drop it")
    for name, _, _ in _RUN_NUMBERS:
        value = getattr(arguments, _dest(name))
        named = {flag.partition("=")[0] for flag in flags}
        asked = [flag for flag in _ASKED_WITH[name] if flag in named or getattr(arguments, _dest(flag), None)]
        if value is not None and not asked:
            raise ConfigError(f"--{name} {value:g}: add {' or '.join(_ASKED_WITH[name])}, or drop it")
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name} {value:g}: must be more than 0")
    if arguments.no_coordinator and not (arguments.run or arguments.host_memory):
        raise ConfigError("--no-coordinator: is about what a run needs; add --run or --host-memory, or drop it")
    if arguments.zero != 1:
        raise ConfigError(f"--zero {arguments.zero}: checkpoints are made of ZeRO-1 shards; use --zero 1")
    given = bool(flags)
    if arguments.engine is not None:
        flags = [*flags, "--checkpoint-engine", arguments.engine]  # some flags are valid only for some engines
    if arguments.model is not None:
        sizes = layout_of(arguments.model, arguments.tp, arguments.pp)
        dp = arguments.dp or 1
        _check_ranks(sizes[0] * sizes[1] * dp, f"TP{sizes[0]} PP{sizes[1]} DP{dp}")  # recomputation looks at each rank
        flags = ["--zero-stage", str(arguments.zero), *flags]
        recompute = arguments.recompute or ("none" if arguments.recompute_on else "auto")
        return preset_for(arguments.model, *sizes, arguments.dp, arguments.vocab_size, flags=flags, recompute=recompute)
    if arguments.recompute is not None:
        raise ConfigError(f"--recompute {arguments.recompute}: is for --model; give flags of pretrain_gpt.py after --")
    if not given:
        raise ConfigError(
            f"--model is missing: give one of {', '.join(model_names())}, or flags of pretrain_gpt.py after --"
        )
    for name, instead in (("tp", "--tensor-model-parallel-size"), ("pp", "--pipeline-model-parallel-size")):
        value = getattr(arguments, name)
        if value is not None:
            raise ConfigError(f"--{name} {value}: without --model, give {instead} {value} after --")
    return config_from_flags(flags, arguments.dp, arguments.vocab_size)


def _engine(arguments: argparse.Namespace, planned: Planned) -> str:
    """That of --engine, or of the flags after --."""
    return arguments.engine or planned[0].checkpoint.checkpoint_engine


def _check_engine(arguments: argparse.Namespace, planned: Planned) -> None:
    """Raises ConfigError for an engine beside --upstream."""
    engine = _engine(arguments, planned)
    if arguments.upstream and engine != "torch":
        flag = "--checkpoint-engine" if arguments.engine is None else "--engine"
        raise ConfigError(f"{flag} {engine}: upstream writes with torch.save; drop it or --upstream")


def _check_rates(arguments: argparse.Namespace, planned: Planned) -> None:
    """Raises ConfigError for rates of copies or files that say nothing, or too little."""
    shared = planned[0].checkpoint.checkpoint_files_per_node
    given = {name: getattr(arguments, _dest(name)) for name, _, _ in _RATES}
    asked = {name: value for name, value in given.items() if value is not None}
    for name, value in asked.items():
        if not arguments.host_memory and not _plans_lazy_files(arguments, planned):
            raise ConfigError(
                f"--{name} {value:g}: is about copies of saves in memory, with --host-memory, or about the files of "
                "--engine lazy, in a plan of these; add one of the two, or drop it"
            )
        if not arguments.host_memory and shared is not None:
            raise ConfigError(
                f"--{name} {value:g}: files that ranks share are not compressed; drop it or {_SHARED_FILES} {shared}"
            )
        if not 0 < value < math.inf:
            raise ConfigError(f"--{name} {value:g}: must be more than 0")
        missing = next((other for other in ("compress-rate", "compressed-share") if other not in asked), None)
        if missing is not None:
            raise ConfigError(f"--{name} {value:g}: whether compression pays depends on --{missing}, too; add it")
    if asked and asked["compressed-share"] >= 1:
        raise ConfigError(
            f"--compressed-share {asked['compressed-share']:g}: must be less than 1, or nothing is gained"
        )


def _plans_lazy_files(arguments: argparse.Namespace, planned: Planned) -> bool:
    others = ("tensors", "recompute_on", "step_time", "compare_listing")
    return _engine(arguments, planned) == "lazy" and not any(getattr(arguments, name) for name in others)


def _check_ranks(ranks: int, layout: str) -> None:
    """Raises ConfigError for more ranks than can be planned in minutes: each rank is planned separately."""
    if ranks > MOST_RANKS:
        raise ConfigError(
            f"{layout} has {ranks} ranks; at most {MOST_RANKS} are planned, as the files of each are worked out by "
            "themselves: give a smaller --dp, whose weights per rank are the same"
        )


def _check_output(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for a flag that would change nothing of what is printed."""
    is_json = arguments.format == "json"
    if arguments.compare_listing is not None:
        for flag, given in (("--files", arguments.files), ("--run", arguments.run), ("--format json", is_json)):
            if given:
                raise ConfigError(f"{flag}: not printed with --compare-listing; drop one of the two")
    if arguments.files and is_json:
        raise ConfigError("--files: --format json has every file without it; drop one of the two")
    if arguments.all and (is_json or not arguments.run):
        raise ConfigError("--all: adds to the table of --run; add --run without --format json, or drop it")


def _plan(arguments: argparse.Namespace, planned: Planned) -> Plan:
    if arguments.iteration is not None and arguments.iteration < 1:
        raise ConfigError(f"--iteration {arguments.iteration}: must be at least 1")
    _import_heavy()
    from .plan import UPSTREAM, make_plan
    from .rank_state import progress_at

    progress = None if arguments.iteration is None else progress_at(planned[0], arguments.iteration)
    engine = UPSTREAM if arguments.upstream else _engine(arguments, planned)
    ranks = int(_run_number(arguments, "ranks-per-host"))
    return make_plan(planned, engine, progress, report=_Progress(), ranks_per_node=ranks)


def _import_heavy() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"  # even if the ranks will have GPUs: planning uses none
    from megatron.startup.initialize import import_heavy

    import_heavy()


def _dest(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _run_number(arguments: argparse.Namespace, name: str) -> float:
    """The value of a flag of _RUN_NUMBERS, or its default."""
    given = getattr(arguments, _dest(name))
    return next(default for each, default, _ in _RUN_NUMBERS if each == name) if given is None else given


class _Progress:
    """Reports the progress of the planning on stderr every few seconds."""

    def __init__(self) -> None:
        self._began = self._reported = time.monotonic()

    def __call__(self, done: int, ranks: int) -> None:
        now = time.monotonic()
        if now - self._reported >= REPORT_EVERY_S:
            self._reported = now
            left_s = (now - self._began) / done * (ranks - done)
            print(f"ckpt-plan: {done} of {ranks} ranks planned, about {left_s:.0f} s left", file=sys.stderr)


def _own_flags(message: str) -> str:
    """The message with the trainer's flags replaced by this tool's names for them."""
    for theirs, ours in _LAYOUT_FLAGS.items():
        message = message.replace(theirs, ours)
    return message


def _read_listing(path: Path | None) -> dict[str, str] | None:
    """Name -> size; None without a listing. Raises ConfigError if the file contains none."""
    if path is None:
        return None
    from .listing import parse_listing

    try:
        return parse_listing(path.read_text(errors="replace"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--compare-listing {path}: {exc}") from exc


def _answer_by_arithmetic(planned: Planned, arguments: argparse.Namespace) -> int:
    """Print the bytes of the tensors. Raises ConfigError for a flag that needs the sizes of files."""
    from .tensors import NOTE, WITHOUT_TORCH, plan_tensors, render, to_json

    asked = arguments.tensors
    for name in ("engine", "iteration", "upstream", "compare_listing", "files", "run", "all", "compress_rate"):
        if getattr(arguments, name):
            why = "not printed with --tensors; drop one of the two" if asked else WITHOUT_TORCH
            raise ConfigError(f"--{name.replace('_', '-')}: {why}")
    plan, note = plan_tensors(planned), NOTE if asked else WITHOUT_TORCH
    write_stdout(to_json(plan, note) if arguments.format == "json" else render(plan, note))
    return OK


def _answer_step_time(planned: Planned, arguments: argparse.Namespace) -> int:
    """Print how long a step takes. Raises ConfigError for an unknown device, or for a flag that this excludes."""
    for name in (*_OF_FILES, "engine", "host_memory"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name.replace('_', '-')}: not printed with --step-time; drop one of the two")
    device = device_facts(arguments.step_time, arguments.device_facts)
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("--step-time: runs the model's code without data, which needs torch: pip install '.[train]'")
    _import_heavy()
    from .step_time.output import render, to_json
    from .step_time.step import settings_of, step_time

    ranks = int(_run_number(arguments, "ranks-per-host"))
    step = step_time(planned, device, ranks)
    settings = [
        step_time(planned, device, ranks, recomputation=mode, compiled=on) for mode, on in settings_of(planned[0])
    ]
    write_stdout(to_json(step, settings) if arguments.format == "json" else render(step, settings))
    return OK


def _answer_host_memory(planned: Planned, arguments: argparse.Namespace) -> int:
    """Print the memory that engine `memory` takes. Raises ConfigError for another engine, or for a flag it excludes."""
    from .slots import compression, host_memory, render, to_json

    engine = _engine(arguments, planned)
    if engine != "memory":
        raise ConfigError(f"--host-memory: engine {engine} keeps no saves in memory; give --engine memory")
    for name in _OF_FILES:
        if getattr(arguments, name):
            raise ConfigError(f"--{name.replace('_', '-')}: not printed with --host-memory; drop one of the two")
    ranks = int(_run_number(arguments, "ranks-per-host"))
    found = host_memory(planned, ranks, coordinator=not arguments.no_coordinator)
    rates = _rates(arguments)
    compressed = None if rates is None else compression(found, rates)
    write_stdout(to_json(found, compressed) if arguments.format == "json" else render(found, compressed))
    return OK


def _rates(arguments: argparse.Namespace) -> Rates | None:
    """Those of --compress-rate and the flags beside it; None without them."""
    from .compression import MB, Rates

    if arguments.compress_rate is None:
        return None
    link = None if arguments.link_rate is None else arguments.link_rate * MB
    return Rates(arguments.compressed_share, arguments.compress_rate * MB, link)


def _answer_recomputation(planned: Planned, arguments: argparse.Namespace) -> int:
    """Print the mode and the reason. Raises ConfigError for a flag that it excludes."""
    from .recomputation import choose

    if arguments.recompute_on < 1:
        raise ConfigError(f"--recompute-on {arguments.recompute_on}: must be at least 1")
    for name in _OF_FILES:
        if getattr(arguments, name):
            raise ConfigError(f"--{name.replace('_', '-')}: not printed with --recompute-on; drop one of the two")
    choice = choose(planned, arguments.recompute_on * 10**9)
    found = {"mode": choice.mode, "bytes_by_mode": choice.by_mode, "reason": choice.reason}
    write_stdout(json.dumps(found) + "\n" if arguments.format == "json" else f"{choice.mode}: {choice.reason}\n")
    return OK


def _needs(plan: Plan, arguments: argparse.Namespace) -> RunNeeds:
    from .run_needs import Targets, run_needs

    ranks, blocked, durable = (_run_number(arguments, name) for name, _, _ in _RUN_NUMBERS)
    targets = Targets(float(blocked), float(durable))
    return run_needs(plan, int(ranks), targets, coordinator=not arguments.no_coordinator)


def _answer(plan: Plan, listing: dict[str, str] | None, arguments: argparse.Namespace) -> int:
    """Print the plan, or how a listing differs from it; returns the exit status. Raises OSError."""
    from .listing import compare
    from .output import render, render_comparison, to_json
    from .run_needs import compression

    if listing is None:
        needs = _needs(plan, arguments) if arguments.run else None
        rates = _rates(arguments)
        packed = None if rates is None else compression(plan, int(_run_number(arguments, "ranks-per-host")), rates)
        if arguments.format == "json":
            write_stdout(to_json(plan, needs, packed))
        else:
            write_stdout(render(plan, needs, arguments.files, show_all=arguments.all, compressed=packed))
        if needs is not None and needs.no_room:
            print(f"ckpt-plan: error: {needs.lack}", file=sys.stderr)
            return CHECK_FAILED
        return OK
    files = {file.name: file.num_bytes for file in plan.files}
    files |= {file.name: file.num_bytes for file in plan.commit_files if file.name in listing}
    found = compare(files, listing)
    write_stdout(render_comparison(found, len(listing), str(arguments.compare_listing)))
    return OK if found.agrees else CHECK_FAILED
