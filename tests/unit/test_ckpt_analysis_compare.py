"""Comparisons: the verdicts against samples whose truth is known, the table of them, and --fail-if."""

from __future__ import annotations

import csv
import io
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.analysis_helpers import ROOT
from tests.unit.trace_factory import Options, write_trace
from tests.unit.upstream_log_factory import LogOptions, upstream_log
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.compare.comparison import compare_runs, compare_variants
from tools.ckpt_analysis.compare.conditions import parse_condition
from tools.ckpt_analysis.compare.metrics import collect
from tools.ckpt_analysis.compare.results import Cell, Comparison
from tools.ckpt_analysis.compare.statistics import ALPHA, can_tell, difference
from tools.ckpt_analysis.compare.variants import Variant
from tools.ckpt_analysis.errors import CouldNotRunError
from tools.ckpt_analysis.imported.file import write_run
from tools.ckpt_analysis.imported.importer import import_log
from tools.ckpt_analysis.imported.to_report import to_report
from tools.ckpt_analysis.load import load_trace
from tools.ckpt_analysis.report import Report, analyse
from tools.ckpt_analysis.results import OperationStats

STUDY_LOGS = ROOT.parent / "shared" / "data" / "upstream_logs"


def imported(options: LogOptions, tmp_path: Path, name: str) -> Path:
    """A directory with the import of a log."""
    log = tmp_path / f"{name}.log"
    log.write_text(upstream_log(options))
    write_run(import_log(log), tmp_path / name)
    return tmp_path / name


def report(options: LogOptions, tmp_path: Path, name: str) -> Report:
    log = tmp_path / f"{name}.log"
    log.write_text(upstream_log(options))
    return to_report(import_log(log), tmp_path)


def cell(comparison: Comparison, metric: str, run: int = 1) -> Cell:
    row = comparison.row(metric)
    assert row is not None, [entry.name for entry in comparison.rows]
    return row.cells[run]


# The test itself.


def exact_p(first: list[float], second: list[float]) -> float:
    """Two-sided p value of the rank sum by enumerating every split of the pooled sample."""
    pooled = sorted([*first, *second])
    rank = {value: float(np.mean([i for i, v in enumerate(pooled) if v == value])) for value in pooled}
    everything = [rank[value] for value in [*first, *second]]
    sums = [sum(part) for part in itertools.combinations(everything, len(first))]
    seen = sum(everything[: len(first)])
    below = sum(total <= seen + 1e-9 for total in sums) / len(sums)
    above = sum(total >= seen - 1e-9 for total in sums) / len(sums)
    return min(1.0, 2 * min(below, above))


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 6) | st.integers(1, 999), min_size=3, max_size=5),
    st.lists(st.integers(1, 6) | st.integers(1, 999), min_size=4, max_size=5),
)
def test_the_p_value_of_few_repeats_is_exact(first: list[int], second: list[int]) -> None:
    """With and without ties, by counting all splits."""
    if len({*first, *second}) == 1:
        return
    a, b = [float(value) for value in first], [float(value) for value in second]
    found = difference(a, b)
    if found.enough:
        assert found.p_value == pytest.approx(exact_p(a, b), abs=1e-9)


@pytest.mark.parametrize(
    ("first", "second", "enough"),
    [
        (1, 1, False),
        (1, 100, False),
        (2, 50, False),
        (3, 3, False),
        (3, 4, False),
        (4, 4, True),
        (3, 5, True),
    ],
)
def test_too_few_repeats_is_what_counting_says(first: int, second: int, enough: bool) -> None:
    assert can_tell(first, second) is enough
    if min(first, second) >= 3:
        apart = exact_p([float(n) for n in range(first)], [100.0 + n for n in range(second)])
        assert (apart < ALPHA) is enough  # even without any overlap


def test_it_does_not_see_differences_in_noise() -> None:
    """Of many comparisons of like with like about one in twenty may be called different (fixed seed)."""
    generator = np.random.default_rng(7)
    called = sum(
        (difference(list(generator.lognormal(0, 0.3, 8)), list(generator.lognormal(0, 0.3, 8))).p_value or 1)
        < ALPHA
        for _ in range(200)
    )
    assert called <= 20  # 10 expected at most; 20 are exceeded once in a thousand
    slower = [
        difference(list(generator.lognormal(0, 0.1, 12)), list(generator.lognormal(0.5, 0.1, 12)))
        for _ in range(20)
    ]
    assert all(found.p_value is not None and found.p_value < ALPHA for found in slower)


