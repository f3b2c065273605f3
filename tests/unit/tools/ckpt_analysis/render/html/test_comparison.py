"""Several runs in one report: what the terminal and figure 10 of the page show is what `compare` computes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from restart_trace.schema import type_of
from tests.unit.tools.ckpt_analysis.analysis_helpers import file_of
from tests.unit.tools.ckpt_analysis.render.html.report_pages import Page, analysis_of
from tests.unit.tools.ckpt_analysis.trace_factory import RANKS, Options, RankLog, dump, rank_log, write_trace
from tests.unit.tools.ckpt_analysis.upstream_log_factory import LogOptions, upstream_log
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.glossary import DEFINITIONS
from tools.ckpt_analysis.compare.metrics import collect
from tools.ckpt_analysis.compare.results import NOT_RECORDED, ONE_VALUE, Cell, Comparison, MetricRow, VariantFacts
from tools.ckpt_analysis.imported.file import write_run
from tools.ckpt_analysis.imported.importer import import_log
from tools.ckpt_analysis.imported.to_report import to_report
from tools.ckpt_analysis.render.html.comparison import FIGURE

pytestmark = pytest.mark.slow  # each writes a page

TORCH_MS = [1000.0, 505.0, 510.0, 515.0, 520.0, 525.0]


def imported(directory: Path, options: LogOptions) -> str:
    """Imports a made-up log; returns where to."""
    directory.with_suffix(".log").write_text(upstream_log(options))
    write_run(import_log(directory.with_suffix(".log")), directory)
    return str(directory)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two engines on two layouts; the second engine saves in a quarter of the time."""
    base = tmp_path_factory.mktemp("study")
    runs = []
    for pp, dp in ((1, 2), (2, 1)):
        for engine, share in (("Torch", 1.0), ("Lazy", 0.25)):
            times = [share * took * pp for took in TORCH_MS]
            runs.append(
                imported(base / f"{engine.lower()}-pp{pp}", LogOptions(engine=engine, pp=pp, dp=dp, save_ms=times))
            )
    return runs


