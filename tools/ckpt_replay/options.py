"""The flags of ckpt-replay, and the request that they define. Engine options are the trainer's own."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.registry import check_engine_name, engine_names
from megatron.config import CheckpointConfig
from megatron.config.flags import spec_of
from megatron.config.uris import URI_FORM, is_uri
from megatron.fileio.host_memory import available_memory
from megatron.parallel.topology import Layout

from ..ckpt_plan.presets import layout_of
from ..common.cli import make_parser, parse_bytes, parse_rank_ranges, require_at_least
from ..restart_bench.presets import LAYOUT_DEFAULT, model_names
from .plan import (
    CONNECTOR,
    DCP_COLLECTIVE,
    DCP_SAFETENSORS,
    IN_MEMORY,
    LAZY_SHARED,
    LAZY_ZSTD,
    LIBRARIES,
    LOAD,
    OPERATIONS,
    RAW,
    SAVE_AND_LOAD,
    SAVES_THEN_LOADS,
    TORCH_CHECKPOINTING,
    ReplayError,
    Request,
    Share,
    Steps,
    Striping,
    checkpoint_flags,
)

ALL = "all"
FIT = "fit"
_LEAST_FITTING = 1 << 20
_FITTING_SHARE = 0.8  # of what is free: leaves some for other processes
_IO_FLAGS = ("host_cache_size", "io_threads", "io_block_size", "direct_io")
_SHARED_FILES = "checkpoint_files_per_node"
_STORE_FLAGS = ("storage_cache", "storage_deadline")
_ENGINE_FLAGS = (*_IO_FLAGS, _SHARED_FILES, "checksum", "checkpoint_durability", "verify_checkpoint", *_STORE_FLAGS)

_DESCRIPTION = (
    "Save and load the checkpoints of chosen ranks of a model with the real engines, and measure the storage."
)
_EPILOG = """\
examples:
  %(prog)s --model 13b --dir /scratch
      find the best engine for this model on this storage: all that can run here, with 1 GiB of one rank
  %(prog)s --model 70b --tp 8 --pp 8 --ranks 0-1 --engine torch,lazy --dir /scratch --limit-bytes 2GiB
      two ranks of the 70b preset, limited to 2 GiB each, compared with the disk itself
  %(prog)s --model 70b --tp 8 --pp 8 --engine lazy --dir /scratch --repeat 1 --limit-bytes none
      one rank at full size
  torchrun --nnodes 4 --nproc-per-node 8 ... -m tools.ckpt_replay --model 70b --tp 8 --pp 4 --engine all --dir /shared
      every rank of a layout, on several nodes; DIR must be shared by all
  %(prog)s --model llama7b --sharding full --dp 8 --ranks 0-3 --engine lazy,s3torchconnector --dir s3://bucket/replay
      object storage, compared with the S3 connector for PyTorch: the table of its benchmark

exit status: 0 measured, 1 an engine failed, 2 could not run. docs/ckpt_replay.md explains the figures.
"""


def parse_ranks(text: str) -> tuple[int, ...]:
    """Ranks in "0-1" or "0,3,8-9". Raises argparse.ArgumentTypeError."""
    found = [rank for first, last in parse_rank_ranges(text) for rank in range(first, last + 1)]
    if len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names a rank twice")
    return tuple(found)


def _limit(text: str) -> int | str | None:
    """Bytes; None for "none"; "fit" as it is. Raises argparse.ArgumentTypeError."""
    if text == "none":
        return None
    return text if text == FIT else parse_bytes(text)


def _striping(text: str) -> Striping | None:
    """ "8" or "8x4MiB"; None for "none". Raises argparse.ArgumentTypeError."""
    return None if text == "none" else parse_striping(text)


def parse_striping(text: str) -> Striping:
    """ "8" or "8x4MiB". Raises argparse.ArgumentTypeError."""
    count, times, piece = text.partition("x")
    if not (count.isascii() and count.isdigit() and int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: write it as N or NxSIZE, such as 8x4MiB")
    return Striping(text, int(count), parse_bytes(piece) if times else None, None)


def _above_zero(text: str) -> float:
    """A number above 0. Raises argparse.ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def fitting_bytes(directory: Path, ranks: int, checkpoints: int = 1) -> int:
    """Bytes per rank for which this machine's memory and, for so many checkpoints, the disk of `directory` suffice.

    A rank holds its state, an engine's copy of it for a save in the background, and what it loads: at most three times
    its bytes. Raises OSError if neither the directory nor its parent exists, ReplayError if there is too little space.
    """
    place = directory if directory.is_dir() else directory.parent
    free = shutil.disk_usage(place).free
    found = int(_FITTING_SHARE * min(available_memory() / 3, free / checkpoints) / ranks)
    if found < _LEAST_FITTING:
        raise ReplayError(f"--limit-bytes fit: {place} has {free} bytes free, {found} for a rank; give another --dir")
    return found


