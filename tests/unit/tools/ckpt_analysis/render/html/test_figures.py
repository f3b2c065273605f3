"""What the figures of the HTML report show, against traces whose truth is known."""

from __future__ import annotations

import base64
import itertools
import json
import re
from array import array
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import polars as pl
import pytest

from restart_trace.schema import PHASES
from tests.unit.tools.ckpt_analysis.analysis_helpers import file_of
from tests.unit.tools.ckpt_analysis.render.html.report_pages import Page, analysis_of, page_of
from tests.unit.tools.ckpt_analysis.trace_factory import RANKS, Options, RankLog, dump, write_trace
from tools.ckpt_analysis.metrics.critical_path import (
    Segment,
    Wait,
    critical_path,
    longest_wait,
    parts_of_path,
    start_windows,
)
from tools.ckpt_analysis.metrics.restart_parts import parts_of
from tools.ckpt_analysis.render.answer import answer
from tools.ckpt_analysis.render.html import colours, heatmap, restart
from tools.ckpt_analysis.render.html.figures import FIGURES
from tools.ckpt_analysis.render.html.plots import matrix
from tools.ckpt_analysis.render.html.run_data import choose


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("sound"), Options(hosts=2))


@pytest.fixture(scope="module")
def page(trace: Path) -> Page:
    return Page(page_of(trace))


def test_the_documentation_says_what_each_figure_answers() -> None:
    page = (Path(__file__).resolve().parents[6] / "docs" / "ckpt_analysis.md").read_text()
    table = page.partition("| figure | what it answers |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([A-Z].*?) \|", table, re.M) == [*(figure.section for figure in FIGURES), "Comparison"]


def test_every_phase_has_one_colour() -> None:
    spans = {name: phases for name, phases in PHASES.items() if name not in ("failure", "process")}  # whose are events
    shown_as = [(p, *(f"{p}/{d}" for d in details)) for phases in spans.values() for p, details in phases.items()]
    assert all(colours.colour(name) for names in shown_as for name in names)
    for operation in ("save", "load", "startup"):  # within an operation colours tell phases apart
        shown = [p for p in PHASES[operation] if p not in ("commit", "load")]
        assert len({colours.colour(p) for p in shown}) == len(shown)


def test_ink_is_read_on_its_colour() -> None:
    assert [colours.ink_on(one) for one in ("#FFFFFF", "#000000", "#CC3311", "#B8C4D6")] == [
        "#000000", "#FFFFFF", "#FFFFFF", "#000000",
    ]  # fmt: skip


def test_a_colour_has_one_meaning(page: Page) -> None:
    """Each of a phase, a part of the budget, a series, or a mark; those of a family mean the same."""
    by_colour: dict[str, set[str]] = {}
    for name in colours.names():
        by_colour.setdefault(colours.colour(name), set()).add(name)
    assert [names for names in by_colour.values() if len(names) > 1 and names not in colours.FAMILIES] == []
    assert all(len({colours.colour(name) for name in family}) == 1 for family in colours.FAMILIES)
    others = [*colours.SERIES, *colours.BARRIERS, colours.MARK, colours.PATH, colours.NEUTRAL]
    assert len(set(others)) == len(others) and not set(others) & set(by_colour)
    drawn = set(re.findall(r"#[0-9A-Fa-f]{6}\b", json.dumps(page.plots())))
    assert len(drawn) > 20 and drawn <= {*by_colour, *others, "#111111"}  # that of text, which the page changes


