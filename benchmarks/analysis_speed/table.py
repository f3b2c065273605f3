"""The measurements as Markdown."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

from benchmarks.analysis_speed.measure import Row

_MET = {True: "yes", False: "**no**", None: ""}


def machine() -> str:
    """A line that says what this ran on."""
    polars = version("polars")
    return (
        f"{os.cpu_count()} CPU cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, polars {polars}; load average {os.getloadavg()[1]:.1f} over 5 minutes"
    )


def table(rows: list[Row]) -> str:
    """One line per measurement: the median, what was aimed at, the most memory and every run."""
    lines = [
        "| work | median | target | met | processor time | peak memory | runs, s |",
        "|---|---:|---|---|---:|---:|---|",
    ]
    for row in rows:
        peak = "" if row.peak_bytes is None else f"{row.peak_bytes / (1 << 30):.2f} GiB"
        cpu = "" if row.cpu_s is None else f"{row.cpu_s:.1f} s"
        runs = ", ".join(f"{seconds:.2f}" for seconds in row.runs)
        lines.append(f"| {row.work} | {row.value} | {row.target} | {_MET[row.met]} | {cpu} | {peak} | {runs} |")
    return "\n".join(lines)
