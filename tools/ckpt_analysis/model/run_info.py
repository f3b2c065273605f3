"""Facts about a run for the head of its report: cycles, ranks, hosts, layout, engine, storage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from restart_trace.schema import AXES

from ..common.problems import Problem, number_list
from ..ingest.load import Trace
from .frame import Frames

_PRELOADED = "RESTART_TRACE_PRELOAD"  # restart_trace.startup.PRELOAD_VARIABLE, whose module is slow to import
_LAUNCH = "RESTART_TRACE_LAUNCH_ID"  # restart_trace.cycles.LAUNCH_ID_VARIABLE
_MOST_CORES = 1 << 16  # more is no number that a host has


@dataclass(frozen=True)
class CycleInfo:
    """Ranks of one cycle. `expected` is its world size, `missing` the ranks without a usable trace."""

    cycle: int
    expected: int
    present: int
    missing: list[int]
    layout: dict[str, int]
    hosts: list[str]
    engine_asked: str | None
    engine_used: str | None
    durability: str | None
    versions: dict[str, str]
    coordinates: dict[int, tuple[int, int, int]]  # rank -> (tp, pp, dp)
    label: str | None = None  # what a reader of any figure must know


def describe_cycles(trace: Trace, frames: Frames) -> tuple[list[CycleInfo], list[Problem]]:
    """One CycleInfo per cycle that left a trace, in order, and what is missing or contradictory."""
    problems: list[Problem] = []
    by_cycle: dict[int, list[dict[str, Any]]] = {}
    for process in trace.ranks:
        by_cycle.setdefault(process["cycle"], []).append(process)
    engines = _engines_used(frames)
    cycles = []
    for cycle in sorted(by_cycle):
        processes = sorted(by_cycle[cycle], key=lambda p: p["rank"])
        lowest = processes[0]
        expected = max(process["world_size"] for process in processes)
        present = {process["rank"] for process in processes}
        missing = sorted(set(range(expected)) - present)
        used = engines.get(cycle, [])
        cycles.append(
            CycleInfo(
                cycle=cycle,
                expected=expected,
                present=len(present),
                missing=missing,
                layout=lowest["layout"],
                hosts=sorted({process["host"] for process in processes}),
                engine_asked=lowest.get("engine_asked"),
                engine_used=used[0] if used else None,
                durability=lowest.get("durability"),
                versions=lowest["versions"],
                coordinates={p["rank"]: (p["tp"], p["pp"], p["dp"]) for p in processes},
                label=lowest["environment"].get("RESTART_TRACE_LABEL") or None,
            )
        )
        problems += _cycle_problems(cycle, missing, expected, processes, used)
    return cycles, problems + _between_cycles(cycles, trace.claimed_cycles)


def _engines_used(frames: Frames) -> dict[int, list[str]]:
    pairs = frames.runtimes.select("cycle", "engine_used").drop_nulls().unique().sort("cycle", "engine_used")
    engines: dict[int, list[str]] = {}
    for cycle, engine in pairs.iter_rows():
        engines.setdefault(cycle, []).append(engine)
    return engines


def _cycle_problems(
    cycle: int, missing: list[int], expected: int, processes: list[dict[str, Any]], engines: list[str]
) -> list[Problem]:
    problems: list[Problem] = []
    if missing:
        message = (
            f"cycle {cycle}: {len(missing)} of {expected} ranks left no usable trace "
            f"({number_list(missing)}): did they start, and see this directory? Every number of this cycle is over "
            "the others, and what all ranks moved is not known"
        )
        problems.append(Problem("missing_ranks", message, {"cycle": cycle, "ranks": missing}))
    for name in ("world_size", "layout", "engine_asked", "durability"):
        values = sorted({str(process.get(name)) for process in processes})
        if len(values) > 1:
            message = f"cycle {cycle}: ranks disagree on {name}: {', '.join(values)}"
            problems.append(Problem("ranks_disagree", message, {"cycle": cycle, "field": name, "values": values}))
    if len(engines) > 1:
        message = f"cycle {cycle}: ranks ran different checkpoint engines: {', '.join(engines)}"
        data = {"cycle": cycle, "field": "engine_used", "values": engines}
        problems.append(Problem("ranks_disagree", message, data))
    return problems


def missing_cycles(cycles: Sequence[CycleInfo], claimed: Sequence[int]) -> list[int]:
    """Cycles that the run had, and of which no rank left a usable trace."""
    seen = {info.cycle for info in cycles}
    return sorted((set(range(max(seen) + 1)) | set(claimed)) - seen)


def _between_cycles(cycles: list[CycleInfo], claimed: list[int]) -> list[Problem]:
    problems: list[Problem] = []
    for cycle in missing_cycles(cycles, claimed):
        message = f"cycle {cycle}: no rank left a usable trace, though the run had this cycle"
        problems.append(Problem("missing_cycle", message, {"cycle": cycle}))
    for before, after in zip(cycles, cycles[1:], strict=False):
        if before.layout != after.layout:
            message = (
                f"the layout changed from {layout_text(before.layout)} in cycle {before.cycle} to "
                f"{layout_text(after.layout)} in cycle {after.cycle}"
            )
            problems.append(Problem("layout_changed", message, {"cycle": after.cycle}))
    return problems


@dataclass(frozen=True)
class Storage:
    """Where `ranks` ranks of the newest cycle that tells save to or load from; `mount` is as mount(8) lists it."""

    use: str  # save or load
    directory: str
    mount: str
    ranks: int


def describe_storage(runtimes: pl.DataFrame) -> list[Storage]:
    """The directories of checkpoints and the file systems that they are on, as the runtime records tell."""
    found = []
    for use in ("save", "load"):
        place = [f"{use}_dir", f"{use}_mount"]
        if not set(place) <= set(runtimes.columns):
            continue
        known = runtimes.drop_nulls(place)
        newest = known.filter(pl.col("cycle") == pl.col("cycle").max())
        rows = newest.group_by(place).agg(pl.len()).sort("len", *place, descending=[True, False, False])
        found += [Storage(use, *row) for row in rows.iter_rows()]
    return found


def layout_text(layout: dict[str, int]) -> str:
    """{"tp": 2, "pp": 2, "dp": 2} as TP2 PP2 DP2; axes besides these where there are any."""
    shown = [*("tp", "pp", "dp"), *(name for name in AXES if layout.get(name, 1) > 1)]
    return " ".join(f"{name.upper()}{layout.get(name, '?')}" for name in dict.fromkeys(shown))


def is_ours(ranks: list[dict[str, Any]]) -> bool:
    """Whether this project's trainer ran, of whose ranks these are the process records; else hooks traced a job."""
    return all(process["instrument"] == "trainer" for process in ranks)