def test_no_two_barriers_have_the_same_colour(trace: Path) -> None:
    """Of sixteen barriers those that cost most have colours of their own, and the others are one."""
    run = choose(analysis_of(trace))
    spans = run.frames.spans
    more = [
        spans.filter(pl.col("phase") == "barrier").with_columns(pl.col("start_ns") + nth, pl.col("duration_ns") // 9)
        for nth in range(14)
    ]
    run = replace(run, frames=replace(run.frames, spans=pl.concat([spans, *more])))
    content = next(figure for figure in FIGURES if figure.name == "barriers").make(run)
    for drawn in (content.plots[0], content.all_plots[-1]):  # of the save; of the load, which is folded
        painted = {bars["name"]: bars["marker"]["color"] for bars in drawn.variants[0].data}
        assert len(painted) > len(colours.BARRIERS) and len(set(painted.values())) == len(painted)
        (rest,) = [name for name in painted if name.endswith("other barriers")]
        assert painted[rest] == colours.NEUTRAL


def windows(*rows: tuple[int, str, float, float]) -> pl.DataFrame:
    """(rank, phase, start, end in s) as `start_windows` gives them."""
    table = pl.DataFrame(
        [(rank, phase, round(start * 1e9), round(end * 1e9)) for rank, phase, start, end in rows],
        schema=["rank", "phase", "start_ns", "end_ns"],
        orient="row",
    ).sort("rank", "phase", "start_ns")
    return table.with_columns(pl.int_range(pl.len()).over("rank", "phase").alias("occurrence"))


def in_seconds(path: list[Segment]) -> list[tuple[int, str, float, float]]:
    return [(s.rank, s.phase, s.start_ns / 1e9, s.end_ns / 1e9) for s in path]


def test_critical_path_goes_to_the_rank_that_came_last() -> None:
    table = windows(
        (0, "imports", 0, 3), (0, "rendezvous", 3, 8), (0, "load/read", 8, 12), (0, "first_step", 12, 20),
        (1, "imports", 1, 7), (1, "rendezvous", 7, 8), (1, "load/read", 8, 10), (1, "first_step", 11, 19),
    )  # fmt: skip
    # Rank 0 ends last; it read until 12, and rank 1 held up the rendezvous until 7.
    assert in_seconds(critical_path(table)) == [
        (1, "imports", 1, 7),
        (0, "rendezvous", 7, 8),
        (0, "load/read", 8, 12),
        (0, "first_step", 12, 20),
    ]


def test_critical_path_takes_the_innermost_span_and_names_gaps() -> None:
    table = windows(
        (0, "engine_init", 0, 10), (0, "load/read", 2, 5), (0, "load/read", 4, 6), (0, "first_step", 11, 12)
    )  # fmt: skip
    assert in_seconds(critical_path(table)) == [
        (0, "engine_init", 0, 2),
        (0, "load/read", 2, 4),
        (0, "load/read", 4, 6),
        (0, "engine_init", 6, 10),
        (0, "unattributed", 10, 11),
        (0, "first_step", 11, 12),
    ]


def test_details_of_one_phase_are_meetings_of_their_own() -> None:
    """Rank 1 comes last to the first of two barriers, rank 0 to the second."""
    table = windows(
        (0, "imports", 0, 1), (0, "barrier/a", 1, 3.1), (0, "data_build", 3.1, 6), (0, "barrier/b", 6, 6.1),
        (0, "first_step", 6.1, 7),
        (1, "imports", 0, 3), (1, "barrier/a", 3, 3.1), (1, "barrier/b", 3.1, 6.1), (1, "first_step", 6.1, 7),
    )  # fmt: skip
    parts = [(part.rank, part.phase, round(part.seconds, 9)) for part in parts_of_path(critical_path(table))]
    assert parts == [
        (1, "imports", 3), (0, "barrier", 0.1), (0, "data_build", 2.9), (0, "barrier", 0.1), (0, "first_step", 0.9),
    ]  # fmt: skip


def test_the_longest_wait_is_that_of_the_median_of_the_others() -> None:
    """Ranks 0 and 1 wait 2 and 2.5 s for rank 2 in the rendezvous, nobody that long in the barrier."""
    table = windows(
        (0, "rendezvous", 1, 3.1), (1, "rendezvous", 0.5, 3.1), (2, "rendezvous", 3, 3.1),
        (0, "barrier/a", 4, 5), (1, "barrier/a", 4.5, 5), (2, "barrier/a", 3.5, 5),
    )  # fmt: skip
    assert longest_wait(table) == Wait(2, "rendezvous", 2.25)
    assert longest_wait(windows((0, "rendezvous", 1, 2), (0, "first_step", 2, 3))) is None
    left = windows((0, "barrier/a", 0, 1), (1, "barrier/a", 5, 6))  # rank 0 left before rank 1 came
    assert longest_wait(left) == Wait(1, "barrier", 1)


def test_the_restart_is_drawn_over_all_ranks(trace: Path) -> None:
    """From the failure to the first step: what the supervisor did, a lane per rank, and the path as a line."""
    run = choose(analysis_of(trace))
    assert run.start is not None and run.start.restart_s is not None
    (plot,) = restart.draw(run).plots
    (variant,) = plot.variants
    lanes = variant.layout["yaxis"]["categoryarray"][::-1]
    assert lanes == ["supervisor", *(f"rank {rank}, node{rank // 4}" for rank in range(RANKS))]
    bars: dict[str, list[tuple[float, float]]] = {}
    for phase in variant.data[:-1]:
        for lane, begin, length in zip(phase["y"], phase["base"], phase["x"], strict=True):
            bars.setdefault(lane, []).append((begin, begin + length))
    for mine in bars.values():  # no bar hides another
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(sorted(mine)))
    ends = {lane: max(end for _, end in mine) for lane, mine in bars.items()}
    assert ends["rank 2, node0"] == pytest.approx(run.start.restart_s) == max(ends.values())
    line = variant.data[-1]
    assert line["name"] == "critical path" and line["y"] == ["supervisor"] * 2 + ["rank 2, node0"] * (
        len(line["y"]) - 2
    )
    assert line["x"][:3] == pytest.approx([0.0, ends["supervisor"], ends["supervisor"]])
    assert line["x"][-1] == pytest.approx(run.start.restart_s)
    named = {phase["name"] for phase in variant.data[:-1] if phase["showlegend"]}
    assert {"detect", "stop", "relaunch", "launcher", "imports"} < named and "communicators" not in named