@pytest.fixture(scope="module")
def study_page(study: list[str], tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = tmp_path_factory.mktemp("page") / "page.html"
    assert main(["report", *study, "-o", str(path), "--quiet"]) == 0
    return Page(path.read_text())


def compared(runs: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """Metric -> its row, as `compare --format json` gives it."""
    assert main(["compare", "--format", "json", *runs]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def page_of_runs(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Page:
    assert main(["report", *runs, "-o", str(tmp_path / "page.html")]) == 0
    capsys.readouterr()
    return Page((tmp_path / "page.html").read_text())


def plot_titled(page: Page, words: str) -> list[dict[str, Any]]:
    """The data of the plot whose title begins so."""
    titles = [h3.text for h3 in page.all("h3") if h3.attributes.get("id", "").startswith("plot-")]
    (index,) = [index for index, title in enumerate(titles) if title.startswith(words)]
    return page.plots()[f"plot-comparison-{index}"][0]["data"]


def rows_of(page: Page, caption: str) -> list[list[str]]:
    """The cells of the table whose caption begins so."""
    found: list[list[str]] = []
    inside = False
    for element in page.elements:
        if element.tag == "caption":
            inside = element.text.startswith(caption)
        elif inside and element.tag == "th" and element.attributes.get("scope") == "row":
            found.append([element.text])
        elif inside and element.tag == "td":
            found[-1].append(element.text)
    return found


@pytest.mark.parametrize("flags", [[], ["--all"]])
def test_report_prints_what_compare_prints(
    flags: list[str], study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(write_trace(tmp_path / "trace"))
    for runs in ([trace, study[0]], [f"a={study[0]}", f"b={study[1]}", f"a={study[2]}"]):
        assert main(["compare", *flags, *runs]) == 0
        as_compared = capsys.readouterr().out
        assert main(["report", *flags, *runs]) == 0
        assert capsys.readouterr().out == as_compared
    assert "blocked_share" in as_compared


def test_facts_too_long_for_a_column_stand_below(
    study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal ones together; a column each would make lines that no terminal shows."""
    trace = str(write_trace(tmp_path / "trace"))
    assert main(["report", study[0], trace, study[1]]) == 0
    lines = capsys.readouterr().out.splitlines()
    (header,) = [i for i, line in enumerate(lines) if line.split() == ["differs", "in", "A", "B", "C"]]
    end = lines.index("", header)
    assert "  model of A, C: 1 G parameters; layers 16, hidden size 2048" in lines[header:end]
    row = ["layout", "TP2", "PP1", "DP2", "TP2", "PP2", "DP2", "TP2", "PP1", "DP2"]
    assert row in [line.split() for line in lines[header:end]]


def test_the_figure_shows_the_numbers_and_verdicts_of_compare(
    study: list[str], study_page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    page, of_study = study_page, compared(study, capsys)
    blocked = of_study["blocked_s"]["cells"]
    times = plot_titled(page, "Times")
    assert [trace["name"] for trace in times] == ["A torch-pp1", "B lazy-pp1", "C torch-pp2", "D lazy-pp2"]
    for trace, cell in zip(times, blocked, strict=True):
        at = trace["x"].index("save:<br>training<br>blocked")
        assert trace["y"][at] == cell["median"]
        assert trace["error_y"]["array"][at] == pytest.approx(max(cell["values"]) - cell["median"])
        assert trace["error_y"]["arrayminus"][at] == pytest.approx(cell["median"] - min(cell["values"]))
    gains = plot_titled(page, "Speed-up")
    assert [trace["name"] for trace in gains] == ["B lazy-pp1", "C torch-pp2", "D lazy-pp2"]
    for trace, cell, times_as_fast in zip(gains, blocked[1:], (4.0, 0.5, 2.0), strict=True):
        at = trace["x"].index("save:<br>training<br>blocked")
        assert trace["y"][at] == pytest.approx(times_as_fast) == pytest.approx(1 / cell["ratio"])
        assert trace["y"][at] + trace["error_y"]["array"][at] == pytest.approx(1 / cell["ratio_low"])
        assert trace["y"][at] - trace["error_y"]["arrayminus"][at] == pytest.approx(1 / cell["ratio_high"])
        assert trace["text"][at].startswith("differs: ") and not trace["marker"]["symbol"][at].endswith("open")
        launch = trace["x"].index("launch:<br>process to<br>first step")
        assert trace["text"][launch] == "equal" and trace["marker"]["symbol"][launch].endswith("open")
    assert set(FIGURE.terms) <= set(DEFINITIONS) and any(p.text.startswith(FIGURE.caption[:40]) for p in page.all("p"))

    shares = [cell["median"] for cell in of_study["blocked_share"]["cells"]]
    (bars,) = plot_titled(page, "Training time that saves block")
    assert bars["x"] == pytest.approx([100 * share for share in shares])
    assert [row[-1] for row in rows_of(page, "Runs compared")] == [f"{100 * share:.2f} %" for share in shares]


def test_the_page_has_runs_grid_and_verdicts(study_page: Page) -> None:
    page = study_page
    runs = rows_of(page, "Runs compared")
    assert [row[0] for row in runs] == ["A torch-pp1", "B lazy-pp1", "C torch-pp2", "D lazy-pp2"]
    assert ("Lazy" in runs[1]) and ("TP2 PP2 DP1" in runs[2])
    grid = {(row[0], row[2]): row[3:] for row in rows_of(page, "Engines by model and layout")}
    assert grid["blocked_s", "TP2 PP1 DP2"] == ["0.515 s (A)", "0.1288 s (B, 4×)"]
    assert grid["blocked_s", "TP2 PP2 DP1"] == ["1.03 s (C, 0.5×)", "0.2575 s (D, 2×)"]
    verdicts = {(row[0], row[3]): row for row in rows_of(page, "Which differences exceed the noise")}
    assert verdicts["blocked_s", "B lazy-pp1"][-1] == "differs: better"
    assert verdicts["blocked_s", "B lazy-pp1"][5:7] == ["0.250", "4.000"]
    level = {(row[0], row[3]): row for row in rows_of(page, "No difference from A shown")}
    assert level["save_files", "B lazy-pp1"][6:] == ["-", "-", "-", "equal"]  # neither more nor less is better
    assert level.keys().isdisjoint(verdicts)


def test_the_checkpoint_of_a_trace_has_its_size(
    study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace" / "restart_trace", Options(supervisor=False))
    other = write_trace(tmp_path / "other" / "trace", Options(background_flush=True))
    page = page_of_runs([str(trace), str(other)], tmp_path, capsys)
    runs = rows_of(page, "Runs compared")
    assert [row[0] for row in runs] == ["A trace", "B other"]
    assert [row[-3:-1] for row in runs] == [["36.0 MB", "16"]] * 2
    times = plot_titled(page, "Times")
    assert "restart:<br>failure to<br>first step" not in times[0]["x"]  # no supervisor: nothing is shown
    assert "restart:<br>failure to<br>first step" in times[1]["x"]
    gains = plot_titled(page, "Speed-up")
    assert {text for text in gains[0]["text"]} == {"too few repeats to tell", "equal"}
    assert gains[0]["error_y"]["array"] == gains[0]["error_y"]["arrayminus"] == [0.0] * len(gains[0]["x"])
    assert rows_of(page, "Engines by model") == []  # one engine


def test_one_run_twice_and_repeats_under_a_name(
    study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = page_of_runs(["x=" + study[0], "y=" + study[0]], tmp_path, capsys)
    assert [trace["name"] for trace in plot_titled(page, "Times")] == ["A x", "B y"]
    named = [f"8/a={study[0]}", f"8/b={study[1]}", f"8/a={study[2]}", f"8/b={study[3]}"]
    page = page_of_runs(named, tmp_path, capsys)
    assert [trace["name"] for trace in plot_titled(page, "Times")] == ["A 8/a", "B 8/b"]
    runs = [after for before, after in pairwise(page.elements) if before.attributes.get("class") == "run"]
    folded = [summary.text for summary in runs]
    assert [text.partition(":")[0] for text in folded] == [
        "A 8/a, run 1 of 2", "A 8/a, run 2 of 2", "B 8/b, run 1 of 2", "B 8/b, run 2 of 2",
    ]  # fmt: skip


def test_runs_with_broken_data_are_not_folded(
    study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = write_trace(tmp_path / "broken")
    file_of(broken, 3, 1).unlink()
    page = page_of_runs([study[0], str(broken)], tmp_path, capsys)
    assert ["open" in details.attributes for details in page.all("details", class_="run")] == [False, True]


# The share of training time that saves block.


def test_blocked_share_of_a_trace(tmp_path: Path) -> None:
    """Against the records: first begin to last end of a step in each cycle; both saves lie between steps."""
    report = analysis_of(write_trace(tmp_path)).report
    trained_ns = 0
    for cycle in (0, 1):
        logs = [rank_log(Options(), rank, cycle).records for rank in range(RANKS)]
        steps = [record for records in logs for record in records if type_of(record) == "iteration"]
        trained_ns += max(step["end_ns"] for step in steps) - min(step["start_ns"] for step in steps)
    (share,) = collect(report)["blocked_share"].values
    assert [save.blocked_s for save in report.saves] == pytest.approx([0.38, 0.38])
    assert share == pytest.approx(0.76 / (trained_ns / 1e9))


def test_a_save_after_the_last_step_is_training_time(tmp_path: Path) -> None:
    """Two steps of 0.1 s, and a save of 0.3 s after each: 0.6 of 0.8 s, not of the 0.5 s up to the last step's end."""
    log = RankLog(Options(), 0, 0, 0)
    log.process()
    for step in (1, 2):
        log.iteration(step)
        op = log.begin("save", tag=f"global_step{step}", step=step)
        op.span("collect", None, 300)
        op.end()
    dump(file_of(tmp_path, 0, 0), log.records)
    assert collect(analysis_of(tmp_path).report)["blocked_share"].values == pytest.approx([0.75])


def test_blocked_share_of_an_imported_log(tmp_path: Path) -> None:
    """Its intervals hold the saves between steps; the last save comes after them."""
    log = tmp_path / "a.log"
    log.write_text(upstream_log(LogOptions(save_ms=TORCH_MS)))
    share = sum(TORCH_MS) / (len(TORCH_MS) * 1200 + TORCH_MS[-1])  # 1.2 s an interval, as the log says
    assert collect(to_report(import_log(log), tmp_path))["blocked_share"].values == pytest.approx([share])
    resumed = upstream_log(LogOptions(save_ms=TORCH_MS, loads_step=4))  # at 4, and its steps begin at 1
    log.write_text(resumed)
    assert "blocked_share" not in collect(to_report(import_log(log), tmp_path))


def test_no_share_without_steps_or_saves(tmp_path: Path) -> None:
    log = RankLog(Options(), 0, 0, 0)
    log.process()
    log.iteration(1)
    dump(file_of(tmp_path, 0, 0), log.records)
    assert "blocked_share" not in collect(analysis_of(tmp_path).report)


def test_the_page_begins_with_the_verdict(
    study: list[str], study_page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--format", "json", *study]) == 0
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert verdict.startswith("lazy-pp1 blocks training 2.0 times shorter than the next, ")
    paragraphs = [element for element in study_page.elements if element.tag in ("div", "details")]
    first = next(element for element in paragraphs if element.attributes.get("class") in ("answer verdict", "run"))
    at = study_page.elements.index(first)
    told = [element.text.strip() for element in study_page.elements[at:] if element.tag == "p"]
    shown = " ".join(told).replace("\u00a0", " ")
    assert first.tag == "div" and shown.startswith(verdict)


def test_compare_writes_the_page_of_report(study: list[str], tmp_path: Path) -> None:
    pages = [tmp_path / "compare.html", tmp_path / "report.html"]
    for path in pages:
        assert main([path.stem, *study[:2], "-o", str(path), "--quiet"]) == 0
    assert pages[0].read_bytes() == pages[1].read_bytes()


def test_what_a_run_lacks_is_one_sentence_and_no_row() -> None:
    """As all times of a run whose first failed: there is no ratio to them."""
    facts = [VariantFacts(label, label, [label], [label], ["trace"], {}) for label in "AB"]
    known = Cell([1.0], 0, 1.0, None, None, None, None, None)
    none = Cell([], 0, None, None, None, None, None, NOT_RECORDED)
    rows = [
        MetricRow("blocked_s", "s", "lower", "", True, [known, replace(known, ratio=1.0, verdict=ONE_VALUE)]),
        MetricRow("load_s", "s", "lower", "", True, [none, replace(known, verdict=NOT_RECORDED)]),
    ]
    content = FIGURE.make(Comparison(facts, {}, "runs", rows, []))
    (differences,) = [one for one in content.tables if one.caption.startswith("Which differences")]
    assert [row[0].text for row in differences.rows] == ["blocked_s"]
    assert "1 of 2 metrics cannot be compared: A or the other run lacks them." in content.notes