def build_parser() -> argparse.ArgumentParser:
    """The command line's parser; the engine options are the trainer's own."""
    parser = make_parser("ckpt-replay", _DESCRIPTION, _EPILOG)
    _add_what_is_replayed(parser.add_argument_group("what is replayed"))
    _add_how(parser.add_argument_group("how"))
    _add_output(parser.add_argument_group("output"))
    engine = parser.add_argument_group("engine options (as in pretrain_gpt.py)")
    for field in dataclasses.fields(CheckpointConfig):
        spec = spec_of(field)
        if field.name in _ENGINE_FLAGS and spec is not None and spec.parse is not None:
            named: dict[str, Any] = {"dest": field.name, "metavar": None if spec.choices else "X"}
            value: dict[str, Any] = {"type": spec.parse, "choices": spec.choices, "default": field.default}
            help_ = spec.help + f"; of {CONNECTOR} a part's" * (field.name == "io_block_size")
            engine.add_argument(*spec.names, **named, **value, help=help_.replace("%", "%%"))
    return parser


def _add_what_is_replayed(what: argparse._ArgumentGroup) -> None:
    what.add_argument("--model", metavar="NAME", help=f"preset, as in ckpt-plan: {', '.join(model_names())}")
    what.add_argument("--tp", type=int, metavar="N", help=f"tensor-parallel size ({LAYOUT_DEFAULT})")
    what.add_argument("--pp", type=int, metavar="N", help=f"pipeline-parallel size ({LAYOUT_DEFAULT})")
    what.add_argument("--dp", type=int, default=1, metavar="N", help="data-parallel size (default: 1)")
    help_ = "zero1: as this trainer shards; full: as torch's FSDP does, an equal part per --dp rank (default: zero1)"
    what.add_argument("--sharding", choices=("zero1", "full"), default="zero1", help=help_)
    what.add_argument(
        "--ranks", type=parse_ranks, metavar="A-B,...", help="ranks of that layout (default: 0; under torchrun all)"
    )
    help_ = (
        "processes that hold each rank's state, with --sharding full: groups of FSDP's hybrid sharding; with --dp 1 "
        "ranks of DDP. One of them saves it, and all load it (default: 1)"
    )
    what.add_argument("--copies", type=int, default=1, metavar="N", help=help_)
    what.add_argument(
        "--vocab-size", type=int, metavar="N", help="vocabulary size of the tokenizer (default: the preset's)"
    )
    help_ = "limit a rank's tensors to this total; none: no limit; fit: what memory and disk can hold (default: 1GiB)"
    what.add_argument("--limit-bytes", type=_limit, default="1GiB", metavar="SIZE", help=help_)
    what.add_argument("--small-tensors", type=int, metavar="N", help="N small tensors per rank, instead of a model")
    what.add_argument(
        "--small-tensor-bytes", type=parse_bytes, default="16KiB", metavar="SIZE", help="(default: 16KiB)"
    )


