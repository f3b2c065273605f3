"""The commands summary, timeline, export and validate on runs whose truth is known."""

from __future__ import annotations

import csv
import functools
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from benchmarks.synthetic_traces.shape import Shape
from benchmarks.synthetic_traces.write import write_run
from tests.unit.tools.ckpt_analysis.analysis_helpers import file_of, result
from tests.unit.tools.ckpt_analysis.trace_factory import Options, dump, rank_log, write_trace
from tools.ckpt_analysis import open_trace
from tools.ckpt_analysis.cli import COMMANDS, main
from tools.ckpt_analysis.commands import common
from tools.ckpt_analysis.commands.export import TABLES
from tools.ckpt_analysis.common.progress import Progress
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.model.frame import Frames, make_frames
from tools.ckpt_analysis.report_frames import SUMMARY
from tools.ckpt_analysis.trace_analysis import TraceAnalysis
from tools.common.cli import parse_rank_ranges


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("commands") / "run"
    write_run(directory, Shape(ranks=16, saves=4, asynchronous=True))
    return directory


@pytest.fixture(scope="module")
def opened(run: Path) -> TraceAnalysis:
    return open_trace(run)


@pytest.fixture(scope="module")
def opened_once() -> Callable[..., TraceAnalysis]:
    """`open_trace` of commands that all read one run: by the first of them it is read and analysed."""
    return functools.cache(open_trace)


@pytest.fixture(scope="module")
def frames(run: Path) -> Frames:
    return make_frames(load_trace(run))


def output(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == status
    return capsys.readouterr().out


# summary


@pytest.mark.slow
def test_summary_tells_what_its_numbers_lack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path)
    for form in ("table", "markdown", "csv"):
        assert main(["summary", str(tmp_path), "--format", form]) == 0
        assert "missing_ranks" not in "".join(capsys.readouterr()).replace("\\", "")
    for path in tmp_path.glob("rank_0000[1-7]_*.jsonl"):
        path.unlink()
    for form in ("table", "markdown"):
        text = output(capsys, "summary", str(tmp_path), "--format", form).replace("\\", "")
        assert "error: missing_ranks: cycle 0:" in text
    assert main(["summary", str(tmp_path), "--format", "csv"]) == 0
    out, err = capsys.readouterr()
    assert "missing_ranks" not in out and "ckpt-analysis: error: missing_ranks: cycle 0:" in err


