"""Goodput by the definitions of others: Google's against its own calculator, the rest against times that are known."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from restart_trace.schema import SUPERVISOR_FILE_PATTERN
from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT, file_of, result
from tests.unit.tools.ckpt_analysis.metrics.google_calculator import VERSION, jobs
from tests.unit.tools.ckpt_analysis.metrics.test_absent_records import strip
from tests.unit.tools.ckpt_analysis.metrics.test_budget import started
from tests.unit.tools.ckpt_analysis.render.html.report_pages import analysis_of
from tests.unit.tools.ckpt_analysis.trace_factory import Options, dump, supervisor_log, write_trace
from tests.unit.tools.ckpt_analysis.upstream_log_factory import upstream_log
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.metrics.goodput.definitions import DEFINITIONS, GOOGLE, Measured, goodputs
from tools.ckpt_analysis.metrics.goodput.google import google_goodput

GOLDEN = ROOT / "tests" / "golden" / "google_goodput.json"
JOBS = jobs()


def measured(directory: Path) -> dict[str, Measured]:
    analysis = analysis_of(directory)
    found = goodputs(analysis.frames, analysis.tables, analysis.report.budget, analysis.report.saves)
    return {one.definition.name: one for one in found}


def check(name: str, expected: dict[str, Any] | None) -> None:
    """Ours against what Google's calculator makes of the same job, to a microsecond, the resolution of its times."""
    cycles = JOBS[name]
    last_s = max(at for cycle in cycles for at in [cycle.started_s, *(at for _, at in cycle.steps)])
    if expected is None:
        with pytest.raises(ValueError, match="are no goodput"):
            google_goodput(cycles, last_s)
        return
    found = google_goodput(cycles, last_s + 1e6 if expected["total_s"] is None else last_s)
    assert found.disruptions == expected["disruptions"]
    assert found.productive_s == pytest.approx(expected["productive_s"], abs=1e-5)
    if expected["total_s"] is not None:
        assert found.total_s == pytest.approx(expected["total_s"], abs=1e-5)
    for kind, spent in expected["badput_s"].items():
        assert found.badput_s[kind] == pytest.approx(spent, abs=1e-5), kind


@pytest.mark.parametrize("name", JOBS)
def test_googles_goodput_is_that_of_its_own_calculator(name: str) -> None:
    """tests/unit/tools/ckpt_analysis/metrics/google_calculator.py says how the golden file is made."""
    golden = json.loads(GOLDEN.read_text())
    assert golden["version"] == VERSION and golden["calculated"].keys() == JOBS.keys()
    check(name, golden["calculated"][name])


@pytest.mark.nightly(minutes=1)
def test_the_golden_file_is_what_googles_package_computes(tmp_path: Path) -> None:
    package = f"ml-goodput-measurement=={VERSION}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), package]
    subprocess.run(pip, check=True, timeout=300)
    command = [sys.executable, "-m", "tests.unit.tools.ckpt_analysis.metrics.google_calculator", str(tmp_path)]
    made = subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True, text=True)
    assert json.loads(made.stdout) == json.loads(GOLDEN.read_text())