def cycles_imported_once(ranks: list[dict[str, Any]]) -> frozenset[int]:
    """Cycles in which all of these ranks have what their launcher imported before it forked them.

    A launcher tells only the ranks of its first start when it imported. Ranks that it starts later belong to the same
    launch, and import nothing either.
    """
    known = [(process["cycle"], process["environment"]) for process in ranks]
    launches = {environment.get(_LAUNCH) for _, environment in known if _PRELOADED in environment} - {None}
    own = {cycle for cycle, found in known if _PRELOADED not in found and found.get(_LAUNCH) not in launches}
    return frozenset(cycle for cycle, _ in known) - own


def returned_ranks(ranks: list[dict[str, Any]]) -> dict[int, tuple[list[int], list[int] | None]]:
    """Cycle -> the ranks whose processes were there before it, and the others, None if all were new.

    None, too, if a rank has left no record, as one that was killed at once. Without cycles of which no rank says it.
    """
    found: dict[int, dict[int, int]] = {}
    expected: dict[int, int] = {}
    for process in ranks:
        if "returns" in process:
            cycle = process["cycle"]
            found.setdefault(cycle, {})[process["rank"]] = process["returns"]
            expected[cycle] = max(expected.get(cycle, 0), process["world_size"])
    split: dict[int, tuple[list[int], list[int] | None]] = {}
    for cycle, returns in found.items():
        returned = sorted(rank for rank, times in returns.items() if times > 0)
        known = returned and len(returns) == expected[cycle]
        split[cycle] = returned, sorted(returns.keys() - set(returned)) if known else None
    return split


def oversubscribed_hosts(ranks: list[dict[str, Any]]) -> pl.DataFrame:
    """cycle, host, ranks, cores of the hosts that ran more of these ranks than all of them may use cores."""
    on_host: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for process in ranks:
        on_host.setdefault((process["cycle"], process["host"]), []).append(process)
    rows = [(*place, len(there), _usable_cores(there)) for place, there in on_host.items()]
    schema = {"cycle": pl.Int64, "host": pl.String, "ranks": pl.Int64, "cores": pl.Float64}
    return pl.DataFrame([row for row in rows if row[2] > row[3] > 0], schema=schema, orient="row")


def cores_of_hosts(ranks: list[dict[str, Any]], cycle: int) -> dict[str, float]:
    """Host -> cores that its ranks of `cycle` may use, all of them; without a host where that is not recorded."""
    on_host: dict[str, list[dict[str, Any]]] = {}
    for process in ranks:
        if process["cycle"] == cycle:
            on_host.setdefault(process["host"], []).append(process)
    return {host: cores for host, there in on_host.items() if (cores := _usable_cores(there))}


def _usable_cores(ranks: list[dict[str, Any]]) -> float:
    """Cores that these ranks of one host may use, or the quota of processor time that they share if that is less; 0 if
    it is not recorded. Ranks with quotas of their own count as if they shared the largest.
    """
    cores = set().union(*(_cores(process.get("cores", "")) for process in ranks))
    return min(float(len(cores)), max(process.get("cpu_limit", math.inf) for process in ranks))


def _cores(text: str) -> set[int]:
    """The numbers in "0-3,8"; none of a text that is no such list."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) >= _MOST_CORES:
            return set()
        found |= set(range(int(first), int(last or first) + 1))
    return found
