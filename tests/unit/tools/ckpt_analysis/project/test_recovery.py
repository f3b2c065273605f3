"""Effective training time over failure rates from measured restarts: against Daly's equation, by tier and by run."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.tools.ckpt_analysis.metrics.test_tiers import report_of
from tests.unit.tools.ckpt_analysis.trace_factory import Options, write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.errors import CouldNotRunError
from tools.ckpt_analysis.project.inputs import Given
from tools.ckpt_analysis.project.recovery import DAY_S, curves
from tools.ckpt_analysis.report import Report

SYNCHRONOUS = Given(blocked_s=2.0, durable_s=2.0, step_s=10.0)


def run_of(directory: Path, restarts: list[tuple[str, float]]) -> Report:
    """A run whose restarts read from these tiers and took so many seconds from their failures."""
    directory.mkdir(exist_ok=True)
    by_tier = {tier: report_of(directory / tier, {7: tier}) for tier in dict(restarts)}
    loads, starts = [], by_tier[restarts[0][0]].starts[:1]
    for cycle, (tier, seconds) in enumerate(restarts, start=1):
        (load,) = by_tier[tier].loads
        loads.append(replace(load, cycle=cycle))
        starts.append(replace(by_tier[tier].starts[-1], cycle=cycle, restart_s=seconds))
    return replace(by_tier[restarts[0][0]], directory=directory, loads=loads, starts=starts)


def test_the_curve_of_a_tier_is_that_of_dalys_equation(tmp_path: Path) -> None:
    """Daly 2006, equation 20: T_w / T_s = M exp(R/M) (exp((tau + C)/M) - 1) / tau; saved every step, C = 2 s."""
    run = run_of(tmp_path, [("peer", 50.0), ("local_memory", 20.0), ("peer", 70.0), ("peer", 60.0)])
    found = curves([run], SYNCHRONOUS, [1.0, 100.0], None)
    assert [(point.tier, point.failures_per_day) for point in found.points] == [
        ("local_memory", 1.0), ("local_memory", 100.0), ("peer", 1.0), ("peer", 100.0),
    ]  # fmt: skip
    assert [each.restarts_s for each in found.recoveries] == [[20.0], [50.0, 60.0, 70.0]]
    assert {each.interval_steps.value for each in found.recoveries} == {1}

    def ratio(restart_s: float, rate: float) -> float:
        mtbf_s = DAY_S / rate
        return 10 / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(12 / mtbf_s))

    for point in found.points[2:]:
        told = (point.goodput_slowest, point.goodput, point.goodput_fastest)
        assert told == pytest.approx([ratio(seconds, point.failures_per_day) for seconds in (70, 60, 50)])
    for point in found.points[:2]:
        assert point.goodput == pytest.approx(ratio(20, point.failures_per_day))


def test_of_several_runs_each_has_its_curves(tmp_path: Path) -> None:
    memory = run_of(tmp_path / "memory", [("peer", 50.0)])
    storage = run_of(tmp_path / "storage", [("storage", 90.0)])
    found = curves([memory, storage], SYNCHRONOUS, [4.0], 100)
    assert [each.name for each in found.recoveries] == [
        f"peer of {memory.directory}",
        f"storage of {storage.directory}",
    ]
    assert [point.interval_steps for point in found.points] == [100, 100]
    assert found.points[0].goodput > found.points[1].goodput
    only = curves([memory, storage], replace(SYNCHRONOUS, tier="storage"), [4.0], 100)
    assert only.points == found.points[1:]
    with pytest.raises(CouldNotRunError, match="^--tier local_memory: no restart of these runs read from there"):
        curves([memory, storage], replace(SYNCHRONOUS, tier="local_memory"), [4.0], 100)
    with pytest.raises(CouldNotRunError, match=r"storage: has no two saves in a row that storage holds: give --interv"):
        curves([storage], SYNCHRONOUS, [4.0], None)
    with pytest.raises(CouldNotRunError, match=r"failure was recorded: .* or of torchrun within `restart-trace"):
        curves([report_of(tmp_path / "no_failure", {})], SYNCHRONOUS, [4.0], None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_trace(tmp_path / "run", Options())
    return tmp_path / "run"


@pytest.mark.slow
def test_the_command_draws_the_curve_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["project", str(run), "--failures-per-day", "1,8", "--interval-steps", "100"]
    assert main([*command, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "projection" and [point["failures_per_day"] for point in found["points"]] == [1, 8]
    assert main([*command, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["goodput"]) for row in rows] == [point["goodput"] for point in found["points"]]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert f"storage of {run}" in text and "In brackets: with the slowest and the fastest restart" in text
    assert main([*command, "--format", "markdown"]) == 0
    assert "| failures/day |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--failures-per-day", "0"], "--failures-per-day 0: '0' is no number above 0"),
        (["--failures-per-day", "1", "--interval-steps", "5,6"], "--interval-steps 5,6: --failures-per-day takes one"),
        (["--failures-per-day", "1", "--nodes", "8"], "--nodes 8: goes with --placement, not with --failures-per-day"),
        (["--failures-per-day", "1", "--restart-seconds", "8"], "--restart-seconds 8.0: goes with --nodes, not with"),
    ],
)
def test_bad_input(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert main(["project", str(run), *words]) == 2
    assert told in capsys.readouterr().err


def test_a_run_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["project", "--failures-per-day", "1"]) == 2
    assert "LOGDIR is missing: --failures-per-day starts from restarts that were measured" in capsys.readouterr().err