def test_definitions_of_a_run_with_a_failure(tmp_path: Path) -> None:
    """The times are those of test_budget.test_two_cycles_with_a_recorded_failure, in ms."""
    found = measured(write_trace(tmp_path))
    wall, starting, blocked, lost = 25439, 4377 + 18970, 2 * 278, 832
    shares = {name: one.share for name, one in found.items()}
    assert shares["goodput"] == pytest.approx(200 / wall)
    assert shares["ettr"] == shares["ettr_queued"] == pytest.approx((wall - starting - blocked - lost) / wall)
    # From rank 2's first step, at 4377. The save of step 5 was committed after rank 0's barrier, at 4654 of rank 0; the
    # failure is injected at 5488, the next process starts at 20000, the last first step ends at 24458.
    t_w, t_ch, t_re, t_rm = wall - 4377, 5488 - 4654, 20000 - 5488, 24458 - 20000
    assert shares["runtime_goodput"] == pytest.approx((t_w - t_ch - t_re - t_rm - blocked) / (t_w - t_re))
    # Rank 0's last step before the failure begins at 4856, its process after it at 20000. Steps 1 to 5 count up to the
    # begin of 6, and 6 to 11 up to that of 12; both saves, of 380, lie between. No end is recorded.
    assert found["google_goodput"].seconds == pytest.approx(1.102, abs=1e-9)
    assert shares["google_goodput"] == pytest.approx(1102 / wall)
    assert shares["infrastructure_recovery_from_disruption"] == pytest.approx((20000 - 4856) / wall)
    assert shares["unproductive_checkpoint_save_time"] == pytest.approx(760 / wall)
    assert shares["wasted_progress_from_disruption"] == pytest.approx(200 / wall)
    assert shares["tpu_initialization"] == pytest.approx(2 * 150 / wall)
    of_google = [one for one in found.values() if one.definition.owner == GOOGLE and one.share is not None]
    assert sum(one.share or 0 for one in of_google) == pytest.approx(1)
    assert found["expected_ettr"].missing == "no cycle has two complete saves, between which an interval would be"


def test_expected_ratio_is_metas_formula(tmp_path: Path) -> None:
    """Two launches of a rank, each of two saves 510 ms apart that block for 10 ms; the first one ends by a failure."""
    for cycle, (now_ms, first) in enumerate([(0, 1), (5000, 11)]):
        log = started(cycle, now_ms, first)
        for step in range(first + 1, first + 11):
            log.iteration(step)
            if step in (first + 2, first + 7):
                op = log.begin("save", tag=f"global_step{step}", step=step)
                op.span("collect", None, 10)
                op.end(bytes=1, num_files=1, durable=True)
        dump(file_of(tmp_path, 0, cycle), log.records)
    # A cycle takes 100 ms to start, 1000 ms for steps, 20 ms for saves: the failure is at 1120 ms, the end at 6120 ms.
    r, u0, dt, w = 1 / 6.12, 3.98, 0.5, 0.01
    assert measured(tmp_path)["expected_ettr"].share == pytest.approx((1 - r * (u0 + dt / 2)) / (1 + w / dt))


def test_a_run_without_a_failure_has_no_rate_of_them(tmp_path: Path) -> None:
    log = started(0, 0, 1)
    log.iteration(2)
    dump(file_of(tmp_path, 0, 0), log.records)
    found = measured(tmp_path)
    assert found["expected_ettr"].missing == "the trace records no failure, so that their rate is not known"
    assert found["runtime_goodput"].share == 1 and found["ettr"].share == pytest.approx(0.5)


@pytest.mark.parametrize("seen_by", ["supervisor", "rank"])
def test_a_failure_counts_that_no_launch_followed(tmp_path: Path, seen_by: str) -> None:
    log = started(0, 0, 1)
    log.iteration(2)
    if seen_by == "rank":
        ended = {"time_ns": log.ns(log.now_ms), "wall_ns": Options().wall_ns + round(log.now_ms * 1e6)}
        log.write("event", operation="process", phase="ended", detail="ValueError", **ended)
    else:
        watching = supervisor_log(Options()).records[:-1]  # it relaunches nothing
        dump(tmp_path / SUPERVISOR_FILE_PATTERN.format(index=0), watching)
    dump(file_of(tmp_path, 0, 0), log.records)
    assert measured(tmp_path)["expected_ettr"].missing == (
        "no cycle has two complete saves, between which an interval would be"
    )


def test_a_failure_of_a_cycle_without_a_trace_has_no_rate(tmp_path: Path) -> None:
    write_trace(tmp_path)
    for path in tmp_path.glob("rank_*_cycle_000.jsonl"):
        path.unlink()
    missing = measured(tmp_path)["expected_ettr"].missing
    assert missing == "the trace does not tell which of its steps count: see the problems of the report"


