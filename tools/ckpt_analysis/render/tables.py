"""Aligned plain-text tables, and colour where a terminal shows it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TextIO


class Style:
    """Marks headings and findings; plain where the output is not a terminal or NO_COLOR is set."""

    def __init__(self, stream: TextIO, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        self._on = stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"

    def heading(self, text: str) -> str:
        return self._mark("1", text)

    def error(self, text: str) -> str:
        return self._mark("31", text)

    def warning(self, text: str) -> str:
        return self._mark("33", text)

    def faint(self, text: str) -> str:
        return self._mark("2", text)

    def _mark(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self._on else text


def align(
    header: Sequence[str], rows: Sequence[Sequence[str]], style: Style, indent: str = "  "
) -> list[str]:
    """Lines of a table: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[0] = cells[0].ljust(widths[0])
        return indent + "  ".join(padded).rstrip()

    return [style.faint(line(header)), *(line(row) for row in rows)]
