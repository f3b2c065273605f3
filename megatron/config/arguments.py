"""The command line: Megatron's flag names, built from the dataclasses of megatron.config.

Runs on every rank before anything heavy is imported, so it uses the standard library only.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from megatron.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    Note,
    OptimizerConfig,
    ParallelConfig,
    TraceConfig,
    TrainingConfig,
)
from megatron.config.deepspeed_config import (
    build_deepspeed_config,
    check_engine_stanza,
    file_precision,
    flag_values,
    name_source,
)
from megatron.config.deepspeed_file import load_deepspeed_file
from megatron.config.flags import FlagSpec, on_off, spec_of
from megatron.config.model import OF_EXPERTS
from megatron.config.unsupported_flags import NO_EFFECT, UNSUPPORTED
from restart_trace.version import __version__

EXIT_CODE = 2
_EPILOG = """\
examples:
  torchrun --nproc-per-node 8 pretrain_gpt.py FLAGS
  DRY_RUN=1 bash examples_deepspeed/restart_bench/run_7b_tp4_pp2.sh
      prints the flags of a preset

exit status: 0 trained to the end or to a planned exit, 1 failed, 2 wrong flags or inputs, 65 the same error at
the same iteration in three starts in a row; see docs/resuming.md
"""
GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "trace": TraceConfig,
}
# A launcher kills all ranks when one has exited; the others give rank 0 this long to print the reason.
OTHER_RANKS_WAIT_S = 5.0
_FOREIGN_WORLD_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print and exit; prints help only where `prints_help` is set."""

    prints_help = True

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def print_help(self, file: IO[str] | None = None) -> None:
        if self.prints_help:
            super().print_help(file)


class _KeepNameAndValues(argparse.Action):
    """Appends (flag, its values...) to the list of the flags without an effect."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        kept = [*getattr(namespace, self.dest, ()), (self.option_strings[0], *values)]
        setattr(namespace, self.dest, kept)


@functools.cache  # it is built once for all starts of a process, and of those that are forked from it
def build_parser() -> argparse.ArgumentParser:
    """A parser of every supported flag. Flags that are not given leave no attribute in the namespace."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        usage="%(prog)s FLAGS",
        description="GPT pretraining with 3D parallelism that measures its checkpoints and restarts.",
        argument_default=argparse.SUPPRESS,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megatron-restart {__version__}")
    for cls in GROUPS.values():
        title, _, description = (cls.__doc__ or "").partition(":")
        group = parser.add_argument_group(title, description.strip(" .\n"))
        for field in dataclasses.fields(cls):
            spec = spec_of(field)
            if spec is not None:
                _add(group, field, spec)
        if cls is ModelConfig:
            group.add_argument("--bf16", action="store_true", help="train in bfloat16, with fp32 master weights")
            group.add_argument("--fp16", action="store_true", help="train in float16, with loss scaling")
    group = parser.add_argument_group("accepted", "flags of upstream's scripts that have no effect here")
    for name, inert in NO_EFFECT.items():
        group.add_argument(
            name,
            action=_KeepNameAndValues,
            dest="no_effect",
            nargs=inert.nargs,
            help=inert.why,
            metavar="{" + ",".join(inert.accepted) + "}" if inert.accepted else "VALUE",
        )
    return parser


def actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Each spelling of each flag of a parser -> its action."""
    return dict(parser._option_string_actions)


def _add(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], spec: FlagSpec) -> None:
    shown = spec.help.replace("%", "%%")
    if spec.parse is None:
        group.add_argument(*spec.names, dest=field.name, action="store_const", const=spec.const, help=shown)
        return
    if field.default is dataclasses.MISSING:
        shown += " (required)"
    elif field.default not in (None, ()):
        default = {True: "on", False: "off"}[field.default] if isinstance(field.default, bool) else field.default
        default = " ".join(map(str, default)) if isinstance(default, tuple) else default
        shown += f" (default: {default})"
    group.add_argument(
        *spec.names,
        dest=field.name,
        type=spec.parse,
        help=shown,
        nargs="*" if spec.many else None,
        metavar=_metavar(field, spec),  # choices are checked by the dataclass, which knows what to say
    )


def _metavar(field: dataclasses.Field[Any], spec: FlagSpec) -> str:
    if spec.choices:
        return "{" + ",".join(spec.choices) + "}"
    if spec.parse is on_off:
        return "{on,off}"
    if spec.parse in (int, float):
        return "N" if spec.parse is int else "X"
    return "PATH" if field.name.endswith(("_path", "_dir", "_file", "_model", "save", "load", "_config")) else "NAME"


def parse_args(argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> argparse.Namespace:
    """Parse a command line into a namespace of the given flags only; defaults live in the dataclasses.

    Raises: ConfigError naming every flag that is unknown (with the nearest known one) or not supported (with
    what to use instead), or a flag whose value cannot be parsed. SystemExit(0) after --help.
    """
    parser = build_parser()
    if isinstance(parser, _Parser):
        parser.prints_help = rank_of(env) == 0
    args, rest = parser.parse_known_args(argv)
    if rest:
        raise ConfigError(_explain_unknown(parser, rest))
    return args


def _explain_unknown(parser: argparse.ArgumentParser, rest: list[str]) -> str:
    import difflib

    names = list(dict.fromkeys(word.split("=")[0] for word in rest if re.match(r"--?[A-Za-z]", word)))
    if not names:
        return f"unexpected argument {rest[0]}: every value needs a flag before it"
    lines = []
    for name in names:
        if name in UNSUPPORTED:
            lines.append(f"{name} is not supported: {UNSUPPORTED[name]}")
            continue
        near = difflib.get_close_matches(name.replace("_", "-"), actions_of(parser), n=1, cutoff=0.7)
        lines.append(f"unknown flag {name}: " + (f"did you mean {near[0]}?" if near else "--help lists all flags"))
    return "\n".join(lines)


def config_from_args(args: argparse.Namespace, env: Mapping[str, str] = os.environ) -> Config:
    """The configuration that a namespace of `parse_args` and the launcher's environment describe.

    Flags that were not given take the value of the --deepspeed_config file, where it has one, else the
    default.

    Raises: ConfigError naming flag, value and fix.
    """
    given = dict(vars(args))
    notes = [_note_of_no_effect(name, values) for name, *values in given.pop("no_effect", ())]
    notes += _without_experts(given)
    given |= _process_place(given, env)
    path = given.get("deepspeed_config")
    raw = {} if path is None else load_deepspeed_file(path)
    given["params_dtype"] = _params_dtype(given, file_precision(raw, str(path)))
    in_file = flag_values(raw, given["params_dtype"])
    of_file = in_file.keys() - given.keys()
    given = in_file | given
    if "tokenizer_type" not in given and {"vocab_file", "merge_file"} <= given.keys():
        given["tokenizer_type"] = "GPT2BPETokenizer"  # as upstream's pretrain_gpt.py
    _check_required(given)
    try:
        config = _config(given, notes)
    except ConfigError as error:
        raise name_source(error, of_file, str(path)) from error
    if path is not None:
        check_engine_stanza(config)
        build_deepspeed_config(config)  # shows conflicts of file and flags before anything heavy runs
    return config


def _config(given: dict[str, Any], notes: list[Note]) -> Config:
    groups: dict[str, Any] = {}
    for name, cls in GROUPS.items():
        fields = {field.name for field in dataclasses.fields(cls)}
        groups[name] = cls(**{key: value for key, value in given.items() if key in fields})
        if isinstance(groups[name], ParallelConfig):  # the batch sizes are checked against it
            given["data_parallel_size"] = groups[name].data_parallel_size
    return Config(**groups, notes=tuple(notes))


def _note_of_no_effect(name: str, values: list[str]) -> Note:
    """Raises ConfigError for a value that would need to have an effect."""
    inert, given = NO_EFFECT[name], " ".join([name, *values])
    if inert.accepted is not None and not set(values) <= set(inert.accepted):
        raise ConfigError(f"{given} is not supported: {inert.otherwise}")
    return Note(logging.INFO, f"{given}: no effect, {inert.why}")


def _without_experts(given: dict[str, Any]) -> list[Note]:
    """Take the flags of experts out of `given`, if it says that the model is dense; a note for each of them.

    Upstream's scripts of dense models give them, too.
    """
    if set(given.get("num_experts", [1])) != {1}:
        return []
    notes = []
    for field in (*dataclasses.fields(ModelConfig), *dataclasses.fields(ParallelConfig)):
        spec = spec_of(field)
        if spec is None or field.name not in OF_EXPERTS or given.get(field.name, "residual") == "residual":
            continue
        value = given.pop(field.name)
        values = value if isinstance(value, list) else [] if spec.parse is None else [value]
        why = "the model is dense" + (": --num-experts is 1" if field.name != "num_experts" else "")
        notes.append(Note(logging.INFO, f"{' '.join([spec.names[0], *map(str, values)])}: no effect, {why}"))
    return notes


def _params_dtype(given: dict[str, Any], in_file: str | None) -> str:
    bf16, fp16 = given.pop("bf16", False), given.pop("fp16", False)
    if bf16 and fp16:
        raise ConfigError("--bf16 and --fp16 exclude each other: give one of them")
    return "bf16" if bf16 else "fp16" if fp16 else in_file or "fp32"


def _check_required(given: dict[str, Any]) -> None:
    missing = []
    for cls in GROUPS.values():
        for field in dataclasses.fields(cls):
            spec = spec_of(field)
            if spec is not None and field.default is dataclasses.MISSING and field.name not in given:
                missing.append(f"{spec.names[0]} ({spec.help})")
    if "train_iters" not in given and "train_samples" not in given:
        missing.append("--train-iters or --train-samples (the length of the run)")
    if not given.get("data_path") and not given.get("train_data_path"):
        missing.append("--data-path or --train-data-path (the dataset)")
    if given.get("tokenizer_type") is None:
        missing.append("--tokenizer-type (the tokenizer of the dataset)")
    if missing:
        raise ConfigError("required flags are missing: " + ", ".join(missing))


def _process_place(given: dict[str, Any], env: Mapping[str, str]) -> dict[str, int]:
    """rank, world_size and local_rank from the launcher's environment; one process without it."""
    world_size = _env_int(env, "WORLD_SIZE")
    rank = _env_int(env, "RANK")
    local_rank = _env_int(env, "LOCAL_RANK")
    if world_size is None:
        for name in ("RANK", *_FOREIGN_WORLD_SIZES):
            if name in env and env[name] != ("0" if name == "RANK" else "1"):
                raise ConfigError(
                    f"{name} is {env[name]} but WORLD_SIZE is not set: start with torchrun or deepspeed, "
                    "or set RANK, WORLD_SIZE and LOCAL_RANK"
                )
    if rank is None and (world_size or 1) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world_size} but RANK is not set: set both, or start with torchrun or deepspeed"
        )
    flag_rank = given.get("local_rank")
    if local_rank is not None and flag_rank is not None and local_rank != flag_rank:
        raise ConfigError(f"--local_rank {flag_rank} contradicts LOCAL_RANK {local_rank}: drop one of them")
    if local_rank is None:
        local_rank = flag_rank
    return {"world_size": world_size or 1, "rank": rank or 0, "local_rank": local_rank or 0}


