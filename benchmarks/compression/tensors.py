"""The bytes of each kind of tensor of a checkpoint in lazy's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common.ranks import MeasurementError
from benchmarks.compression.planes import Bytes
from megatron.checkpointing.engines.lazy.header import METADATA, SUFFIX, entries_of, read_header

_WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}
WEIGHTS = "weights"


@dataclass(frozen=True)
class Extent:
    """Whole values in a file."""

    path: Path
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Kind:
    """All tensors of one kind: weights, master, exp_avg, exp_avg_sq. `width`: bytes of a value."""

    name: str
    width: int
    extents: tuple[Extent, ...]

    @property
    def num_bytes(self) -> int:
        """Of all its tensors."""
        return sum(one.num_bytes for one in self.extents)


def kinds_of(checkpoint: Path) -> dict[str, Kind]:
    """By name. Raises MeasurementError if `checkpoint` is no directory with files of engine lazy."""
    found: dict[str, tuple[int, list[Extent]]] = {}
    for path in sorted(checkpoint.glob(f"rank_*{SUFFIX}")):
        header = read_header(path)
        entries = entries_of(header)
        described = json.loads(entries.pop(METADATA)["tensors"])
        for name, entry in entries.items():
            placement = described[name].get("placement")
            if placement is None or entry["dtype"] not in _WIDTHS:
                continue
            start, stop = entry["data_offsets"]
            width = _WIDTHS[entry["dtype"]]
            extents = found.setdefault(placement.get("kind", WEIGHTS), (width, []))[1]
            extents.append(Extent(path, len(header) + start, stop - start))
    if not found:
        raise MeasurementError(
            f"{checkpoint}: no tensors in files of engine lazy; give a directory global_stepN of one"
        )
    return {name: Kind(name, width, tuple(extents)) for name, (width, extents) in found.items()}


def sample(kind: Kind, block: int, limit: float) -> list[Extent]:
    """Blocks of at most `block` bytes, together at most about `limit`, evenly spread over all of the kind."""
    blocks = [
        Extent(one.path, one.start + at, min(block, one.num_bytes - at))
        for one in kind.extents
        for at in range(0, one.num_bytes, block)
    ]
    most = max(1, round(len(blocks) * min(1.0, limit / kind.num_bytes)))
    return [blocks[number * len(blocks) // most] for number in range(most)]


def read(extents: Sequence[Extent], instead_of: Path | None = None) -> list[Bytes]:
    """Their bytes; those of the files of the same names in the directory `instead_of` if that is given."""
    found = []
    for one in extents:
        path = one.path if instead_of is None else instead_of / one.path.name
        found.append(np.fromfile(path, np.uint8, one.num_bytes, offset=one.start))
    return found