def test_the_interval_covers_the_true_ratio() -> None:
    """95 % intervals of samples with a known ratio of 1.5 hold it in at least 85 of 100 cases (fixed seed)."""
    generator = np.random.default_rng(11)
    held = 0
    for _ in range(100):
        found = difference(list(generator.lognormal(0, 0.2, 15)), list(1.5 * generator.lognormal(0, 0.2, 15)))
        assert found.low is not None and found.high is not None
        held += found.low <= 1.5 <= found.high
    assert held >= 85


def test_the_same_samples_give_the_same_answer() -> None:
    first, second = [1.0, 1.1, 1.2, 1.3, 1.1], [1.2, 1.3, 1.4, 1.5, 1.1]
    assert difference(first, second) == difference(first, second)
    forth, back = difference(first, second), difference(second, first)
    assert forth.ratio is not None and back.ratio is not None
    assert forth.ratio * back.ratio == pytest.approx(1) and forth.p_value == pytest.approx(back.p_value)


def test_a_median_of_zero_has_no_ratio() -> None:
    found = difference([0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.ratio is None and found.low is None and found.p_value is not None and found.p_value < ALPHA


# Runs.


def test_slower_saves_are_found_and_the_first_is_warm_up(tmp_path: Path) -> None:
    fast = [9000.0, 1000.0, 1010.0, 1020.0, 1030.0, 1040.0]
    a = report(LogOptions(save_ms=fast), tmp_path, "a")
    b = report(LogOptions(save_ms=[2 * took for took in fast], engine="Snap"), tmp_path, "b")
    comparison = compare_runs([a, b])
    found = cell(comparison, "blocked_s")
    assert found.left_out == 1 and found.values == pytest.approx([2.0, 2.02, 2.04, 2.06, 2.08])
    assert found.ratio == pytest.approx(2.0) and found.verdict == "differs"
    assert found.p_value == pytest.approx(2 / 252) and found.ratio_low is not None and found.ratio_low > 1.8
    assert comparison.differing == {"engine": ["Torch", "Snap"]}
    assert cell(comparison, "iteration_s").verdict == "equal"
    assert (len(cell(comparison, "iteration_s").values), cell(comparison, "iteration_s").left_out) == (5, 1)
    assert any("left out as warm-up" in note for note in comparison.notes)
    kept = compare_runs([a, b], keep_first=True)
    assert cell(kept, "blocked_s").left_out == 0 and max(cell(kept, "blocked_s", 0).values) == 9.0


def test_warm_up_is_left_out_of_all_runs_or_of_none(tmp_path: Path) -> None:
    long = report(LogOptions(save_ms=[5000.0] + [1000.0 + n for n in range(9)]), tmp_path, "long")
    short = report(LogOptions(save_ms=[5000.0, 1000.0, 1001.0]), tmp_path, "short")
    found = compare_runs([long, short])
    assert [entry.left_out for entry in found.rows[0].cells] == [0, 0]
    assert len(cell(found, "blocked_s", 0).values) == 10


def test_noise_few_repeats_and_totals_have_their_verdicts(tmp_path: Path) -> None:
    a = report(LogOptions(), tmp_path, "a")
    b = report(LogOptions(save_ms=[1500.0, 1011.0, 1019.0, 1031.0, 1039.0, 1049.0]), tmp_path, "b")
    comparison = compare_runs([a, b])
    assert cell(comparison, "blocked_s").verdict == "within the noise"
    assert cell(comparison, "total_blocked_s").verdict == "one value per run"
    assert cell(comparison, "save_files").verdict == "equal"
    assert cell(comparison, "launch_s").verdict == "equal"
    few = compare_runs([a, report(LogOptions(save_ms=[1500.0, 1600.0]), tmp_path, "few")])
    assert (
        cell(few, "blocked_s").verdict == "too few repeats to tell"
        and cell(few, "blocked_s").ratio is not None
    )


def test_a_load_that_found_nothing_is_no_load(tmp_path: Path) -> None:
    nothing, found = LogOptions(), LogOptions(loads_step=4)
    comparison = compare_runs([report(nothing, tmp_path, "a"), report(found, tmp_path, "b")])
    assert cell(comparison, "load_s", 0).values == [] and cell(comparison, "load_s").values == [1.25075]


def test_unfinished_saves_are_left_out_and_said(tmp_path: Path) -> None:
    comparison = compare_runs(
        [report(LogOptions(), tmp_path, "a"), report(LogOptions(finish=False), tmp_path, "b")]
    )
    assert [len(entry.values) for entry in comparison.rows[0].cells] == [5, 4]
    assert any(
        note.startswith("B (") and ": 1 of 6 saves did not end well" in note for note in comparison.notes
    )


def saves_of(trace: Report, count: int, factor: float = 1.0) -> list[OperationStats]:
    """Copies of a trace's first save that take a little longer each."""
    save = trace.saves[0]
    assert save.blocked_s is not None
    return [replace(save, blocked_s=save.blocked_s * factor * (1 + 0.01 * n)) for n in range(count)]


def test_ranks_are_no_repeats(tmp_path: Path) -> None:
    """A trace of 8 ranks with two saves and one restart is too few to tell, however many ranks there are."""
    trace = analyse(load_trace(write_trace(tmp_path / "a")))
    slower = analyse(load_trace(write_trace(tmp_path / "b", Options(background_flush=True))))
    comparison = compare_runs([trace, slower])
    assert len(cell(comparison, "blocked_s", 0).values) == 2
    assert cell(comparison, "blocked_s").verdict == "too few repeats to tell"
    assert cell(comparison, "restart_s", 0).values == [trace.restarts[0].restart_s]
    assert cell(comparison, "save.flush.fsync_s", 0).median == pytest.approx(0.240)
    assert cell(comparison, "restart.load_s", 0).median is not None
    enough = [replace(trace, saves=saves_of(trace, 6)), replace(trace, saves=saves_of(trace, 6, 1.5))]
    assert cell(compare_runs(enough), "blocked_s").verdict == "differs"


def test_repeated_runs_count_once_each(tmp_path: Path) -> None:
    """Two runs a name with clearly different saves: five of each run would differ, two runs cannot tell."""
    shifts = {"a": [0.0, 100.0, 30.0, 60.0], "b": [400.0, 500.0, 430.0, 460.0]}
    runs = {
        name: [
            report(LogOptions(save_ms=[1000.0 + shift + n for n in range(6)]), tmp_path, f"{name}{index}")
            for index, shift in enumerate(of_name)
        ]
        for name, of_name in shifts.items()
    }
    two = compare_variants([Variant(name, reports[:2]) for name, reports in runs.items()])
    assert two.repeats == "runs" and cell(two, "blocked_s").verdict == "too few repeats to tell"
    assert cell(two, "blocked_s", 0).values == pytest.approx([1.003, 1.103])  # medians without the first save
    four = compare_variants([Variant(name, reports) for name, reports in runs.items()])
    assert cell(four, "blocked_s").verdict == "differs" and cell(four, "blocked_s").p_value == pytest.approx(
        2 / 70
    )
    assert (
        cell(four, "total_blocked_s").verdict == "differs"
    )  # four totals a name: there is something to test
    assert len(four.variants[0].directories) == 4
    # The spread between runs is the noise: the same shift within a wider one is none.
    wide = [runs["a"], [*runs["a"][:2], *runs["b"][:1], runs["a"][2]]]
    assert cell(compare_variants([Variant("x", wide[0]), Variant("y", wide[1])]), "blocked_s").verdict == (
        "within the noise"
    )


def test_a_metric_that_one_run_lacks_is_not_recorded(tmp_path: Path) -> None:
    trace = analyse(load_trace(write_trace(tmp_path / "a")))
    comparison = compare_runs([trace, report(LogOptions(), tmp_path, "b")])
    lacking = cell(comparison, "durable_s")
    assert (lacking.verdict, lacking.ratio, lacking.values) == ("not recorded", None, [])
    assert comparison.differing["layout"] == ["TP2 PP2 DP2", "TP2 PP1 DP2"]
    assert comparison.variants[1].facts["model"] == "1 G parameters; layers 16, hidden size 2048"
    trained, other = comparison.differing["model"]
    assert trained != other  # what the trace's own command line and runtime records tell


def test_every_metric_is_documented(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "comparing.md").read_text()
    trace = analyse(load_trace(write_trace(tmp_path / "a")))
    names = {*collect(trace), *collect(report(LogOptions(), tmp_path, "b"))}
    named = {name for name in names if "." not in name}
    assert {name for name in named if f"`{name}`" not in text} == set()
    assert {name.split(".")[0] for name in names - named} <= {"save", "load", "restart", "timer"}


@pytest.mark.parametrize("command", ["compare", "import", "project"])
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys\nfrom tools.ckpt_analysis.cli import main\n"
        f"try: main([{command!r}, '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'polars', 'numpy', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "examples:" in done.stdout and f"ckpt-analysis {command}" in done.stdout


# Output and --fail-if.


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three imported runs: the second saves twice as long, the third is like the first."""
    base = tmp_path_factory.mktemp("three")
    double = LogOptions(save_ms=[2 * took for took in LogOptions().save_ms])
    options = {"a": LogOptions(), "b": double, "c": LogOptions()}
    return [str(imported(entry, base, name)) for name, entry in options.items()]


def test_formats(three: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *three]) == 0
    table = capsys.readouterr().out
    rows = [line.split() for line in table.splitlines() if line.strip().startswith("blocked_s ")]
    assert [row[4] for row in rows] == ["B", "C"] and rows[0][-2:] == ["differs:", "worse"]
    assert rows[1][-3:] == ["within", "the", "noise"] and "timer.interval-time_s" not in table
    assert main(["compare", "--all", *three]) == 0
    assert "timer.interval-time_s" in capsys.readouterr().out
    assert main(["compare", "--format", "json", *three]) == 0
    data = json.loads(capsys.readouterr().out)
    blocked = next(row for row in data["rows"] if row["name"] == "blocked_s")
    assert blocked["cells"][1]["ratio"] == pytest.approx(2.0) and len(blocked["cells"][0]["values"]) == 5
    assert "Mann-Whitney" in data["method"]
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
def test_fail_if(
    conditions: list[str], status: int, three: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_names_on_the_command_line(
    three: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = three
    assert main(["compare", "--format", "json", f"old={a}", f"new={b}", f"old={c}"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(side["name"], side["directories"]) for side in data["variants"]] == [
        ("old", [a, c]),
        ("new", [b]),
    ]
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


@settings(deadline=None, derandomize=True)
@given(st.text(max_size=20))
def test_any_other_text_is_refused_by_name(text: str) -> None:
    try:
        condition = parse_condition(text)
    except CouldNotRunError as exc:
        assert repr(text) in str(exc)
    else:
        assert condition.sign in text and condition.metric in text


@pytest.mark.skipif(not STUDY_LOGS.is_dir(), reason="the study's logs are not beside this checkout")
def test_the_studys_own_ratio(tmp_path: Path) -> None:
    """Total size over the time that saves blocked training, as both logs print them, 30 saves each."""
    names = ("3B-tp4-pp1-dp1-ckpt2.log", "3B-tp4-pp1-dp1-ckpt5.log")
    comparison = compare_runs([to_report(import_log(STUDY_LOGS / name), tmp_path) for name in names])
    printed = [(STUDY_LOGS / name).read_text(errors="replace").splitlines() for name in names]
    throughput = []
    for lines in printed:
        sizes = [
            float(line.split("Save GB: ")[1].split(",")[0]) for line in lines if "Checkpoint Save GB" in line
        ]
        seconds = [float(line.split("(second): ")[1]) for line in lines if "Checkpoint Save GB" in line]
        throughput.append(sum(sizes) / sum(seconds))
    found = cell(comparison, "printed_total_GBps")
    assert found.ratio == pytest.approx(throughput[1] / throughput[0]) == pytest.approx(4.931, abs=0.001)
    assert cell(comparison, "save_s").verdict == "differs"
    # Blocked time with the waits for the snapshots in it, which the printed figure leaves out.
    total = cell(comparison, "total_blocked_s")
    assert total.ratio == pytest.approx(207.893 / 501.151, rel=1e-4)
