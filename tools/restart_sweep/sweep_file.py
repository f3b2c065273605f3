"""A sweep as its YAML file says it, checked: every error names the file's line and the key."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron.checkpointing import engine_names
from restart_trace.command_line import hint
from restart_trace.regular import read_regular

from ..ckpt_plan.presets import preset_layout
from ..ckpt_replay.options import parse_striping
from ..ckpt_replay.plan import CONNECTOR, IN_MEMORY, OPERATIONS, RAW, SAVE_AND_LOAD, SAVES_THEN_LOADS
from ..common.cli import parse_bytes, parse_rank_ranges
from ..common.sweep_files import COLD, MODES, NO_FAULT, NO_STRIPING, WARM
from ..restart_bench.launcher_entries import IN_PLACE, LAUNCHERS
from ..restart_bench.presets import model_names
from ..restart_drill.faults import FAULTS, ON_NODES, refusal
from ..restart_drill.injection_points import parse_injection_point
from ..restart_drill.plan import LAUNCH, RELAUNCH

PRESET = "preset"  # the layout of the preset's own script
_DRILLED = ("scaled", "restart")
_TRAINED = ("scaled", "restart", "train")
_SIZE_WORDS = ("fit", "none")


class SweepFileError(ValueError):
    """A sweep that cannot be run as it stands; the message has file, line, key and what to write instead."""


@dataclass(frozen=True)
class Entry:
    """A value of the file: the key that it stands under, and where."""

    path: Path
    key: str
    node: yaml.Node

    def error(self, message: str) -> SweepFileError:
        return _error(self.path, self.node, f"{self.key}: {message}")


@dataclass(frozen=True)
class Key:
    """A key of the file or of one of its runs. `read` makes its value; `modes` are those it has a meaning in."""

    read: Callable[[Entry], Any]
    about: str
    default: Any = None
    modes: tuple[str, ...] = MODES


@dataclass(frozen=True)
class Run:
    """One grid of the sweep: all models x layouts x variants. `settings` are those that its commands take."""

    mode: str
    models: tuple[str, ...]
    layouts: tuple[str | tuple[int, int, int], ...]
    engines: tuple[str, ...]
    cache: tuple[str, ...]
    faults: tuple[str, ...]
    save_intervals: tuple[int | None, ...]
    operations: tuple[str, ...]
    striping: tuple[str, ...]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """`storage_bytes`: what the storage itself is measured with, once in each repeat; 0: not at all."""

    name: str
    about: str
    repeats: int
    storage_bytes: int
    time_limit_s: float
    runs: tuple[Run, ...]
    text: bytes


def read_sweep(path: Path) -> Sweep:
    """Read and check a file. Raises SweepFileError, naming line and key."""
    try:
        text = read_regular(path)
    except OSError as exc:
        raise SweepFileError(f"{path}: cannot be read: {exc.strerror}") from exc
    try:
        root = yaml.SafeLoader(text.decode("utf-8")).get_single_node()
    except UnicodeDecodeError as exc:
        raise SweepFileError(f"{path}: is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        raise SweepFileError(f"{path}:{mark.line + 1 if mark else 1}: is not YAML: {exc.problem}") from exc
    except yaml.YAMLError as exc:
        raise SweepFileError(f"{path}: is not YAML: {' '.join(str(exc).split())}") from exc
    if root is None:
        raise SweepFileError(f"{path}:1: is empty; see examples_deepspeed/restart_bench/sweeps")
    values, _ = _mapping(path, root, SWEEP_KEYS, "the file", required=("name", "runs"))
    return Sweep(
        name=values["name"],
        about=values["about"],
        repeats=values["repeats"],
        storage_bytes=values["storage_bytes"],
        time_limit_s=values["time_limit"],
        runs=tuple(_run(path, node) for node in values["runs"]),
        text=text,
    )


def _run(path: Path, node: yaml.Node) -> Run:
    values, entries = _mapping(path, node, RUN_KEYS, "a run", required=("mode", "models", "engines"))
    mode = values["mode"]
    for key, entry in entries.items():
        if mode not in RUN_KEYS[key].modes:
            raise entry.error(f"means nothing in mode {mode}; it belongs to {', '.join(RUN_KEYS[key].modes)}")
    cache = values["cache"] or ((COLD, WARM) if mode == "replay" else (WARM,))
    if cache == (COLD,) and mode == "replay":
        raise entries["cache"].error("a replay measures warm loads in any case; write [cold, warm] or [warm]")
    if "none" in values["engines"] and mode == "replay":
        raise entries["engines"].error("engine `none` writes no files, so there is nothing to replay; leave it out")
    replayed = [name for name in values["engines"] if name in (*RAW, CONNECTOR)]
    if replayed and mode != "replay":
        raise entries["engines"].error(f"`{replayed[0]}` saves in replays alone; no training can be saved with it")
    faults = values["faults"] or (NO_FAULT,)
    _check_nodes(values, entries, faults, cache)
    if cache != (WARM,) and mode in _DRILLED and NO_FAULT in faults:
        raise entries["cache"].error(
            "without a fault nothing is loaded; leave `none` out of faults, or cold out of cache"
        )
    striping = values["striping"] or (NO_STRIPING,)
    if values["stripe_command"] is not None and striping == (NO_STRIPING,):
        raise entries["stripe_command"].error("sets what `striping` says; give that, too")
    _check_saves(values, entries)
    own = ("mode", "models", "layouts", "engines", "cache", "faults", "save_interval", "operations", "striping")
    settings = {
        key: value
        for key, value in values.items()
        if key not in own and value is not None and mode in RUN_KEYS[key].modes
    }
    return Run(
        mode=mode, models=values["models"], layouts=values["layouts"] or (PRESET,), engines=values["engines"],
        cache=cache, faults=faults, save_intervals=values["save_interval"] or (None,),
        operations=values["operations"] or (SAVE_AND_LOAD,), striping=striping, settings=settings,
    )  # fmt: skip


def _check_saves(values: dict[str, Any], entries: dict[str, Entry]) -> None:
    """Whether `saves` and the operation that it belongs to are given together, without others, for engines that keep
    all saves."""
    operations = values["operations"] or ()
    if values["saves"] is not None and operations != (SAVES_THEN_LOADS,):
        raise entries["saves"].error(f"belongs to `operations: {SAVES_THEN_LOADS}` alone; write that")
    if SAVES_THEN_LOADS not in operations:
        return
    if len(operations) > 1:
        raise entries["operations"].error(
            f"`{SAVES_THEN_LOADS}` stands alone; give it a run of its own, with `saves: N`"
        )
    if values["saves"] is None:
        raise entries["operations"].error(f"`{SAVES_THEN_LOADS}` needs `saves: N`, the saves of a cell; give that")
    for name in (name for name in values["engines"] if name in IN_MEMORY):
        raise entries["engines"].error(
            f"the slots of `{name}` hold the newest save alone, and `{SAVES_THEN_LOADS}` keeps all; leave out one of "
            "the two"
        )


def _check_nodes(
    values: dict[str, Any], entries: dict[str, Entry], faults: tuple[str, ...], cache: tuple[str, ...]
) -> None:
    """Whether what a fault of a node needs is there, and nothing that it does not go with."""
    of_nodes = [fault for fault in faults if fault.partition("@")[0] in ON_NODES]
    if not of_nodes:
        if values["nodes_command"] is not None:
            raise entries["nodes_command"].error(f"only faults of nodes use it: {', '.join(ON_NODES)}")
        return
    if values["nodes_command"] is None:
        raise entries["faults"].error(
            f"{of_nodes[0]} is a fault of a node, which needs a program that injects it: add nodes_command; see "
            "docs/restart_drill.md"
        )
    if values["launcher"] not in (None, *IN_PLACE):
        raise entries["launcher"].error(
            f"{of_nodes[0]} takes launcher {' or '.join(IN_PLACE)}, whose agents restart on the nodes left"
        )
    if COLD in cache:
        raise entries["cache"].error(f"{of_nodes[0]}: the agents restart the ranks at once; leave cold out")


def _mapping(
    path: Path, node: yaml.Node, keys: dict[str, Key], what: str, required: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Values of all `keys`, with defaults, and the places of those that are there."""
    if not isinstance(node, yaml.MappingNode):
        raise _error(path, node, f"{what} must have keys with values, and is {_kind(node)}")
    entries: dict[str, Entry] = {}
    for key_node, value in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else _kind(key_node)
        if key not in keys:
            raise _error(path, key_node, f"{key}: no such key{hint(key, keys) or '; there are ' + ', '.join(keys)}")
        if key in entries:
            raise _error(path, key_node, f"{key}: is there twice; the first is in line {_line(entries[key].node)}")
        entries[key] = Entry(path, key, value)
    for key in required:
        if key not in entries:
            raise _error(path, node, f"{key}: is missing from {what}: {keys[key].about}")
    values = {key: spec.read(entries[key]) if key in entries else spec.default for key, spec in keys.items()}
    return values, entries


