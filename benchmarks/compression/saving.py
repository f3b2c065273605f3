"""Real time of a save through a link of limited speed, with threads that compress, and of a step beside it."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.common.rounds import in_turn
from benchmarks.compression.break_even import LINKS_MBPS, STORED
from benchmarks.compression.planes import Bytes
from benchmarks.compression.ways import WAYS
from restart_trace.clock import now_ns

_SIDE = 512  # of the matrices of a step
_THREADS = 4  # those of engine lazy


class Link:
    """Takes bytes at `MBps`, in the order in which they come, and discards them; who sends need not wait for others."""

    def __init__(self, MBps: float) -> None:
        self._ns_per_byte = 1e3 / MBps
        self._lock = threading.Lock()
        self._free_at = 0.0

    def send(self, num_bytes: int) -> None:
        """Return when they have been taken."""
        with self._lock:
            self._free_at = taken_at = max(self._free_at, now_ns()) + num_bytes * self._ns_per_byte
        time.sleep(max(0.0, taken_at - now_ns()) / 1e9)


def save(
    blocks: Mapping[str, Sequence[Bytes]], widths: Mapping[str, int], ways: Mapping[str, str], link: Link, threads: int
) -> float:
    """Seconds until all blocks have been taken, those of each kind compressed its way, by so many threads."""

    def one(kind: str, block: Bytes) -> None:
        way = ways[kind]
        parts = [block] if way == STORED else WAYS[way].pack(block, None, widths[kind])
        link.send(sum(len(part) for part in parts))

    began = now_ns()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda work: one(*work), [(kind, block) for kind, found in blocks.items() for block in found]))
    return (now_ns() - began) / 1e9


@contextmanager
def steps(threads: int) -> Iterator[list[int]]:
    """Matrix products on `threads` threads until the block ends; what is yielded counts them."""
    stop, counts = threading.Event(), [0] * threads

    def work(number: int) -> None:
        matrix = np.ones((_SIDE, _SIDE), np.float32)
        while not stop.is_set():
            np.dot(matrix, matrix)
            counts[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield counts
    finally:
        stop.set()
        for worker in workers:
            worker.join()


def saved(
    blocks: Mapping[str, Sequence[Bytes]], widths: Mapping[str, int], rows: Sequence[Mapping[str, Any]], rounds: int
) -> list[dict[str, Any]]:
    """Saves over each link, compressed as the row for one core says or stored, by four threads, alone or not.

    Beside: products on as many threads as there are cores. `products_per_s` is empty without them.
    """
    ways = {row["link"]: row["ways"] for row in rows if row["cores"] == 1}
    plain = dict.fromkeys(blocks, STORED)
    cases = {
        repr(case): case for case in itertools.product(LINKS_MBPS, (False, True), (False, True))
    }  # link, beside products, compressed
    found = {name: {"seconds": [], "products_per_s": []} for name in cases}
    for _, name in in_turn(list(cases), rounds):
        link, beside, packed = cases[name]
        with steps((os.cpu_count() or 1) if beside else 0) as counts:
            seconds = save(blocks, widths, ways[link] if packed else plain, Link(LINKS_MBPS[link]), _THREADS)
            products = sum(counts)
        found[name]["seconds"].append(seconds)
        found[name]["products_per_s"] += [products / seconds] if beside else []
    return [
        {"link": link, "packed": packed, **found[repr((link, beside, packed))]}
        for link, beside, packed in cases.values()
    ]
