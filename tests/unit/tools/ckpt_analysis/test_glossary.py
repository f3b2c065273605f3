"""One word for one thing: keys, heads and labels of the commands' outputs consist of words that are defined once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.golden.glossary_page import page as glossary_page
from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT
from tests.unit.tools.ckpt_analysis.compare.test_replays import replay
from tests.unit.tools.ckpt_analysis.glossary_helpers import (
    heads_of,
    keys_of,
    table_heads,
    titles_of,
    undefined,
    undefined_in_titles,
)
from tests.unit.tools.ckpt_analysis.render.html.report_pages import Page
from tests.unit.tools.ckpt_analysis.trace_factory import Options, write_trace
from tests.unit.tools.ckpt_replay.replay_helpers import figures, samples
from tests.unit.tools.restart_drill.test_restart_drill import injection, restart, trained
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.glossary import ENTRIES, ORDINARY, UNITS
from tools.ckpt_analysis.project.drills import Deployment, Drill
from tools.ckpt_analysis.project.twin import Predicted, Prediction
from tools.ckpt_analysis.render import sweep, twin
from tools.ckpt_analysis.sweeps.read import Sweep
from tools.common.extrapolation import Extrapolation
from tools.common.tables import Column, titles
from tools.restart_drill.output import describe


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


def test_heads_of_a_sweeps_files_are_defined() -> None:
    view = sweep.View(Sweep(Path(), "", "", 1, [], {}, []), [])
    assert undefined(titles(sweep.files_columns(view))) == []


def test_keys_and_heads_of_predictions_are_defined() -> None:
    """Of another layout, learnt from runs of several sizes."""
    place = Deployment(*(1.0 for _ in fields(Deployment)))
    drill = Drill("", "lazy", place, {})
    predicted = Predicted("load_s", 1.0, 1.0, 1.0, {"read": 0.5, "barrier": 0.5}, ["bytes"], 0.0)
    reach = Extrapolation("ranks", 1.0, 2.0, 2.0, too_far=False)
    shown = twin.document(Prediction("prediction", "lazy", place, [drill], 1.0, [predicted], [reach]))
    found = json.loads(shown.json())
    assert {"deployment", "predicted", "too_far", "imported_once"} <= keys_of(found)
    assert undefined(keys_of(found)) == [] and undefined(heads_of(shown.markdown())) == []


@pytest.mark.slow
def test_names_of_metrics_for_prometheus_are_defined(trace: str, tmp_path: Path) -> None:
    assert main(["export", trace, "-o", str(tmp_path / "restart_trace.prom"), "--quiet"]) == 0
    names = re.findall(r"^# TYPE restart_trace_(\S+)", (tmp_path / "restart_trace.prom").read_text(), re.MULTILINE)
    assert len(names) > 20 and undefined(names, "prometheus") == []


@pytest.mark.slow
@pytest.mark.parametrize("names", [[""], ["a=", "b="]], ids=["run", "comparison"])
def test_labels_of_the_page_are_defined(trace: str, names: list[str], tmp_path: Path) -> None:
    assert main(["report", *(name + trace for name in names), "-o", str(tmp_path)]) == 0
    (written,) = tmp_path.glob("*.html")
    page = Page(written.read_text())
    heads = {
        (button.text + (unit.text if unit.attributes.get("class") == "unit" else "")).replace("\u00a0", " ").strip()
        for head, button, unit in zip(page.elements, page.elements[1:], page.elements[2:], strict=False)
        if head.attributes.get("scope") == "col"
    }
    labels = {term.text.strip() for term in page.all("dt")}
    plots = [plot["data"] for variants in page.plots().values() for plot in variants]
    legends = {line["name"] for data in plots for line in data if line.get("name") and line.get("showlegend", True)}
    assert len(heads) > 5 and len(labels) > 5 and legends
    names_of_runs = {"A a", "B b"}
    assert undefined(heads | labels | legends - names_of_runs) == []
    assert len(titles_of(page)) > 10 and undefined_in_titles(titles_of(page)) == []


@pytest.mark.slow
def test_heads_of_the_terminals_tables_are_defined(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert main(["report", "--all", trace, "--no-cache"]) == 0
    heads = table_heads(capsys.readouterr().out.partition("in one HTML file:")[2])
    assert len(heads) > 20 and undefined(heads) == []


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "tiny", "--engine", "lazy", "--run"],
        ["--model", "tiny", "--engine", "memory", "--run"],
        ["--model", "tiny", "--tensors"],
        ["--model", "1b", "--tp", "1", "--pp", "1", "--step-time", "h100"],
    ],
    ids=["files", "memory", "tensors", "step-time"],
)
@pytest.mark.slow
def test_keys_of_plans_are_defined(words: list[str]) -> None:
    command = [sys.executable, "-m", "tools.ckpt_plan", *words, "--format", "json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    found.get("run", {}).pop("configuration", None)  # names of flags
    assert undefined(keys_of(found), "ckpt_plan") == []


def test_keys_of_replays_are_defined() -> None:
    found = figures(samples(), limit_bytes=10**9)
    found["engines"] = list(found["engines"].values())
    found["storage"]["details"] = [{**kind, "combinations": []} for kind in found["storage"]["details"].values()]
    del found["options"]  # names of flags
    del found["samples"]  # what ranks report: no figures
    assert undefined(keys_of(found), "ckpt_replay") == []


def test_keys_of_drills_are_defined() -> None:
    cycles = {0: trained({9: 1.0}), 1: trained({9: 1.0}, resumed=8)}
    found = describe([injection(0)], "relaunch", {"restarts": [restart(1)]}, cycles, None, 0.0)
    assert undefined(keys_of(found), "restart_drill") == []


def test_a_word_without_a_definition_is_found() -> None:
    assert undefined(["lost_share", "cycles", "blocked s", "save.flush_s"]) == ["lost_share"]
    assert undefined_in_titles(["Save global_step5: who waited", "Save by epoch"]) == ["Save by epoch"]


def test_ordinary_words_are_no_terms() -> None:
    terms = {name for entry in ENTRIES for name in (entry.term, *entry.names)} | set(UNITS)
    assert terms & set(ORDINARY) == set() and len(set(ORDINARY)) == len(ORDINARY)


def test_each_word_has_one_entry_of_one_sentence() -> None:
    assert len(ENTRIES) <= 40
    said = Counter(name for entry in ENTRIES for name in {entry.term, *entry.names})
    assert [name for name, times in said.items() if times > 1] == []
    assert [entry.term for entry in ENTRIES if re.search(r"\. [A-Z]", entry.definition)] == []


def test_the_document_is_that_of_the_entries() -> None:
    how = "print it with python -m tests.golden.glossary_page > docs/glossary.md"
    assert (ROOT / "docs" / "glossary.md").read_text() == glossary_page(), how
