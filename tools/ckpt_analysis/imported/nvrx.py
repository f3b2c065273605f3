"""Reads the `cycle_info` files of a job, which ft_launcher of NVIDIA Resiliency Extension writes, one per cycle.

A cycle begins when its rendezvous is complete. It ends when the launcher opens the next rendezvous, or shuts down.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from restart_trace.regular import read_regular

from ..common.errors import CouldNotRunError
from ..model.imported_run import ImportedCycle, ImportedRun, Launched

_FILE = re.compile(r"cycle_info\.(.*)\.(\d+)\.(\d+)")  # job, attempt, cycle; the link `.current` is none
_EXPECTED = "give the directory of the files cycle_info.JOB.ATTEMPT.CYCLE, which ft_launcher was told to write"
_NODES = re.compile(r"([^,\[\]]+)(?:\[([\d,-]+)\])?(?:,|$)")  # "node[001-004,007],login"
_MOST_NODES = 1 << 20


def read_cycles(directory: Path, world_size: int | None, job: str | None) -> ImportedRun:
    """The cycles of `job`, or of the only one in `directory`. `world_size`: the number of ranks of the newest cycle.

    Raises CouldNotRunError if the directory has no such files, or one of them is damaged or contradicts another.
    """
    try:
        names = sorted(path.name for path in directory.iterdir())
        chosen, keys = _chosen(names, directory, job)
        digest = hashlib.sha256()
        cycles = []
        for key in sorted(keys):
            content = read_regular(directory / keys[key])
            digest.update(content)
            cycles.append(_cycle(directory / keys[key], content, (chosen, *key)))
    except OSError as exc:
        raise CouldNotRunError(f"{directory}: cannot be read: {exc.strerror}: {_EXPECTED}") from exc
    if world_size is None:
        raise CouldNotRunError(f"{directory}: no file states the number of ranks: add --world-size N")
    cycles = _with_ranks(cycles, world_size)
    return ImportedRun(
        source=f"cycle_info.{chosen}",
        run_id=digest.hexdigest()[:12],
        launched=Launched(world_size, {}, cycles[-1].hosts),
        engine=None,
        parameters=None,
        arguments={},
        versions={},
        saves=[],
        loads=[],
        iterations=[],
        cycles=cycles,
    )


def _chosen(names: list[str], directory: Path, asked: str | None) -> tuple[str, dict[tuple[int, int], str]]:
    """The job and its files: (attempt, cycle) -> name."""
    jobs: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    for name in names:
        if found := _FILE.fullmatch(name):
            jobs[found[1]][int(found[2]), int(found[3])] = name
    if not jobs:
        raise CouldNotRunError(f"{directory}: has no cycle_info file: {_EXPECTED}")
    held = ", ".join(sorted(jobs))
    if asked is None and len(jobs) > 1:
        raise CouldNotRunError(f"{directory}: holds files of several jobs ({held}): choose one with --run-id JOB")
    job = next(iter(jobs)) if asked is None else asked
    if job not in jobs:
        raise CouldNotRunError(f"--run-id {job}: no such job in {directory}; it holds {held}")
    return job, jobs[job]


def _cycle(path: Path, content: bytes, key: tuple[str, int, int]) -> ImportedCycle:
    """One file. Its ranks are not known yet."""
    try:
        data = json.loads(content)
        if not isinstance(data, dict):
            raise ValueError("is not a JSON object")
        if (data.get("job_id"), data.get("attempt_index"), data.get("cycle_number")) != key:
            raise ValueError("job_id, attempt_index and cycle_number are not those of its name")
        start = _time(data, "cycle_start_time")
        end = _time(data, "cycle_end_time")
        if start is None:
            raise ValueError("cycle_start_time is missing")
        if end is not None and end < start:
            raise ValueError("cycle_end_time is before cycle_start_time")
        hosts, standby = _hosts(_text(data, "active_nodes")), _hosts(_text(data, "standby_nodes"))
        return ImportedCycle(key[1], key[2], start, end, 0, hosts, standby, _text(data, "cycle_log_file") or None)
    except (ValueError, RecursionError) as exc:
        raise CouldNotRunError(f"{path}: is damaged ({exc}): take it out of the directory") from None


def _text(data: dict[str, Any], name: str) -> str:
    value = data.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text: {value!r:.60}")
    return value


def _time(data: dict[str, Any], name: str) -> float | None:
    """Unix time of a date in UTC; None if there is none. Raises ValueError for another one."""
    text = _text(data, name)
    if not text:
        return None
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    if moment.tzinfo is None or moment.timestamp() < 0:
        raise ValueError(f"{name} is no date in UTC: {text!r:.60}")
    return moment.timestamp()


def _hosts(nodes: str) -> list[str]:
    """The hosts of a list in Slurm's format. Raises ValueError for another one."""
    hosts: list[str] = []
    at = 0
    while at < len(nodes):
        found = _NODES.match(nodes, at)
        if not found:
            raise ValueError(f"is no list of nodes: {nodes!r:.60}")
        at = found.end()
        for numbers in found[2].split(",") if found[2] else [None]:
            if numbers is None:
                hosts.append(found[1])
                continue
            first, _, last = numbers.partition("-")
            count = int(last or first) - int(first) + 1
            if not 0 < count <= _MOST_NODES - len(hosts):
                raise ValueError(f"is no list of nodes: {nodes!r:.60}")
            hosts += [f"{found[1]}{number:0{len(first)}}" for number in range(int(first), int(first) + count)]
    return hosts


def _with_ranks(cycles: list[ImportedCycle], world_size: int) -> list[ImportedCycle]:
    """The cycles with the number of ranks of each: ft_launcher starts as many on every node."""
    newest = len(cycles[-1].hosts)
    ranks = []
    for cycle in cycles:
        nodes = len(cycle.hosts)
        scaled, rest = divmod(world_size * nodes, newest) if nodes and newest else (world_size, 0)
        if rest:
            raise CouldNotRunError(
                f"--world-size {world_size}: the newest cycle has {newest} nodes and cycle {cycle.number} has {nodes}, "
                "so ranks do not divide evenly among them: give the number of ranks of the newest cycle"
            )
        ranks.append(scaled)
    return [replace(cycle, ranks=count) for cycle, count in zip(cycles, ranks, strict=True)]