def test_of_many_ranks_those_on_the_path_are_drawn_and_others() -> None:
    assert restart.shown_ranks(range(48), {3}) == list(range(48))
    shown = restart.shown_ranks(range(10_000), {7, 9_999})
    assert 40 <= len(shown) <= 48 and {7, 9_999} <= set(shown) and shown == sorted(shown)
    assert max(b - a for a, b in itertools.pairwise(shown)) < 500
    assert restart.shown_ranks(range(10_000), set(range(100))) == list(range(100))  # no rank of the path is left out


@pytest.mark.slow
def test_waterfall_adds_up_to_the_restart(trace: Path) -> None:
    analysis = analysis_of(trace)
    (restart,) = analysis.report.restarts
    path = critical_path(start_windows(analysis.frames, restart.group))
    assert restart.failure is not None and restart.restart_s is not None
    for before, after in zip(path, path[1:], strict=False):
        assert before.end_ns == after.start_ns
    on_path = (path[-1].end_ns - path[0].start_ns) / 1e9
    first = restart.wall
    assert first is not None and on_path == pytest.approx(first.max_s, abs=1e-9)
    plots = Page(page_of(trace)).plots()
    bars = [bar for bar in plots["plot-waterfall-0"][0]["data"][1:] if bar["type"] == "bar"]
    shown = sum(sum(bar["x"]) for bar in bars if bar["name"] != "caught_up")  # which comes after
    assert shown == pytest.approx(restart.restart_s, abs=1e-6)
    # One definition of the critical rank: the sentences, the finding, the labels and the bars say the same.
    rank = restart.critical_rank
    texts = [drawn for drawn in plots["plot-waterfall-0"][0]["data"] if drawn.get("mode") == "text"]
    labels = [text.strip() for drawn in texts for text in drawn["text"]]
    room, width = 0.12, plots["plot-waterfall-0"][0]["layout"]["xaxis"]["range"][1]  # what a label takes of the plot
    for drawn in texts:  # none is cut by an end of the axis
        left = drawn["textposition"] == "middle left"
        assert all(x > room * width if left else x < (1 - room) * width for x in drawn["x"])
    imports_s = parts_of(restart)["imports"]
    assert f"{imports_s:.3f} s" in labels
    words = " ".join(answer(analysis.report))
    assert f"along its critical path, imports took {imports_s:.3f} s (79 %), " in words
    assert ". The run had reached step 8 and resumed after step 5: " in words
    (cold,) = [finding for finding in analysis.report.findings if finding.rule == "cold_imports"]
    assert f"{imports_s:.3f} s of" in cold.evidence and f"on critical rank {rank};" in cold.evidence
    title = "Restart, cycle 1"
    beside = [bar for bar in plots["plot-waterfall-1"][0]["data"] if title in bar["y"]]
    added = sum(bar["x"][bar["y"].index(title)] for bar in beside)
    assert added == pytest.approx(restart.restart_s, abs=1e-6)


def decoded(spec: dict[str, Any]) -> list[list[float]]:
    rows, columns = map(int, spec["shape"].split(","))
    flat = array("f", base64.b64decode(spec["bdata"]))
    assert len(flat) == rows * columns
    return [list(flat[row * columns : (row + 1) * columns]) for row in range(rows)]


def test_matrix_survives_its_encoding() -> None:
    assert decoded(matrix([[1.0, 2.5], [3.0, 4.0], [-1.0, 0.0]])) == [[1.0, 2.5], [3.0, 4.0], [-1.0, 0.0]]
    with pytest.raises(ValueError, match="differ in length"):
        matrix([[1.0], [1.0, 2.0]])


