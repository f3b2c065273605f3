"""Computes the figures of the report from raw samples. A duration over several ranks is that of the slowest rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from ..common.page_cache import COLD, WARM
from ..common.samples import interquartile_range
from .plan import IN_MEMORY, LOAD, LOAD_BESIDE, LOAD_COLD, LOAD_WARM, SAVE, SAVE_AND_LOAD, STORAGE_KINDS, Request
from .replay import Samples

Ranks = list[dict[str, Any]]


def summary(values: Sequence[float]) -> dict[str, Any] | None:
    """Median, spread and all samples; None without samples."""
    if not values:
        return None
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "iqr": interquartile_range(values),
        "samples": list(values),
    }


def analyse(request: Request, samples: Samples, left_out: dict[str, str], machine: dict[str, Any]) -> dict[str, Any]:
    """The figures of a replay; docs/ckpt_replay.md explains the keys."""
    sizes = _sizes(samples)
    saved = sum(size for process, (size, _) in enumerate(sizes) if request.share.copy_of(process) == 0)
    totals = Totals(saved, sum(size for size, _ in sizes))
    full = max((full for _, full in sizes), default=0)
    limited = request.share.limit_bytes is not None and any(size < whole for size, whole in sizes)
    return {
        "ranks": list(request.share.ranks),
        "hosts": _hosts(samples),
        "model": request.share.model,
        "vocab_size": request.share.vocab_size,
        "layout": dict(zip(("tp", "pp", "dp"), request.share.layout, strict=True)),
        "small_tensors": request.share.small_tensors,
        "bytes_per_rank": max((size for size, _ in sizes), default=0),
        "bytes_of_ranks": [size for size, _ in sizes],
        "limited": {"limit_bytes": request.share.limit_bytes, "full_bytes_per_rank": full} if limited else None,
        "repeat": request.repeat,
        "cold_asked": request.cold,
        "steps": asdict(request.steps),
        "options": request.options | {"throughput_target_gbps": request.throughput_target_gbps},
        "machine": machine,
        "operations": request.operations,
        "readers": request.readers,
        "striping": None if request.striping is None else request.striping.text,
        "engines": {name: engine_figures(samples, name, totals, request.operations) for name in request.engines},
        "left_out": left_out,
        "storage": storage_figures(samples),
        "sharding": "full" if request.share.fully_sharded else "zero1",
        "in_object_storage": request.in_object_storage,
        "samples": {"engines": samples.engines, "storage": samples.storage, "tasks_s": samples.tasks_s},
    }


def _sizes(samples: Samples) -> list[tuple[int, int]]:
    """(bytes of the tensors, bytes before they were limited) of each replayed rank."""
    return [(rank["state_bytes"], rank["full_state_bytes"]) for rank in _saving(samples)]


def _hosts(samples: Samples) -> int | None:
    """The number of hosts that the ranks ran on; None if no engine saved."""
    return len({rank["host"] for rank in _saving(samples)}) or None


def _saving(samples: Samples) -> Ranks:
    """All ranks in the first save that ended well."""
    return next((kinds[SAVE][0] for kinds in samples.engines.values() if kinds.get(SAVE)), [])


class Totals(NamedTuple):
    """Bytes of all tensors: what a save writes has those that several processes hold once, a load for each."""

    saved: int
    loaded: int


def engine_figures(samples: Samples, name: str, totals: Totals, operations: str = SAVE_AND_LOAD) -> dict[str, Any]:
    """The figures of one engine. Throughputs: bytes of all ranks' tensors, GB of 1e9, divided by the median time."""
    kinds = samples.engines[name]
    saves = kinds.get(SAVE, [])

    def of_saves(field: str, warmup: bool = False) -> dict[str, Any] | None:
        counted = [] if operations == LOAD else saves
        return _slowest([[_save(rank, warmup) for rank in ranks] for ranks in counted], field)

    def first_writes(kind: str, cache: str) -> list[float]:
        return _loads(kinds.get(kind, []), cache, again=False, field="first_write_s")

    cold = _loads(kinds.get(LOAD_COLD, []), COLD, again=False)
    warm = _loads(kinds.get(LOAD_WARM, []), WARM, again=False)
    in_memory, failures = name in IN_MEMORY, samples.failures.get(name, {})
    counted, durable = of_saves("durable_s"), None if in_memory else of_saves("durable_s")
    moving = of_saves("moving_s")
    first, attempts = saves[0][0] if saves else {}, _attempts(samples, name)
    loaded = any(attempts.get(kind, {}).get("done") for kind in (LOAD_WARM, LOAD_COLD))
    return {
        "blocked_s": of_saves("blocked_s"),
        "durable_s": durable,
        "in_memory_s": counted if in_memory else None,
        "load_cold_s": summary(cold),
        "load_warm_s": summary(warm),
        "load_warm_again_s": summary(_loads(kinds.get(LOAD_WARM, []), WARM, again=True)),
        "first_write_cold_s": summary(first_writes(LOAD_COLD, COLD)),
        "first_write_warm_s": summary(first_writes(LOAD_WARM, WARM)),
        "peak_rss_bytes": of_saves("peak_rss_bytes"),
        "kept_rss_bytes": of_saves("kept_rss_bytes"),
        "children_peak_bytes": of_saves("children_peak_bytes"),
        "durable_GBps": throughput(totals.saved, durable),
        "load_cold_GBps": throughput(totals.loaded, summary(cold)),
        "load_warm_GBps": throughput(totals.loaded, summary(warm)),
        "first_blocked_s": of_saves("blocked_s", warmup=True),
        "first_durable_s": None if in_memory else of_saves("durable_s", warmup=True),
        "step_interference": of_saves("interference"),
        "written_bytes": [rank["saves"][-1]["written_bytes"] for rank in saves[0]] if saves else [],
        "num_files": first["saves"][-1]["num_files"] if first else None,
        "engine_used": first.get("engine_used"),
        "client": first.get("client"),
        "asynchronous": first.get("asynchronous"),
        "verified": loaded and not (name in samples.failed or failures),
        "operations": _operations(samples, name, totals, {SAVE: (durable, moving), LOAD_COLD: _cold(kinds)})
        | _loads_beside(kinds.get(LOAD_BESIDE, []), totals, sum(attempts.get(SAVE, {}).values())),
        "attempts": attempts,
        "not_measured": _not_measured(kinds),
        "failed": samples.failed.get(name, next((errors[0] for errors in failures.values()), None)),
    }