def _error(path: Path, node: yaml.Node, message: str) -> SweepFileError:
    return SweepFileError(f"{path}:{_line(node)}: {message}")


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "keys with values"
    return "a list" if isinstance(node, yaml.SequenceNode) else f"`{node.value}`"


def _scalar(entry: Entry, what: str) -> Any:
    """The value as YAML types it. Raises SweepFileError for a list or keys."""
    if not isinstance(entry.node, yaml.ScalarNode):
        raise entry.error(f"must be {what}, and is {_kind(entry.node)}")
    return yaml.SafeLoader("").construct_object(entry.node)


def _text(entry: Entry) -> str:
    value = _scalar(entry, "text")
    if not isinstance(value, str) or not value:
        raise entry.error(f"must be text, and is `{entry.node.value}`; put it in quotes if it is meant so")
    return value


def _name(entry: Entry) -> str:
    value = _text(entry)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", value):
        raise entry.error(f"`{value}` is to name files: use letters, digits, _ . -")
    return value


def _whole(least: int) -> Callable[[Entry], int]:
    def read(entry: Entry) -> int:
        value = _scalar(entry, "a whole number")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise entry.error(f"must be a whole number, at least {least}, and is `{entry.node.value}`")
        return value

    return read


def _number(above: float, *, including: bool) -> Callable[[Entry], float]:
    def read(entry: Entry) -> float:
        value = _scalar(entry, "a number")
        right = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not right or not (value > above or (including and value == above)):
            bound = f"at least {above:g}" if including else f"above {above:g}"
            raise entry.error(f"must be a number {bound}, and is `{entry.node.value}`")
        return float(value)

    return read


