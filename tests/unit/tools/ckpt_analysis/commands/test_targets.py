"""--target of report and summary: met and missed in every output, the exit status, and names that do not exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT
from tests.unit.tools.ckpt_analysis.trace_factory import Options, write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.compare.metrics import known_metrics

RESTART_S = 18.970  # of the trace; its saves block 0.38 s each


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace"))


def targets(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--target", text)]


@pytest.mark.parametrize("command", ["report", "summary"])
def test_met_and_missed_in_the_terminal_and_the_exit_status(
    trace: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    met = targets(f"restart_s={RESTART_S}", "blocked_s=0.4", "goodput=0.007", "coverage_min=0.9")
    assert main([command, str(trace), *met]) == 0
    rows = capsys.readouterr().out
    assert "MISSED" not in rows and re.search(r"restart_s +at most 18.97 s +18.97 +1 +met", rows)
    assert re.search(r"goodput +at least 0.007 +0.007\d+ +1 +met", rows)
    assert main([command, str(trace), *met, *targets("restart_s=18.9", "blocked_s=0.37")]) == 1
    rows = capsys.readouterr().out
    assert rows.count("MISSED") == 2 and re.search(r"blocked_s +at most 0.37 s +0.38 +2 +MISSED", rows)
    assert main([command, str(trace), *targets("goodput=0.5")]) == 1


def test_what_was_not_recorded_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path, Options(supervisor=False))
    assert main(["summary", "--format", "markdown", str(tmp_path), *targets("restart_s=60")]) == 1
    assert "| restart_s | at most 60 s | - | 0 | not observed |" in capsys.readouterr().out


@pytest.mark.slow
def test_in_json_csv_and_the_page(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = targets("restart_s=10", "load_s=1")
    assert main(["report", str(trace), "--format", "json", "-o", str(tmp_path), *asked]) == 1
    found = json.loads(capsys.readouterr().out)["targets"]
    assert [(entry["name"], entry["met"], entry["values"]) for entry in found] == [
        ("restart_s", False, 1), ("load_s", True, 1),
    ]  # fmt: skip
    assert found[0]["worst"] == pytest.approx(RESTART_S) and found[0]["limit"] == 10
    page = (tmp_path / "ckpt_report.html").read_text()
    assert page.index("<caption>Targets</caption>") < page.index('class="findings"')
    assert page.count("MISSED") == 1
    assert '<td class="bad">MISSED</td>' in page and '<td class="good">met</td>' in page
    assert main(["summary", str(trace), "--format", "csv", *asked]) == 1
    assert "MISSED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("restart=60", ["there is no number restart;", "restart_s", "coverage_min"]),
        ("save_bytes=5", ["there is no number save_bytes;"]),  # larger and smaller are equally good
        ("restart_s", ["give NAME=VALUE"]),
        ("restart_s=fast", ["give NAME=VALUE"]),
        ("restart_s=-1", ["a number of 0 or more"]),
        ("restart_s=nan", ["a number of 0 or more"]),
    ],
)
def test_what_is_no_target_is_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str]
) -> None:
    assert main(["report", str(trace), "--target", text]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and f"--target {text}: " in captured.err
    assert all(word in captured.err for word in words)


def test_several_runs_take_no_target(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(trace), str(trace), "--target", "restart_s=60"]) == 2
    assert "--target restart_s=60: applies to one run" in capsys.readouterr().err


def test_the_documented_names_are_those_that_exist() -> None:
    section = (ROOT / "docs" / "ckpt_analysis.md").read_text().split("## Targets")[1].split("\n## ")[0]
    table = "".join(line for line in section.splitlines() if line.startswith("| `"))
    known = {metric.name for metric in known_metrics() if metric.better != "neither"} | {"goodput", "coverage_min"}
    assert set(re.findall(r"`(\w+)`", table)) == known
