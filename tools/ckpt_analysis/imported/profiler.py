"""Reads Chrome traces of torch.profiler (Kineto's JSON): steps, and the saves and loads that are visible in them.

A step is a span `ProfilerStep#N`, which a profiler with a schedule records. A save or load is a call of one of
`_CALLS`, which a profiler with with_stack=True records, or a span of the program's own (record_function) whose name
says so. Of spans within one another on a thread the outermost counts.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from restart_trace.regular import read_regular

from ..common.errors import CouldNotRunError
from ..model.imported_run import ImportedIteration, ImportedLoad, ImportedRun, ImportedSave, Launched, Range

_EXPECTED = "give a Chrome trace of torch.profiler (.json or .json.gz), or a directory of those of all ranks"
_GZIP = b"\x1f\x8b"
_STEP = re.compile(r"ProfilerStep#(\d{1,15})$")
_CALL = re.compile(r"(?:.*/)?([\w.]+/[\w.]+)\(\d+\): (\w+)$")  # "torch/serialization.py(944): save"
# The last two parts of a source's path -> function -> what it does
_CALLS = {
    "torch/serialization.py": {"save": "save", "load": "load"},
    "checkpoint/state_dict_saver.py": {"save": "save", "async_save": "async_save"},
    "checkpoint/state_dict_loader.py": {"load": "load"},
    "safetensors/torch.py": {"save_file": "save", "load_file": "load"},
    "runtime/engine.py": {"save_checkpoint": "save", "load_checkpoint": "load"},
    "training/checkpointing.py": {"save_checkpoint": "save", "load_checkpoint": "load"},
    "megatron/checkpointing.py": {"save_checkpoint": "save", "load_checkpoint": "load"},
    "transformers/trainer.py": {"_save_checkpoint": "save", "_load_from_checkpoint": "load"},
    "accelerate/accelerator.py": {"save_state": "save", "load_state": "load"},
    "trainer/trainer.py": {"save_checkpoint": "save"},
}
# Of the program's own spans: its words need not be those of a function.
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_ABOUT = {"checkpoint", "checkpoints", "checkpointing", "ckpt", "ckpts"}  # or "state dict"
_SAVE, _LOAD = {"save", "saves", "saving"}, {"load", "loads", "loading", "restore", "restores", "restoring"}
# Of recomputation in a step, of files on their way elsewhere, and of what a data loader or a sampler keeps.
_OF_OTHERS = {"activation", "activations", "recompute", "upload", "dataloader", "loader", "sampler"}
_Key = tuple[int | None, int]  # step of the profiler, and which save or load in it


@dataclass(frozen=True)
class _Span:
    start_us: float
    end_us: float
    kind: str  # "step", "save", "async_save" or "load"
    number: int = 0  # of a step
    went_on: bool = False  # training did, after this save or load

    @property
    def seconds(self) -> float:
        return (self.end_us - self.start_us) / 1e6


@dataclass
class _Rank:
    """What the traces of one rank have: spans by thread, and spans of the program that are none of these."""

    by_thread: dict[tuple[str, str], list[_Span]] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)
    trained_us: float = -1.0  # end of the last step, of the profiler or of an optimizer


def read_profile(path: Path, world_size: int | None) -> ImportedRun:
    """The run that a trace, or a directory of traces, is of; `world_size`: its number of ranks, if they do not say.

    Raises CouldNotRunError if there is no such trace, or one is damaged or contradicts another.
    """
    digest, ranks, stated = hashlib.sha256(), {}, {}
    for file in _files(path):
        try:
            content = read_regular(file)
            digest.update(content)
            rank, size = _read(json.loads(gzip.decompress(content) if content[:2] == _GZIP else content), ranks)
        except OSError as exc:
            raise CouldNotRunError(f"{file}: cannot be read: {exc.strerror or exc}: {_EXPECTED}") from exc
        except (ValueError, EOFError, RecursionError, zlib.error) as exc:
            raise CouldNotRunError(f"{file}: is no trace of torch.profiler ({exc}): {_EXPECTED}") from None
        if size is not None:
            stated[size] = file
        if size is not None and rank >= size:
            raise CouldNotRunError(f"{file}: is of rank {rank} of {size}: {_EXPECTED}")
    return _run(path, digest.hexdigest()[:12], ranks, _launched(path, stated, ranks, world_size))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))
    if not found:
        raise CouldNotRunError(f"{path}: has no file .json or .json.gz: {_EXPECTED}")
    return found


def _read(data: Any, ranks: dict[int, _Rank]) -> tuple[int, int | None]:
    """Take in one trace; returns its rank and the number of ranks. Raises ValueError if it is something else."""
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise ValueError("it has no list traceEvents")
    job = data.get("distributedInfo")
    job = job if isinstance(job, dict) else {}
    number, size = job.get("rank", 0), job.get("world_size")
    if type(number) is not int or number < 0 or not (size is None or (type(size) is int and size > 0)):
        raise ValueError("its distributedInfo has no rank and number of ranks")
    rank = ranks.setdefault(number, _Rank())
    for event in data["traceEvents"]:
        if isinstance(event, dict) and event.get("ph") == "X" and isinstance(event.get("name"), str):
            _take(event, rank)
    return number, size


def _take(event: dict[str, Any], rank: _Rank) -> None:
    """Take in one event. gpu_user_annotation repeats a span of the program on the device's time: it is left out."""
    name, category = event["name"], event.get("cat")
    kind, number, is_optimizer = None, 0, False
    if category == "python_function":
        call = _CALL.match(name)
        kind = _CALLS.get(call[1], {}).get(call[2]) if call else None
    elif category == "user_annotation":
        step, kind = _STEP.match(name), _own(name)
        if step:
            kind, number = "step", int(step[1])
        elif kind is None:
            is_optimizer = name.startswith("Optimizer.step#")
            rank.others[re.sub(r"\d+", "N", name)] += 1
    if kind is None and not is_optimizer:
        return
    start_us, took_us = _time_us(event, "ts"), _time_us(event, "dur")
    if kind == "step" or is_optimizer:
        rank.trained_us = max(rank.trained_us, start_us + took_us)
    if kind is not None:
        thread = (str(event.get("pid")), str(event.get("tid")))
        rank.by_thread.setdefault(thread, []).append(_Span(start_us, start_us + took_us, kind, number))


