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


RANK = 3  # of those kinds that concern one rank
COMPILED = "data_build"  # a phase of a start, whose spans the traces of this file call `compile`


def _of(operation: str, records: list[Record], record_type: str | None = None) -> list[Record]:
    """Records of the operations of this kind."""
    ops = {r["op"] for r in records if r.get("type") == "operation_begin" and r["operation"] == operation}
    return [r for r in records if r.get("op") in ops and record_type in (None, r.get("type"))]


def _in(part: str, name: str, records: list[Record]) -> list[Record]:
    """All records of a file with `part` in its name."""
    return records if part in name else []


# Records that may be absent -> those of a file, by its name.
ABSENT: dict[str, Callable[[str, list[Record]], list[Record]]] = {
    "steps": lambda name, records: [r for r in records if type_of(r) == "iteration"],
    "first steps": lambda name, records: [r for r in records if r.get("phase") == "first_step"],
    "compile spans": lambda name, records: [r for r in records if r.get("phase") == "compile"],
    "ends of starts": lambda name, records: _of("startup", records, "operation_end"),
    "ends of saves": lambda name, records: _of("save", records, "operation_end"),
    "an end of each save": lambda name, records: _of("save", _in(f"rank_{RANK:05}", name, records), "operation_end"),
    "ends of loads": lambda name, records: _of("load", records, "operation_end"),
    "an end of a load": lambda name, records: _of("load", _in(f"rank_{RANK:05}", name, records), "operation_end"),
    "commits": lambda name, records: [r for r in records if r.get("phase") == "commit"],
    "failures": lambda name, records: [r for r in records if r.get("operation") == "failure"],
    "the supervisor": lambda name, records: _in("supervisor", name, records),
    "a rank": lambda name, records: _in(f"rank_{RANK:05}", name, records),
    "the first cycle": lambda name, records: _in("cycle_000", name, records),
}
_MOVED = ["bytes", "num_files"]
_EARLIER_STEPS = [f"restarts.{name}" for name in ("reached_step", "lost_steps", "lost_work_s", "equal_losses")]
_OF_FAILURES = ["restarts.restart_s", "restarts.failure", "restarts.failure_to_caught_up_s"]
# The figures that depend on them, as paths in the JSON report.
DEPENDENT = {
    "steps": ["budget", "restarts.repeated_steps", *_EARLIER_STEPS],
    "first steps": [
        "budget", "restarts.time_to_first_step_s", "restarts.restart_s", "restarts.coverage_min",
        "launches.time_to_first_step_s",
    ],
    "compile spans": ["restarts.phases.compile", "launches.phases.compile"],
    "ends of saves": ["saves.wall", *(f"saves.{name}" for name in (*_MOVED, "durable_s", "blocked_GBps"))],
    "an end of each save": [f"saves.{name}" for name in (*_MOVED, "durable_s", "blocked_GBps")],
    "ends of loads": ["loads.wall", "loads.load_s", *(f"loads.{name}" for name in _MOVED)],
    "an end of a load": [f"loads.{name}" for name in _MOVED],
    "commits": ["saves.committed_s", "saves.durable_s"],
    "failures": _OF_FAILURES,
    "the supervisor": _OF_FAILURES,
    "a rank": [
        *(f"saves.{name}" for name in (*_MOVED, "durable_s", "blocked_GBps", "io_GBps")),
        *(f"loads.{name}" for name in (*_MOVED, "io_GBps")),
    ],
    "the first cycle": [
        "budget", "restarts.repeated_steps", "restarts.down_s", *_EARLIER_STEPS, "launches.time_to_first_step_s",
        "launches.phases.compile",
    ],
}  # fmt: skip


def values(report: Any, path: str) -> list[Any]:
    """All values at a path, which may pass lists; None for what is not there."""
    name, _, rest = path.partition(".")
    found = report.get(name)
    parts = found if isinstance(found, list) else [found]
    return [value for part in parts for value in values(part, rest)] if rest else parts


def strip(directory: Path, absent: tuple[str, ...]) -> None:
    """Take records out of a trace; a file without records goes, too."""
    for path in directory.glob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            if record.get("phase") == COMPILED:
                record["phase"] = "compile"
        out = {id(record) for name in absent for record in ABSENT[name](path.name, records)}
        kept = [record for record in records if id(record) not in out]
        path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in kept))
        if not kept:
            path.unlink()


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
