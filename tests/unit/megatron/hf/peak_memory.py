"""How much memory conversions take, in a process that has done nothing else: `... DIRECTORY ENGINE [ENGINE ...]`.

In DIRECTORY/ENGINE are two checkpoints, small and large. Each is exported, and the exports of the first engine are
imported again. Of the large ones the growth of the resident memory is printed as JSON: the small ones have imported and
allocated before what is needed once.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.hf.exporting import export
from megatron.hf.importing import import_model

SIZES = ("small", "large")


def peak_growth(function: Callable[..., Any], *arguments: Any) -> int:
    """Bytes by which the resident memory of this process grows at most during a call."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free, and would be used
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident now
    before = _peak()
    function(*arguments)
    return _peak() - before


def _peak() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def main(directory: Path, engines: list[str]) -> dict[str, int]:
    """Bytes of the export of each engine, and of the import."""
    grown = {}
    for engine in engines:
        for size in SIZES:
            checkpoint, out = directory / engine / size, directory / engine / f"{size}_hf"
            grown[engine] = peak_growth(export, checkpoint, out, None, 1 << 30)
    for size in SIZES:
        exported = directory / engines[0] / f"{size}_hf"
        grown["import"] = peak_growth(import_model, exported, directory / f"{size}_imported", None, 128)
    return grown


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])))
