"""Who was waited for in a save: traces in which the longest wall time is that of a rank that waited."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.synthetic_traces.shape import Shape
from benchmarks.synthetic_traces.write import write_run
from tests.unit.tools.ckpt_analysis.analysis_helpers import file_of, result
from tests.unit.tools.ckpt_analysis.trace_factory import Options, RankLog, dump
from tools.ckpt_analysis import open_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.metrics.restart_parts import UNNAMED, parts_of
from tools.ckpt_analysis.render.answer import answer

pytestmark = pytest.mark.slow  # each writes and analyses the traces of whole runs
_SHAPE = Shape(ranks=24, saves=4, plants=frozenset({"straggler-rank"}))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank is late at each barrier, since its fsync takes long; others have longer wall times, and wait."""
    directory = tmp_path_factory.mktemp("victims") / "run"
    write_run(directory, _SHAPE)
    return directory


def test_a_victim_in_a_barrier_is_not_critical(trace: Path) -> None:
    straggler = _SHAPE.planted_rank("straggler-rank")
    found = result(trace, per_rank=True)
    victims = 0
    for save in found["saves"]:
        waited = {entry["rank"]: entry["phases"]["barrier"] for entry in save["per_rank"]}
        victims += save["wall"]["slowest_rank"] != straggler and waited[save["wall"]["slowest_rank"]] > 0.3
        assert (save["critical_rank"], save["critical_phase"]) == (straggler, "flush")
        own = next(entry for entry in save["per_rank"] if entry["rank"] == straggler)
        assert save["wall"]["at_critical_s"] == pytest.approx(own["wall_s"])
        assert save["phases"]["barrier"]["at_critical_s"] == pytest.approx(own["phases"]["barrier"])
    assert victims  # else this trace would show nothing


