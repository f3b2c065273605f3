"""pretrain_gpt.py with every collective and message of torch.distributed counted.

Run in its place by the harness. Each rank leaves {name: calls} as JSON in `$COUNTS_DIR/rank_N.json`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

ROOT = Path(__file__).resolve().parents[2]
COLLECTIVE = re.compile("gather|reduce|broadcast|barrier|scatter|all_?to_?all|send|recv")


def count_calls(counts: Counter[str]) -> None:
    """Count each call of a ProcessGroup method: everything in torch.distributed ends in one of them."""

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(*args, **kwargs)

        return call

    for name in filter(COLLECTIVE.search, dir(ProcessGroup)):
        setattr(ProcessGroup, name, counted(name, getattr(ProcessGroup, name)))


def main() -> None:
    counts: Counter[str] = Counter()
    count_calls(counts)
    try:
        runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
    finally:
        path = Path(os.environ["COUNTS_DIR"]) / f"rank_{os.environ['RANK']}.json"
        path.write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
