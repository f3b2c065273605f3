"""Touches memory, so that a virtual machine that gets its memory as it is touched has it before anything is timed.

A thread for each processor writes to the pages of its share of a GiB. OUTPUT is written anew after each GiB, and the
process asks the kernel to be ended before any other if there is too little memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.fileio.host_memory import available_memory
from tests.gpu.files import write_json

GIB = 1 << 30
THREADS = os.cpu_count() or 1
SPARED_BYTES = 4 * GIB  # of the memory that the kernel calls available


def touch(wanted: int, limit_s: float, output: Path) -> dict[str, Any]:
    """Touch `wanted` bytes, release them, and touch one GiB of them again.

    Fewer if there is less memory (SPARED_BYTES of it stay), or if `limit_s` is over before. What is returned is what
    OUTPUT has.
    """
    began = time.monotonic()
    told: dict[str, Any] = {"wanted_bytes": wanted, "available_before_bytes": available_memory(), "seconds": []}
    told |= {"touched_bytes": 0, "first_GBps": None, "again_GBps": None, "available_after_bytes": None}
    held = []
    with ThreadPoolExecutor(THREADS) as pool:
        while (
            told["touched_bytes"] < wanted and available_memory() > SPARED_BYTES and time.monotonic() - began < limit_s
        ):
            piece = mmap.mmap(-1, min(GIB, wanted - told["touched_bytes"]))
            held.append(piece)
            told["seconds"].append(round(_fill(piece, pool), 4))
            told["touched_bytes"] += len(piece)
            told["first_GBps"] = told["touched_bytes"] / sum(told["seconds"]) / 1e9
            write_json(output, told)
        while held:
            held.pop().close()
        again = mmap.mmap(-1, min(GIB, wanted))
        told["again_GBps"] = len(again) / _fill(again, pool) / 1e9
    told["available_after_bytes"] = available_memory()
    write_json(output, told)
    return told


def _fill(piece: mmap.mmap, pool: ThreadPoolExecutor) -> float:
    """Seconds to write to all of it."""
    share = -(-len(piece) // (THREADS * mmap.PAGESIZE)) * mmap.PAGESIZE
    view = (ctypes.c_char * len(piece)).from_buffer(piece)
    address = ctypes.addressof(view)
    began = time.perf_counter()
    # ctypes releases the interpreter's lock during the call
    list(pool.map(lambda at: ctypes.memset(address + at, 1, min(share, len(piece) - at)), range(0, len(piece), share)))
    seconds = time.perf_counter() - began
    del view  # else the mapping cannot be closed
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    touch(given.bytes, given.seconds, given.output)
