"""A result in the formats of `--format`: data for JSON, rows for CSV, blocks of text for terminal and Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.escaping import markdown, visible
from ...common.tables import Column, Item, Style, csv_table, markdown_table, text_table, texts, titles, wrapped

_WIDTH = 100  # columns that sentences are broken at


@dataclass(frozen=True)
class Heading:
    """A line above a table."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of texts below a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Notes:
    """Sentences below a heading; `warn`: they warn of something."""

    heading: str
    sentences: Sequence[str]
    warn: bool = False


Block = Heading | Table | Notes | str  # str: a paragraph


@dataclass(frozen=True)
class Document:
    """`data` is what JSON holds, `header` and `rows` what CSV holds.

    `blocks` returns what people read. Its argument makes a text from the trace safe for the format, and is applied to
    all of them (`escaping.shown`).
    """

    data: Any
    header: Sequence[str]
    rows: Iterable[Sequence[Any]]
    blocks: Callable[[Callable[[str], str]], list[Block]]

    def json(self) -> str:
        """Indented JSON."""
        return json.dumps(self.data, indent=2, allow_nan=False) + "\n"

    def csv(self) -> str:
        """One line per row."""
        return csv_table(self.header, self.rows)

    def markdown(self) -> str:
        """GitHub's Markdown."""
        parts = []
        for block in self.blocks(markdown):
            if isinstance(block, Table):
                parts.append("\n".join(markdown_table(block.header, block.rows)))
            elif isinstance(block, Notes):
                parts.append("\n".join([f"{block.heading}:", "", *(f"- {one}" for one in block.sentences)]))
            else:
                parts.append(f"**{block.text}**" if isinstance(block, Heading) else block)
        return "\n\n".join(parts) + "\n"

    def table(self, style: Style) -> str:
        """Text for a terminal."""
        lines: list[str] = []
        for block in self.blocks(visible):
            if isinstance(block, Heading):
                lines.append(style.heading(block.text))
            elif isinstance(block, Table):
                lines += [*text_table(block.header, block.rows, style), ""]
            elif isinstance(block, Notes):
                lines += [f"{block.heading}:", *_bullets(block, style), ""]
            else:
                lines += [*wrapped(block, _WIDTH), ""]
        return "\n".join(lines).rstrip("\n") + "\n"


def table_of(columns: Sequence[Column[Item]], items: Iterable[Item]) -> Table:
    """A row per item."""
    return Table(titles(columns), texts(columns, items))


def _bullets(notes: Notes, style: Style) -> list[str]:
    told = [line for one in notes.sentences for line in wrapped(one, _WIDTH, begin="- ", rest="  ")]
    return [style.warning(line) if notes.warn else line for line in told]
