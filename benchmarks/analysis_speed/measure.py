"""The measurements: each is a command in a process of its own, so that imports and the end count too."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.analysis_speed.run import Taken, directory_bytes, median_of, run

SIZES = ((1_024, 1_000_000), (10_240, 10_000_000))  # ranks, spans
_SUMMARY_S = {10_240: 15.0}
_REPORT_S = {1_024: 3.5, 10_240: 25.0}
_REPORT_BYTES = {10_240: 5 << 29}
_HTML_BYTES = {10_240: 15_000_000}
_HELP_S = 0.3
_GROWTH = 1.2  # of the time per span, from the small logs to the large ones
_AGAINST_PANDAS = 5.0
_TOOL = "tools.ckpt_analysis"


@dataclass(frozen=True)
class Row:
    """One line of the table. `value` is compared with `target`, at most or (for a ratio) at least."""

    work: str
    value: str
    target: str
    met: bool | None
    peak_bytes: int | None = None
    cpu_s: float | None = None
    runs: tuple[float, ...] = ()


def measure(directory: Path, divide: int, repeat: int, *, with_pandas: bool, with_html: bool) -> list[Row]:
    """All rows. Raises RuntimeError if a command fails or pandas gives other numbers."""
    rows: list[Row] = []
    cold: list[float] = []
    for full_ranks, full_spans in SIZES:
        ranks, spans = max(2, full_ranks // divide), full_spans // divide
        logs = _logs(directory, ranks, spans)
        size = f"{ranks} ranks, {spans / 1e6:g} M spans ({directory_bytes(logs, '*.jsonl') / 1e9:.2f} GB)"
        _say(f"analysing {size}")
        taken = [run(_TOOL, "summary", str(logs), "--no-cache", "--format", "json") for _ in range(repeat)]
        cold.append(median_of(taken))
        rows.append(_timed(f"summary of {size}", taken, _SUMMARY_S.get(full_ranks)))
        rows += _cached(logs, size, repeat)
        rows += _html(directory, logs, size, full_ranks, repeat) if with_html else []
        if with_pandas and full_ranks == SIZES[0][0]:
            rows.append(_pandas(logs, size, taken))
    growth = cold[1] / cold[0] * SIZES[0][1] / SIZES[1][1]
    rows.append(Row("time per span, large over small logs", f"{growth:.2f}", f"< {_GROWTH}", growth < _GROWTH))
    return [*rows, _timed("--help", [run(_TOOL, "--help") for _ in range(repeat)], _HELP_S)]


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _logs(directory: Path, ranks: int, spans: int) -> Path:
    logs = directory / f"logs_{ranks}_{spans}"
    if not (logs / "truth.json").exists():
        shutil.rmtree(logs, ignore_errors=True)  # of a run that was interrupted
        _say(f"making logs of {ranks} ranks, {spans} spans")
        size = ("--ranks", str(ranks), "--spans", str(spans), "--steps", "1")
        run("benchmarks.synthetic_traces", str(logs), *size)
    return logs


def _timed(work: str, taken: list[Taken], target_s: float | None, target_bytes: int | None = None) -> Row:
    seconds, peak = median_of(taken), max(one.peak_bytes for one in taken)
    targets = [f"< {target_s:g} s"] if target_s else []
    targets += [f"< {target_bytes / (1 << 30):g} GiB"] if target_bytes else []
    met = None
    if targets:
        met = (target_s is None or seconds < target_s) and (target_bytes is None or peak < target_bytes)
    runs = tuple(one.seconds for one in taken)
    cpu = statistics.median(one.cpu_seconds for one in taken)
    return Row(work, f"{seconds:.2f} s", ", ".join(targets) or "none", met, peak, cpu, runs)


def _cached(logs: Path, size: str, repeat: int) -> list[Row]:
    """The first look, which keeps the cache, and later ones."""
    cache = logs.with_name(f"{logs.name}_cache")
    summary = (_TOOL, "summary", str(logs), "--cache-dir", str(cache), "--format", "json")
    first = []
    for _ in range(repeat):
        shutil.rmtree(cache, ignore_errors=True)
        first.append(run(*summary))
    again = [run(*summary) for _ in range(repeat)]
    if again[0].output != first[0].output:
        raise RuntimeError("the summary out of the cache is another one")
    held = f"{directory_bytes(cache, '**/*') / 1e9:.2f} GB"
    shutil.rmtree(cache, ignore_errors=True)
    return [
        _timed(f"the same, and keeping the Parquet cache ({held})", first, None),
        _timed("the same out of the cache", again, None),
    ]


def _html(directory: Path, logs: Path, size: str, full_ranks: int, repeat: int) -> list[Row]:
    out = directory / "report"
    taken = []
    for _ in range(repeat):
        shutil.rmtree(out, ignore_errors=True)
        taken.append(run(_TOOL, "report", str(logs), "--no-cache", "--quiet", "-o", str(out)))
    num_bytes = directory_bytes(out, "*.html")
    shutil.rmtree(out, ignore_errors=True)
    limit = _HTML_BYTES.get(full_ranks)
    target = f"< {limit / 1e6:g} MB" if limit else "none"
    return [
        _timed(f"HTML report of {size}", taken, _REPORT_S.get(full_ranks), _REPORT_BYTES.get(full_ranks)),
        Row("its size", f"{num_bytes / 1e6:.2f} MB", target, num_bytes < limit if limit else None),
    ]


def _pandas(logs: Path, size: str, taken: list[Taken]) -> Row:
    _say("the same with pandas")
    naive = run("benchmarks.analysis_speed.naive", str(logs))
    difference = compare(json.loads(naive.output), json.loads(taken[0].output)["saves"])
    if difference:
        raise RuntimeError(f"pandas gives other numbers: {difference}")
    ratio = naive.seconds / median_of(taken)
    return Row(
        f"plain pandas, saves only, {size}: times slower than the summary",
        f"{naive.seconds:.2f} s, {ratio:.1f} x",
        f"> {_AGAINST_PANDAS:g} x",
        ratio > _AGAINST_PANDAS,
        naive.peak_bytes,
        naive.cpu_seconds,
        (naive.seconds,),
    )


def compare(naive: list[dict[str, Any]], saves: list[dict[str, Any]]) -> str:
    """The first number in which the two summaries differ; "" if they agree."""
    if [(save["cycle"], save["tag"]) for save in naive] != [(save["cycle"], save["tag"]) for save in saves]:
        return "not the same saves"
    for plain, save in zip(naive, saves, strict=True):
        pairs = [("bytes", plain["bytes"], save["bytes"]), ("blocked_s", plain["blocked_s"], save["blocked_s"])]
        pairs += _pairs("wall", plain["wall"], save["wall"])
        for phase, spread in plain["phases"].items():
            pairs += _pairs(phase, spread, save["phases"][phase])
        for name, spread in plain["details"].items():
            phase, _, detail = name.partition("/")
            pairs += _pairs(name, spread, save["phases"][phase]["details"][detail])
        for name, one, other in pairs:
            if not math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9):
                return f"{name} of {save['tag']}: {one}, and the tool {other}"
    return ""


def _pairs(name: str, plain: dict[str, float], spread: dict[str, Any]) -> list[tuple[str, float, float]]:
    return [(f"{name} {key}", plain[key], spread[key]) for key in ("max_s", "median_s", "min_s")]
