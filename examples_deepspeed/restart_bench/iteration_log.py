"""Read iteration lines in upstream's form: ` iteration  8/  12 | consumed samples: ... | lm loss: ... |`"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

# Launchers may put the rank in front of a line.
_LINE = re.compile(r"(?:^|\s)iteration\s+(\d+)/\s*(\d+)\s+\|(.*)")


class IterationLine(NamedTuple):
    """One line. `fields` maps a name, such as "lm loss", to its text, digit by digit as it was printed."""

    iteration: int
    total: int
    fields: dict[str, str]


def parse_line(line: str) -> IterationLine | None:
    """The iteration that `line` reports; None for any other line."""
    match = _LINE.search(line)
    if match is None:
        return None
    parts = (part.partition(":") for part in match[3].split("|"))
    fields = {name.strip(): value.strip() for name, colon, value in parts if colon}
    return IterationLine(int(match[1]), int(match[2]), fields)


def read_log(path: Path) -> dict[int, IterationLine]:
    """Iteration -> its line, of a log file."""
    with path.open(encoding="utf-8", errors="replace") as stream:
        lines = [parsed for line in stream if (parsed := parse_line(line)) is not None]
    return {line.iteration: line for line in lines}
