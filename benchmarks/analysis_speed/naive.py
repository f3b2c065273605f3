"""The summary as one would write it with pandas in an afternoon: what the analysis is compared with.

`python -m benchmarks.analysis_speed.naive LOGDIR` prints it as JSON: of every save the ranks' wall time, bytes,
blocked time, and of every phase and detail the slowest, median and lowest rank. Only saves, and only sound logs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_KEY = ["cycle", "tag"]
_OPERATION = ["cycle", "rank", "op"]


def summary(directory: Path) -> list[dict[str, Any]]:
    """One entry per save, in the order of cycle and step."""
    import pandas as pd

    frames = [pd.read_json(path, lines=True) for path in sorted(directory.glob("rank_*.jsonl"))]
    for frame in frames:  # the first record says whose file it is
        frame["cycle"], frame["rank"] = frame["cycle"].iloc[0], frame["rank"].iloc[0]
    records = pd.concat(frames, ignore_index=True)
    begins = records[(records["type"] == "operation_begin") & (records["operation"] == "save")]
    begins = begins[[*_OPERATION, "tag", "start_ns"]]
    spans = records[records["type"].isna()].drop(columns="tag").merge(begins[[*_OPERATION, "tag"]], on=_OPERATION)
    ends = records[records["type"] == "operation_end"].drop(columns=["tag", "start_ns"]).merge(begins, on=_OPERATION)
    ends["wall"] = (ends["end_ns"] - ends["start_ns"]) / 1e9
    spans["seconds"] = spans["duration_ns"].fillna(spans["end_ns"] - spans["start_ns"]) / 1e9
    whole = spans.groupby([*_KEY, "phase", "rank"])["seconds"].sum()
    parts = spans.groupby([*_KEY, "phase", "detail", "rank"])["seconds"].sum()
    blocking = spans[spans["blocking"].isna()] if "blocking" in spans else spans  # false is all that is written
    blocked = blocking.groupby([*_KEY, "rank"])[["start_ns", "end_ns"]].apply(_union)
    saves = []
    for (cycle, tag), rows in ends.groupby(_KEY):
        ranks = rows["rank"]
        saves.append(
            {
                "cycle": int(cycle),
                "tag": tag,
                "bytes": int(rows["bytes"].sum()),
                "wall": _spread(rows.set_index("rank")["wall"], ranks),
                "blocked_s": float(blocked[cycle, tag].max()),
                "phases": {
                    phase: _spread(values.droplevel([0, 1, 2]), ranks)
                    for phase, values in whole.loc[[cycle], [tag]].groupby("phase")
                },
                "details": {
                    f"{phase}/{detail}": _spread(values.droplevel([0, 1, 2, 3]), ranks)
                    for (phase, detail), values in parts.loc[[cycle], [tag]].groupby(["phase", "detail"])
                },
            }
        )
    return sorted(saves, key=lambda save: (save["cycle"], int(save["tag"].removeprefix("global_step"))))


def _union(spans: Any) -> float:
    """Seconds that at least one of the spans covers."""
    total, until = 0, 0
    for start, end in sorted(zip(spans["start_ns"], spans["end_ns"], strict=True)):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total / 1e9


def _spread(values: Any, ranks: Any) -> dict[str, float]:
    every = values.reindex(ranks, fill_value=0.0)
    return {"max_s": float(every.max()), "median_s": float(every.median()), "min_s": float(every.min())}


if __name__ == "__main__":
    print(json.dumps(summary(Path(sys.argv[1]))))