def _cold(kinds: dict[str, list[Ranks]]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """(seconds of cold loads, seconds of them in which bytes were transferred)."""
    found = (summary(_loads(kinds.get(LOAD_COLD, []), COLD, again=False, field=f)) for f in ("load_s", "moving_s"))
    return next(found), next(found)


def _operations(
    samples: Samples,
    name: str,
    totals: Totals,
    durations: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]],
) -> dict[str, Any]:
    """For saves and cold loads: what the benchmark of the S3 connector for PyTorch reports, and more.

    MiB/s: bytes of all ranks' tensors divided by the duration. Durations exclude set-up; `processing_s` includes it,
    and for saves the warm-up; it is None for saves with readers. Requests: of all ranks; `success_ratio`: share of
    requests that needed no retry. `coordination_s`: the duration minus the longest time in which a rank transferred its
    own bytes.
    """
    found: dict[str, Any] = {}
    for kind, (duration, moving) in durations.items():
        if duration is None or moving is None:
            continue
        seconds, counts = duration["samples"], _requests(samples.engines[name].get(kind, []), kind)
        total_bytes = totals.saved if kind == SAVE else totals.loaded
        sent = sum(requests for requests, _ in counts) if counts else None
        failed = sum(retries for _, retries in counts)
        found["save" if kind == SAVE else "load"] = {
            "throughput_MiBps": summary([total_bytes / 2**20 / took for took in seconds]),
            "duration_s": duration,
            "processing_s": summary(samples.tasks_s.get(name, {}).get(kind, [])),
            "coordination_s": summary([took - own for took, own in zip(seconds, moving["samples"], strict=True)]),
            "requests": sent / len(counts) if sent is not None else None,
            "requests_per_s": sent / sum(seconds) if sent is not None else None,
            "success_ratio": 1 - failed / sent if sent else None,
        }
    return found


def _loads_beside(readers: list[Ranks], totals: Totals, saves: int) -> dict[str, Any]:
    """As `_operations`, of the loads that readers did beside `saves` saves, failed ones included.

    A rate is that of all at once: of as many readers as have loaded beside a save, on average.
    """
    # [reader and save][load][rank]
    loads = [each for ranks in readers for each in zip(*(rank["loads"] for rank in ranks), strict=True)]
    if not loads:
        return {}
    seconds = [max(load["load_s"] for load in each) for each in loads]
    counted = [load for each in loads for load in each if load["requests"] is not None]
    sent = sum(load["requests"] for load in counted)
    known = len(counted) == sum(map(len, loads))
    own = [max(load["moving_s"] for load in each) for each in loads]
    at_once = sum(bool(ranks[0]["loads"]) for ranks in readers) / saves
    return {
        LOAD_BESIDE: {
            "throughput_MiBps": summary([totals.loaded / 2**20 / took for took in seconds]),
            "duration_s": summary(seconds),
            "processing_s": None,
            "coordination_s": summary([took - moving for took, moving in zip(seconds, own, strict=True)]),
            "requests": sent / len(loads) if known else None,
            "requests_per_s": at_once * sent / sum(seconds) if known else None,
            "success_ratio": 1 - sum(load["retries"] for load in counted) / sent if known and sent else None,
        }
    }


