"""pretrain_gpt.py in which each rank counts its connections before and after its first step.

`$OUT/rank_N.json`: [TCP connections before, after]. Each is one descriptor of this process.
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import psutil
from deepspeed.runtime.pipe.engine import PipelineEngine

ROOT = Path(__file__).resolve().parents[3]


def connections() -> int:
    """Established TCP connections of this process, whichever side opened them."""
    found = psutil.Process().net_connections(kind="tcp")
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in found)


if __name__ == "__main__":
    train_batch = PipelineEngine.train_batch
    counted: list[int] = []

    def first_is_counted(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if counted:
            return train_batch(engine, *args, **kwargs)
        counted.append(connections())
        loss = train_batch(engine, *args, **kwargs)
        counted.append(connections())
        (Path(os.environ["OUT"]) / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(counted))
        return loss

    setattr(PipelineEngine, "train_batch", first_is_counted)  # noqa: B010  (types refuse an assignment)
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
