"""The runs that the tests of the trace look at, and what of them is on record and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.checkpointing.store import naming as names
from megatron.parallel.topology import Layout
from tests.dist.harness import LLAMA_STYLE
from tests.dist.tiny_runs import MODEL, NO_DROPOUT, TRAINING

PAIR = Layout(tp=2, pp=1, dp=1)
RANKS = range(PAIR.world_size)
# 400 MB of checkpoint per rank in 13 files: one save takes about a second.
BIG = [
    "--num-layers", "8", "--hidden-size", "768", "--num-attention-heads", "8", "--seq-length", "32", "--bf16",
    "--micro-batch-size", "1", "--global-batch-size", "1", "--lr", "1e-3", "--log-interval", "1",
    *LLAMA_STYLE, *NO_DROPOUT,
]  # fmt: skip
SMALL = [*MODEL, *LLAMA_STYLE, *TRAINING, *NO_DROPOUT, "--bf16", "--train-iters", "4"]
ONE_ITERATION = ["--exit-interval", "1"]


def bytes_by_file(trace: list[dict[str, Any]], phase: str, detail: str) -> dict[str, int]:
    """File -> bytes that spans of this phase moved. A file that two spans name is an error."""
    found: dict[str, int] = {}
    for r in trace:
        if r["type"] == "span" and (r["phase"], r.get("detail")) == (phase, detail):
            assert r["file"] not in found, r["file"]
            found[r["file"]] = r["bytes"]
    return found


def checkpoint_sizes(directory: Path) -> dict[str, int]:
    """Size on disk of every file that ranks write; the manifest is the commit's and in no rank's bytes."""
    return {p.name: p.stat().st_size for p in directory.iterdir() if p.name != names.MANIFEST}