def _add_how(how: argparse._ArgumentGroup) -> None:
    help_ = (
        f"engines (default: all that save to storage and can run here); or {', '.join(RAW)}: only the bytes, in a "
        f"file per rank, per host, or for all ranks; or {LAZY_SHARED}: lazy with --checkpoint-files-per-node (default: "
        f"1); or {LAZY_ZSTD}: lazy with --checkpoint-compression zstd; or {', '.join(IN_MEMORY)}: saves only in host "
        f"memory, loads from there or from another process's copy; or libraries: {CONNECTOR} (the S3 connector for "
        f"PyTorch, under DCP, in object storage) and, in a directory, {TORCH_CHECKPOINTING} (Meta's), {DCP_COLLECTIVE} "
        f"and {DCP_SAFETENSORS} (torch's DCP, one checkpoint of all ranks; its own files or Hugging Face's)"
    )
    how.add_argument("--engine", action="append", metavar="NAME,...", help=help_)
    help_ = (
        "what to measure; load: each engine saves one checkpoint first; saves_then_loads: each engine does all its "
        "saves, which are kept, and then its loads (default: save_and_load)"
    )
    help2 = (
        "while a save is measured, N readers (each as many processes as ranks) load an earlier checkpoint again and "
        "again; a save or reader that fails is counted, and the replay goes on (default: 0)"
    )
    how.add_argument("--readers", type=int, default=0, metavar="N", help=help2)
    how.add_argument("--operations", choices=OPERATIONS, default=SAVE_AND_LOAD, help=help_)
    help_ = f"gigabits per second that the client of {CONNECTOR} aims at (default: the library's, in 1.5 10)"
    how.add_argument("--throughput-target-gbps", type=_above_zero, metavar="X", help=help_)
    help_ = "stripe each file over N targets, in stripes of SIZE, on a file system that supports it: 8 or 8x4MiB"
    how.add_argument("--striping", type=_striping, metavar="N[xSIZE]", help=help_)
    help_ = "command that sets --striping, with {count}, {size} and {directory} (default: of Lustre or BeeGFS)"
    how.add_argument("--stripe-command", metavar="COMMAND", help=help_)
    how.add_argument("--dir", required=True, metavar="DIR", help=f"where to write, or {URI_FORM}")
    how.add_argument(
        "--repeat",
        type=int,
        default=4,
        metavar="N",
        help="repeats; 4 are the fewest for a statistical test (default: 4)",
    )
    help_ = "also load with the page cache dropped (default: --cold)"
    how.add_argument("--cold", action=argparse.BooleanOptionalAction, default=True, help=help_)
    help_ = "train for S seconds after a save; 0: the state changes at once (default: 2)"
    how.add_argument("--steps-between", type=float, default=2.0, metavar="S", help=help_)
    how.add_argument("--step-seconds", type=float, default=1.0, metavar="S", help="of a step (default: 1)")
    how.add_argument(
        "--step-work", choices=("matmul", "idle"), default="matmul", help="what a step does (default: matmul)"
    )
    how.add_argument(
        "--warmup-saves",
        type=int,
        default=1,
        metavar="N",
        help="first saves of a process, reported separately (default: 1)",
    )
    how.add_argument("--no-storage", action="store_true", help="do not measure the storage itself")
    how.add_argument(
        "--storage-bytes",
        type=parse_bytes,
        metavar="SIZE",
        help="bytes per rank to measure the storage with (default: a rank's, at most 2GiB)",
    )


def _add_output(out: argparse._ArgumentGroup) -> None:
    out.add_argument("--format", choices=("table", "json"), default="table", help="(default: table)")
    out.add_argument(
        "--all", action="store_true", help="table: add throughputs, ratios and every measurement of the storage"
    )
    out.add_argument("--output", type=Path, metavar="FILE", help="write the JSON here, too")
    out.add_argument("--no-verdict", action="store_true", help="json: do not compare the engines, which needs SciPy")
    out.add_argument("--trace-dir", type=Path, metavar="DIR", help="write a restart trace for ckpt-analysis")
    out.add_argument("--keep", action="store_true", help="keep the last checkpoint of each engine in DIR")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    arguments.engine = ",".join(arguments.engine or [ALL])  # given twice: both
    if (arguments.model is None) == (arguments.small_tensors is None):
        parser.error("give --model NAME, or --small-tensors N, and not both")
    require_at_least(parser, arguments, 1, "tp", "pp", "dp", "copies", "repeat", "small_tensors", "small_tensor_bytes")
    require_at_least(parser, arguments, 1, *([] if arguments.limit_bytes == FIT else ["limit_bytes"]), "storage_bytes")
    require_at_least(parser, arguments, 0, "warmup_saves", "readers")
    if arguments.readers and arguments.operations == LOAD:
        parser.error(f"--readers {arguments.readers}: they load beside saves, and --operations load measures none")
    if arguments.steps_between < 0 or arguments.step_seconds <= 0:
        parser.error("--steps-between must be at least 0 and --step-seconds above 0")
    if is_uri(arguments.dir):
        _check_uri(parser, arguments)
    if arguments.sharding == "full" and (
        arguments.small_tensors is not None or (arguments.tp or 1) * (arguments.pp or 1) > 1
    ):
        parser.error("--sharding full: --model is divided equally among --dp ranks, without --tp and --pp; drop those")
    if arguments.copies > 1 and arguments.sharding != "full":
        parser.error(f"--copies {arguments.copies}: needs --sharding full, whose copies hold the same; add it")
    if arguments.stripe_command is not None and arguments.striping is None:
        parser.error(f"--stripe-command {arguments.stripe_command}: needs --striping; add it")
    if arguments.no_verdict and arguments.format != "json":
        parser.error("--no-verdict: the table is a comparison; add --format json")
    return arguments


