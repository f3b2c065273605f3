"""Tables: what their columns show of an item, and how a table becomes text, Markdown or CSV.

Nothing is escaped here but cells of CSV: a report is made safe as a whole before its tables are made
(`escaping.shown`), since its sentences need that as well.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TextIO, TypeVar

from .escaping import csv_cell
from .formatting import count, seconds, unbroken

Item = TypeVar("Item")


@dataclass(frozen=True)
class Cell:
    """Text of a cell, the number that it is sorted by (None: by its text), and whether it is good or bad news."""

    text: str
    order: float | None = None
    mark: str = ""  # good, bad, or neither


@dataclass(frozen=True)
class Column(Generic[Item]):
    """A column: its title, the text that it shows of an item, and the number that this is (None: it is a word).

    `mark` says whether that is "good" or "bad": HTML gives it a colour.
    """

    title: str
    text: Callable[[Item], str]
    order: Callable[[Item], float | None] | None = None
    mark: Callable[[Item], str] | None = None

    def cell(self, item: Item) -> Cell:
        return Cell(self.text(item), self.order(item) if self.order else None, self.mark(item) if self.mark else "")


def numbers(title: str, value: Callable[[Item], Any], show: Callable[[Any], str] = count) -> Column[Item]:
    """A column of numbers, which `show` makes text."""
    return Column(title, lambda item: show(value(item)), value)


def times(title: str, value: Callable[[Item], float | None], digits: int = 4) -> Column[Item]:
    """A column of seconds."""
    return numbers(title, value, partial(seconds, digits=digits))


def titles(columns: Iterable[Column[Any]]) -> list[str]:
    return [column.title for column in columns]


def texts(columns: Sequence[Column[Item]], items: Iterable[Item]) -> list[list[str]]:
    """A row of texts per item."""
    return [[column.cell(item).text for column in columns] for item in items]


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


def text_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    style: Style | None = None,
    *,
    indent: str = "  ",
    left: int = 1,
) -> list[str]:
    """Lines for a terminal: the first `left` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.ljust(width) for cell, width in zip(cells[:left], widths, strict=False)]
        padded += [cell.rjust(width) for cell, width in zip(cells[left:], widths[left:], strict=True)]
        return indent + "  ".join(padded).rstrip()

    return [style.faint(line(header)) if style else line(header), *map(line, rows)]


def terminal_width() -> int | None:
    """Columns of the terminal: COLUMNS, else those of standard output; None where neither says."""
    return shutil.get_terminal_size((0, 0)).columns or None


def text_width(most: int = 100) -> int:
    """Columns that sentences are broken at."""
    return min(terminal_width() or most, most)


def wrapped(text: str, width: int | None = None, *, begin: str = "", rest: str = "") -> list[str]:
    """Lines of sentences, `text_width()` wide; the first begins with `begin`, the others with `rest`.

    A number stays on the line of its unit.
    """
    lines = textwrap.wrap(unbroken(text), width or text_width(), initial_indent=begin, subsequent_indent=rest)
    return [line.replace("\u00a0", " ") for line in lines]


def fitted_table(
    columns: Sequence[Column[Item]],
    items: Sequence[Item],
    style: Style | None = None,
    *,
    optional: Sequence[str] = (),
    left: int = 1,
) -> list[str]:
    """As `text_table`. Columns titled as in `optional` are left out, in this order, until the terminal has room.

    A last line names those that were left out.
    """
    kept, gone = list(columns), list[str]()
    width = terminal_width()
    while True:
        lines = text_table(titles(kept), texts(kept, items), left=left)
        title = next((title for title in optional if any(column.title == title for column in kept)), None)
        if width is None or title is None or max(map(len, lines)) <= width:
            break
        kept = [column for column in kept if column.title != title]
        gone.append(title)
    lines = text_table(titles(kept), texts(kept, items), style, left=left)
    return [*lines, *([f"  (no room for: {', '.join(gone)})"] if gone else [])]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """Lines of a table in GitHub's Markdown. `numbers`: all columns but the first are right-aligned."""
    ruler = ["---", *["---:" if numbers else "---"] * (len(header) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (header, ruler, *rows)]


def csv_table(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """CSV whose cells no spreadsheet takes for formulas; None is an empty cell."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerows([csv_cell(cell) for cell in row] for row in (header, *rows))
    return stream.getvalue()
