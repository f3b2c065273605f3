"""What a trace does not tell is null in the report, whichever records it lacks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from restart_trace.schema import type_of
from tests.unit.tools.ckpt_analysis.analysis_helpers import kinds, result
from tests.unit.tools.ckpt_analysis.trace_factory import Options, write_trace

Record = dict[str, Any]


def _ends_of(operation: str, records: list[Record]) -> list[Record]:
    ops = {r["op"] for r in records if r.get("type") == "operation_begin" and r["operation"] == operation}
    return [r for r in records if r.get("type") == "operation_end" and r["op"] in ops]


# Records that may be absent -> those of a file.
ABSENT: dict[str, Callable[[list[Record]], list[Record]]] = {
    "steps": lambda records: [r for r in records if type_of(r) == "iteration"],
    "first steps": lambda records: [r for r in records if r.get("phase") == "first_step"],
    "ends of starts": lambda records: _ends_of("startup", records),
    "ends of saves": lambda records: _ends_of("save", records),
    "ends of loads": lambda records: _ends_of("load", records),
    "failures": lambda records: [r for r in records if r.get("operation") == "failure"],
}
# The figures that depend on them, as paths in the JSON report.
DEPENDENT = {
    "steps": ["budget", "restarts.reached_step", "restarts.lost_steps", "restarts.lost_work_s"],
    "first steps": [
        "budget", "restarts.time_to_first_step_s", "restarts.restart_s", "restarts.coverage_min",
        "launches.time_to_first_step_s",
    ],
    "ends of saves": ["saves.wall", "saves.bytes", "saves.num_files", "saves.durable_s", "saves.blocked_GBps"],
    "ends of loads": ["loads.wall", "loads.bytes", "loads.load_s"],
    "failures": ["restarts.restart_s", "restarts.failure", "restarts.failure_to_caught_up_s"],
}  # fmt: skip


def values(report: Any, path: str) -> list[Any]:
    """All values at a path, which may pass lists."""
    name, _, rest = path.partition(".")
    found = report[name]
    parts = found if isinstance(found, list) else [found]
    return [value for part in parts for value in values(part, rest)] if rest else parts


def strip(directory: Path, absent: tuple[str, ...]) -> None:
    for path in directory.glob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        out = [id(record) for name in absent for record in ABSENT[name](records)]
        kept = [record for record in records if id(record) not in out]
        path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in kept))


# But for a start of our own trainer of which nothing tells that it ended: see the last but one test.
SUBSETS = [
    subset
    for size in (0, 1, 2)
    for subset in itertools.combinations([name for name in ABSENT if name != "ends of starts"], size)
]


@pytest.mark.parametrize("absent", SUBSETS, ids=" and ".join)
def test_no_figure_that_depends_on_an_absent_record_is_a_number(tmp_path: Path, absent: tuple[str, ...]) -> None:
    write_trace(tmp_path)
    strip(tmp_path, absent)
    report = result(tmp_path)
    null = {path for name in absent for path in DEPENDENT[name]}
    for path in {path for paths in DEPENDENT.values() for path in paths}:
        found = values(report, path)
        if path in null:
            assert set(map(str, found)) <= {"None"}, path
        elif path != "restarts.failure_to_caught_up_s":  # also depends on what `absent` may contain
            assert found and None not in found, path


def test_a_job_without_observed_steps_is_told_how_to_tell_them(tmp_path: Path) -> None:
    """It has no goodput of 0 %, its targets are not missed, and it is not said that it made no step."""
    write_trace(tmp_path, Options(instrument="hooks"))
    strip(tmp_path, ("steps", "first steps"))
    report = result(tmp_path)
    (told,) = [p for p in report["problems"] if p["kind"] == "steps_not_observed"]
    assert "import restart_trace.hooks" in told["message"] and "restart_trace.hooks.step(number)" in told["message"]
    assert told["data"] == {"cycles": [0, 1]}
    assert report["budget"] is None
    assert "unfinished_operation" not in kinds(report)  # of the starts, which follows from it


def test_our_own_trainer_without_a_step_made_none(tmp_path: Path) -> None:
    """It records every step: a launch that ended before its first one spent all its time launching."""
    write_trace(tmp_path)
    strip(tmp_path, ("steps", "first steps", "ends of starts"))
    report = result(tmp_path)
    assert "steps_not_observed" not in kinds(report)
    assert report["budget"]["training_s"] == 0


def test_counted_steps_of_two_cycles_are_not_compared(tmp_path: Path) -> None:
    """As of SGD, whose state has no number: step 1 of a restart need not be the run's first."""
    write_trace(tmp_path, Options(instrument="hooks"))
    for path in tmp_path.glob("rank_*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            if record.get("type") == "runtime":
                record["step_source"] = "count"
        path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))
    report = result(tmp_path)
    (restart,) = report["restarts"]
    names = ("resumed_step", "reached_step", "lost_steps", "lost_work_s")
    assert [restart[name] for name in names] == [None] * 4
    assert report["budget"] is None and restart["time_to_first_step_s"] > 0
    assert "steps_not_numbered" in kinds(report)