def _attempts(samples: Samples, name: str) -> dict[str, dict[str, int]]:
    """Of each kind of task of an engine: how many were done, and how many failed. One that was skipped is neither."""
    kinds, failures = samples.engines[name], samples.failures.get(name, {})
    return {
        kind: {
            "done": sum(not any(rank.get("skipped") for rank in ranks) for ranks in kinds.get(kind, [])),
            "failed": len(failures.get(kind, [])),
        }
        for kind in dict.fromkeys([*kinds, *failures])
    }


def _requests(repeats: list[Ranks], kind: str) -> list[tuple[int, int]]:
    """(requests, retries) of all ranks in each repeat; empty if they are not counted."""
    found = []
    for ranks in repeats:
        mine = [rank["saves"][-1] if kind == SAVE else rank["loads"][0] for rank in ranks if rank.get("loads") != []]
        if not mine or any(one["requests"] is None for one in mine):
            return []
        found.append((sum(one["requests"] for one in mine), sum(one["retries"] for one in mine)))
    return found


def _save(rank: dict[str, Any], warmup: bool) -> dict[str, Any] | None:
    """The measured (last) save of a repeat, or the first of its warm-up."""
    chosen = [save for save in rank["saves"] if save["warmup"] == warmup]
    return (chosen[0] if warmup else chosen[-1]) if chosen else None


def _slowest(repeats: list[list[dict[str, Any] | None]], field: str) -> dict[str, Any] | None:
    """The largest value of `field` over the ranks, for each repeat in which all have one."""
    values: list[float] = []
    for ranks in repeats:
        known = [rank[field] for rank in ranks if rank is not None and rank[field] is not None]
        if known and len(known) == len(ranks):
            values.append(max(known))
    return summary(values)


def _loads(repeats: list[Ranks], cache: str, *, again: bool, field: str = "load_s") -> list[float]:
    """The durations `field` of the loads that found the page cache in the state `cache` on every rank."""
    found = []
    for ranks in repeats:
        mine = [load for rank in ranks for load in rank["loads"] if load["again"] == again]
        if mine and all(load["cache"] == cache for load in mine):
            found.append(max(load[field] for load in mine))
    return found


def _not_measured(kinds: dict[str, list[Ranks]]) -> dict[str, str]:
    """Name of a figure -> why loads are missing in it."""
    found: dict[str, str] = {}
    for kind, figure, wanted in ((LOAD_COLD, "load_cold_s", COLD), (LOAD_WARM, "load_warm_s", WARM)):
        for rank in (rank for ranks in kinds.get(kind, []) for rank in ranks):
            if rank["skipped"]:
                found[figure] = rank["skipped"]
            for load in rank["loads"]:
                if load["cache"] != wanted:
                    found[figure] = f"the page cache could not be made {wanted}: it was {load['cache']}"
    return found


def throughput(total_bytes: int, seconds: dict[str, Any] | None) -> float | None:
    """GB/s, GB of 1e9 bytes, at the median."""
    return total_bytes / seconds["median"] / 1e9 if seconds else None


def storage_figures(samples: Samples) -> dict[str, Any]:
    """Per kind the best throughput of its combinations of threads and block, each by its median; GB/s of 1e9."""
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for kind in STORAGE_KINDS:
        found = {name: _combination(samples.storage, kind, name) for name in _names(samples.storage, kind)}
        best = max(found, key=lambda name: found[name]["gbps"], default=None)
        figures[f"{kind}_gbps"] = found[best]["gbps"] if best else None
        details[kind] = {"best": best, "combinations": found}
    first = samples.storage[0] if samples.storage else []
    return figures | {"bytes_per_rank": first[0]["bytes"] if first else 0, "details": details}


def _names(repeats: list[Ranks], kind: str) -> list[str]:
    return list(repeats[0][0]["seconds"][kind]) if repeats else []


def _combination(repeats: list[Ranks], kind: str, name: str) -> dict[str, Any]:
    seconds = [
        max(rank["seconds"][kind][name] for rank in ranks)
        for ranks in repeats
        if all(name in rank["seconds"][kind] for rank in ranks)
    ]
    total = sum(rank["bytes"] for rank in repeats[0])
    return {"gbps": total / statistics.median(seconds) / 1e9, "seconds": summary(seconds)}
