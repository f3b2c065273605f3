"""`open_trace`: the frames of a run, their documentation, and the example notebook."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from benchmarks.synthetic_traces.shape import Shape
from benchmarks.synthetic_traces.write import write_run
from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT, file_of, result
from tests.unit.tools.ckpt_analysis.trace_factory import Options, write_trace
from tests.unit.tools.ckpt_analysis.upstream_log_factory import upstream_log
from tools.ckpt_analysis import open_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.commands.export import TABLES
from tools.ckpt_analysis.trace_analysis import TraceAnalysis

PAGE = ROOT / "docs" / "guides" / "notebooks.md"
NOTEBOOK = ROOT / "docs" / "examples" / "trace_analysis.ipynb"
OF_ANY_LOG = ("summary", "budget", "goodput", "findings", "problems")


def documented(frame: object) -> dict[str, str]:
    """Column -> type of the lines `NAME TYPE, NAME TYPE: meaning` in the last paragraph of a docstring."""
    lines = (inspect.getdoc(frame) or "").rpartition("\n\n")[2].splitlines()
    rows = [line for line in lines if not line.startswith("    ")]  # the others continue a meaning
    columns = [re.fullmatch(r"((?:\w+ \w+, )*\w+ \w+): \S.*", row) for row in rows]
    assert all(columns), f"a line is no column with its type and meaning: {rows}"
    return dict(pair.split(" ") for row in columns if row for pair in row[1].split(", "))


def types(frame: pl.DataFrame) -> list[tuple[str, str]]:
    return [(name, kind.base_type().__name__) for name, kind in frame.schema.items()]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("imported")
    (directory / "train.log").write_text(upstream_log())
    assert main(["import", str(directory / "train.log"), "-o", str(directory / "run"), "--quiet"]) == 0
    return directory / "run"


@pytest.fixture(scope="module")
def runs(imported: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TraceAnalysis]:
    """A run with all kinds of records, a run of one rank that did nothing but start, an imported log."""
    write_run(full := tmp_path_factory.mktemp("full"), Shape(ranks=16, saves=4, asynchronous=True))
    write_trace(small := tmp_path_factory.mktemp("small"), Options(supervisor=False))
    for file in small.iterdir():
        if file != file_of(small, 0, 0):
            file.unlink()
    lines = file_of(small, 0, 0).read_text().splitlines(keepends=True)
    file_of(small, 0, 0).write_text("".join(lines[:2]))
    return {"full": open_trace(full), "small": open_trace(small), "imported": open_trace(imported)}


@pytest.mark.parametrize("table", TABLES)
def test_columns_are_those_of_the_docstrings(runs: dict[str, TraceAnalysis], table: str) -> None:
    """In their order and with their types, whether there are rows or not."""
    place = {} if table in OF_ANY_LOG else documented(TraceAnalysis)
    expected = [*(place | documented(getattr(TraceAnalysis, table))).items()]
    assert len(expected) > len(place)
    for name, run in runs.items():
        if name == "imported" and table not in OF_ANY_LOG:
            with pytest.raises(ValueError, match="an imported run has operations and no spans"):
                getattr(run, table)()
        else:
            assert types(getattr(run, table)()) == expected, name


def test_every_frame_is_documented_and_exported() -> None:
    frames = {name for name, value in vars(TraceAnalysis).items() if not name.startswith("_") and callable(value)}
    assert frames == set(TABLES)
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [name for name in vars(TraceAnalysis) if name in frames]


def test_frames_hold_the_numbers_of_the_report(tmp_path: Path) -> None:
    write_trace(tmp_path)
    run, report = open_trace(tmp_path), result(tmp_path)
    summary = run.summary().filter(pl.col("operation") == "save", pl.col("tag") == "global_step5")
    save = report["saves"][0]
    assert summary.filter(pl.col("phase").is_null())["blocked_s"].to_list() == [save["blocked_s"]]
    fsync = summary.filter(pl.col("detail") == "fsync").row(0, named=True)
    assert {name: fsync[name] for name in ("max_s", "slowest_rank")} == {"max_s": 0.24, "slowest_rank": 5}
    budget = run.budget().with_columns(took_s=pl.col("end_s") - pl.col("start_s"))
    assert budget["took_s"].sum() == pytest.approx(report["budget"]["wall_s"])
    training = budget.filter(pl.col("part") == "training")["took_s"].sum()
    assert training == pytest.approx(report["budget"]["training_s"])
    assert run.findings()["title"].to_list() == [finding["title"] for finding in report["findings"]]
    assert [json.loads(data) for data in run.findings()["data"]] == [finding["data"] for finding in report["findings"]]


def test_rank_frames_hold_every_ranks_numbers(tmp_path: Path) -> None:
    write_trace(tmp_path)
    run, save = open_trace(tmp_path), result(tmp_path)["saves"][0]
    of_save = (pl.col("operation") == "save") & (pl.col("tag") == save["tag"])
    totals, phases = run.rank_totals().filter(of_save), run.rank_phases().filter(of_save)
    assert totals["rank"].to_list() == list(range(8))
    assert totals.select("tp", "pp", "dp").row(5) == (1, 1, 0)
    for rank in save["per_rank"]:
        mine = totals.row(rank["rank"], named=True)
        assert (mine["wall_ns"] / 1e9, mine["blocked_ns"] / 1e9) == (rank["wall_s"], rank["blocked_s"])
        rows = phases.filter(pl.col("rank") == rank["rank"]).select("phase", "detail", "busy_ns")
        found = {f"{phase}/{detail}" if detail else phase: busy / 1e9 for phase, detail, busy in rows.iter_rows()}
        assert found == rank["phases"]


def test_another_run_of_an_imported_log_is_refused(imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(imported), "--run-id", "other"]) == 2
    assert "--run-id other: no such run in" in capsys.readouterr().err


def test_nothing_to_read_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        open_trace(tmp_path)


def test_the_name_of_an_installed_package_is_the_checkouts() -> None:
    installed = importlib.import_module("megatron_restart_tools.ckpt_analysis")
    assert Path(installed.__file__ or "") == ROOT / "tools" / "ckpt_analysis" / "__init__.py"
    assert installed.open_trace.__module__ == "megatron_restart_tools.ckpt_analysis"


@pytest.mark.slow
def test_the_example_notebook_shows_what_it_holds() -> None:
    """All its cells, in a process of their own."""
    command = [sys.executable, "-m", "tests.unit.notebook_runner", str(NOTEBOOK)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