def _size(words: tuple[str, ...]) -> Callable[[Entry], str]:
    """A size as ckpt-replay takes it, left as it is written."""

    def read(entry: Entry) -> str:
        text = str(_scalar(entry, "a size such as 64MiB"))
        if text not in words:
            try:
                parse_bytes(text)
            except argparse.ArgumentTypeError:
                more = "".join(f", or {word}" for word in words)
                raise entry.error(f"`{text}` is no size; write it as 64MiB{more}") from None
        return text

    return read


def _storage(entry: Entry) -> int:
    text = _size(("none",))(entry)
    return 0 if text == "none" else parse_bytes(text)


def _ranks(entry: Entry) -> str:
    text = str(_scalar(entry, "ranks such as 0-1"))
    try:
        parse_rank_ranges(text)
    except argparse.ArgumentTypeError as exc:
        raise entry.error(str(exc)) from None
    return text


def _flags(entry: Entry) -> str:
    text = _text(entry)
    try:
        shlex.split(text)
    except ValueError as exc:
        raise entry.error(f"`{text}` is no command line: {exc}") from None
    return text


def _choice(among: Callable[[], Sequence[str]], what: str) -> Callable[[Entry], str]:
    def read(entry: Entry) -> str:
        text = str(_scalar(entry, f"the name of {what}"))
        names = list(among())
        if text not in names:
            raise entry.error(f"`{text}` is no {what}{hint(text, names)}; there are {', '.join(names)}")
        return text

    return read


def _layout(entry: Entry) -> str | tuple[int, int, int]:
    text = str(_scalar(entry, "a layout"))
    if text == PRESET:
        return text
    match = re.fullmatch(r"tp([1-9]\d*)_pp([1-9]\d*)(?:_dp([1-9]\d*))?", text)
    if match is None:
        raise entry.error(f"`{text}` is no layout; write it as tp4_pp2 or tp4_pp2_dp2, or {PRESET}")
    return int(match[1]), int(match[2]), int(match[3] or 1)


def _fault(entry: Entry) -> str:
    text = str(_scalar(entry, "a fault"))
    if text == NO_FAULT:
        return text
    fault, at, point = text.partition("@")
    if fault not in FAULTS:
        raise entry.error(
            f"`{fault}` is no fault{hint(fault, list(FAULTS))}; there are {', '.join((NO_FAULT, *FAULTS))}"
        )
    try:
        if not at:
            raise ValueError(f"{text}: write FAULT@WHEN, such as {fault}@mid-save-write")
        of_node = fault in ON_NODES
        refused = refusal(fault, parse_injection_point(point), LAUNCH if of_node else RELAUNCH, on_nodes=of_node)
    except ValueError as exc:
        raise entry.error(str(exc)) from None
    if refused is not None:
        raise entry.error(refused)
    return text


def _striping(entry: Entry) -> str:
    text = str(_scalar(entry, "a striping such as 8x4MiB"))
    if text != NO_STRIPING:
        try:
            parse_striping(text)
        except argparse.ArgumentTypeError as exc:
            raise entry.error(f"{exc}, or {NO_STRIPING}") from None
    return text


