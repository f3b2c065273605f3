"""Projections: the formulas against published cases, against a simulation of the process, and against themselves."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.unit.tools.ckpt_analysis.trace_factory import ITERATION_MS, Options, write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.project.inputs import Given, gather
from tools.ckpt_analysis.project.model import Costs, Outcome, daly_work_s, optimal_work_s, outcome, young_work_s
from tools.ckpt_analysis.project.projection import NEARLY, project
from tools.ckpt_analysis.project.ranges import parse_counts, parse_positives
from tools.ckpt_analysis.report import analyse

MINUTE, HOUR = 60.0, 3600.0


def synchronous(blocked_s: float, restart_s: float = 0.0) -> Costs:
    return Costs(blocked_s, blocked_s, restart_s)


# Published cases.


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_daly_gives_the_optima_of_his_figures(mtbf_s: float, minutes: float) -> None:
    """Daly 2006, captions of figures 3 to 5: dump time 5 min, restart 10 min."""
    found = daly_work_s(synchronous(5 * MINUTE, 10 * MINUTE), mtbf_s) / MINUTE
    assert found == pytest.approx(minutes, abs=0.5 if minutes > 10 else 0.05)


def test_young_is_the_first_order() -> None:
    assert young_work_s(synchronous(2.0), 10_000.0) == 200.0
    for mtbf_s in (1e6, 1e8, 1e10):  # the rarer failures are, the closer the three come
        costs = synchronous(10.0)
        exact = optimal_work_s(costs, mtbf_s)
        assert young_work_s(costs, mtbf_s) == pytest.approx(exact, rel=3 * math.sqrt(10 / mtbf_s))
        assert daly_work_s(costs, mtbf_s) == pytest.approx(exact, rel=max(10 / mtbf_s, 1e-6))


def test_daly_where_a_save_outlasts_the_time_between_failures() -> None:
    assert daly_work_s(synchronous(200.0), 100.0) == daly_work_s(synchronous(900.0), 100.0) == 100.0


def test_wall_time_is_that_of_dalys_equation_20() -> None:
    """Synchronous saves: T_w / T_s = M exp(R/M) (exp((tau + delta)/M) - 1) / tau."""
    for mtbf_s, work_s, blocked_s, restart_s in ((3600, 600, 30, 120), (500, 400, 100, 300), (1e5, 50, 5, 0)):
        wall = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((work_s + blocked_s) / mtbf_s) / work_s
        assert outcome(synchronous(blocked_s, restart_s), mtbf_s, work_s).goodput == pytest.approx(1 / wall)


def test_without_failures_only_saving_costs() -> None:
    found = outcome(Costs(10, 60, 400), 1e15, 90)
    assert (found.goodput, found.saving_share, found.restarting_share) == pytest.approx((0.9, 0.1, 0), abs=1e-9)


def test_rare_failures_lose_half_an_interval_and_the_time_to_durable() -> None:
    found = outcome(Costs(0.0, 25.0, 0.0), 1e8, 100.0)
    assert found.lost_work_s == pytest.approx(50 + 25, rel=1e-4)


# The process itself, step by step.


def simulate(costs: Costs, mtbf_s: float, work_s: float, failures: int, seed: int) -> Outcome:
    """Train, save in the background, fail and restart; counts what happened. No formula of the model is used."""
    source = random.Random(seed)
    wall = kept = trained = blocked = restarting = 0.0
    for _ in range(failures):
        left = source.expovariate(1 / mtbf_s)
        wall += left
        now = pending_until = done = 0.0
        saves: list[tuple[float, float]] = []  # (durable at, work in it)
        while True:
            took = min(work_s, left - now)
            done += took
            now += took
            if now >= left:
                break
            start = max(now, pending_until)  # waits for the save before
            saves.append((start + costs.durable_s, done))
            pending_until = start + costs.durable_s
            end = start + costs.blocked_s
            blocked += min(end, left) - now
            now = end
            if now >= left:
                break
        safe = max((work for durable, work in saves if durable <= left), default=0.0)
        trained += done
        kept += safe
        while (survives := source.expovariate(1 / mtbf_s)) < costs.restart_s:
            restarting += survives
        restarting += costs.restart_s
    wall += restarting
    return Outcome(0.0, kept / wall, blocked / wall, (trained - kept) / wall, restarting / wall,
                   (trained - kept) / failures)  # fmt: skip


CASES = {
    "synchronous": (Costs(20, 20, 60), 3000.0, 300.0),
    "frequent failures": (Costs(20, 20, 100), 200.0, 80.0),
    "asynchronous": (Costs(5, 90, 60), 1500.0, 200.0),
    "counts while still blocked": (Costs(30, 20, 60), 500.0, 100.0),
    "saves wait": (Costs(5, 150, 30), 600.0, 60.0),
    "saves wait, frequent failures": (Costs(10, 400, 30), 200.0, 100.0),
    "free saves": (Costs(0, 40, 0), 800.0, 100.0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_what_a_simulation_shows(name: str) -> None:
    costs, mtbf_s, work_s = CASES[name]
    expected = outcome(costs, mtbf_s, work_s)
    found = simulate(costs, mtbf_s, work_s, failures=20_000, seed=sum(map(ord, name)))
    # Averages over 20,000 failures: a standard error of each is below 1 % of what a failure costs.
    for share in ("goodput", "saving_share", "wasted_share", "restarting_share"):
        assert getattr(found, share) == pytest.approx(getattr(expected, share), rel=0.03, abs=0.002), share
    assert found.lost_work_s == pytest.approx(expected.lost_work_s, rel=0.03)


# What holds for any numbers.


TIMES = st.floats(0.01, 5000)


@settings(deadline=None, derandomize=True)
@given(TIMES, TIMES, st.floats(0, 5000), st.floats(10, 1e7), TIMES)
def test_shares_add_up(blocked_s: float, durable_s: float, restart_s: float, mtbf_s: float, work_s: float) -> None:
    found = outcome(Costs(blocked_s, durable_s, restart_s), mtbf_s, work_s)
    shares = (found.goodput, found.saving_share, found.wasted_share, found.restarting_share)
    assert sum(shares) == pytest.approx(1) and all(-1e-9 <= share <= 1 for share in shares)
    assert -1e-6 <= found.lost_work_s <= mtbf_s


@settings(deadline=None, derandomize=True)
@given(TIMES, st.floats(0, 5000), st.floats(0, 5000), st.floats(100, 1e7), st.floats(0.1, 10))
def test_no_other_interval_is_better(
    blocked_s: float, lag_s: float, restart_s: float, mtbf_s: float, factor: float
) -> None:
    assume(restart_s < 100 * mtbf_s)
    costs = Costs(blocked_s, blocked_s + lag_s, restart_s)
    best = optimal_work_s(costs, mtbf_s)
    assert outcome(costs, mtbf_s, factor * best).goodput <= outcome(costs, mtbf_s, best).goodput * (1 + 1e-9)


@settings(deadline=None, derandomize=True)
@given(TIMES, st.floats(1000, 1e7))
def test_the_optimum_solves_its_equation(blocked_s: float, mtbf_s: float) -> None:
    """The derivative of Daly's run time is 0 where (1 - tau/M) exp((tau + delta)/M) = 1."""
    x = optimal_work_s(synchronous(blocked_s), mtbf_s) / mtbf_s
    assert math.log1p(-x) + x + blocked_s / mtbf_s == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("costs", [(-1, 5, 0), (5, -4, 0), (1, 2, math.nan), (1, math.inf, 0)])
