"""DeepSpeed's FastPersist statistics: what a file writer prints when it is released (`show_statistics`).

The line is "stats = " and a Python dictionary with, among others, `path`, `bytes` and `write_secs`
(deepspeed/io/base_file_writer.py, DeepSpeed 0.19). It says nothing of the rank or of when the file was written.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

_STATS = re.compile(r"stats = (\{[^{}]*\})")
_SHARD = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


@dataclass(frozen=True)
class FileStatistics:
    """One file as its writer counted it; `write_s` is the time in write calls."""

    path: str
    bytes: int
    write_s: float

    @property
    def shard(self) -> tuple[int, int] | None:
        """(data-parallel rank, model-parallel rank) of an optimizer shard; None for other files."""
        match = _SHARD.search(self.path)
        return (int(match[1]), int(match[2])) if match else None


def parse_statistics(line: str) -> FileStatistics | None:
    """The statistics in a line; None if it has none, or they are damaged."""
    match = _STATS.search(line)
    if match is None:
        return None
    try:
        stats = ast.literal_eval(match[1])
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
