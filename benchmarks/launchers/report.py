"""The measurement as a table for people and as JSON for programs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from benchmarks.launchers.variants import BASELINE, PP, TP, VARIANTS, Setting, restarts_in_place

# restart_s of the demonstration over that of the baseline, at most: of restarts in place, and of the others
_TARGET_IN_PLACE, _TARGET = 0.03, 0.7


def analyse(samples: Mapping[str, Sequence[float]], setting: Setting, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Medians, spreads and ratios to the baseline, and every sample, in seconds, by round."""
    variants: dict[str, dict[str, Any]] = {
        name: {
            "what": VARIANTS[name],
            "median_s": statistics.median(values),
            "min_s": min(values),
            "max_s": max(values),
            "samples_s": list(values),
        }
        for name, values in samples.items()
    }
    base = variants[BASELINE]["median_s"] if BASELINE in variants else None
    for name, variant in variants.items():
        variant["ratio"] = None if base is None else variant["median_s"] / base
        variant["target"] = None if name == BASELINE else _TARGET_IN_PLACE if restarts_in_place(name) else _TARGET
    return {
        "machine": dict(machine) | {name: metadata.version(name) for name in ("torch", "deepspeed")},
        "layout": {"tp": TP, "pp": PP, "dp": setting.dp},
        "engine": setting.engine,
        "dtype": setting.dtype,
        "rounds": max(map(len, samples.values())),
        "variants": variants,
    }


def render(found: Mapping[str, Any]) -> str:
    """The table."""
    layout = found["layout"]
    ranks = layout["tp"] * layout["pp"] * layout["dp"]
    lines = [
        f"restart_s: SIGKILL of all {ranks} ranks (TP{layout['tp']} PP{layout['pp']} DP{layout['dp']}, "
        f"{found['dtype']}) to the end of the first step after it; {found['rounds']} interleaved rounds",
        f"  {'':14} {'median':>8} {'min':>8} {'max':>8} {'ratio':>6}",
    ]
    for name, variant in found["variants"].items():
        ratio = "-" if variant["ratio"] is None else f"{variant['ratio']:.3f}"
        times = " ".join(f"{variant[key]:7.2f}s" for key in ("median_s", "min_s", "max_s"))
        verdict = ""
        if variant["ratio"] is not None and variant["target"] is not None:
            verdict = f"  target {variant['target']}: {'met' if variant['ratio'] <= variant['target'] else 'MISSED'}"
        lines.append(f"  {name:14} {times} {ratio:>6}{verdict}")
    lines += [f"  {name}: {variant['what']}" for name, variant in found["variants"].items()]
    return "\n".join(lines)
