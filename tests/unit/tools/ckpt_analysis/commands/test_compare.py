"""`compare` on the command line: its formats, --fail-if, and names for repeats."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT
from tests.unit.tools.ckpt_analysis.trace_factory import write_trace
from tests.unit.tools.ckpt_analysis.upstream_log_factory import LogOptions, upstream_log
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.errors import CouldNotRunError
from tools.ckpt_analysis.compare.conditions import parse_condition
from tools.ckpt_analysis.imported.file import write_run
from tools.ckpt_analysis.imported.importer import import_log


def imported(options: LogOptions, tmp_path: Path, name: str) -> Path:
    """A directory with the import of a log."""
    log = tmp_path / f"{name}.log"
    log.write_text(upstream_log(options))
    write_run(import_log(log), tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize("command", ["compare", "import", "project"])
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys\nfrom tools.ckpt_analysis.cli import main\n"
        f"try: main([{command!r}, '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'polars', 'numpy', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "examples:" in done.stdout and f"ckpt-analysis {command}" in done.stdout


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three imported runs: the second saves twice as long, the third is like the first."""
    base = tmp_path_factory.mktemp("three")
    double = LogOptions(save_ms=[2 * took for took in LogOptions().save_ms])
    options = {"a": LogOptions(), "b": double, "c": LogOptions()}
    return [str(imported(entry, base, name)) for name, entry in options.items()]


@pytest.mark.slow
def test_formats(three: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *three]) == 0
    table = capsys.readouterr().out
    rows = [line.split() for line in table.splitlines() if line.strip().startswith("blocked_s ")]
    assert [row[4] for row in rows] == ["B"] and rows[0][-2:] == ["differs:", "worse"]
    assert "timer.interval-time_s" not in table
    verdict = " ".join(table.partition("\n\n")[0].split())
    assert verdict == (
        "blocked times of a and c show no difference, and are 2.0 times shorter than the next, b; "
        "no difference shown in launches and steps."
    )
    assert "Not shown: no difference from A shown in: " in table and "blocked_s of C" in table
    assert main(["compare", "--all", *three]) == 0
    everything = capsys.readouterr().out
    rows = [line.split() for line in everything.splitlines() if line.strip().startswith("blocked_s ")]
    assert [row[4] for row in rows] == ["B", "C"] and rows[1][-3:] == ["within", "the", "noise"]
    assert "timer.interval-time_s" in everything and "Not shown" not in everything
    assert main(["compare", "--format", "json", *three]) == 0
    data = json.loads(capsys.readouterr().out)
    blocked = next(row for row in data["rows"] if row["name"] == "blocked_s")
    assert blocked["cells"][1]["ratio"] == pytest.approx(2.0) and len(blocked["cells"][0]["values"]) == 5
    assert "Mann-Whitney" in data["method"] and data["verdict"] == verdict
    assert main(["compare", "--format", "csv", *three]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(lines) == 3 * len(data["rows"])
    assert [line["ratio"] for line in lines if line["metric"] == "blocked_s"] == ["", "2.0", "1.0"]
    assert main(["compare", "--format", "markdown", *three]) == 0
    assert "| blocked_s | s | 1.03 (5) | B | 2.06 (5) | 2.000 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("conditions", "status"),
    [
        (["blocked_s>1.05"], 1),
        (["blocked_s>2.5"], 0),
        (["blocked_s>2"], 0),  # exactly twice is not above
        (["save_files<1"], 0),
        (["blocked_s<0.9"], 0),
        (["printed_GBps<0.9"], 1),
        (["blocked_s>2.5", "total_blocked_s > 1.99"], 1),
    ],
)
def test_fail_if(conditions: list[str], status: int, three: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [part for condition in conditions for part in ("--fail-if", condition)]
    assert main(["compare", *flags, *three]) == status
    captured = capsys.readouterr()
    assert ("B: " in captured.err) is bool(status) and "C: " not in captured.err
    assert "Comparison of 3 runs" in captured.out  # the table is there all the same


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("restarts>1.05", "no run has a metric restarts; there are: blocked_s,"),
        ("durable_s>1.05", "no run has a metric durable_s"),
        ("blocked_s=1.05", "give METRIC>RATIO or METRIC<RATIO"),
        ("blocked_s>", "give METRIC>RATIO"),
        ("blocked_s>fast", "give METRIC>RATIO"),
        ("blocked_s>-1", "give METRIC>RATIO"),
    ],
)
def test_a_condition_that_cannot_be_checked_has_not_passed(
    condition: str, message: str, three: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--fail-if", condition, *three]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_a_condition_on_what_one_run_lacks(
    three: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace")
    assert main(["compare", "--fail-if", "durable_s>1.05", str(trace), three[0]]) == 2
    assert f"durable_s has no value to compare in {three[0]}" in capsys.readouterr().err


def test_names_on_the_command_line(three: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = three
    assert main(["compare", "--format", "json", f"old={a}", f"new={b}", f"old={c}"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(side["name"], side["directories"]) for side in data["variants"]] == [("old", [a, c]), ("new", [b])]
    odd = tmp_path / "x=y"
    odd.symlink_to(a)
    assert main(["compare", "--format", "json", str(odd), b]) == 0
    assert json.loads(capsys.readouterr().out)["variants"][0]["name"] == str(odd)


def test_one_run_is_no_comparison(three: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", three[0]]) == 2
    assert "two runs at least" in capsys.readouterr().err


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(["blocked_s", "save.flush.fsync_s", "timer.full-time_s"]), st.sampled_from("<>"),
       st.floats(0.001, 1000), st.sampled_from(["", " ", "  "]))  # fmt: skip
def test_conditions_are_read_as_they_are_written(metric: str, sign: str, ratio: float, space: str) -> None:
    text = f"{space}{metric}{space}{sign}{space}{ratio:.6f}"
    condition = parse_condition(text)
    assert (condition.metric, condition.sign) == (metric, sign)
    assert condition.ratio == pytest.approx(ratio, abs=1e-6)


@pytest.mark.slow
@settings(deadline=None, derandomize=True)
@given(st.text(max_size=20))
def test_any_other_text_is_refused_by_name(text: str) -> None:
    try:
        condition = parse_condition(text)
    except CouldNotRunError as exc:
        assert repr(text) in str(exc)
    else:
        assert condition.sign in text and condition.metric in text