def test_summary_json_is_the_report(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(output(capsys, "summary", str(run), "--format", "json")) == result(run)


def test_summary_csv_has_every_operation_and_phase(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = result(run)
    rows = list(csv.DictReader(io.StringIO(output(capsys, "summary", str(run), "--format", "csv"))))
    assert list(rows[0]) == list(SUMMARY)
    for save in report["saves"]:
        mine = [row for row in rows if (row["operation"], row["tag"]) == ("save", save["tag"])]
        whole = [row for row in mine if not row["phase"]]
        assert len(whole) == 1
        for name in ("blocked_s", "durable_s", "io_GBps", "bytes", "coverage_min"):
            assert float(whole[0][name]) == save[name]
        assert whole[0]["drain_s"] == ("" if save["drain_s"] is None else str(save["drain_s"]))
        assert float(whole[0]["max_s"]) == save["wall"]["max_s"]
        fsync = next(row for row in mine if row["detail"] == "fsync")
        expected = save["phases"]["flush"]["details"]["fsync"]
        assert float(fsync["median_s"]) == expected["median_s"] and fsync["blocking"] == "none"
        assert {row["phase"] for row in mine if row["phase"]} == set(save["phases"])
    assert [row["operation"] for row in rows if not row["phase"]] == ["launch", "restart", "load", *["save"] * 4]


@pytest.mark.parametrize("style", ["table", "markdown"])
def test_summary_tables(run: Path, capsys: pytest.CaptureFixture[str], style: str) -> None:
    text = output(capsys, "summary", str(run), "--format", style)
    assert "\033" not in text and "flush/fsync" in text
    for tag in ("global_step2", "global_step4", "global_step6", "global_step8"):
        assert f"save {tag}" in text
    if style == "markdown":
        tables = [block.splitlines() for block in text.split("\n\n")]
        assert len(tables) == 2
        for lines in tables:
            assert {line.count("|") for line in lines} == {lines[0].count("|")}
            assert set(lines[1]) == set("| -:")


def test_summary_of_many_saves_shows_the_phases_of_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", Shape(ranks=2, saves=9))
    short = output(capsys, "summary", str(tmp_path / "run"))
    assert short.count("flush/fsync") == 1
    assert output(capsys, "summary", str(tmp_path / "run"), "--all").count("flush/fsync") == 9


def test_summary_strict(tmp_path: Path) -> None:
    write_trace(tmp_path)
    assert main(["summary", "--strict", str(tmp_path)]) == 0
    file_of(tmp_path, 3, 1).unlink()
    assert main(["summary", "--strict", str(tmp_path)]) == 1


# timeline


def events_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def spans_of(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    complete = [e for e in events if e["ph"] == "X" and e["cat"] in ("save", "load", "startup")]
    rows = [
        (e["pid"], e["cat"], e["name"], round(e["dur"] * 1000), e["args"]["busy_ns"], e["args"].get("file"))
        for e in complete
    ]
    return sorted(rows, key=str)


def expected_spans(spans: pl.DataFrame) -> list[tuple[Any, ...]]:
    names = spans.select(pl.concat_str("phase", "detail", separator="/", ignore_nulls=True)).to_series()
    rows = spans.select(
        "rank", pl.col("operation").cast(pl.String), names.alias("name"), pl.col("end_ns") - pl.col("start_ns"),
        "duration_ns", "file",
    )  # fmt: skip
    return sorted(rows.iter_rows(), key=str)


def test_timeline_events_are_the_spans(
    run: Path, frames: Frames, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    assert main(["timeline", str(run), "-o", str(path)]) == 0
    events = events_of(path)
    told = sum(event["ph"] != "M" for event in events)  # without the names of tracks
    assert f"{path}: {told} events; open it at " in capsys.readouterr().err
    assert spans_of(events) == expected_spans(frames.spans_of())
    steps = [e for e in events if e.get("cat") == "iteration"]
    assert len(steps) == frames.iterations.height and all(e["ph"] == "X" for e in steps)
    operations = [e for e in events if e.get("cat") == "operation"]
    assert sorted({(e["ph"], e["id"]) for e in operations}) == sorted(
        (ph, f"{rank}.{cycle}.{op}") for ph in "be"
        for rank, cycle, op in frames.operations.select("rank", "cycle", "op_id").iter_rows()
    )  # fmt: skip
    assert [e["name"] for e in events if e.get("cat") == "event"] == ["injected", "detected", "stopped", "relaunched"]


def test_timeline_times_are_exact_and_start_at_zero(run: Path, frames: Frames, tmp_path: Path) -> None:
    main(["timeline", str(run), "-o", str(tmp_path / "t.json"), "--quiet"])
    text = (tmp_path / "t.json").read_text()
    timed = [e for e in json.loads(text, parse_float=str)["traceEvents"] if e["ph"] == "X"]
    moments = [int(e["ts"].replace(".", "")) for e in timed]  # three decimals of a microsecond: ns
    zero = frames.spans["start_ns"].min()
    starts = [*frames.spans["start_ns"], *frames.iterations["start_ns"]]
    assert sorted(moments) == sorted(start - zero for start in starts) and min(moments) == 0


def test_timeline_background_threads_have_tracks_of_their_own(run: Path, tmp_path: Path) -> None:
    main(["timeline", str(run), "-o", str(tmp_path / "t.json"), "--quiet"])
    events = events_of(tmp_path / "t.json")
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    threads = {named[e["pid"], e["tid"]]: set() for e in events if e["ph"] == "X"}
    for e in events:
        if e["ph"] == "X":
            threads[named[e["pid"], e["tid"]]].add(e["name"])
    assert set(threads) == {"MainThread", "iterations", "ckpt-writer", "ckpt-commit"}
    assert "flush/fsync" in threads["ckpt-writer"] and "flush/fsync" not in threads["MainThread"]
    assert {"barrier", "commit/publish"} <= threads["ckpt-commit"]
    ranks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert ranks[5].startswith("rank 5 (tp 5, pp 0, dp 0) on node0000") and ranks[-1].startswith("supervisor")


@pytest.mark.parametrize(
    ("flags", "keep"),
    [
        (["--ranks", "0-2,9"], pl.col("rank").is_in([0, 1, 2, 9])),
        (["--cycle", "1"], pl.col("cycle") == 1),
        (["--checkpoint", "global_step4"], pl.col("group").is_in([2, 4])),
        (["--checkpoint", "4", "--cycle", "0", "--ranks", "3"], (pl.col("rank") == 3) & (pl.col("group") == 2)),
    ],
)
def test_timeline_cut_down(run: Path, frames: Frames, tmp_path: Path, flags: list[str], keep: pl.Expr) -> None:
    main(["timeline", str(run), "-o", str(tmp_path / "t.json"), "--quiet", *flags])
    expected = frames.spans_of(keep)
    assert 0 < expected.height < frames.spans.height
    assert spans_of(events_of(tmp_path / "t.json")) == expected_spans(expected)


def test_timeline_of_one_checkpoint_has_the_steps_beside_it(run: Path, frames: Frames, tmp_path: Path) -> None:
    main(["timeline", str(run), "-o", str(tmp_path / "t.json"), "--quiet", "--checkpoint", "2", "--ranks", "0"])
    steps = [e["name"] for e in events_of(tmp_path / "t.json") if e.get("cat") == "iteration"]
    assert steps and set(steps) <= {"step 3", "step 4"}


def test_timeline_writes_any_text_as_json(tmp_path: Path) -> None:
    log = rank_log(Options(), 0, 0)
    op = log.begin("save", tag='a "quoted" tag', step=9)
    op.span("serialize", None, 10, file="dir\\name\t.pt", error='OSError: "x"\n')
    op.end(error="lost")
    log.event("save", "notice", 'with "quotes"')
    dump(file_of(tmp_path, 0, 0), log.records)
    assert main(["timeline", str(tmp_path), "-o", str(tmp_path / "t.json"), "--quiet"]) == 0
    span = next(e for e in events_of(tmp_path / "t.json") if e["name"] == "serialize" and "error" in e["args"])
    assert span["args"]["tag"] == 'a "quoted" tag' and span["args"]["file"] == "dir\\name\t.pt"
    assert span["args"]["error"] == 'OSError: "x"\n'


def test_timeline_of_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    assert main(["timeline", str(run), "-o", str(path), "--ranks", "99", "--cycle", "3"]) == 2
    assert "no records of --ranks 99-99 --cycle 3" in capsys.readouterr().err and not path.exists()


def test_timeline_of_a_checkpoint_that_is_not_there(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "t.json"
    assert main(["timeline", str(run), "-o", str(path), "--checkpoint", "global_step99"]) == 2
    assert "no records of --checkpoint global_step99" in capsys.readouterr().err and not path.exists()
    assert recwarn.list == []


def test_list_of_ranks() -> None:
    assert parse_rank_ranges("0-7, 12") == [(0, 7), (12, 12)]
    for wrong in ("", "a", "3-1", "1-", "-1", "1,,2"):
        with pytest.raises(Exception, match="no list of ranks"):
            parse_rank_ranges(wrong)


# export


@pytest.mark.parametrize("table", TABLES)
def test_export(
    run: Path, opened: TraceAnalysis, opened_once: Callable[..., TraceAnalysis], tmp_path: Path, table: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(common, "open_trace", opened_once)
    expected = getattr(opened, table)()
    assert expected.height > 0 or table == "problems"
    for ending in ("parquet", "csv"):
        path = tmp_path / f"{table}.{ending}"
        assert main(["export", str(run), "-o", str(path), "--table", table, "--quiet"]) == 0
    assert pl.read_parquet(tmp_path / f"{table}.parquet").equals(expected)
    text = pl.read_csv(tmp_path / f"{table}.csv", infer_schema=False)
    assert text.columns == expected.columns and text.height == expected.height
    whole = [name for name, kind in expected.schema.items() if kind.is_integer()]
    assert text.select(whole).equals(expected.select(pl.col(whole).cast(pl.String)))


def test_exported_spans_say_all_they_belong_to(opened: TraceAnalysis) -> None:
    spans = opened.spans()
    row = spans.filter((pl.col("rank") == 9) & (pl.col("phase") == "flush")).row(0, named=True)
    assert (row["tp"], row["pp"], row["dp"], row["host"]) == (1, 1, 0, "node0001")
    assert (row["tag"], row["step"], row["engine"]) == ("global_step2", 2, "TorchCheckpointEngine")
    assert row["thread"] == "ckpt-writer" and row["file"] == "rank_00009_0.pt"
    assert spans.filter(pl.col("operation") == "save")["tag"].null_count() == 0


def test_export_tells_what_it_wrote(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spans.csv"
    assert main(["export", str(run), "-o", str(path)]) == 0
    assert f"{path}: " in capsys.readouterr().err and path.is_file()


def test_export_needs_a_format(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "-o", str(tmp_path / "spans.xlsx")]) == 2
    assert "--format parquet or --format csv" in capsys.readouterr().err
    assert main(["export", str(run), "-o", str(tmp_path / "spans.out"), "--format", "csv", "--quiet"]) == 0


# what all share


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0 and "exit status: 0 fine" in text
    assert re.search(r"examples:\n(  trace=\$\(.*\n)?  ckpt-analysis ", text)
    assert ("$trace" in text) == ("  trace=$(" in text)
    for flag in ("--quiet", "--run-id", "--cache-dir"):
        assert flag in text


@pytest.mark.parametrize("before", [[], ["--quiet"], ["--cache-dir", "cache"]])
def test_overview_lists_every_command(before: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*before, "--help"])
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert main([]) == 2 and "give a directory" in capsys.readouterr().err


@pytest.mark.slow
def test_a_directory_alone_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path)
    plain = output(capsys, str(tmp_path))
    assert plain == output(capsys, "report", str(tmp_path)) and "Restart of cycle 1" in plain


def test_progress_bar_only_on_a_terminal_and_when_work_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(quiet=False).bar(10, "reading logs", "B") as advance:
        advance(10)
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(quiet=False).bar(10, "reading logs", "B") as advance:
        advance(10)
    assert capsys.readouterr().err == ""  # done at once
    monkeypatch.setattr("tools.ckpt_analysis.common.progress.SHOWN_AFTER_S", 0)
    with Progress(quiet=False).bar(10, "reading logs", "B") as advance:
        advance(5)
    assert "reading logs" in capsys.readouterr().err
    with Progress(quiet=True).bar(10, "reading logs", "B") as advance:
        advance(5)
    assert capsys.readouterr().err == ""