def _list(read: Callable[[Entry], Any]) -> Callable[[Entry], tuple[Any, ...]]:
    """One value or a list of them; none may be there twice."""

    def read_all(entry: Entry) -> tuple[Any, ...]:
        nodes = entry.node.value if isinstance(entry.node, yaml.SequenceNode) else [entry.node]
        if not nodes:
            raise entry.error("is an empty list; name one at least, or leave the key out")
        found: list[Any] = []
        for node in nodes:
            one = Entry(entry.path, entry.key, node)
            value = read(one)
            if value in found:
                raise one.error(f"`{node.value}` is there twice")
            found.append(value)
        return tuple(found)

    return read_all


def _runs(entry: Entry) -> tuple[yaml.Node, ...]:
    if not isinstance(entry.node, yaml.SequenceNode) or not entry.node.value:
        raise entry.error(f"must be a list of runs, and is {_kind(entry.node)}")
    return tuple(entry.node.value)


# docs/restart_sweep.md lists them; a test compares.
SWEEP_KEYS = {
    "name": Key(_name, "what the sweep is called"),
    "about": Key(_text, "a sentence that stands above its report", ""),
    "repeats": Key(_whole(1), "how often every cell is measured; 4 are enough for a test of significance", 4),
    "storage_bytes": Key(_storage, "what the storage itself is measured with in each repeat, or none", 256 << 20),
    "time_limit": Key(_number(0, including=False), "seconds until a cell counts as failed", 3600.0),
    "runs": Key(_runs, "the grids: each all of its models x layouts x engines x cache x faults x save intervals"),
}
RUN_KEYS = {
    "mode": Key(_choice(lambda: MODES, "mode"), "replay, scaled, restart or train"),
    "models": Key(_list(_choice(model_names, "preset")), "presets, as in ckpt-plan"),
    "layouts": Key(_list(_layout), "tpT_ppP[_dpD], or preset: that of the preset's own script"),
    "engines": Key(_list(_choice(lambda: [*engine_names(), *RAW, CONNECTOR], "engine")),
                   "checkpoint engines; the first is compared with; in replay also raw-rank, raw-host, raw-all, and "
                   "in object storage s3torchconnector"),
    "cache": Key(_list(_choice(lambda: (COLD, WARM), "state of the page cache")), "before a load: cold, warm or both",
                 modes=("replay", *_DRILLED)),
    "faults": Key(_list(_fault), "FAULT@WHEN as restart-drill has them, or none", modes=_DRILLED),
    "nodes_command": Key(_text, "what harms nodes, for faults of nodes", modes=_DRILLED),
    "save_interval": Key(_list(_whole(1)), "iterations between saves", modes=_TRAINED),
    "iterations": Key(_whole(1), "of the training", modes=_TRAINED),
    "micro_batch": Key(_whole(1), "samples of a micro batch", modes=_TRAINED),
    "global_batch": Key(_whole(1), "samples of an iteration", modes=_TRAINED),
    "seq_length": Key(_whole(1), "tokens of a sample", modes=_TRAINED),
    "launcher": Key(_choice(lambda: list(LAUNCHERS), "launcher"), "who starts the ranks", modes=_TRAINED),
    "ranks": Key(_ranks, "of the layout, those that are replayed", "0", modes=("replay",)),
    "operations": Key(_list(_choice(lambda: OPERATIONS, "operation")), "save_and_load, save, load or saves_then_loads",
                      modes=("replay",)),
    "saves": Key(_whole(1), "of saves_then_loads: in a cell, each kept until all are loaded", modes=("replay",)),
    "striping": Key(_list(_striping), "targets that a file is spread over, and bytes of a piece; or none",
                    modes=("replay",)),
    "stripe_command": Key(_text, "what sets the striping", modes=("replay",)),
    "limit_bytes": Key(_size(_SIZE_WORDS), "of each rank; none: whole ranks; fit: what memory and disk hold", "1GiB",
                       modes=("replay",)),
    "steps_between": Key(_number(0, including=True), "seconds of training after a save", modes=("replay",)),
    "step_seconds": Key(_number(0, including=False), "length of a training step", modes=("replay",)),
    "step_work": Key(_choice(lambda: ("matmul", "idle"), "work of a step"), "what a step does", modes=("replay",)),
    "vocab_size": Key(_whole(1), "tokens of the tokenizer", modes=("replay",)),
    "flags": Key(_flags, "more flags: of pretrain_gpt.py, in replay of ckpt-replay"),
}  # fmt: skip


def layouts_of(run: Run, model: str) -> list[tuple[int, int, int]]:
    """(TP, PP, DP) of each layout of a run for a model."""
    found = [(*preset_layout(model), 1) if layout == PRESET else layout for layout in run.layouts]
    return list(dict.fromkeys((int(tp), int(pp), int(dp)) for tp, pp, dp in found))
