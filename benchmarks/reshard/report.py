"""The measurement as a table for people and as JSON for programs."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from benchmarks.common.samples import ratio_of_medians
from benchmarks.reshard.launch import Measurement
from benchmarks.reshard.plan import PLAIN, SOURCE, VARIANTS
from tools.common.samples import interquartile_range

COMPARISONS = (("direct torch", "plain torch"), ("direct lazy", "plain lazy"))  # (numerator, denominator)
TARGET = 1.3  # of these ratios, at most


def analyse(measurement: Measurement) -> dict[str, Any]:
    """All figures of one layout, and every raw sample."""
    seconds = {variant: measurement.seconds(variant) for variant in VARIANTS}
    return {
        "layout": list(measurement.layout),
        **measurement.facts,
        "rounds": len(next(iter(seconds.values()))),
        "page_cache": _page_cache(measurement),
        "median_s": {variant: statistics.median(values) for variant, values in seconds.items()},
        "iqr_s": {variant: interquartile_range(values) for variant, values in seconds.items()},
        "ratios": [_ratio(seconds, *comparison) for comparison in COMPARISONS],
        "read_per_byte": {variant: _read_per_byte(measurement, variant) for variant in VARIANTS},
        "phases_s": {variant: _phases(measurement, variant) for variant in VARIANTS},
        "seconds": seconds,
        "samples": measurement.samples,
    }


def _ratio(seconds: dict[str, list[float]], above: str, below: str) -> dict[str, Any]:
    found = ratio_of_medians(seconds[above], [seconds[below]])
    return {"of": above, "to": below, "ratio": asdict(found), "target": TARGET, "met": found.value <= TARGET}


def _page_cache(measurement: Measurement) -> str:
    """In what state the loads found their files: as was seen, not as was asked."""
    states = {
        rank["page_cache"]
        for rounds in measurement.samples.values()
        for ranks in rounds
        for rank in ranks
        if rank["page_cache"] is not None
    }
    return states.pop() if len(states) == 1 else "partly warm"


def _read_per_byte(measurement: Measurement, variant: str) -> float:
    """Bytes that all ranks read, over those of the checkpoint."""
    way, engine = VARIANTS[variant]
    sizes = measurement.facts["own_bytes" if way == PLAIN else "source_bytes"]
    read = sum(rank["bytes_read"] for rank in measurement.samples[variant][0])
    return read / sizes[engine]


def _phases(measurement: Measurement, variant: str) -> dict[str, float]:
    """Phase -> median over the rounds of the slowest rank's seconds."""
    per_round = [max(ranks, key=lambda rank: rank["wall_s"])["phases_s"] for ranks in measurement.samples[variant]]
    names = dict.fromkeys(name for phases in per_round for name in phases)
    return {name: statistics.median(phases.get(name, 0.0) for phases in per_round) for name in names}


def render(results: list[dict[str, Any]]) -> str:
    """The table."""
    lines = []
    for result in results:
        size = result["source_bytes"]
        lines += [
            "",
            f"TP{SOURCE[0]} PP{SOURCE[1]} DP{SOURCE[2]} -> TP{result['layout'][0]} PP{result['layout'][1]} "
            f"DP{result['layout'][2]}: {size['torch'] / 2**30:.2f} GiB (torch), {size['lazy'] / 2**30:.2f} GiB (lazy), "
            f"page cache {result['page_cache']}, {result['rounds']} rounds; times are those of the slowest rank",
        ]
        for variant in VARIANTS:
            read = result["read_per_byte"][variant]
            lines.append(
                f"  {variant:<16} median {result['median_s'][variant]:7.3f} s   IQR {result['iqr_s'][variant]:6.3f} s"
                + f"   read {read:.2f} x the checkpoint"
            )
        lines += [_shown(ratio) for ratio in result["ratios"]]
    return "\n".join([*lines, "", *_EXPLANATION, ""])


def _shown(found: dict[str, Any]) -> str:
    ratio, verdict = found["ratio"], "met" if found["met"] else "not met"
    return (
        f"  {found['of']} / {found['to']}: {ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}], target "
        f"at most {found['target']:g}: {verdict}"
    )


_EXPLANATION = [
    "plain: the same state, saved on the layout that loads it. direct: the same state, saved on the other one.",
    "A ratio is that of two medians; in brackets, its 95 % bootstrap interval over the rounds.",
]