def _own(name: str) -> str | None:
    """Whether a span of the program's own is a save or a load, by the words of its name; else None."""
    words = [word.lower() for word in _WORD.findall(name)]
    of_state = ("state", "dict") in zip(words, words[1:], strict=False) or not _ABOUT.isdisjoint(words)
    if not of_state or not _OF_OTHERS.isdisjoint(words):
        return None
    return next((kind for word in words for kind, of in (("save", _SAVE), ("load", _LOAD)) if word in of), None)


def _time_us(event: dict[str, Any], name: str) -> float:
    value: Any = event.get(name)
    if type(value) not in (int, float) or not 0 <= value < 1e18:
        raise ValueError(f"the span {event['name']!r:.60} has no number {name}")
    return value


def _launched(path: Path, stated: dict[int, Path], ranks: dict[int, _Rank], given: int | None) -> Launched:
    if len(stated) > 1:
        (first, a), (second, b), *_ = sorted(stated.items())
        raise CouldNotRunError(f"{a} is of {first} ranks, {b} of {second}: give the traces of one launch")
    size = next(iter(stated), None)
    if size is not None and given not in (None, size):
        raise CouldNotRunError(f"--world-size {given}: {stated[size]} says {size}. Leave the flag out")
    size = size or given
    if size is None:
        raise CouldNotRunError(f"{path}: no trace tells how many ranks ran: give --world-size N")
    return Launched(size, {}, [])


