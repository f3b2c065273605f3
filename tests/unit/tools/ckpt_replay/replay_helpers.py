"""A request to the replay, samples of it, and the figures that the replay makes of them."""

from __future__ import annotations

from typing import Any

from tools.ckpt_replay.figures import analyse
from tools.ckpt_replay.options import parse_arguments, request_from
from tools.ckpt_replay.plan import STORAGE_KINDS, Request, Share
from tools.ckpt_replay.replay import Samples
from tools.common.page_cache import COLD, WARM

MIB = 1 << 20


def request(**changes: Any) -> Request:
    share = Share("70b", (8, 8, 1), (0, 1), **changes)
    line = "--model 70b --tp 8 --pp 8 --engine torch,lazy --dir . --ranks 0-1 --steps-between 6 --step-seconds 3"
    found = request_from(parse_arguments(line.split()), None)
    return Request(**vars(found) | {"share": share, "repeat": 5, "cold": True})


def save(durable: float, blocked: float, warmup: bool = False) -> dict[str, Any]:
    return {
        "warmup": warmup, "blocked_s": blocked, "durable_s": durable, "peak_rss_bytes": MIB, "kept_rss_bytes": 0,
        "children_peak_bytes": 0, "peak_is_exact": True, "written_bytes": 1000, "num_files": 1, "interference": 0.02,
        "moving_s": durable - 0.5, "requests": 10, "retries": 1,
    }  # fmt: skip


def load(seconds: float, cache: str, again: bool = False) -> dict[str, Any]:
    return {
        "again": again, "load_s": seconds, "first_write_s": 2 * seconds, "cache": cache, "resident_share": 0.0,
        "moving_s": seconds, "requests": None, "retries": None,
    }  # fmt: skip


def samples(lazy_durable: float = 1.0, cold_cache: str = COLD) -> Samples:
    """Five repeats of two ranks of 10^9 bytes; rank 1 is slower by a tenth."""
    found = Samples(engines={"torch": {}, "lazy": {}})
    for name, durable, blocked, cold in (("torch", 8.0, 8.0, 4.0), ("lazy", lazy_durable, 0.01, 1.0)):
        for _ in range(5):
            slower = (1.0, 1.1)
            saved = [
                {
                    "saves": [save(9 * f, 9 * f, True), save(durable * f, blocked * f)], "state_bytes": 10**9,
                    "host": "node0", "full_state_bytes": 2 * 10**9, "engine_used": name, "asynchronous": name == "lazy",
                }
                for f in slower
            ]  # fmt: skip
            cold_loads = [{"loads": [load(cold * f, cold_cache)], "skipped": None} for f in slower]
            warm_loads = [
                {"loads": [load(0.5 * cold, WARM), load(0.2, WARM, again=True)], "skipped": None} for _ in slower
            ]
            for kind, ranks in (("save", saved), ("load_cold", cold_loads), ("load_warm", warm_loads)):
                found.engines[name].setdefault(kind, []).append(ranks)
    seconds = {kind: {"1x8": 2.0, "4x8": 1.0} for kind in STORAGE_KINDS}
    found.storage = [[{"seconds": seconds, "bytes": 10**9}] * 2] * 5
    return found


def figures(found: Samples, **share: Any) -> dict[str, Any]:
    made = analyse(request(**share), found, {}, {"processors": 4, "filesystem": "ext4"})
    return made | {"directory": "/scratch"}
