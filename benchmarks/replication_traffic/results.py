"""What GEMINI's artifact writes of its experiment: results.json, and the paper's figures 7 and 8.

Its script reads step times from a log, sums the spans that its profile found idle, and computes how long copies take
and what remains idle beside them. Here all of these are measured: `step_times` by variant (there one list: 8 steps of
warm-up, 10 without copies, the others with them), `checkpoint_time` and the idle times as medians.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.replication_traffic.figures import Figures
from benchmarks.replication_traffic.plan import INTERLEAVE, NAIVE, NONE, VARIANTS

_MODEL = "GPT"  # the only one; the artifact has an entry for each


def write_results(found: Figures, directory: Path) -> None:
    """Write results.json and both figures to `directory`, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps({_MODEL: results_of(found)}, indent=4) + "\n")
    steps = {name: [value for block in one.steps for value in block] for name, one in found.variants.items()}
    _bars(steps, "Iteration time (s)", directory / "Figure_7.svg")
    _bars({name: one.idle for name, one in found.variants.items()}, "Network idle time (s)", directory / "Figure_8.svg")


def results_of(found: Figures) -> dict[str, Any]:
    """`checkpoint_size`: MB (1e6 bytes) of a rank's copy. Times in s; None: no such step was measured."""
    variants = found.variants
    return {
        "checkpoint_size": found.copy_bytes / 1e6,
        "step_times": {name: [round(s, 3) for block in variants[name].steps for s in block] for name in VARIANTS},
        "idle_time": _median(variants[NONE].idle),
        "checkpoint_time": _median(variants[INTERLEAVE].copied),
        "gemini_idle_time": _median(variants[INTERLEAVE].idle),
        "naive_idle_time": _median(variants[NAIVE].idle),
    }


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def _bars(samples: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """A bar for each variant that has samples: the median, with the middle half of its steps."""
    from matplotlib.figure import Figure

    shown = {name: sorted(values) for name, values in samples.items() if values}
    medians = [statistics.median(values) for values in shown.values()]
    quarters = [statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3 for values in shown.values()]
    spread = [
        [middle - low for middle, (low, _, _) in zip(medians, quarters, strict=True)],
        [high - middle for middle, (_, _, high) in zip(medians, quarters, strict=True)],
    ]
    figure = Figure(figsize=(4, 3), layout="constrained")
    axes = figure.subplots()
    axes.bar(list(shown), medians, yerr=spread, capsize=4)
    axes.set_ylabel(title)
    figure.savefig(path)
