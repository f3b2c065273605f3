"""Reads the profile that --profile writes: what the device did in the recorded iterations."""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ITERATIONS = re.compile(r"_iterations_(\d+)-(\d+)\.json\.gz$")
# What scaled_dot_product_attention calls after it has selected a backend.
_ATTENTION = re.compile(r"aten::_scaled_dot_product_(?P<backend>\w+?)(?P<backward>_backward)?$")


@dataclass(frozen=True)
class Attention:
    """Attention in one profile, per iteration.

    `calls`: forward calls by torch's name of the backend, those of recomputation included. Seconds of the kernels that
    the backend launched; None if the profile has no kernel of it (on a CPU, or if the backward pass of a backend is
    composed of other operators).
    """

    calls: dict[str, float]
    forward_s: float | None
    backward_s: float | None

    @property
    def seconds(self) -> float | None:
        """Of both passes; None if either was not observed."""
        if self.forward_s is None or self.backward_s is None:
            return None
        return self.forward_s + self.backward_s


def profiles_of(out: Path, part: str) -> list[Path]:
    """The profiles that a part has written, of each rank."""
    return sorted((out / part / "trace").glob("profile_*.json.gz"))


@functools.cache
def kernels(path: Path) -> tuple[tuple[str, float, int], ...]:
    """Name, seconds and number of each of the device's kernels and copies in a profile, by time; empty on a CPU."""
    seconds: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for event in _events(path):
        if event.get("cat") in _ON_DEVICE:
            seconds[event["name"]] += event["dur"] / 1e6
            number[event["name"]] += 1
    return tuple((name, spent, number[name]) for name, spent in seconds.most_common())


@functools.cache
def attention(path: Path) -> Attention | None:
    """What computed attention in a profile; None if nothing did."""
    events = _events(path)
    of_passes: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    calls: Counter[str] = Counter()
    for event in events:
        found = _ATTENTION.match(event.get("name", "")) if event.get("cat") == "cpu_op" else None
        if found is not None:
            of_passes[found["backward"] is not None].append(event)
            if found["backward"] is None:
                calls[found["backend"]] += 1
    named = _ITERATIONS.search(path.name)
    if not calls or named is None:
        return None
    iterations = int(named[2]) - int(named[1]) + 1
    forward_s, backward_s = (_device_seconds(events, of_passes[backward]) for backward in (False, True))
    return Attention(
        {backend: number / iterations for backend, number in calls.most_common()},
        None if forward_s is None else forward_s / iterations,
        None if backward_s is None else backward_s / iterations,
    )


def _events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def _device_seconds(events: list[dict[str, Any]], operators: list[dict[str, Any]]) -> float | None:
    """Seconds of the kernels that a thread launched while it was within one of the operators."""
    launched = set(_launched_within(events, operators))
    kernels_s = [
        event["dur"] / 1e6
        for event in events
        if event.get("cat") in _ON_DEVICE and event["args"].get("correlation") in launched
    ]
    return sum(kernels_s) if kernels_s else None


def _launched_within(events: Iterable[dict[str, Any]], operators: list[dict[str, Any]]) -> Iterator[int]:
    """Numbers by which the profiler connects a launch with its kernel."""
    of_threads: defaultdict[tuple[Any, Any], list[tuple[float, float]]] = defaultdict(list)
    for operator in operators:
        of_threads[operator["pid"], operator["tid"]].append((operator["ts"], operator["ts"] + operator["dur"]))
    for event in events:
        if event.get("cat") not in _LAUNCHES or "correlation" not in event.get("args", {}):
            continue
        spans = of_threads.get((event["pid"], event["tid"]), ())
        if any(begin <= event["ts"] <= end for begin, end in spans):
            yield event["args"]["correlation"]