def test_costs_that_cannot_be(costs: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="_s"):
        Costs(*costs)
    with pytest.raises(ValueError, match="must be above 0"):
        outcome(Costs(1, 1, 1), 100.0, 0.0)


# From a trace to rows.


def test_inputs_are_the_medians_of_the_run(tmp_path: Path) -> None:
    report = analyse(load_trace(write_trace(tmp_path))).report
    inputs = gather(report, Given())
    assert [entry.source for entry in inputs.listed] == ["measured"] * 5
    assert inputs.blocked_s.value == pytest.approx(0.380) and inputs.durable_s.value == pytest.approx(0.380, abs=0.002)
    assert inputs.restart_s.value == report.restarts[0].restart_s
    assert inputs.durable_s.note == "median of 2 saves (durable_s)"
    assert inputs.step_s.value == pytest.approx(1.1 * ITERATION_MS / 1000)  # rank 4 is the slowest
    assert inputs.checkpoint_bytes is not None and inputs.checkpoint_bytes.value == report.saves[0].bytes
    overruled = gather(report, Given(restart_s=600.0))
    assert (overruled.restart_s.value, overruled.restart_s.source, overruled.restart_s.note) == (
        600.0, "given", "--restart-seconds",
    )  # fmt: skip


def test_what_stands_in_for_a_number_is_said(tmp_path: Path) -> None:
    fast = analyse(load_trace(write_trace(tmp_path / "a", Options(durable=False, supervisor=False)))).report
    inputs = gather(fast, Given(durable_s=None))
    assert "not synchronised to storage" in inputs.durable_s.note
    assert "to notice the failure and to launch again is not in it" in inputs.restart_s.note
    first = fast.restarts[0].wall
    assert first is not None and inputs.restart_s.value == first.max_s


