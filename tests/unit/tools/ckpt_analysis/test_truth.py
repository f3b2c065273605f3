"""Every number of the analysis against the truth about a made-up run, and every planted problem found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic_traces.__main__ import main
from benchmarks.synthetic_traces.shape import PLANTS, Shape, saves_for
from benchmarks.synthetic_traces.write import write_run
from restart_trace.schema import check_record, type_of
from tests.unit.tools.ckpt_analysis.analysis_helpers import result
from tools.ckpt_analysis.ingest import files, records
from tools.ckpt_analysis.ingest.discover import list_trace
from tools.ckpt_analysis.ingest.load import load_trace

pytestmark = pytest.mark.slow  # each writes and analyses the traces of whole runs

# Keys that the truth leaves out on purpose: where the data lies, what needs no arithmetic, and what rules make of
# the numbers, which test_findings holds to the planted stragglers; test_budget, test_targets and, for critical paths,
# test_terminal and test_figures have theirs. No synthetic trace has the label tier.
_NOT_IN_TRUTH = {
    "cycles", "per_rank", "critical_path", "findings", "model", "budget", "targets", "storage",
    # tests/unit/tools/ckpt_analysis/metrics has these:
    "parts", "tier", "tiers", "replication", "compression", "reads", "store_traffic",
}  # fmt: skip
_SHAPES = {
    "sync": Shape(ranks=24, saves=4),
    "async": Shape(ranks=24, saves=5, asynchronous=True),
    "async-waiting": Shape(ranks=9, saves=6, steps=1, files=3, asynchronous=True),
    "small": Shape(ranks=2, saves=2, files=1, steps=1),
    **{name: Shape(ranks=24, saves=4, plants=frozenset({name})) for name in PLANTS},
    "all": Shape(ranks=24, saves=4, plants=frozenset(PLANTS)),
    "async-all": Shape(ranks=40, saves=5, asynchronous=True, plants=frozenset(PLANTS)),
}


def differences(truth: Any, found: Any, place: str = "") -> list[str]:
    """Everything that the truth states and the report does not, or has another value for."""
    if isinstance(truth, dict):
        if not isinstance(found, dict):
            return [f"{place}: {found!r} is no object"]
        absent = [f"{place}.{name} is absent" for name in truth if name not in found]
        inner = [differences(truth[n], found[n], f"{place}.{n}") for n in truth if n in found]
        return absent + [line for lines in inner for line in lines]
    if isinstance(truth, list) and isinstance(found, list) and len(truth) == len(found):
        pairs = enumerate(zip(truth, found, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{place}[{i}]")]
    if isinstance(truth, float) and isinstance(found, (int, float)):
        return [] if found == pytest.approx(truth, rel=1e-12, abs=1e-9) else [f"{place}: {found}, not {truth}"]
    return [] if truth == found else [f"{place}: {found!r}, not {truth!r}"]


@pytest.mark.parametrize("name", _SHAPES)
def test_every_number_is_the_known_one(tmp_path: Path, name: str) -> None:
    truth = write_run(tmp_path / "run", _SHAPES[name])
    found = result(tmp_path / "run")
    expected = {key: value for key, value in truth.items() if key not in ("problems", "planted")}
    assert differences(expected, found) == []
    problems = [(p["kind"], p["data"]) for p in found["problems"]]
    # Sorted by kind: the order in which they are found is none of the truth's business.
    assert sorted(kind for kind, _ in problems) == sorted(p["kind"] for p in truth["problems"])
    for planted in truth["problems"]:
        (data,) = [data for kind, data in problems if kind == planted["kind"]]
        assert differences(planted["data"], data) == []


def test_the_truth_leaves_out_no_number(tmp_path: Path) -> None:
    truth = write_run(tmp_path / "run", Shape(ranks=24, saves=4))
    found = result(tmp_path / "run", per_rank=False)

    def keys(value: Any, place: str = "") -> set[str]:
        if isinstance(value, dict):
            inner = [keys(child, f"{place}.{name}") for name, child in value.items() if name not in _NOT_IN_TRUTH]
            return {f"{place}.{name}" for name in value if name not in _NOT_IN_TRUTH}.union(*inner)
        return set().union(*(keys(child, place) for child in value)) if isinstance(value, list) else set()

    missing = {key for key in keys(found) - keys(truth) if not key.startswith(".problems")}
    of_paths = (
        "critical_rank",
        "critical_phase",
        "at_critical_s",
        "after_critical_s",
    )  # of starts: test_figures has their paths
    of_returns = ("returned_ranks", "new_ranks", "return_s")  # test_metrics has ranks that return
    elsewhere = (*of_paths, *of_returns)
    missing = {key for key in missing if not (key.startswith((".launches", ".restarts")) and key.endswith(elsewhere))}
    # A launch has no failure before it: these are null in it, and in the restart the truth has them.
    of_restarts = {key.replace(".restarts.", ".launches.", 1) for key in keys(truth) if key.startswith(".restarts.")}
    assert missing <= of_restarts


def test_a_wrong_number_would_be_noticed(tmp_path: Path) -> None:
    truth = write_run(tmp_path / "run", Shape(ranks=4, saves=2))
    found = result(tmp_path / "run")
    truth["saves"][0]["phases"]["flush"]["details"]["fsync"]["median_s"] += 1e-6
    truth["saves"][1]["bytes"] += 1
    del found["restarts"][0]["down_s"]
    places = [line.split(":")[0] for line in differences({k: truth[k] for k in ("saves", "restarts")}, found)]
    assert places == [
        ".saves[0].phases.flush.details.fsync.median_s", ".saves[1].bytes", ".restarts[0].down_s is absent",
    ]  # fmt: skip


def test_stragglers_are_named(tmp_path: Path) -> None:
    planted = frozenset({"straggler-rank", "straggler-host", "barrier-skew"})
    truth = write_run(tmp_path / "run", Shape(ranks=24, saves=4, plants=planted))
    found = result(tmp_path / "run", per_rank=True)
    for save in found["saves"]:
        assert save["phases"]["flush"]["details"]["fsync"]["slowest_rank"] == truth["planted"]["straggler-rank"]
        waited = {entry["rank"]: entry["phases"]["barrier"] for entry in save["per_rank"]}
        assert min(waited, key=lambda rank: waited[rank]) == truth["planted"]["barrier-skew"]
    (load,) = found["loads"]
    slowest = load["phases"]["load"]["details"]["read"]["slowest_rank"]
    assert slowest // 8 == truth["planted"]["straggler-host"]


@pytest.mark.parametrize("plants", [frozenset(), frozenset(PLANTS) - {"torn-log", "mixed-versions"}])
def test_records_are_valid(tmp_path: Path, plants: frozenset[str]) -> None:
    write_run(tmp_path / "run", Shape(ranks=16, saves=3, asynchronous=bool(plants), plants=plants))
    kinds = set()
    for path in (tmp_path / "run").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            assert check_record(record) == [], record
            kinds.add(type_of(record))
    assert kinds == {
        "process", "runtime", "operation_begin", "operation_label", "span", "operation_end", "iteration", "event",
        "probe", "sample",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["sync", "async"])
def test_the_columns_and_the_lines_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_run(tmp_path / "run", _SHAPES[name])
    monkeypatch.setattr(records, "read_lines", None)  # nothing is wrong, so it is not called
    fast = load_trace(tmp_path / "run").records
    monkeypatch.undo()
    monkeypatch.setattr(records, "read_columns", lambda texts: None)
    by_line = load_trace(tmp_path / "run").records
    for table, rows in fast.tables.items():
        assert rows.height and rows.equals(by_line.tables[table]), table


def _given_twice(lines: list[str]) -> None:
    lines[3] = lines[3].replace('"op":0,', '"op":0,"op":1,')


def _before_its_begin(lines: list[str]) -> None:
    begin = next(i for i, line in enumerate(lines) if '"operation":"save"' in line)
    lines[begin], lines[begin + 2] = lines[begin + 2], lines[begin]


def _unknown(lines: list[str]) -> None:
    lines[3] = lines[3].replace('"op":0,', '"op":0,"colour":"red",')


@pytest.mark.parametrize(("damage", "left_out"), [(_given_twice, 1), (_before_its_begin, 2), (_unknown, 0)])
def test_the_columns_leave_to_the_lines_what_they_cannot_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[list[str]], None], left_out: int
) -> None:
    write_run(tmp_path / "run", Shape(ranks=4, saves=2))
    path = tmp_path / "run" / "rank_00000_cycle_000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    damage(lines)
    path.write_text("".join(lines))
    found = load_trace(tmp_path / "run")
    counts = [problem.data["count"] for problem in found.problems if problem.kind == "invalid_record"]
    assert counts == ([left_out] if left_out else [])
    monkeypatch.setattr(records, "read_columns", lambda texts: None)
    by_line = load_trace(tmp_path / "run")
    assert by_line.problems == found.problems
    for table, rows in found.records.tables.items():
        assert rows.equals(by_line.records.tables[table]), table


def test_large_logs_are_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", _SHAPES["all"])
    whole = result(tmp_path / "run")
    monkeypatch.setattr(files, "BATCH_BYTES", 20_000)
    read: list[int] = []
    listing = list_trace(tmp_path / "run")
    sizes = [file.size() for file in listing.files]
    records.read_records(listing.files, sizes, advance=read.append)
    assert len(read) > 5 and sum(read) == sum(sizes)
    assert result(tmp_path / "run") == whole


def test_generator_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "run"), "--ranks", "4", "--spans", "400", "--plant", "torn-log"]) == 0
    truth = json.loads((tmp_path / "run" / "truth.json").read_text())
    spans = sum(p.read_text().count('\n{"op":') for p in (tmp_path / "run").glob("rank_*"))
    assert abs(spans - 400) <= 4 * 10 and truth["planted"] == {"torn-log": 2}
    assert main([str(tmp_path / "run")]) == 2 and "is not empty" in capsys.readouterr().err
    for arguments, message in (
        (["--plant", "gremlins"], "--plant gremlins: no such problem"),
        (["--ranks", "1"], "--ranks 1: needs at least 2"),
        (["--ranks", "8", "--plant", "clock-offset"], "--ranks 8: a host with a problem needs more than 8 ranks"),
    ):
        assert main([str(tmp_path / "other"), *arguments]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_spans_asked_for() -> None:
    assert saves_for(10_240, 10_000_000, 2) == 95
    with pytest.raises(ValueError, match="--saves 1"):
        Shape(saves=1)