def _check_uri(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exits with status 2 if a flag has no meaning for a --dir in object storage."""
    of_directories = {
        "--no-cold": not arguments.cold, "--striping": arguments.striping is not None,
        "--limit-bytes fit": arguments.limit_bytes == FIT, "--storage-bytes": arguments.storage_bytes is not None,
    }  # fmt: skip
    for flag in (flag for flag, given in of_directories.items() if given):
        parser.error(f"{flag}: applies to directories only, and --dir {arguments.dir} is in object storage; drop it")


def chosen_engines(text: str, in_object_storage: bool = False) -> tuple[str, ...]:
    """Names in the value of --engine. Raises UnknownEngineError, EngineUnavailableError and ReplayError."""
    if text == ALL:
        on_storage = tuple(name for name in engine_names() if name not in IN_MEMORY)
        libraries = [name for name in LIBRARIES if (name == CONNECTOR) == in_object_storage]
        return (*on_storage, *libraries)
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise ReplayError(f"--engine {text!r}: names no engine; there are: {', '.join(engine_names())}")
    for name in (name for name in names if name not in (*LIBRARIES, *RAW, *IN_MEMORY, LAZY_SHARED, LAZY_ZSTD)):
        check_engine_name(name)
    return names


def _layout(arguments: argparse.Namespace) -> Layout:
    """The requested layout; without --tp and --pp the smallest one of the preset's scripts. Raises ConfigError."""
    tp, pp = arguments.tp, arguments.pp
    if arguments.model is not None and arguments.sharding != "full":
        tp, pp = layout_of(arguments.model, tp, pp)
    return Layout(1 if tp is None else tp, 1 if pp is None else pp, arguments.dp)


def _limit_of(arguments: argparse.Namespace, ranks: int, engines: int) -> int | None:
    """Bytes of a rank that --limit-bytes allows, for so many processes; None: all.

    Readers load a checkpoint of each of the `engines`. Raises OSError and ReplayError as fitting_bytes.
    """
    if arguments.limit_bytes != FIT:
        return arguments.limit_bytes
    checkpoints = arguments.repeat if arguments.operations == SAVES_THEN_LOADS else 1
    return fitting_bytes(Path(arguments.dir), ranks, checkpoints + engines * (arguments.readers > 0))


def _check_shared_files(files_per_node: int | None, engines: Sequence[str]) -> None:
    if files_per_node is not None and LAZY_SHARED not in engines:
        raise ReplayError(
            f"--checkpoint-files-per-node {files_per_node}: only {LAZY_SHARED} heeds it; add that to --engine, or drop "
            "the flag"
        )


def _check_in_memory(engines: Sequence[str], operations: str, *, launched: bool) -> None:
    """Raises ReplayError if saves in host memory cannot be measured so."""
    in_memory = [name for name in engines if name in IN_MEMORY]
    if in_memory and launched:
        raise ReplayError(
            f"--engine {in_memory[0]}: the slots of all ranks are held by one process, and a launcher starts several; "
            "run ckpt-replay without one, with --ranks"
        )
    if in_memory and operations == SAVES_THEN_LOADS:
        raise ReplayError(
            f"--operations {SAVES_THEN_LOADS}: the slots of --engine {in_memory[0]} hold the newest save alone; "
            "leave out one of the two"
        )


def _check_readers(readers: int, engines: Sequence[str], stored: bool, options: dict[str, Any]) -> None:
    """Raises ReplayError for engines whose loads would not be what readers are to measure: all of it, each time."""
    ranged = options["checksum"] != "none" and options["verify_checkpoint"] == "checksum"
    for name in engines:
        why = None
        if name in IN_MEMORY:
            why = "whose slots are read by the rank that saves there alone"
        elif stored and name in ("lazy", LAZY_ZSTD) and not ranged:
            why = "which reads ranges of objects only with --checksum crc32 and --checkpoint-verify checksum"
        elif stored and name not in ("lazy", LAZY_ZSTD, CONNECTOR):
            why = "which reads from object storage once, and then what it has kept on the node's disk"
        if why is not None:
            raise ReplayError(f"--readers {readers}: --engine {name}, {why}; leave out one of the two")


def request_from(arguments: argparse.Namespace, world_size: int | None) -> Request:
    """The request of a command line; `world_size` is the launcher's. Raises ReplayError or ConfigError too."""
    layout = _layout(arguments)
    ranks = arguments.ranks
    if ranks is None:
        ranks = tuple(range(max(1, (world_size or 1) // arguments.copies)))
    if world_size is not None and len(ranks) * arguments.copies != world_size:
        copies = f" and --copies {arguments.copies}" * (arguments.copies > 1)
        raise ReplayError(f"--ranks names {len(ranks)} ranks{copies}, and the launcher started {world_size} processes")
    if arguments.small_tensors is not None:
        layout = Layout(1, 1, max(ranks) + 1)
    outside = [rank for rank in ranks if rank >= layout.world_size]
    if outside:
        raise ReplayError(f"--ranks: rank {outside[0]} is outside the layout {layout} of {layout.world_size} ranks")
    options = {name: getattr(arguments, name) for name in _ENGINE_FLAGS}
    stored = is_uri(arguments.dir)
    checkpoint_flags(arguments.dir, options)  # checks the values
    engines = chosen_engines(arguments.engine, stored)
    processes = len(ranks) * arguments.copies * (1 + arguments.readers)
    share = Share(
        model=arguments.model,
        layout=(layout.tp, layout.pp, layout.dp),
        ranks=ranks * arguments.copies,
        limit_bytes=_limit_of(arguments, processes, len(engines)),
        small_tensors=arguments.small_tensors,
        small_tensor_bytes=arguments.small_tensor_bytes,
        vocab_size=arguments.vocab_size,
        fully_sharded=arguments.sharding == "full",
    )
    _check_shared_files(options[_SHARED_FILES], engines)
    _check_in_memory(engines, arguments.operations, launched=world_size is not None)
    target = arguments.throughput_target_gbps
    if target is not None and CONNECTOR not in engines:
        raise ReplayError(
            f"--throughput-target-gbps {target:g}: only {CONNECTOR} heeds it; add that to --engine, or drop the flag"
        )
    if arguments.readers:
        _check_readers(arguments.readers, engines, stored, options)
    striping = arguments.striping
    if striping is not None:
        striping = dataclasses.replace(striping, command=arguments.stripe_command)
    trace_dir = arguments.trace_dir.resolve() if arguments.trace_dir else None
    return Request(
        share=share,
        engines=engines,
        directory=arguments.dir if stored else str(Path(arguments.dir).resolve()),
        repeat=arguments.repeat,
        cold=arguments.cold,
        warmup_saves=arguments.warmup_saves,
        steps=Steps(arguments.steps_between, arguments.step_seconds, arguments.step_work),
        options=options,
        measure_storage=not (arguments.no_storage or stored),
        storage_bytes=arguments.storage_bytes or 0,
        keep=arguments.keep,
        trace_dir=str(trace_dir) if trace_dir else None,
        operations=arguments.operations,
        striping=striping,
        readers=arguments.readers,
        throughput_target_gbps=target,
    )