def _run(path: Path, run_id: str, ranks: dict[int, _Rank], launched: Launched) -> ImportedRun:
    steps: dict[int, list[float]] = {}
    found: dict[str, dict[_Key, list[_Span]]] = {"save": {}, "load": {}}
    others: Counter[str] = Counter()
    for number, rank in ranks.items():
        others += rank.others
        of_rank = sorted((call for spans in rank.by_thread.values() for call in _outermost(spans)), key=_begin)
        for step, seconds in _steps(number, rank).items():
            steps.setdefault(step, []).append(seconds)
        for kind, of_kind in found.items():
            for key, span in _numbered(kind, rank, of_rank):
                of_kind.setdefault(key, []).append(span)
    if not (steps or found["save"] or found["load"]):
        raise CouldNotRunError(
            f"{path}: no step, save or load is visible in it: profile with a schedule, or with with_stack=True"
        )
    return ImportedRun(
        source=path.name, run_id=run_id, launched=launched, engine=None, parameters=None, arguments={}, versions={},
        saves=[_save(step, spans) for (step, _), spans in _in_order(found["save"])],
        loads=[ImportedLoad(None, True, _range(spans)) for _, spans in _in_order(found["load"])],
        iterations=[ImportedIteration(step, max(steps[step]), None, None) for step in sorted(steps)],
        unused_timers=dict(sorted(others.items())),
    )  # fmt: skip


def _in_order(found: dict[_Key, list[_Span]]) -> Iterable[tuple[_Key, list[_Span]]]:
    """By begin, of the rank that began first."""
    return sorted(found.items(), key=lambda one: min(map(_begin, one[1])))


def _begin(span: _Span) -> float:
    return span.start_us


def _outermost(spans: list[_Span]) -> Iterator[_Span]:
    """Saves and loads of a thread that lie in no other of it."""
    until_us = -1.0
    for span in sorted(spans, key=lambda span: (span.start_us, -span.end_us)):
        if span.kind != "step" and span.start_us >= until_us:
            until_us = span.end_us
            yield span


def _steps(number: int, rank: _Rank) -> dict[int, float]:
    """Seconds of each step without the saves and loads in it, but for those on other threads.

    Raises CouldNotRunError if a step was profiled twice.
    """
    took: dict[int, float] = {}
    for spans in rank.by_thread.values():
        calls = list(_outermost(spans))
        for step in (span for span in spans if span.kind == "step"):
            if step.number in took:
                raise CouldNotRunError(
                    f"rank {number} has ProfilerStep#{step.number} twice: give the traces of one launch"
                )
            inside = [call for call in calls if step.start_us <= call.start_us < step.end_us]
            inside_us = sum(min(call.end_us, step.end_us) - call.start_us for call in inside)
            took[step.number] = max(0.0, step.seconds - inside_us / 1e6)
    return took


def _numbered(kind: str, rank: _Rank, calls: list[_Span]) -> Iterator[tuple[_Key, _Span]]:
    """The saves or loads of a rank, each with the step in which it began and its number there."""
    steps = [span for spans in rank.by_thread.values() for span in spans if span.kind == "step"]
    seen: Counter[int | None] = Counter()
    for call in calls:
        if (call.kind == "load") == (kind == "load"):
            step = next((s.number for s in steps if s.start_us <= call.start_us < s.end_us), None)
            yield (step, seen[step]), replace(call, went_on=call.end_us <= rank.trained_us)
            seen[step] += 1


def _save(step: int | None, spans: list[_Span]) -> ImportedSave:
    """A call that raised has an end, too: that a save completed is known if all its ranks went on training."""
    is_async = any(span.kind == "async_save" for span in spans)
    completed = True if not is_async and all(span.went_on for span in spans) else None
    return ImportedSave(
        step=step,
        tag=None if step is None else f"ProfilerStep#{step}",
        completed=completed,
        call=_range(spans),
        wait=None,
        drain=None,
        num_files=None,
        bytes=None,
        slowest_file=None,
        slowest_file_s=None,
        printed=None,
        scheduled=is_async,
    )


def _range(spans: list[_Span]) -> Range:
    seconds = [span.seconds for span in spans]
    return Range(max(seconds), min(seconds) if len(seconds) > 1 else None)
