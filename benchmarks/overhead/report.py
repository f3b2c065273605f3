"""The measurement as a table for people and as JSON for programs."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.common.samples import Ratio, median_of_ratios, ratio_of_medians, verdict
from benchmarks.overhead.launch import Measurement
from benchmarks.overhead.plan import BASELINE, CONTROL, TRACED, VARIANTS
from tools.common.samples import interquartile_range

TARGET = 0.01  # overhead, less than
_COLD = 0.9  # part of the bytes that must come from storage for a load to be called cold


def analyse(measurement: Measurement) -> dict[str, Any]:
    """All figures of a measurement, and every raw sample; the keys are explained in docs/results/overhead.md."""
    comparisons = {}
    for operation in measurement.samples:
        seconds = {v: measurement.seconds(operation, v) for v in VARIANTS}
        cpu = {v: measurement.seconds(operation, v, "cpu_s") for v in VARIANTS}
        ratio = ratio_of_medians(seconds[TRACED], [seconds[BASELINE], seconds[CONTROL]])
        control = ratio_of_medians(seconds[CONTROL], [seconds[BASELINE]])
        comparisons[operation] = {
            "compared": f"{operation}_checkpoint, traced against untraced",
            "target": TARGET,
            "verdict": verdict(ratio, control, TARGET, len(seconds[TRACED])),
            "ratio_of_medians": asdict(ratio),
            "median_of_ratios": asdict(median_of_ratios(seconds[TRACED], [seconds[BASELINE], seconds[CONTROL]])),
            "control_ratio": asdict(control),
            "cpu_ratio": asdict(ratio_of_medians(cpu[TRACED], [cpu[BASELINE], cpu[CONTROL]])),
            "recorder_s": statistics.median(measurement.seconds(operation, TRACED, "recorder_s")),
            "median_s": {v: statistics.median(values) for v, values in seconds.items()},
            "iqr_s": {v: interquartile_range(values) for v, values in seconds.items()},
            "page_cache": _page_cache(measurement, operation),
        }
    return {
        "directory": measurement.directory,
        "filesystem": measurement.filesystem,
        "ranks": measurement.ranks,
        "rounds": max(len(variants[CONTROL]) for variants in measurement.samples.values()),
        "bytes_per_rank": measurement.bytes_per_rank,
        "files_per_rank": measurement.files_per_rank,
        "others_share": _others_share(measurement),
        "comparisons": comparisons,
        "samples": measurement.samples,
    }


def _others_share(measurement: Measurement) -> float | None:
    """Mean part of the processors' time that others than the ranks used while samples were taken."""
    used = available = 0.0
    for rounds in (rounds for variants in measurement.samples.values() for rounds in variants.values()):
        for ranks in rounds:
            if ranks[0]["machine_cpu_s"] is None:
                return None
            used += max(0.0, ranks[0]["machine_cpu_s"] - sum(rank["cpu_s"] for rank in ranks))
            available += ranks[0]["wall_s"] * (os.cpu_count() or 1)
    return used / available


def _page_cache(measurement: Measurement, operation: str) -> str | None:
    """State of the cache in which the loads found their files, as the kernel counted, not as was intended."""
    if operation == "save":
        return None
    counts = [
        rank["storage_read_bytes"]
        for rounds in measurement.samples[operation].values()
        for ranks in rounds
        for rank in ranks
    ]
    if any(count is None for count in counts):
        return "unknown"
    if min(counts) > _COLD * measurement.bytes_per_rank:
        return "cold"
    return "warm" if max(counts) < (1 - _COLD) * measurement.bytes_per_rank else "partly warm"


def render(results: list[dict[str, Any]]) -> str:
    """The table."""
    lines = []
    for result in results:
        size = result["bytes_per_rank"]
        lines += [
            "",
            f"{result['ranks']} rank{'s' * (result['ranks'] > 1)}, {result['filesystem']} "
            f"({result['directory']}): {size / 2**30:.2f} GiB in {result['files_per_rank']} files per rank, "
            f"{result['rounds']} rounds; times are those of the slowest rank",
            f"  processor time of others meanwhile (the kernel's threads too): {_share(result['others_share'])}",
        ]
        for found in result["comparisons"].values():
            lines += _comparison(found)
    return "\n".join([*lines, "", *_EXPLANATION, ""])


def _comparison(found: dict[str, Any]) -> list[str]:
    cache = f", page cache {found['page_cache']}" if found["page_cache"] else ""
    lines = [f"  {found['compared']}{cache}"]
    for variant in VARIANTS:
        median, iqr = found["median_s"][variant], found["iqr_s"][variant]
        name = f"{BASELINE} {CONTROL}" if variant == CONTROL else variant
        lines.append(f"    {name:<16} median {median:7.3f} s   IQR {iqr:6.3f} s")
    target = f"target < {found['target']:.0%}: {found['verdict']}"
    lines.append(f"    {'overhead':<16} {_percent(found['ratio_of_medians'])}   {target}")
    lines.append(f"    {'  within rounds':<16} {_percent(found['median_of_ratios'])}")
    lines.append(f"    {'  processor time':<16} {_percent(found['cpu_ratio'])}")
    lines.append(f"    {'noise':<16} {_percent(found['control_ratio'])}")
    share = found["recorder_s"] / found["median_s"][BASELINE]
    lines.append(f"    {'in the recorder':<16} {found['recorder_s'] * 1e3:6.2f} ms = {share:.2%}, clocked directly")
    return lines


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0%}"


def _percent(ratio: dict[str, float]) -> str:
    r = Ratio(**ratio)
    return f"{r.value - 1:+7.2%}  [{r.low - 1:+.2%}, {r.high - 1:+.2%}]"


_EXPLANATION = [
    "overhead: ratio of medians, the baseline being both its series; [95 % bootstrap interval over rounds].",
    "within rounds: median of the ratios within each round: slow changes of the machine's speed cancel.",
    "processor time: the same ratio for user + system time, which waiting for the disk does not blur.",
    "noise: the baseline against its own repetition; an overhead within this interval cannot be told from none.",
]


def spread(samples: Sequence[Any], key: str, unit: float, digits: int) -> str:
    """The median of a figure of the samples and its interquartile range, in units of 1 / `unit`."""
    values = [unit * sample[key] for sample in samples]
    return f"{statistics.median(values):.{digits}f} +- {interquartile_range(values):.{digits}f}"


def table_of(rows: Sequence[Sequence[str]], below: str) -> str:
    """A table in Markdown, whose first row is its head, and a line below it."""
    lines = [f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]]
    return "\n".join([*lines, "", below])
