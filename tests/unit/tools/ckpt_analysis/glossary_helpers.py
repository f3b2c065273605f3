"""Names of outputs, and whether the glossary or the document of their command defines the words in them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from restart_trace.schema import PHASES, RECORD_FIELDS
from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT
from tests.unit.tools.ckpt_analysis.render.html.report_pages import Page
from tools.ckpt_analysis.common.glossary import ENTRIES, ORDINARY, UNITS

_DATA = {"versions", "data", "layout", "factors", "differing", "facts"}  # keys below them are names in the data


def words(name: str) -> str:
    """A name as words: `blocked_GBps` and "blocked GB/s" alike."""
    return " ".join(re.sub(r"[_.,()%<>:\-]|\b[0-9]+\b", " ", name.replace("GBps", "GB/s")).lower().split())


def of_the_format() -> set[str]:
    """Operations, phases, their details, and fields of records."""
    found = {name for fields in RECORD_FIELDS.values() for name in fields}
    for operation, phases in PHASES.items():
        found |= {operation, *phases, *(detail for details in phases.values() for detail in details)}
    return found


def documented_keys() -> set[str]:
    """Names in backticks in the documents that define keys; in those of comparisons and sweeps only in tables."""
    text = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("comparing", "restart_sweep"))
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)} | _names("metrics")


def _names(document: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / f"{document}.md").read_text()))


def named_in(document: str) -> set[str]:
    """Names that a document of a tool has in backticks, or its JSON in quotation marks."""
    names, text = _names(document), (ROOT / "docs" / f"{document}.md").read_text()
    return {*names, *(name.rpartition(".")[2] for name in names), *re.findall(r'"([a-z_]+)"', text)}


def undefined(names: Iterable[str], document: str | None = None) -> list[str]:
    """Those of `names` that are no key of a table or of `document`, and do not consist of defined words."""
    known = {words(name) for name in documented_keys() | (named_in(document) if document else set())}
    parts = {name for entry in ENTRIES for name in (entry.term, *entry.names)} | of_the_format() | set(UNITS)
    composed = _composed_of(parts)
    return sorted({name for name in names if words(name) not in known and not composed.fullmatch(words(name))})


def keys_of(value: Any) -> set[str]:
    """All keys of a JSON value but those that the data name."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if not isinstance(value, dict):
        return set()
    return set(value).union(*(keys_of(inner) for key, inner in value.items() if key not in _DATA))


def heads_of(markdown: str) -> set[str]:
    """The heads of all tables."""
    lines = markdown.splitlines()
    heads = [line for line, below in zip(lines, lines[1:], strict=False) if re.match(r"\|[ :-]+\|", below)]
    return {head.strip() for line in heads for head in line.strip("|").split("|")}


def undefined_in_titles(titles: Iterable[str]) -> list[str]:
    """Those of `titles` that have a word that is neither defined nor the field's ordinary English."""
    parts = {name for entry in ENTRIES for name in (entry.term, *entry.names)} | of_the_format()
    composed = _composed_of(parts | set(UNITS) | set(ORDINARY))
    plain = {title: words(re.sub(r"\bglobal_step[0-9]+|'s\b|[;']", " ", title)) for title in titles}
    return sorted(title for title, text in plain.items() if not composed.fullmatch(text))


def titles_of(page: Page) -> set[str]:
    """Of sections, plots, axes and tables."""
    layouts = [plot["layout"] for variants in page.plots().values() for plot in variants]
    axes = [value for layout in layouts for name, value in layout.items() if re.match("[xy]axis", name)]
    of_axes = {text for axis in axes if (text := axis.get("title", {}).get("text"))}
    return of_axes | {found.text.strip() for tag in ("h2", "h3", "h4", "caption") for found in page.all(tag)}


def _composed_of(parts: Iterable[str]) -> re.Pattern[str]:
    pattern = "|".join(sorted((re.escape(words(part)) for part in parts), key=len, reverse=True))
    return re.compile(rf"((?:{pattern})s?(?: |/|$))*")


def table_heads(text: str) -> set[str]:
    """The heads of the tables of a terminal's output: of lines with three columns and more the first."""
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    firsts = [row for row, above in zip(rows[1:], rows, strict=False) if len(row) > 2 and len(above) < 3]
    return {head for row in firsts for head in row}