def test_heat_map_of_many_ranks_keeps_the_worst() -> None:
    ranks = 10_240
    slow = 7_777
    table = pl.DataFrame({"rank": range(ranks)}).with_columns(
        pl.concat_str(pl.lit("node"), pl.col("rank") // 8).alias("host"),
        (pl.col("rank") % 8).alias("tp"), (pl.col("rank") // 1024).alias("pp"), (pl.col("rank") // 8 % 128).alias(""
        "dp"),
        pl.when(pl.col("rank") == slow).then(9.0).otherwise(1.0).alias("flush/write"),
    )  # fmt: skip
    data, layout = heatmap.arranged(table, ["flush/write"], {slow}, "host")
    (row,) = decoded(data[0]["z"])
    assert "texttemplate" not in data[0]  # cells without room for a value
    assert len(row) == len(data[0]["x"]) <= heatmap.COLUMNS
    assert max(row) == 9.0 and row.count(9.0) == 1
    marked = data[0]["x"][row.index(9.0)]
    assert data[1]["x"] == [marked] and marked.startswith(f"ranks from {slow // 10 * 10} to")
    assert len(layout["xaxis"]["tickvals"]) <= 13


def test_rank_map_shows_every_rank_of_a_small_run(page: Page) -> None:
    by_host, by_layout = page.plots()["plot-ranks-0"]
    assert (by_host["label"], by_layout["label"]) == ("by host", "by TP × PP × DP")
    maps = {row["name"]: row for row in by_host["data"] if row["type"] == "heatmap"}
    rows = {name: decoded(row["z"])[0] for name, row in maps.items()}
    assert rows["flush/fsync"] == pytest.approx([0.24 if rank == 5 else 0.04 for rank in range(RANKS)])
    order = [int(re.match(r"rank (\d+)", label).group(1)) for label in by_layout["data"][0]["x"]]  # type: ignore[union-attr]
    assert order == [0, 1, 2, 3, 4, 5, 6, 7]  # the factory's pp is rank // 4, its dp rank // 2 % 2
    assert by_host["data"][-1]["x"] == ["rank 5 (node1, tp 1 pp 1 dp 0)"]
    for row in maps.values():  # each on a scale of its own, with its values, and one legend for all
        high = max(decoded(row["z"])[0])
        assert row["zmax" if row["reversescale"] else "zmin"] == pytest.approx(median(decoded(row["z"])[0]))
        assert row["zmax"] - row["zmin"] >= 0.1 * high - 1e-9  # noise is not stretched over all colours
        assert row["texttemplate"] == "%{z:.3f}"
    assert by_host["layout"]["yaxis"]["ticktext"] == list(maps)
    assert [row["y"] for row in maps.values()] == [[place] for place in by_host["layout"]["yaxis"]["tickvals"]]
    assert [row["showscale"] for row in maps.values()].count(True) == 1
    # Who works longest is bright, and so is who waits least: the others waited for it.
    assert {name for name, row in maps.items() if row["reversescale"]} == {"barrier"}


def test_ranks_of_an_operation_that_failed_are_not_compared(trace: Path) -> None:
    run = choose(analysis_of(trace))
    assert run.save is not None
    assert "worked much longer" in heatmap.draw(run).notes[0]
    failed = heatmap.draw(replace(run, save=replace(run.save, outcome="failed")))
    assert failed.notes[0] == "Save global_step10, cycle 1: failed, so that its ranks cannot be compared."


def test_barriers_name_who_was_waited_for(trace: Path) -> None:
    run = choose(analysis_of(trace))
    content = next(figure for figure in FIGURES if figure.name == "barriers").make(run)
    save = content.tables[0]
    assert [[cell.text for cell in row[:5]] for row in save.rows] == [
        ["1", "8", "rank 5", "node1", "0.2000"],
        ["2", "7", "rank 0", "node0", "0.0090"],  # rank 0 committed meanwhile
    ]
    held = "the others waited for rank 5 by up to 0.200 s: it spends 0.240 s in flush/fsync, the median rank 0.040 s."
    assert held in content.notes[0]


def test_steps_during_a_save_are_told_from_the_others(tmp_path: Path) -> None:
    log = RankLog(Options(), 0, 0, 0)
    log.process()
    log.iteration(1)
    log.iteration(2)
    op = log.begin("save", tag="global_step2", step=2)
    op.span("collect", None, 10)
    begun_ms = log.now_ms
    for step in (3, 4):
        log.iteration(step)
    op.at(begun_ms, log.now_ms - begun_ms, "flush", "write", blocking=False, bytes=5)
    op.end(bytes=5)
    log.iteration(5)
    dump(file_of(tmp_path, 0, 0), log.records)
    content = next(figure for figure in FIGURES if figure.name == "steps").make(choose(analysis_of(tmp_path)))
    assert [[cell.text for cell in row[:2]] for row in content.tables[0].rows] == [
        ["step during a save", "2"],
        ["no save under way", "2"],
        ["first of a cycle", "1"],
    ]
    assert content.notes[0].startswith("2 steps during saves took 0.1000 s in the median, 1.00 times")


def test_blocking_saves_overlap_no_step(trace: Path) -> None:
    content = next(figure for figure in FIGURES if figure.name == "steps").make(choose(analysis_of(trace)))
    (fold,) = content.folds  # saves made no step longer: nothing of the wall time
    assert fold.result.startswith("No training step ran during a save") and len(fold.content.plots) == 1
    assert content.plots == content.tables == content.notes == []


def test_what_took_less_than_a_hundredth_of_the_wall_time_is_folded(trace: Path) -> None:
    """The load takes 0.5 % of this run, its saves 3 %, its starts most of it."""
    run = choose(analysis_of(trace))
    assert run.load is not None and run.save is not None and run.has_small(run.load) and not run.has_small(run.save)
    for name in ("breakdown", "ranks", "barriers"):
        content = next(figure for figure in FIGURES if figure.name == name).make(run)
        (fold,) = content.folds
        assert fold.result.startswith("Load global_step5, cycle 1") and fold.content.plots and fold.content.tables
        assert content.all_plots[: len(content.plots)] == content.plots
        assert content.all_plots[len(content.plots) :] == fold.content.plots
    report = replace(run.report, budget=None)  # then nothing is known to be small
    assert not any(figure.make(replace(run, report=report)).folds for figure in FIGURES)


def test_throughput_over_a_save_is_drawn(tmp_path: Path) -> None:
    """Sampled rates as they are, counters as their rise per second; nothing of before and after the save.

    A device's counter that is 0 in all samples was not observed; one that stands still shows 0.
    """
    log = RankLog(Options(), 0, 0, 0)
    log.process()
    for at_ms in range(0, 1100, 100):
        written = 1_000_000 * max(0, min(at_ms, 700) - 200)  # 1 GB/s from 200 to 700 ms
        rate = 2e9 if 200 < at_ms <= 700 else 0.0
        values = {"pcie_tx_bytes_per_s": rate, "nvlink_tx_bytes": 7, "io_write_storage_bytes": written}
        values |= {"pcie_rx_bytes_per_s": 0, "nvlink_rx_bytes": 0}
        log.write("sample", time_ns=log.ns(at_ms), values=values)
    log.now_ms = 250
    op = log.begin("save", tag="global_step2", step=2)
    log.write("probe", op=0, at="start", time_ns=log.ns(250), values={"rss_bytes": 1})
    op.span("collect", None, 400)
    op.end()
    dump(file_of(tmp_path, 0, 0), log.records)
    content = next(figure for figure in FIGURES if figure.name == "probes").make(choose(analysis_of(tmp_path)))
    assert content.plots[0].title == "Throughput over Save global_step2, cycle 0, critical rank 0"
    found = {line["name"]: line for line in content.plots[0].variants[0].data}
    assert {name: line["y"] for name, line in found.items()} == {
        "PCIe, from the device": [2.0] * 5, "NVLink, from the device": [0.0] * 5,
        "sent to storage": pytest.approx([1.0] * 5),
    }  # fmt: skip
    zero = "Not observed, since it is 0 in every sample of the run: PCIe, to the device, NVLink, to the device."
    assert zero in content.notes
    assert found["sent to storage"]["x"] == pytest.approx([0.05, 0.15, 0.25, 0.35, 0.45])  # to the first after the end
    (written,) = [row for row in content.tables[-1].rows if row[0].text == "sent to storage"]
    assert [cell.text for cell in written] == ["sent to storage", "1", "1", "0"]


def test_probes_are_drawn(tmp_path: Path) -> None:
    log = RankLog(Options(), 0, 0, 0)
    log.process()
    op = log.begin("save", tag="global_step2", step=2)
    for at, rss in (("start", 2e9), ("end", 3e9)):
        values = {"rss_bytes": int(rss), "io_read_storage_bytes": int(rss), "made_up_by_a_later_version": 1}
        if at == "end":
            op.span("collect", None, 10)
            op.end()
        log.write("probe", op=0, at=at, time_ns=log.ns(log.now_ms), values=values)
    dump(file_of(tmp_path, 0, 0), log.records)
    content = next(figure for figure in FIGURES if figure.name == "probes").make(choose(analysis_of(tmp_path)))
    assert content.plots[0].variants[0].data[0]["y"] == [2.0, 3.0]
    assert content.plots[1].variants[0].data[0]["y"] == [1.0]  # GB fetched during the save
    assert "Memory of a device" in content.notes[0]