def _env_int(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} {text!r}: the launcher must set a whole number") from None


def namespace_from_config(config: Config) -> argparse.Namespace:
    """All settings under upstream's argparse destinations, for `get_args` and for checkpoints."""
    values: dict[str, Any] = {}
    for name in GROUPS:
        group = getattr(config, name)
        values |= {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    values |= {name: list(values[name]) or None for name in values if isinstance(values[name], tuple)}
    values |= {"bf16": config.model.bf16, "fp16": config.model.fp16}
    values["data_parallel_size"] = config.parallel.data_parallel_size
    return argparse.Namespace(**values)


def rank_of(env: Mapping[str, str]) -> int:
    """The rank that RANK names; 0 where it is unset or no number, so that its error is printed."""
    try:
        return int(env.get("RANK", "0"))
    except ValueError:
        return 0


def exit_with(error: Exception, rank: int, wait_s: float | None = None, *, every_rank_sees_it: bool = True) -> NoReturn:
    """End the process with exit code 2, or the error's own; rank 0 prints the error, the others nothing, and end later.

    If the error may concern one node only (its files, its disk), another rank that still runs after the wait
    (OTHER_RANKS_WAIT_S if `wait_s` is None) prints it, too: rank 0 has not seen it then.
    """
    if rank != 0:
        time.sleep(OTHER_RANKS_WAIT_S if wait_s is None else wait_s)
    if rank == 0 or not every_rank_sees_it:
        where = "" if rank == 0 else f" on rank {rank}, {os.uname().nodename}"
        # In one write also if output is unbuffered: others end at the same time, and their lines would come within it.
        print(f"error{where}: {error}\n", end="", file=sys.stderr, flush=True)
    raise SystemExit(getattr(error, "exit_code", EXIT_CODE))


def parse_or_exit(argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> Config:
    """The configuration of this process, for a program's entry point: on ConfigError see `exit_with`."""
    try:
        return config_from_args(parse_args(argv, env), env)
    except ConfigError as error:
        exit_with(error, rank_of(env))
