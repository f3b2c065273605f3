"""What the analysis must find in the made-up run, from the same closed formulas: keys as in its JSON report.

Nothing here reads a log or knows how the analysis computes: durations come from `times`, and are added up,
compared and divided as docs/metrics.md defines each number.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.synthetic_traces.lines import ENGINE, RUN_ID
from benchmarks.synthetic_traces.plants import problems_of
from benchmarks.synthetic_traces.schedule import BEFORE_LOOP_US, engine_ready, loop_start
from benchmarks.synthetic_traces.shape import Shape
from benchmarks.synthetic_traces.times import (
    COMMIT_US,
    GAP_US,
    STARTUP_PHASES,
    TAIL_US,
    Cycle,
    RankSave,
    Save,
    Times,
    late,
)

US = 1e6
PerRank = Mapping[int, int]  # rank -> us; a rank that is not in it spent no time


def make_truth(times: Times, cycles: list[Cycle], failure: dict[str, int]) -> dict[str, Any]:
    """The truth about every number, for the ranks whose logs can be read."""
    shape = times.shape
    visible = [_visible(shape, number) for number in range(2)]
    truth = {
        "run_id": RUN_ID,
        "ranks": {"expected": shape.ranks, "present": len(visible[1])},
        "saves": [_known(_save(times, save, visible[c.number]), shape) for c in cycles for save in c.saves],
        "weights": [],  # no save of weights is written
        "loads": [_known(_load(times, cycles[1], visible[1]), shape)],
        "launches": [_start(times, cycles[0], visible[0])],
        "restarts": [_restart(times, cycles, failure, visible)],
        "problems": problems_of(shape, cycles[1].saves[-1].tag, visible[1]),
    }
    planted = {name: shape.planted_rank(name) for name in sorted(shape.plants)}
    truth["planted"] = planted | {
        name: shape.planted_host(name) for name in ("straggler-host", "clock-offset") if name in planted
    }
    return truth


def _visible(shape: Shape, cycle: int) -> list[int]:
    hidden = {shape.planted_rank("missing-rank"), shape.planted_rank("mixed-versions")} if cycle else set()
    return [rank for rank in range(shape.ranks) if rank not in hidden]


def _known(operation: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """An operation without the figures that are over all ranks, if a rank of its cycle left no log."""
    if len(_visible(shape, operation["cycle"])) == shape.ranks:
        return operation
    of_all = ("bytes", "num_files", "durable_s", "blocked_GBps", "io_GBps")
    return operation | dict.fromkeys(operation.keys() & of_all)


def _spread(values: PerRank, ranks: list[int]) -> dict[str, Any]:
    full = [values.get(rank, 0) for rank in ranks]
    longest = max(full)
    return {
        "max_s": longest / US,
        "median_s": median(full) / US,
        "min_s": min(full) / US,
        "spread_s": (longest - min(full)) / US,
        "slowest_rank": ranks[full.index(longest)],
    }


def _phase(
    values: PerRank,
    ranks: list[int],
    critical: int | None = None,
    *,
    num_bytes: int | None = None,
    files: int | None = None,
    blocking: str = "all",
    details: dict[str, Any] | None = None,
) -> dict[str, Any]:
    spread = _spread(values, ranks)
    rate = num_bytes / 1e9 / spread["max_s"] if num_bytes and spread["max_s"] else None
    entry = spread | {"ranks": len(values), "bytes": num_bytes, "num_files": files, "GBps": rate, "blocking": blocking}
    if critical is not None:
        entry["at_critical_s"] = values.get(critical, 0) / US
    return entry | ({"details": details} if details else {})


def _operation(
    walls: PerRank,
    covered: PerRank,
    ranks: list[int],
    num_bytes: int | None,
    files: int | None,
    parts: Mapping[int, Mapping[str, int]],
) -> dict[str, Any]:
    """What saves and loads have in common. `parts`: rank -> what it did until it came to the first barrier."""
    wall = _spread(walls, ranks)
    critical = _critical(walls, parts)
    shares = {rank: covered[rank] / walls[rank] for rank in ranks}
    lowest = min(ranks, key=lambda rank: shares[rank])
    return {
        "cycle": None,
        "engine": ENGINE,
        "outcome": "ok",
        "error": None,
        "ranks": len(ranks),
        "finished_ranks": len(ranks),
        "bytes": num_bytes,
        "num_files": files,
        **critical,
        "wall": wall | {"at_critical_s": walls[critical["critical_rank"]] / US},
        "coverage_min": shares[lowest],
        "coverage_rank": lowest,
        "unattributed_s": max(walls[rank] - covered[rank] for rank in ranks) / US,
    }


def _critical(walls: PerRank, parts: Mapping[int, Mapping[str, int]]) -> dict[str, Any]:
    """The rank that came to the barrier last, and the longest of what it did until then, or since others began."""
    longest = max(walls.values())
    before = {rank: {**parts[rank], "late": longest - walls[rank]} for rank in parts}
    last = max(before, key=lambda rank: (sum(before[rank].values()), sum(parts[rank].values()), -rank))
    return {"critical_rank": last, "critical_phase": max(before[last], key=lambda phase: before[last][phase])}


def _save(times: Times, save: Save, ranks: list[int]) -> dict[str, Any]:
    parts = {rank: times.save(save, rank) for rank in ranks}
    num_files = times.shape.files * len(ranks)
    num_bytes = sum(times.bytes_per_file(rank) for rank in ranks) * times.shape.files
    labels = {"tag": save.tag, "step": save.step, "cycle": save.cycle}
    later = "none" if times.shape.asynchronous else "all"
    if not save.finished:
        phases = _written(times, save, ranks, None, later, num_bytes, num_files)
        return labels | {
            "outcome": "unfinished", "ranks": len(ranks), "finished_ranks": 0, "bytes": None, "num_files": None,
            "wall": None, "blocked_s": None, "drain_s": None, "committed_s": None, "durable_s": None,
            "engine": ENGINE, "coverage_min": None, "phases": phases,
        }  # fmt: skip
    walls = {rank: save.end(rank) - part.start for rank, part in parts.items()}
    gaps = TAIL_US + GAP_US * times.shape.files
    covered = {rank: walls[rank] - gaps - (save.end(rank) - save.over - TAIL_US) for rank in ranks}
    before = {rank: _before_barrier(part) for rank, part in parts.items()}
    truth = _operation(walls, covered, ranks, num_bytes, num_files, before) | labels
    if save.drain_from:  # the wait lies over what goes on in the background: not worth a formula
        for name in ("coverage_min", "coverage_rank", "unattributed_s"):
            del truth[name]
    until = {rank: save.over if later == "all" else parts[rank].blocked_until for rank in ranks}
    blocked = max(until[rank] - parts[rank].start for rank in ranks) / US
    drains = [save.over - save.drain_from - late(rank) for rank in ranks] if save.drain_from else []
    published = save.left + COMMIT_US["manifest"] + COMMIT_US["publish"]
    committed = (published - min(part.start for part in parts.values())) / US
    flush = max(sum(part.write) + sum(part.fsync) for part in parts.values()) / US
    phases = _written(times, save, ranks, truth["critical_rank"], later, num_bytes, num_files)
    phases |= _agreed(times, save, ranks, truth["critical_rank"], later)
    return truth | {
        "blocked_s": blocked,
        "drain_s": max(drains) / US if drains else None,
        "blocked_GBps": num_bytes / 1e9 / blocked,
        "io_GBps": num_bytes / 1e9 / flush,
        "committed_s": committed,
        "durable_s": committed,
        "device_copies": None,
        "phases": phases,
    }


def _before_barrier(part: RankSave) -> dict[str, int]:
    named = {"wait_previous": part.waited, "collect": part.collect, "device_to_host": part.copy}
    named |= {"serialize": sum(part.serialize), "flush": sum(part.write) + sum(part.fsync)}
    return named | {"unattributed": part.arrival - part.start - sum(named.values())}


def _written(
    times: Times, save: Save, ranks: list[int], critical: int | None, later: str, num_bytes: int, files: int
) -> dict[str, Any]:
    """Phases up to the arrival at the barrier."""
    parts = {rank: times.save(save, rank) for rank in ranks}
    write = {rank: sum(part.write) for rank, part in parts.items()}
    fsync = {rank: sum(part.fsync) for rank, part in parts.items()}
    moved: dict[str, Any] = {"num_bytes": num_bytes, "files": files, "blocking": later}
    details = {"write": _phase(write, ranks, critical, **moved)}
    flush = write
    if save.finished:
        details["fsync"] = _phase(fsync, ranks, critical, **moved)
        flush = {rank: write[rank] + fsync[rank] for rank in ranks}
    serialized = {rank: sum(part.serialize) for rank, part in parts.items()}
    phases = {
        "collect": _phase({rank: part.collect for rank, part in parts.items()}, ranks, critical),
        "device_to_host": _phase({rank: part.copy for rank, part in parts.items()}, ranks, critical),
        "serialize": _phase(serialized, ranks, critical, files=files, blocking=later),
        "flush": _phase(flush, ranks, critical, **moved, details=details),
    }
    waited = {rank: part.waited for rank, part in parts.items() if part.waited}
    if save.drain_from:
        for rank in ranks:
            waited[rank] = waited.get(rank, 0) + save.over - save.drain_from - late(rank)
    return ({"wait_previous": _phase(waited, ranks, critical)} if waited else {}) | phases


def _agreed(times: Times, save: Save, ranks: list[int], critical: int | None, later: str) -> dict[str, Any]:
    """Barriers and commit."""
    barrier = {rank: save.left - times.save(save, rank).arrival for rank in ranks}
    for rank in ranks:
        barrier[rank] += save.over - save.left if rank else 0
    details = {detail: _phase({0: took}, ranks, critical, blocking=later) for detail, took in COMMIT_US.items()}
    commit = {0: sum(COMMIT_US.values())}
    return {
        "barrier": _phase(barrier, ranks, critical, blocking=later),
        "commit": _phase(commit, ranks, critical, blocking=later, details=details),
    }


def _load(times: Times, cycle: Cycle, ranks: list[int]) -> dict[str, Any]:
    parts = {rank: times.load(engine_ready(times, cycle, rank), rank) for rank in ranks}
    walls = {rank: cycle.loaded + TAIL_US - part.start for rank, part in parts.items()}
    covered = {rank: walls[rank] - TAIL_US for rank in ranks}
    files = times.shape.files * len(ranks)
    num_bytes = sum(times.bytes_per_file(rank) for rank in ranks) * times.shape.files
    took = {rank: sum(part.read) + sum(part.verify) + sum(part.deserialize) + part.copy for rank, part in parts.items()}
    before = {
        rank: {"discover": part.discover, "load": took[rank], "redistribute": part.gather}
        for rank, part in parts.items()
    }
    truth = _operation(walls, covered, ranks, num_bytes, files, before)
    phases = _load_phases(times, cycle, ranks, truth["critical_rank"], num_bytes, files)
    read = phases["load"]["details"]["read"]["max_s"]
    return truth | {
        "tag": f"global_step{cycle.resumed}",
        "step": cycle.resumed,
        "cycle": cycle.number,
        "load_s": truth["wall"]["max_s"],
        "io_GBps": num_bytes / 1e9 / read,
        "phases": phases,
    }


def _load_phases(
    times: Times, cycle: Cycle, ranks: list[int], critical: int | None, num_bytes: int, files: int
) -> dict[str, Any]:
    parts = {rank: times.load(engine_ready(times, cycle, rank), rank) for rank in ranks}
    took = {
        "read": {rank: sum(part.read) for rank, part in parts.items()},
        "verify": {rank: sum(part.verify) for rank, part in parts.items()},
        "deserialize": {rank: sum(part.deserialize) for rank, part in parts.items()},
        "host_to_device": {rank: part.copy for rank, part in parts.items()},
    }
    moved = {"read": num_bytes, "verify": num_bytes}
    details = {
        name: _phase(
            values, ranks, critical, num_bytes=moved.get(name), files=None if name == "host_to_device" else files
        )
        for name, values in took.items()
    }
    whole = {rank: sum(values[rank] for values in took.values()) for rank in ranks}
    gather = {rank: part.gather for rank, part in parts.items()}
    barrier = {rank: cycle.loaded - part.arrival for rank, part in parts.items()}
    return {
        "discover": _phase({rank: part.discover for rank, part in parts.items()}, ranks, critical),
        "load": _phase(whole, ranks, critical, num_bytes=num_bytes, files=files, details=details),
        "redistribute": _phase(gather, ranks, critical, details={"all_gather": _phase(gather, ranks, critical)}),
        "barrier": _phase(barrier, ranks, critical),
    }


def _start(times: Times, cycle: Cycle, ranks: list[int]) -> dict[str, Any]:
    starts = {rank: cycle.begin + late(rank) for rank in ranks}
    walls = {rank: cycle.first_step_end - starts[rank] for rank in ranks}
    wall = _spread(walls, ranks)
    durations = {rank: times.startup(cycle.number, rank) for rank in ranks}
    for rank in ranks:
        durations[rank][2] = cycle.together - starts[rank] - sum(durations[rank][:2])
    phases = {
        phase: _phase({rank: durations[rank][place] for rank in ranks}, ranks)
        for place, phase in enumerate(STARTUP_PHASES)
    }
    phases["communicators"]["details"] = {"world": dict(phases["communicators"])}
    first = {rank: cycle.first_step_end - loop_start(times, cycle, rank) for rank in ranks}
    phases["first_step"] = _phase(first, ranks)
    shares = {rank: 1 - BEFORE_LOOP_US / walls[rank] for rank in ranks}
    lowest = min(ranks, key=lambda rank: shares[rank])
    return {
        "cycle": cycle.number,
        "ranks": len(ranks),
        "finished_ranks": len(ranks),
        "time_to_first_step_s": wall["max_s"],
        "wall": wall,
        "resumed_step": cycle.resumed,
        "unattributed_s": BEFORE_LOOP_US / US,
        "coverage_min": shares[lowest],
        "coverage_rank": lowest,
        "phases": phases,
    }


def _restart(times: Times, cycles: list[Cycle], failure: dict[str, int], visible: list[list[int]]) -> dict[str, Any]:
    before, after = cycles
    ranks = visible[1]
    reached = max(before.iterations, default=before.first_step)
    lost = [step for step in before.iterations if step > after.resumed]
    work = max(sum(times.iteration(step, rank) for step in lost) for rank in visible[0])
    caught_up = {rank: _caught_up(times, after, rank) for rank in ranks}
    began = min(after.begin + late(rank) for rank in ranks)
    truth = _start(times, after, ranks)
    loaded = {rank: after.loaded + TAIL_US - engine_ready(times, after, rank) for rank in ranks}
    truth["phases"]["load"] = _loaded_phase(times, after, ranks, loaded)
    since = {rank: moment - after.first_step_end for rank, moment in caught_up.items()}
    truth["phases"]["caught_up"] = _phase(since, ranks)
    last_record = failure["injected"] - 30_000
    return truth | {
        "caught_up_s": max(caught_up[rank] - after.begin - late(rank) for rank in ranks) / US,
        "reached_step": reached,
        "lost_steps": reached - after.resumed,
        "lost_work_s": work / US,
        "repeated_steps": len(lost),
        "equal_losses": len(lost),
        "down_s": (began - last_record) / US,
        "restart_s": (after.first_step_end - failure["injected"]) / US,
        "failure_to_caught_up_s": (max(caught_up.values()) - failure["injected"]) / US,
        "failure": {"fault": "sigkill"}
        | {
            f"{phase}_s": (failure[phase] - failure["injected"]) / US for phase in ("detected", "stopped", "relaunched")
        },
    }


def _caught_up(times: Times, cycle: Cycle, rank: int) -> int:
    step = cycle.caught_up
    if step is None or step == cycle.first_step:
        return cycle.first_step_end
    return cycle.iterations[step] + late(rank) + times.iteration(step, rank)


def _loaded_phase(times: Times, cycle: Cycle, ranks: list[int], loaded: PerRank) -> dict[str, Any]:
    """The start-up's phase `load`: the load's wall time, with the load's own phases as details."""
    num_bytes = sum(times.bytes_per_file(rank) for rank in ranks) * times.shape.files
    own = _load_phases(times, cycle, ranks, None, num_bytes, times.shape.files * len(ranks))
    details = {name: {k: v for k, v in entry.items() if k != "details"} for name, entry in own.items()}
    return _phase(loaded, ranks, num_bytes=num_bytes, details=details)
