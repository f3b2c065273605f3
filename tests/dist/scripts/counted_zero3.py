"""The benchmark's training by DeepSpeed's ZeRO-3, with the bytes of its collectives counted.

Each rank leaves {function: bytes that it passed, whole} as JSON in `$COUNTS_DIR/rank_N.json`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed

from benchmarks.replication_traffic.zero3 import main


def count_bytes(counts: Counter[str]) -> None:
    """Of what all ranks have together: the first argument of a gather, the second one of a reduce-scatter."""

    def counted(name: str, position: int, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            whole = args[position] if len(args) > position else kwargs[("output_tensor", "input_tensor")[position]]
            counts[name] += whole.numel() * whole.element_size()
            return method(*args, **kwargs)

        return call

    for position, name in enumerate(("all_gather_into_tensor", "reduce_scatter_tensor")):
        setattr(torch.distributed, name, counted(name, position, getattr(torch.distributed, name)))


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    count_bytes(counts)
    status = main()
    (Path(os.environ["COUNTS_DIR"]) / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(counts))
    raise SystemExit(status)
