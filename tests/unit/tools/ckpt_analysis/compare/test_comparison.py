"""Comparisons of runs: what is a repeat, what is left out, and the verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT
from tests.unit.tools.ckpt_analysis.trace_factory import Options, write_trace
from tests.unit.tools.ckpt_analysis.upstream_log_factory import LogOptions, upstream_log
from tools.ckpt_analysis.common.errors import CouldNotRunError
from tools.ckpt_analysis.compare.comparison import compare_runs, compare_variants
from tools.ckpt_analysis.compare.metrics import collect
from tools.ckpt_analysis.compare.results import Cell, Comparison
from tools.ckpt_analysis.compare.variants import Variant, by_engine
from tools.ckpt_analysis.imported.importer import import_log
from tools.ckpt_analysis.imported.to_report import to_report
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.metrics.results import OperationStats
from tools.ckpt_analysis.report import Report, analyse


def report(options: LogOptions, tmp_path: Path, name: str) -> Report:
    log = tmp_path / f"{name}.log"
    log.write_text(upstream_log(options))
    return to_report(import_log(log), tmp_path)


def cell(comparison: Comparison, metric: str, run: int = 1) -> Cell:
    row = comparison.row(metric)
    assert row is not None, [entry.name for entry in comparison.rows]
    return row.cells[run]


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


def of_engines(tmp_path: Path, *names: str) -> Report:
    """A run whose cycles had these engines: saves of the second cycle take 10 s more than those of the first."""
    parts = []
    for cycle, name in enumerate(names):
        of_cycle = report(LogOptions(save_ms=[1000.0 * (1 + 10 * cycle)] * 4), tmp_path, f"{tmp_path.name}{cycle}")
        info = replace(of_cycle.cycles[0], cycle=cycle, engine_asked=name, engine_used=f"{name}Engine")
        saves = [replace(save, cycle=cycle) for save in of_cycle.saves]
        parts.append(replace(of_cycle, cycles=[info], saves=saves))
    return replace(
        parts[0],
        cycles=[info for part in parts for info in part.cycles],
        saves=[save for part in parts for save in part.saves],
    )


def test_engines_of_one_run_are_no_repeats_of_each_other(tmp_path: Path) -> None:
    mixed = of_engines(tmp_path, "torch", "lazy")
    alone = compare_runs([mixed])
    assert [variant.name for variant in alone.variants] == ["torch", "lazy"]
    assert [variant.facts["engine"] for variant in alone.variants] == ["torchEngine", "lazyEngine"]
    assert [set(cell(alone, "blocked_s", run).values) for run in (0, 1)] == [{1.0}, {11.0}]
    again = of_engines(tmp_path, "lazy", "torch")
    names = [variant.name for variant in compare_runs([mixed, again]).variants]
    assert names == [
        f"{tmp_path.name} torch",
        f"{tmp_path.name} lazy",
        f"{tmp_path.name} lazy",
        f"{tmp_path.name} torch",
    ]
    repeated = compare_variants(by_engine([Variant("x", [mixed, again]), Variant("y", [of_engines(tmp_path, "dcp")])]))
    assert [(variant.name, len(variant.run_ids)) for variant in repeated.variants] == [
        ("x torch", 2), ("x lazy", 2), ("y", 1),
    ]  # fmt: skip
    assert [cell(repeated, "blocked_s", run).values for run in range(3)] == [[1.0, 11.0], [11.0, 1.0], [1.0]]
    unknown = replace(mixed, cycles=[replace(info, engine_asked=None, engine_used=None) for info in mixed.cycles])
    names = [variant.name for variant in by_engine([Variant("x", [mixed, unknown])])]
    assert names == ["torch", "lazy", "engine not recorded"]  # no run is left out
    with pytest.raises(CouldNotRunError, match="give two runs at least to compare"):
        compare_runs([of_engines(tmp_path, "lazy", "lazy")])


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
    assert cell(few, "blocked_s").verdict == "too few repeats to tell" and cell(few, "blocked_s").ratio is not None


def test_a_load_that_found_nothing_is_no_load(tmp_path: Path) -> None:
    nothing, found = LogOptions(), LogOptions(loads_step=4)
    comparison = compare_runs([report(nothing, tmp_path, "a"), report(found, tmp_path, "b")])
    assert cell(comparison, "load_s", 0).values == [] and cell(comparison, "load_s").values == [1.25075]


def test_unfinished_saves_are_left_out_and_said(tmp_path: Path) -> None:
    comparison = compare_runs([report(LogOptions(), tmp_path, "a"), report(LogOptions(finish=False), tmp_path, "b")])
    assert [len(entry.values) for entry in comparison.rows[0].cells] == [5, 4]
    assert any(note.startswith("B (") and ": 1 of 6 saves did not end well" in note for note in comparison.notes)


def saves_of(trace: Report, count: int, factor: float = 1.0) -> list[OperationStats]:
    """Copies of a trace's first save that take a little longer each."""
    save = trace.saves[0]
    assert save.blocked_s is not None
    return [replace(save, blocked_s=save.blocked_s * factor * (1 + 0.01 * n)) for n in range(count)]