GIVEN = Given(blocked_s=2.0, durable_s=60.0, restart_s=400.0, step_s=8.0, checkpoint_bytes=1e12)


def test_rows() -> None:
    projection = project(gather(None, GIVEN), [1, 100], [10_000.0], [50])
    assert [(row.nodes, row.rule) for row in projection.rows] == [
        (nodes, rule) for nodes in (1, 100) for rule in ("given", "young", "daly", "optimum")
    ]
    given_row, young, _, best = projection.rows[4:]
    assert (given_row.interval_s, given_row.period_s, given_row.job_mtbf_hours) == (400.0, 402.0, 100.0)
    assert young.interval_s == pytest.approx(math.sqrt(2 * 2 * 100 * HOUR))
    assert best.goodput == pytest.approx(max(row.goodput for row in projection.rows[4:]), abs=1e-12)
    assert best.steps_per_hour == pytest.approx(best.goodput * 450)
    assert given_row.failures_per_day == pytest.approx(0.24)
    assert given_row.needed_GBps == pytest.approx(1000 / 402)
    assert given_row.needed_GBps_per_node == pytest.approx(10 / 402)
    assert given_row.lost_steps == pytest.approx(given_row.lost_work_s / 8)
    assert projection.kind == "projection" and projection.rows[0].goodput > given_row.goodput
    waiting = project(gather(None, replace(GIVEN, step_s=0.5)), [100], [10_000.0], [50]).rows[0]
    assert waiting.waits_for_previous and waiting.period_s == 60.0


@given(
    blocked_s=st.floats(0, 100), lag_s=st.floats(-50, 2000), restart_s=st.floats(0, 2000),
    step_s=st.floats(0.1, 60), hours=st.floats(0.1, 1e5),
)  # fmt: skip
@example(blocked_s=0.0, lag_s=5e-324, restart_s=0.0, step_s=1.0, hours=1.0)
@example(blocked_s=6e-8, lag_s=0.0, restart_s=0.0, step_s=0.109375, hours=22349.0)
def test_the_answer_is_the_best_in_whole_steps_and_its_ends_are_sharp(
    blocked_s: float, lag_s: float, restart_s: float, step_s: float, hours: float
) -> None:
    durable_s = max(0.0, blocked_s + lag_s)
    given_ = Given(blocked_s=blocked_s, durable_s=durable_s, restart_s=restart_s, step_s=step_s)
    (answer,) = project(gather(None, given_), [1], [hours], []).answers

    def goodput(steps: int) -> float:
        return outcome(Costs(blocked_s, durable_s, restart_s), hours * 3600, steps * step_s).goodput

    best, least, most = answer.interval_steps, answer.least_steps, answer.most_steps
    assert 1 <= least <= best <= most and answer.goodput == goodput(best)
    assert all(goodput(steps) <= goodput(best) + 1e-12 for steps in (best - 1, best + 1, 2 * best) if steps >= 1)
    assert min(goodput(least), goodput(most)) >= goodput(best) - NEARLY
    if goodput(best) > 0.02:
        assert least == 1 or goodput(least - 1) < goodput(best) - NEARLY
        assert goodput(most + 1) < goodput(best) - NEARLY
    if goodput(best) < 0.01:
        assert (least, most) == (best, best)


