"""The trained model, from the command line and the runtime records."""

from __future__ import annotations

import polars as pl

from ..ingest.load import Trace
from .frame import Frames

# Flag of the training's command line -> how the report calls it.
_SHAPE = {
    "--num-layers": "layers",
    "--hidden-size": "hidden size",
    "--num-attention-heads": "attention heads",
    "--seq-length": "sequence length",
    "--micro-batch-size": "micro batch",
    "--global-batch-size": "global batch",
}


def describe_model(trace: Trace, frames: Frames) -> str | None:
    """The model in a line, such as "1.2 M parameters; layers 4, hidden size 128"; None if nothing is recorded.

    Parameters are the sum over the ranks of data-parallel rank 0 in the newest cycle, of those with parts of the same
    sequences over the first, each counting what it holds: what tensor parallelism replicates counts once per rank.
    """
    parts = [part for part in (_parameters(trace, frames), _shape(trace)) if part]
    return "; ".join(parts) if parts else None


def _parameters(trace: Trace, frames: Frames) -> str | None:
    newest = max(process["cycle"] for process in trace.ranks)
    first = [p["rank"] for p in trace.ranks if p["cycle"] == newest and p["dp"] == p.get("cp", 0) == 0]
    held = frames.runtimes.filter((pl.col("cycle") == newest) & pl.col("rank").is_in(first))["parameters"]
    if held.is_empty() or held.null_count():
        return None
    total = int(held.sum())
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if total >= scale:
            return f"{total / scale:.3g} {unit} parameters"
    return f"{total} parameters"


def _shape(trace: Trace) -> str | None:
    """Sizes out of the command line of the lowest rank of the newest cycle."""
    process = max(trace.ranks, key=lambda p: (p["cycle"], -p["rank"]))
    arguments = [str(word) for word in process["argv"]]
    found = []
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name in _SHAPE:
            found.append(f"{_SHAPE[name]} {value or following}")
    return ", ".join(found) if found else None