def test_a_launch_that_makes_no_step_is_counted_without_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The second of three: no rank represents it."""
    for cycle, now_ms in enumerate((0, 1000, 2000)):
        log = started(cycle, now_ms, 1)
        if cycle == 1:
            log.records = [r for r in log.records if r.get("type") not in ("iteration", "operation_end")][:-1]
        dump(file_of(tmp_path, 0, cycle), log.records)
    found = measured(tmp_path)
    assert recwarn.list == []
    # 100 ms of first launch, its process is the last thing known of the second one, which ends by the third's start.
    assert found["ettr"].share == pytest.approx(0) and found["runtime_goodput"].share is not None


@pytest.mark.parametrize("absent", ["steps", "first steps"])
def test_nothing_is_said_of_a_run_whose_steps_are_unknown(tmp_path: Path, absent: str) -> None:
    write_trace(tmp_path, Options(instrument="hooks"))
    strip(tmp_path, (absent,))
    for one in measured(tmp_path).values():
        assert one.share is None and one.seconds is None and one.missing


def test_saves_and_loads_without_a_recorded_end(tmp_path: Path) -> None:
    """What saves blocked is known without their ends; how long a load took is not."""
    whole = measured(write_trace(tmp_path))
    strip(tmp_path, ("ends of saves", "ends of loads"))
    found = measured(tmp_path)
    same = ("goodput", "ettr", "google_goodput", "unproductive_checkpoint_save_time", "runtime_goodput")
    assert [found[name].share for name in same] == pytest.approx([whole[name].share for name in same])
    for name in ("unproductive_checkpoint_restore_time", "other"):
        assert found[name].share is None and found[name].missing == "the end of a load is not recorded"


def test_the_command_prints_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path)
    assert main(["goodput", str(tmp_path), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in told["definitions"]] == [each.name for each in DEFINITIONS]
    assert all((each["share"] is None) == bool(each["missing"]) for each in told["definitions"])
    assert main(["goodput", str(tmp_path), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["share"]) for row in rows if row["share"]] == [
        each["share"] for each in told["definitions"] if each["share"] is not None
    ]
    assert main(["goodput", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert all(each.name in text and each.formula in text for each in DEFINITIONS)
    assert re.search(r"Meta +ettr +2\.77 % +0\.704 ", text) and "a trace has no slices" in text


@pytest.mark.slow
def test_problems_of_the_trace_come_with_the_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path)
    assert main(["goodput", str(tmp_path)]) == 0
    assert "Problems" not in capsys.readouterr().out
    for path in tmp_path.glob("rank_0000[1-7]_*.jsonl"):
        path.unlink()
    for form in ("table", "markdown"):
        assert main(["goodput", str(tmp_path), "--format", form]) == 0
        text = capsys.readouterr().out
        table = text.index("ettr")
        assert (
            0
            <= text.index("Problems of the trace")
            < text.replace("\\", "").index("error: missing_ranks: cycle 0:")
            < table
        )
    assert main(["goodput", str(tmp_path), "--format", "json"]) == 0
    out, err = capsys.readouterr()
    problems = json.loads(out)["problems"]
    assert problems == result(tmp_path)["problems"] and problems[0]["severity"] == "error" and not err
    assert main(["goodput", str(tmp_path), "--format", "csv"]) == 0
    assert "ckpt-analysis: error: missing_ranks: cycle 0:" in capsys.readouterr().err
    assert main(["goodput", str(tmp_path), "--format", "csv", "--quiet"]) == 0
    assert not capsys.readouterr().err


def test_an_imported_log_has_no_goodput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").write_text(upstream_log())
    assert main(["import", str(tmp_path / "train.log"), "-o", str(tmp_path / "run"), "--quiet"]) == 0
    assert main(["goodput", str(tmp_path / "run"), "--format", "json"]) == 0
    assert {each["share"] for each in json.loads(capsys.readouterr().out)["definitions"]} == {None}


def test_terms_of_the_formulas_are_told_on_the_page() -> None:
    """The command tells formulas and sources; keys of the budget have their own section."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    section = text.partition("\n## Goodput of others\n")[2].partition("\n## ")[0]
    for each in DEFINITIONS:
        if not each.is_badput:
            for term in re.findall(r"[a-z]\w*", each.formula.replace(" x ", " ")):
                told = f"`{term}`" in text if term.endswith("_s") else re.search(rf"(?<!\w){term}(?!\w)", section)
                assert told, f"{each.name}: {term}"