def test_the_output_begins_with_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    costs = {"--blocked-seconds": "2", "--durable-seconds": "60", "--restart-seconds": "400", "--step-seconds": "8"}
    words = ["--mtbf-hours", "20000", *chain(*costs.items())]
    assert main(["project", "--nodes", "128,512", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    first = "128 nodes with an MTBF of 20,000 h each: save every 187 steps (25 min): 99.65 % goodput;"
    assert f"{first} any interval from 81 to 435 steps loses less than 0.1 % more. 512 nodes" in text
    assert main(["project", "--nodes", "100000", "--mtbf-hours", "1", *words[2:]]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "100000 nodes with an MTBF of 1 h each: save every step (8 s): 0.00 % goodput. " in text


def test_saves_that_cost_nothing_have_no_best_interval() -> None:
    free = replace(GIVEN, blocked_s=0.0, durable_s=0.0)
    assert [row.rule for row in project(gather(None, free), [8], [1000.0], [10]).rows] == ["given"]


# The command.


FLAGS = {
    "--nodes": "64", "--mtbf-hours": "20000", "--blocked-seconds": "2", "--durable-seconds": "60",
    "--restart-seconds": "400", "--step-seconds": "8", "--checkpoint-bytes": "1e12", "--interval-steps": "50",
}  # fmt: skip


def command(**changed: str | None) -> list[str]:
    flags = FLAGS | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    return ["project", *(part for name, value in flags.items() if value is not None for part in (name, value))]


def test_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command()) == 0
    table = capsys.readouterr().out
    assert table.startswith("Projection: nothing below was measured at these scales")
    assert "given: --blocked-seconds" in table and "16.67 GB/s" in table
    assert main([*command(), "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == "projection" and data["inputs"]["blocked_s"]["source"] == "given"
    assert main([*command(), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["kind"] for row in rows} == {"projection"} and len(rows) == len(data["rows"]) == 4
    assert float(rows[3]["goodput"]) == data["rows"][3]["goodput"]
    assert main([*command(checkpoint_bytes=None), "--format", "markdown"]) == 0
    markdown = capsys.readouterr().out
    assert "**Projection" in markdown and "give --checkpoint-bytes" in markdown


def test_from_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path)
    assert main(["project", str(tmp_path), "--nodes", "8..32", "--mtbf-hours", "1000"]) == 0
    text = capsys.readouterr().out
    assert "measured: median of 2 saves (blocked_s, slowest rank)" in text
    assert len([line for line in text.splitlines() if " optimum " in line]) == 3


@pytest.mark.slow
def test_the_headline_says_how_far_the_nodes_are_beyond_those_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path)
    hosts = len(analyse(load_trace(tmp_path)).report.cycles[-1].hosts)
    words = ["project", str(tmp_path), "--mtbf-hours", "1000"]
    assert main([*words, "--nodes", f"{hosts},{20 * hosts}"]) == 0
    assert "at these scales; extrapolated from 8 to 160 ranks\n" in capsys.readouterr().out
    assert main([*words, "--nodes", str(21 * hosts)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "extrapolated from 8 to 168 ranks; beyond 20 times what ran no figure is to be relied on: ranks" in text
    assert main([*words, "--nodes", str(21 * hosts), "--format", "json"]) == 0
    (reach,) = json.loads(capsys.readouterr().out)["extrapolated"]
    assert reach == {"unit": "ranks", "ran": 8, "asked": 168, "times": 21, "too_far": True}
    assert main([*words, "--nodes", str(hosts), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["extrapolated"] == []
    assert main([*words, "--nodes", str(hosts)]) == 0  # what ran
    text = capsys.readouterr().out
    assert "nothing below was measured" not in text and "computed from times measured at these scales" in text
    assert main([*words, "--nodes", f"{hosts},{21 * hosts}", "--format", "csv"]) == 0
    rows = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert {(row["times_what_ran"], row["too_far"]) for row in rows} == {("1.0", "False"), ("21.0", "True")}
    assert main([*command(nodes="1000"), "--format", "json"]) == 0  # nothing was measured
    assert json.loads(capsys.readouterr().out)["extrapolated"] == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nodes": "0"}, "--nodes 0: '0' is no number from 1"),
        ({"nodes": "8,many"}, "--nodes 8,many: 'many' is no number from 1"),
        ({"nodes": "64..8"}, "64..8 is empty"),
        ({"mtbf_hours": "-5"}, "--mtbf-hours -5: '-5' is no number above 0"),
        ({"mtbf_hours": "nan"}, "--mtbf-hours nan"),
        ({"blocked_seconds": "-1"}, "--blocked-seconds -1.0: give a number of 0 or more"),
        ({"step_seconds": "0"}, "--step-seconds 0: a step must take more than 0 s"),
        ({"restart_seconds": None}, "restart_s was not recorded: give it with --restart-seconds"),
        ({"blocked_seconds": None}, "blocked_s was not recorded: give it with --blocked-seconds"),
    ],
)
def test_bad_flags(changed: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = command(**changed)
    flags = [f"{a}={b}" for a, b in zip(flags[1::2], flags[2::2], strict=True)]  # -5 as a value
    assert main(["project", *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=10))
def test_lists_of_counts(values: list[int]) -> None:
    assert parse_counts("--nodes", ",".join(map(str, values))) == list(dict.fromkeys(values))
    assert parse_positives("--mtbf-hours", ",".join(map(str, values))) == list(dict.fromkeys(values))


def test_ranges_double() -> None:
    assert parse_counts("--nodes", "8..70,3") == [8, 16, 32, 64, 3]


@pytest.mark.slow
def test_a_run_of_several_engines_is_not_pooled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path)
    for path in tmp_path.glob("rank_*_cycle_001.jsonl"):
        asked = re.sub(r'"engine_asked": ?"torch"', '"engine_asked": "lazy"', path.read_text())
        path.write_text(asked)
    words = ["project", str(tmp_path), "--nodes", "8", "--mtbf-hours", "1000", "--restart-seconds", "9", "--quiet"]
    assert main(words) == 2
    assert "has several engines, torch, lazy, which are no repeats of each other" in capsys.readouterr().err
    for engine, saves in (("torch", 1), ("lazy", 1)):
        assert main([*words, "--engine", engine, "--format", "json"]) == 0
        assert f"median of {saves} saves" in json.loads(capsys.readouterr().out)["inputs"]["blocked_s"]["note"]
    assert main([*words, "--engine", "dcp"]) == 2
    assert f"--engine dcp: {tmp_path} has torch, lazy" in capsys.readouterr().err
    assert main([words[0], *words[2:], "--engine", "dcp"]) == 2
    assert "--engine dcp: chooses among the saves of a run; give a LOGDIR" in capsys.readouterr().err
    assert main([*words[:2], "--what-if", "imports=0.5"]) == 0  # it answers for each start and save by itself


def test_an_engine_is_of_the_run_not_of_its_last_cycle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "8", "--mtbf-hours", "1000", "--restart-seconds", "9", "--quiet"]
    write_trace(tmp_path)
    for path in tmp_path.glob("rank_*_cycle_001.jsonl"):  # as if it had died before it recorded its engine
        path.write_text(re.sub(r'"engine_(asked|used)": ?"[^"]*",?', "", path.read_text()))
    assert main(["project", str(tmp_path), *words, "--engine", "torch"]) == 0
    for path in tmp_path.glob("rank_*_cycle_000.jsonl"):
        path.write_text(re.sub(r'"engine_(asked|used)": ?"[^"]*",?', "", path.read_text()))
    capsys.readouterr()
    assert main(["project", str(tmp_path), *words, "--engine", "torch"]) == 2
    assert "has engine not recorded" in capsys.readouterr().err
