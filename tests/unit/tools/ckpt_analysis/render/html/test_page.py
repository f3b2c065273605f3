"""The HTML report without a browser: its structure, that it is whole by itself, and what it says where data lacks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.ckpt_analysis.analysis_helpers import file_of
from tests.unit.tools.ckpt_analysis.render.html.report_pages import Page, analysis_of, page_comparing, page_of
from tests.unit.tools.ckpt_analysis.trace_factory import Options, RankLog, dump, rank_log, write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.glossary import DEFINITIONS
from tools.ckpt_analysis.findings import RULES
from tools.ckpt_analysis.metrics.budget import Budget
from tools.ckpt_analysis.metrics.results import NO_GROUP, Spread
from tools.ckpt_analysis.render.html.budget import bar_of
from tools.ckpt_analysis.render.html.colours import colour, ink_on
from tools.ckpt_analysis.render.html.figures import FIGURES
from tools.ckpt_analysis.render.html.page import run_page
from tools.ckpt_analysis.render.html.run_data import choose
from tools.ckpt_analysis.report import without_ranks

pytestmark = pytest.mark.slow  # each writes a page

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("sound"), Options(hosts=2))


@pytest.fixture(scope="module")
def page(trace: Path) -> Page:
    return Page(page_of(trace))


def test_one_file_that_asks_no_network_for_anything(page: Page) -> None:
    assert len(page.all("script", id="plotly")) == 1
    assert [script.attributes.get("src") for script in page.all("script")] == [None] * 3
    assert all(link.attributes["href"].startswith("data:") for link in page.all("link"))
    assert all(a.attributes["href"].startswith("#") for a in page.all("a"))
    assert page.all("img") == page.all("iframe") == page.all("object") == []
    (style,) = page.all("style")
    assert "url(" not in style.text and "@import" not in style.text
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy.attributes["content"].startswith("default-src 'none'")


def test_every_figure_is_there_with_caption_and_links_to_its_definitions(page: Page) -> None:
    ids = {element.attributes["id"] for element in page.elements if "id" in element.attributes}
    captions = [p.text.split("\n")[0].strip() for p in page.all("p", class_="caption")]
    shown = [figure for figure in FIGURES if figure.name != "probes"]  # this trace has none: a sentence
    assert captions == [figure.caption for figure in shown]
    assert {figure.name for figure in FIGURES} <= ids
    assert all(f"plot-{figure.name}-0" in page.plots() for figure in shown)
    linked = {a.attributes["href"][1:] for a in page.all("a")}
    assert linked <= ids
    assert len([name for name in linked if name.startswith("def-")]) > 15


def test_what_people_with_screen_readers_and_keyboards_need(page: Page) -> None:
    assert page.all("html")[0].attributes["lang"] == "en"
    assert [len(page.all(tag)) for tag in ("header", "nav", "main", "footer", "h1")] == [1] * 5
    assert page.all("a", class_="skip")[0].attributes["href"] == "#main"
    tables = page.all("table")
    assert tables and len(page.all("caption")) == len(tables)
    drawn = [div for div in page.all("div") if div.attributes.get("class") == "plot"]
    assert len(drawn) == len(page.plots())
    for div in drawn:
        assert div.attributes["role"] == "img" and len(div.attributes["aria-label"]) > 20
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    for element in page.elements:
        if "aria-labelledby" in element.attributes:
            assert element.attributes["aria-labelledby"] in ids


def test_first_page_says_who_ran_what_is_wrong_and_the_answer(page: Page) -> None:
    facts = {dt.text: dd.text for dt, dd in pairwise(page.elements) if (dt.tag, dd.tag) == ("dt", "dd")}
    assert facts["Layout"] == "TP2 PP2 DP2" and facts["Hosts"] == "2: node0, node1"
    assert facts["Engine"] == "TorchCheckpointEngine (asked for: torch)"
    assert facts["Saves"] == "2 of 2 complete" and facts["Cycles"] == "2, of them 1 restart"
    words = " ".join(element.text for element in page.all("p"))
    assert "3 steps had to be trained again" in words
    assert "several_clocks" in [element.text for element in page.all("b")]
    assert "straggling_rank" in [element.text for element in page.all("code")]


def test_numbers_and_picture_stand_before_the_answer_and_folded_facts(page: Page) -> None:
    classes = [element.attributes.get("class") for element in page.elements]
    order = [classes.index(name) for name in ("numbers", "budget", "plot", "answer questions", "facts", "findings")]
    assert order == sorted(order)
    shown = [e.text for e in page.elements[classes.index("numbers") :] if e.tag in ("dt", "dd")][: 4 * 3]
    titles, values, notes = shown[::3], shown[1::3], [note.strip().replace("\u00a0", " ") for note in shown[2::3]]
    assert titles == ["Time to first step", "Blocked per save", "Lost work", "Coverage"]
    # Rank 2 imports longest; ranks leave the first step together; rank 5 writes longest; rank 4 trains slowest.
    assert values[2] == "0.330 s" and notes[2].startswith("3 steps undone in 1 restart; ")
    assert notes[0].startswith("restart of cycle 1, from process start; ") and notes[0].endswith(" s from the failure")
    assert notes[1].startswith("median of 2 saves, longest 0.") and values[3].endswith(" %")
    assert "open" not in next(e for e in page.all("details") if e.attributes.get("class") == "data").attributes


def test_the_budget_is_a_bar_on_the_first_screen(tmp_path: Path) -> None:
    analysis = analysis_of(write_trace(tmp_path / "trace", Options()))
    budget = analysis.report.budget
    assert budget is not None
    page = Page(run_page(analysis))
    first = next(i for i, element in enumerate(page.elements) if element.attributes.get("class") == "budget")
    parts = [element for element in page.elements[first + 1 : first + 1 + len(budget.seconds)] if element.tag == "span"]
    spent = {part: took for part, took in budget.seconds.items() if took > 0}
    assert len(parts) == len(spent) > 3
    for (name, took), part in zip(spent.items(), parts, strict=True):
        assert part.attributes["title"].startswith(f"{name}: ")
        assert part.attributes["style"] == (
            f"flex-grow: {took / budget.wall_s}; background: {colour(name)}; color: {ink_on(colour(name))}"
        )
        label = f"{name} {100 * took / budget.wall_s:.0f} %"
        assert part.text == (label if took >= 0.09 * budget.wall_s else "")
    said = next(element.text for element in page.all("p") if element.attributes.get("class") == "wall")
    assert said == "Wall time: 25.439 s; small parts, from the left: training 1 %, blocked 2 %, wasted 3 %, other 2 %"


def test_a_share_of_the_bar_is_neither_nothing_nor_all() -> None:
    seconds = {"launching": 99.7, "restarting": 0.3, "training": 0.0, "blocked": 0.0, "wasted": 0.0, "other": 0.0}
    shown = bar_of(Budget(0, 100.0, 0.0, seconds, [], []))
    assert shown is not None and [part.label for part in shown.parts] == ["launching >99 %", ""]
    assert shown.title == "Wall time: 100.000 s; small parts, from the left: restarting <1 %"
    whole = bar_of(Budget(0, 100.0, 0.0, dict.fromkeys(seconds, 0.0) | {"launching": 100.0}, [], []))
    assert whole is not None and [part.label for part in whole.parts] == ["launching 100 %"]
    assert bar_of(Budget(0, 0.0, 0.0, dict.fromkeys(seconds, 0.0), [], [])) is None


def test_each_finding_says_what_it_costs(page: Page) -> None:
    """And what half of it would be worth, where that is known."""
    findings = next(i for i, e in enumerate(page.elements) if e.attributes.get("class") == "findings")
    told = [e.text.replace("\u00a0", " ") for e in page.elements[findings:] if e.tag == "p"]
    costs = [text for text in told if text.startswith("Costs ")]
    assert "; if half of it: the restart takes " in costs[0]
    seconds = [float(text.split()[1]) for text in costs]
    assert len(seconds) > 2 and seconds == sorted(seconds, reverse=True)


def test_findings_and_figures_link_to_each_other(page: Page) -> None:
    assert {rule.figure for rule in RULES} <= {figure.name for figure in FIGURES}
    links = [a.attributes["href"] for a in page.all("a")]
    found = [li.attributes["id"] for li in page.all("li") if "id" in li.attributes]
    assert found and found == [f"finding-{i}" for i in range(1, len(found) + 1)]
    assert sorted(link for link in links if link.startswith("#finding-")) == sorted(f"#{name}" for name in found)
    assert links.count("#ranks") == 2  # of the contents, and of the straggler


def test_an_error_that_repeats_itself_is_shown_with_the_budget(tmp_path: Path) -> None:
    for cycle in range(2):
        log = RankLog(Options(), 0, cycle, 20_000 * cycle)
        log.process()
        log.event("failure", "training_error", "ValueError: no such token", step=7)
        dump(file_of(tmp_path, 0, cycle), log.records)
    text = page_of(tmp_path)
    assert "The same error ended 2 cycles at iteration 7" in text
    assert 'Shown in <a href="#budget">Budget</a>' in text


def test_hostile_names_are_text(tmp_path: Path) -> None:
    """Run ids, hosts, tags, files and errors come from files that somebody else may have written."""
    write_trace(tmp_path, Options(run_id=HOSTILE, save_fails_on=(3,)))
    for path in tmp_path.glob("rank_*"):
        text = path.read_text().replace("node0", json.dumps(HOSTILE)[1:-1])
        text = text.replace("global_step5/", json.dumps("</script>" + HOSTILE)[1:-1])
        path.write_text(text.replace('"global_step5"', json.dumps(HOSTILE)).replace("MainThread", HOSTILE))
    source = page_of(tmp_path)
    hostile = Page(source)
    assert len(hostile.all("script")) == 3 and hostile.all("img") == []
    assert HOSTILE in hostile.all("title")[0].text and HOSTILE in hostile.all("h1")[0].text
    assert HOSTILE in json.dumps(hostile.plots())  # in the data of the plots, from where no tag can begin


def only_first_steps(log: RankLog) -> None:
    op = log.begin("startup")
    op.span("imports", None, 10)
    op.span("first_step", None, 10)
    op.end()


def only_an_unfinished_save(log: RankLog) -> None:
    op = log.begin("save", tag="global_step5", step=5)
    op.span("collect", None, 10)


def nothing(log: RankLog) -> None:
    pass


def a_save_without_bytes_or_files(log: RankLog) -> None:
    op = log.begin("save", tag="global_step5", step=5)
    op.span("collect", None, 10)
    op.end()


def a_save_of_no_length(log: RankLog) -> None:
    log.begin("save", tag="global_step5", step=5).end(bytes=0, num_files=0)


@pytest.mark.parametrize(
    "make", [nothing, only_first_steps, only_an_unfinished_save, a_save_without_bytes_or_files, a_save_of_no_length]
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_was_not_recorded_is_a_sentence(tmp_path: Path, make: Any, ranks: int) -> None:
    for rank in range(ranks):
        log = RankLog(Options(), rank, 0, 0)
        log.process()
        make(log)
        dump(file_of(tmp_path, rank, 0), log.records)
    run = choose(analysis_of(tmp_path))
    for figure in FIGURES:
        content = figure.make(run)
        assert content.plots or content.notes, figure.name
        assert all(note.endswith(".") and len(note) > 20 for note in content.notes), figure.name
    Page(page_of(tmp_path)).plots()


def test_notes_name_what_is_missing(tmp_path: Path) -> None:
    log = RankLog(Options(), 0, 0, 0)
    log.process()
    dump(file_of(tmp_path, 0, 0), log.records)
    text = page_of(tmp_path)
    assert "No save was recorded span by span" in text
    assert "No training step was recorded." in text
    assert "--restart-trace-probes off" in text


def test_a_run_of_which_only_the_longest_times_are_known(trace: Path) -> None:
    """What an imported log gives: a report without phases, ranks or spans, and spreads with holes."""
    known = analysis_of(trace).report
    nobody: Any = None
    wall = Spread(15.0, nobody, 14.0, nobody, None)
    bare: dict[str, Any] = {"phases": [], "per_rank": [], "unattributed": None, "group": NO_GROUP, "io_GBps": None}
    report = replace(
        known,
        saves=[replace(save, wall=wall, **bare) for save in known.saves],
        loads=[],
        starts=[
            replace(start, wall=wall, failure=None, **{k: v for k, v in bare.items() if k != "io_GBps"})
            for start in known.starts
        ],
        cycles=[replace(info, coordinates={}, hosts=[]) for info in known.cycles],
        budget=None,
    )
    analysis = without_ranks(report)
    page = Page(run_page(analysis))
    assert {name.rpartition("-")[0] for name in page.plots()} == {"plot-throughput", "plot-steps"}
    assert "Hosts" in [dt.text for dt in page.all("dt")] and "not recorded" in [dd.text for dd in page.all("dd")]
    words = " ".join(p.text for p in page.all("p"))
    assert "no phases are recorded, only the whole" in words and "Ranks and hosts are not recorded" in words
    assert "plot-comparison-0" in Page(page_comparing(a=[report], b=[report])).plots()


def test_terms_of_figures_are_defined() -> None:
    assert {term for figure in FIGURES for term in figure.terms} <= set(DEFINITIONS)


def test_checkpoint_that_is_shown_can_be_chosen(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert choose(analysis_of(trace)).save.tag == "global_step10"  # type: ignore[union-attr]
    assert main(["report", str(trace), "-o", str(tmp_path / "a.html"), "--checkpoint", "global_step5"]) == 0
    assert "Save global_step5, cycle 0: phases" in (tmp_path / "a.html").read_text()
    capsys.readouterr()
    assert main(["report", str(trace), "-o", str(tmp_path / "b.html"), "--checkpoint", "global_step6"]) == 2
    error = capsys.readouterr().err
    assert "--checkpoint global_step6" in error and "global_step5, global_step10" in error
    assert not (tmp_path / "b.html").exists()


def test_the_save_at_the_end_of_training_is_shown_only_if_there_is_no_other(tmp_path: Path) -> None:
    log = RankLog(Options(), 0, 0, 0)
    log.process()
    for step in (1, 2):
        log.iteration(step)
        op = log.begin("save", tag=f"global_step{step}", step=step)
        op.span("collect", None, 10)
        if step == 2:  # the end of training waits for this one
            op.span("wait_previous", None, 50)
        op.end()
    dump(file_of(tmp_path, 0, 0), log.records)
    run = choose(analysis_of(tmp_path))
    assert run.save is not None and run.save.tag == "global_step1"
    asked = choose(analysis_of(tmp_path), "global_step2")
    timeline = next(figure for figure in FIGURES if figure.name == "timeline").make(asked)
    assert "training was over, and its end waited for this save" in timeline.notes[0]


def test_output_goes_to_a_directory_or_a_file(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    before = sorted(trace.iterdir())
    assert main([str(trace)]) == 0
    assert sorted(trace.iterdir()) == before  # nothing is written that was not asked for
    assert main([str(trace), "-o", str(tmp_path / "new" / "dir")]) == 0
    assert [p.name for p in (tmp_path / "new" / "dir").iterdir()] == ["ckpt_report.html"]
    assert str(tmp_path / "new" / "dir" / "ckpt_report.html") in capsys.readouterr().err


def test_a_label_stands_above_everything_and_in_every_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    label = "Scaled: <b>not</b> the 70b model"
    for name, value in (("scaled", label), ("bare", "")):
        write_trace(tmp_path / name)
        for path in (tmp_path / name).glob("rank_*.jsonl"):
            first, rest = path.read_text().split("\n", 1)
            record = json.loads(first)
            record["environment"]["RESTART_TRACE_LABEL"] = value
            path.write_text(json.dumps(record) + "\n" + rest)
    page = page_of(tmp_path / "scaled")
    shown = page.index("<p>Scaled: &lt;b&gt;not&lt;/b&gt; the 70b model</p>")
    assert shown < page.index("<nav")
    assert '<div class="label">' not in page_of(tmp_path / "bare")

    assert main([str(tmp_path / "scaled")]) in (0, 1)
    assert f"  label: {label}" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "scaled"), str(tmp_path / "bare")]) in (0, 1)
    assert label in capsys.readouterr().out


def test_report_that_cannot_be_written(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("mine")
    assert main([str(trace), "-o", str(tmp_path / "file" / "sub")]) == 2
    captured = capsys.readouterr()
    assert f"-o {tmp_path / 'file' / 'sub'}" in captured.err and captured.err.count("\n") == 1
    assert "Run 0123456789ab" in captured.out  # what can be said was said
    assert (tmp_path / "file").read_text() == "mine"
    assert main([str(trace), "-o", "/proc/report.html"]) == 2  # the system refuses new files there
    assert "/proc/report.html: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--checkpoint", "global_step5"], "--checkpoint global_step5"),
        (["AGAIN", "--run-id", "x"], "--run-id x"),
        (["AGAIN", "--format", "json"], "--format json"),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    trace: Path, capsys: pytest.CaptureFixture, flags: list[str], word: str
) -> None:
    words = [str(trace) if flag == "AGAIN" else flag for flag in flags]
    assert main(["report", str(trace), *words]) == 2
    captured = capsys.readouterr()
    assert word in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_the_trace_of_a_kill_within_a_save_is_drawn(tmp_path: Path) -> None:
    write_trace(tmp_path, Options(save_killed_on=(1, 2, 5), supervisor=False))
    log = rank_log(Options(), 7, 1)
    dump(file_of(tmp_path, 7, 1), log.records[: len(log.records) // 2])
    Page(page_of(tmp_path)).plots()
