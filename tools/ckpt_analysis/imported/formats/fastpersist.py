"""DeepSpeed's FastPersist statistics: what a file writer prints when it is released (`show_statistics`).

The line is "stats = " and a Python dictionary with, among others, `path`, `bytes` and `write_secs`
(deepspeed/io/base_file_writer.py, DeepSpeed 0.19). It says nothing of the rank or of when the file was written.
"""

from __future__ import annotations

import ast

from ..draft import Draft, reads
from ..saves import FileStatistics, step_of

PROGRAMS: tuple[str, ...] = ("DeepSpeed",)
LOGS = "the output of a run with DeepSpeed's FastPersist (its show_statistics)"


@reads(r"stats = (\{[^{}]*\})")
def _statistics(run: Draft, text: str) -> None:
    statistics = parse_statistics(text)
    if statistics is None:
        return
    parts = statistics.path.split("/")
    tag = parts[-2] if len(parts) > 1 else ""
    if step_of(tag) is not None:
        run.save_of(tag).written[statistics.path] = statistics


def parse_statistics(text: str) -> FileStatistics | None:
    """The statistics in a printed dictionary; None if it is damaged."""
    try:
        stats = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if not isinstance(stats, dict):
        return None
    path, num_bytes, seconds = stats.get("path"), stats.get("bytes"), stats.get("write_secs")
    # bool is an int to Python, not to us.
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or num_bytes < 0:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
        return None
    return FileStatistics(path, num_bytes, float(seconds)) if isinstance(path, str) else None
