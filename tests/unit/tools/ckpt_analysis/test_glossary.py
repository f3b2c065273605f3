"""One word for one thing: keys, heads and labels of the commands' outputs consist of words that are defined once."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from restart_trace.schema import PHASES, RECORD_FIELDS
from tests.golden.glossary_page import page as glossary_page
from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT
from tests.unit.tools.ckpt_analysis.compare.test_replays import replay
from tests.unit.tools.ckpt_analysis.render.html.report_pages import Page
from tests.unit.tools.ckpt_analysis.trace_factory import Options, write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.glossary import ENTRIES, UNITS
from tools.ckpt_analysis.render import sweep
from tools.common.tables import Column, titles

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
    """Names in the tables of the documents that define keys."""
    text = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("metrics", "comparing", "restart_sweep"))
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def undefined(names: Iterable[str]) -> list[str]:
    """Those of `names` that are no key of a table, and do not consist of defined words."""
    known = {words(name) for name in documented_keys()}
    parts = {name for entry in ENTRIES for name in (entry.term, *entry.names)} | of_the_format() | set(UNITS)
    pattern = "|".join(sorted((re.escape(words(part)) for part in parts), key=len, reverse=True))
    composed = re.compile(rf"((?:{pattern})s?(?: |/|$))*")
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


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_trace(tmp_path_factory.mktemp("sound"), Options(hosts=2)))


def asked(trace: str) -> list[list[str]]:
    """Command lines of all commands that print numbers."""
    project = ["project", trace, "--nodes", "8", "--mtbf-hours", "5000"]
    placement = ["project", "--placement", "group", "--nodes", "8", "--replicas", "2", "--lost-nodes", "2"]
    return [
        ["summary", "--all", trace],
        ["compare", "--all", f"a={trace}", f"b={trace}"],
        ["goodput", trace],
        project,
        ["project", trace, "--failures-per-day", "3", "--interval-steps", "5"],
        ["project", trace, "--what-if", "imports=0.5"],
        placement,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(7))
def test_keys_and_heads_are_defined(trace: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    command = asked(trace)[number]
    assert main([*command, "--format", "json"]) == 0
    assert undefined(keys_of(json.loads(capsys.readouterr().out))) == []
    assert main([*command, "--format", "markdown"]) == 0
    heads = heads_of(capsys.readouterr().out)
    assert undefined(head for head in heads if trace not in head) == []  # a column may have the name of a run


@pytest.mark.slow
def test_keys_and_heads_of_replays_are_defined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replays = [replay(tmp_path / "disk.json"), replay(tmp_path / "shm.json", "/dev/shm")]
    assert main(["compare", "--all", *replays, "--format", "json"]) == 0
    assert undefined(keys_of(json.loads(capsys.readouterr().out))) == []
    assert main(["compare", "--all", *replays, "--format", "markdown"]) == 0
    heads = heads_of(capsys.readouterr().out)
    assert undefined(head for head in heads if not head.startswith("/")) == []  # a column may have a directory


@pytest.mark.parametrize(
    "columns",
    [sweep.SAVES, sweep.RESTARTS, sweep.SPEED_UPS, sweep.THROUGHPUT, sweep.FREQUENCY, sweep.ITERATIONS, sweep.CEILING],
)
def test_heads_of_sweeps_are_defined(columns: tuple[Column[Any], ...]) -> None:
    assert undefined(titles(columns)) == []


@pytest.mark.slow
@pytest.mark.parametrize("names", [[""], ["a=", "b="]], ids=["run", "comparison"])
def test_labels_of_the_page_are_defined(trace: str, names: list[str], tmp_path: Path) -> None:
    assert main(["report", *(name + trace for name in names), "-o", str(tmp_path)]) == 0
    (written,) = tmp_path.glob("*.html")
    page = Page(written.read_text())
    buttons = [below.text for head, below in pairwise(page.elements) if head.attributes.get("scope") == "col"]
    heads = {button.replace("\u00a0", " ").strip() for button in buttons}
    labels = {term.text.strip() for term in page.all("dt")}
    plots = [plot["data"] for variants in page.plots().values() for plot in variants]
    legends = {line["name"] for data in plots for line in data if line.get("name") and line.get("showlegend", True)}
    assert len(heads) > 5 and len(labels) > 5 and legends
    names_of_runs = {"A a", "B b"}
    assert undefined(heads | labels | legends - names_of_runs) == []


def test_a_word_without_a_definition_is_found() -> None:
    assert undefined(["lost_share", "cycles", "blocked s", "save.flush_s"]) == ["lost_share"]


def test_each_word_has_one_entry_of_one_sentence() -> None:
    assert len(ENTRIES) <= 40
    said = Counter(name for entry in ENTRIES for name in {entry.term, *entry.names})
    assert [name for name, times in said.items() if times > 1] == []
    assert [entry.term for entry in ENTRIES if re.search(r"\. [A-Z]", entry.definition)] == []


def test_the_document_is_that_of_the_entries() -> None:
    how = "print it with python -m tests.golden.glossary_page > docs/glossary.md"
    assert (ROOT / "docs" / "glossary.md").read_text() == glossary_page(), how