def test_the_rank_that_was_waited_for_is_named_in_all_outputs(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straggler = _SHAPE.planted_rank("straggler-rank")
    assert main(["--all", str(trace), "--no-cache"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count(f"waited for: rank {straggler} (critical), in flush") == 4
    assert main(["-o", str(tmp_path / "report"), str(trace), "--no-cache"]) == 0
    page = next((tmp_path / "report").glob("*.html")).read_text()
    assert f"Rank {straggler} was waited for, in flush;" in page
    assert f"rank {straggler} (critical)" in page


def test_a_rank_that_begins_late_is_critical(tmp_path: Path) -> None:
    """The others wait in the barrier since it began after them; it takes no longer over anything."""
    shape = Shape(ranks=24, saves=4, plants=frozenset({"barrier-skew"}))
    write_run(tmp_path / "run", shape)
    for save in result(tmp_path / "run")["saves"]:
        assert (save["critical_rank"], save["critical_phase"]) == (shape.planted_rank("barrier-skew"), "late")


def test_a_rank_without_a_first_step_is_not_critical(tmp_path: Path) -> None:
    """The last launch of a drill ends once a rank is seen to train: others may not have recorded their first step.

    Rank 0 waits 2 s for rank 1, which then ends before its first step does.
    """
    for rank, imports_ms in ((0, 1000), (1, 3000)):
        log = RankLog(Options(), rank, 0, 0)
        log.process()
        op = log.begin("startup")
        op.span("imports", None, imports_ms)
        op.span("rendezvous", None, 3100 - imports_ms)
        begun_ms = log.now_ms
        if rank == 0:
            log.iteration(1)
            op.at(begun_ms, log.now_ms - begun_ms, "first_step", None)
            op.end()
        dump(file_of(tmp_path, rank, 0), log.records)
    (start,) = open_trace(tmp_path).analysis.report.starts
    assert (start.finished_ranks, start.critical_rank) == (1, 0)
    assert start.wall is not None and start.wall.at_critical_s == start.wall.max_s and start.after_critical_s == 0


def test_a_first_step_that_ends_after_that_of_the_critical_rank(tmp_path: Path) -> None:
    for rank, imports_ms, step_ms in ((0, 1000, 900), (1, 3000, 600)):
        log = RankLog(Options(), rank, 0, 0)
        log.process()
        op = log.begin("startup")
        op.span("imports", None, imports_ms)
        op.span("rendezvous", None, 3100 - imports_ms)
        op.span("first_step", None, step_ms)
        op.end()
        dump(file_of(tmp_path, rank, 0), log.records)
    (start,) = open_trace(tmp_path).analysis.report.starts
    assert (start.critical_rank, start.after_critical_s, start.last_first_step_s) == (1, 0.3, 0.9)
    assert parts_of(start) == pytest.approx({"imports": 3.0, "rendezvous": 0.1, "first_step": 0.9, UNNAMED: 0.0})


def test_phases_that_alternate_in_one_window_have_their_own_time_on_the_path(tmp_path: Path) -> None:
    log = RankLog(Options(), 0, 0, 0)
    log.process()
    op = log.begin("startup")
    op.span("imports", None, 1000)
    begun_ms = log.now_ms
    for phase, detail, busy_ms in (("engine_init", None, 700), ("communicators", "world", 250), ("compile", None, 50)):
        op.at(begun_ms, 1000, phase, detail, busy_ms=busy_ms)
    log.now_ms += 1000
    begun_ms = log.now_ms
    log.iteration(1)
    op.at(begun_ms, log.now_ms - begun_ms, "first_step", None)
    op.end()
    dump(file_of(tmp_path, 0, 0), log.records)
    path = open_trace(tmp_path).analysis.report.path
    assert path is not None
    took = {part.phase: part.seconds for part in path.parts}
    assert [took[name] for name in ("imports", "engine_init", "communicators", "compile")] == [1.0, 0.7, 0.25, 0.05]
    (start,) = open_trace(tmp_path).analysis.report.starts
    assert start.critical_phase == "imports"


@pytest.mark.parametrize(
    ("plans", "rank", "phase"),
    [
        # Rank 2 comes last by a moment, and rank 0 works on alone after it.
        ([[("serialize", 10), ("barrier", 4), ("library_call", 3000)], [("serialize", 11), ("barrier", 3)],
          [("serialize", 13), ("barrier", 1)]], 0, "library_call"),
        # Rank 2 takes no part in the barrier, and has ended before the last comes to it.
        ([[("serialize", 1000), ("barrier", 2001)], [("serialize", 3000), ("barrier", 1)], [("serialize", 100)]],
         1, "serialize"),
        # Rank 0 takes no part either, and works for as long as the others wait.
        ([[("serialize", 100), ("library_call", 3000)], [("serialize", 100), ("barrier", 3000)]], 0, "library_call"),
    ],
)  # fmt: skip
def test_a_rank_that_began_with_the_others_is_not_late(
    tmp_path: Path, plans: list[list[tuple[str, float]]], rank: int, phase: str
) -> None:
    for number, plan in enumerate(plans):
        log = RankLog(Options(), number, 0, 0)
        log.process()
        op = log.begin("save", "Engine", tag="global_step5", step=5)
        for name, took_ms in plan:
            op.span(name, None, took_ms)
        op.end(bytes=1000, num_files=1, durable=True)
        dump(file_of(tmp_path, number, 0), log.records)
    (save,) = open_trace(tmp_path).analysis.report.saves
    assert (save.critical_rank, save.critical_phase) == (rank, phase)


def test_who_was_waited_for_in_the_background_did_not_hold_training_up(tmp_path: Path) -> None:
    for name, background in (("behind", True), ("before", False)):
        directory = tmp_path / name
        directory.mkdir()
        for rank in range(2):
            log = RankLog(Options(), rank, 0, 0)
            log.process()
            op = log.begin("save", "Engine", tag="global_step5", step=5)
            op.span("serialize", None, 10)
            begun_ms = log.now_ms
            log.now_ms += 100 * (rank + 1)
            op.at(begun_ms, 100 * (rank + 1), "flush", "fsync", blocking=not background)
            op.end(bytes=1000, num_files=1, durable=True)
            dump(file_of(directory, rank, 0), log.records)
        said = " ".join(answer(open_trace(directory).analysis.report))
        assert "Rank 1 was waited for, in flush" in said
        assert ("in flush, which held no training up; " in said) == background
