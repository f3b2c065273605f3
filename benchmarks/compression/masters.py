"""How many weights are nothing but their master weights, rounded: those need not be stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron.checkpointing.engines.lazy.header import METADATA, SUFFIX, entries_of, read_header


def rounded(master: np.ndarray[Any, np.dtype[np.uint32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The bits of bf16 of the bits of finite fp32 values, rounded to the nearest, ties to even."""
    return ((master + np.uint32(0x7FFF) + ((master >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )


def share_of_rounded(checkpoint: Path) -> float | None:
    """Of the bf16 weights that have a master weight: those that equal it, rounded; None if there are none."""
    weights: dict[str, np.ndarray[Any, np.dtype[np.uint16]]] = {}
    masters: list[tuple[dict[str, Any], np.memmap[Any, np.dtype[np.uint32]]]] = []
    for path in sorted(checkpoint.glob(f"rank_*{SUFFIX}")):
        header = read_header(path)
        entries = entries_of(header)
        described = json.loads(entries.pop(METADATA)["tensors"])
        for name, entry in entries.items():
            placement, (start, stop) = described[name].get("placement"), entry["data_offsets"]
            at = len(header) + start
            if placement is None:
                continue
            if placement.get("kind") == "master":
                values = np.memmap(path, np.uint32, "r", at, ((stop - start) // 4,))
                masters += [(fragment, values) for fragment in placement["fragments"]]
            elif entry["dtype"] == "BF16":
                weights[_identity(placement)] = np.memmap(path, np.uint16, "r", at, ((stop - start) // 2,))
    equal = total = 0
    for fragment, values in masters:
        weight = weights.get(_identity(fragment))
        if weight is not None:
            start, offset, numel = fragment["start"], fragment["offset"], fragment["numel"]
            equal += int((weight[start : start + numel] == rounded(values[offset : offset + numel])).sum())
            total += numel
    return equal / total if total else None


def _identity(placement: dict[str, Any]) -> str:
    return json.dumps([placement["name"], placement["ranges"]])