def test_ranks_are_no_repeats(tmp_path: Path) -> None:
    """A trace of 8 ranks with two saves and one restart is too few to tell, however many ranks there are."""
    trace = analyse(load_trace(write_trace(tmp_path / "a"))).report
    slower = analyse(load_trace(write_trace(tmp_path / "b", Options(background_flush=True)))).report
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
    assert cell(four, "blocked_s").verdict == "differs" and cell(four, "blocked_s").p_value == pytest.approx(2 / 70)
    assert cell(four, "total_blocked_s").verdict == "differs"  # four totals a name: there is something to test
    assert len(four.variants[0].directories) == 4
    # The spread between runs is the noise: the same shift within a wider one is none.
    wide = [runs["a"], [*runs["a"][:2], *runs["b"][:1], runs["a"][2]]]
    assert cell(compare_variants([Variant("x", wide[0]), Variant("y", wide[1])]), "blocked_s").verdict == (
        "within the noise"
    )


def test_a_metric_that_one_run_lacks_is_not_recorded(tmp_path: Path) -> None:
    trace = analyse(load_trace(write_trace(tmp_path / "a"))).report
    comparison = compare_runs([trace, report(LogOptions(), tmp_path, "b")])
    lacking = cell(comparison, "durable_s")
    assert (lacking.verdict, lacking.ratio, lacking.values) == ("not recorded", None, [])
    assert comparison.differing["layout"] == ["TP2 PP2 DP2", "TP2 PP1 DP2"]
    assert comparison.variants[1].facts["model"] == "1 G parameters; layers 16, hidden size 2048"
    trained, other = comparison.differing["model"]
    assert trained != other  # what the trace's own command line and runtime records tell


def test_every_metric_is_documented(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "comparing.md").read_text()
    trace = analyse(load_trace(write_trace(tmp_path / "a"))).report
    names = {*collect(trace), *collect(report(LogOptions(), tmp_path, "b"))}
    named = {name for name in names if "." not in name}
    assert {name for name in named if f"`{name}`" not in text} == set()
    assert {name.split(".")[0] for name in names - named} <= {"save", "load", "restart", "timer"}


def test_the_ratio_of_throughputs_is_that_of_the_printed_lines(tmp_path: Path) -> None:
    """Total size over the time that saves blocked training, as both logs print them, 30 saves each."""
    slow, fast = ([base + 40 * n for n in range(30)] for base in (15_000.0, 3_000.0))
    logs = {
        "torch": LogOptions(save_ms=slow),
        "snapshot": LogOptions(save_ms=fast, engine="TorchSnapshot", waits_s=[2.0, 2.5, 2.25, 2.0]),
    }
    comparison = compare_runs([report(options, tmp_path, name) for name, options in logs.items()])
    throughput = []
    for name in logs:
        lines = (tmp_path / f"{name}.log").read_text().splitlines()
        printed = [line for line in lines if "Checkpoint Save GB" in line]
        sizes = [float(line.split("Save GB: ")[1].split(",")[0]) for line in printed]
        seconds = [float(line.split("(second): ")[1]) for line in printed]
        throughput.append(sum(sizes) / sum(seconds))
    found = cell(comparison, "printed_total_GBps")
    assert found.ratio == pytest.approx(throughput[1] / throughput[0]) == pytest.approx(sum(slow) / sum(fast))
    assert cell(comparison, "save_s").verdict == "differs"
    # Blocked time with the waits for all snapshots but the last in it, which the printed figure leaves out.
    total = cell(comparison, "total_blocked_s")
    assert total.ratio == pytest.approx((sum(fast) / 1000 + 29 * 2.5) / (sum(slow) / 1000), rel=1e-4)
