"""What a trace does not tell is null in the report, whichever records it lacks."""

from __future__ import annotations

import itertools
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from restart_trace.schema import type_of
from tests.unit.tools.ckpt_analysis.analysis_helpers import kinds, result
from tests.unit.tools.ckpt_analysis.trace_factory import RANKS, Options, write_trace

Record = dict[str, Any]


RANK = 3  # of those kinds that concern one rank
COMPILED = "data_build"  # a phase of a start, whose spans the traces of this file call `compile`


def _of(operation: str, records: list[Record], record_type: str | None = None) -> list[Record]:
    """Records of the operations of this kind."""
    ops = {r["op"] for r in records if r.get("type") == "operation_begin" and r["operation"] == operation}
    return [r for r in records if r.get("op") in ops and record_type in (None, r.get("type"))]


def _both_of(operation: str, name: str, records: list[Record]) -> list[Record]:
    """Begins and ends of these operations of rank RANK."""
    mine = _in(f"rank_{RANK:05}", name, records)
    return [*_of(operation, mine, "operation_begin"), *_of(operation, mine, "operation_end")]


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
    "a rank of each save": lambda name, records: _both_of("save", name, records),
    "a rank of a load": lambda name, records: _both_of("load", name, records),
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
    "a rank of each save": [f"saves.{name}" for name in (*_MOVED, "durable_s", "blocked_GBps", "io_GBps")],
    "a rank of a load": [f"loads.{name}" for name in (*_MOVED, "io_GBps")],
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


def strip(directory: Path, absent: Iterable[str], others: Callable[[], bool] = lambda: False) -> None:
    """Take records out of a trace, and each other one for which `others` says so; a file without records goes, too.

    The first of a file stays, what begins an operation, and what ends a start: see KINDS.
    """
    for path in directory.glob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            if record.get("phase") == COMPILED:
                record["phase"] = "compile"
        out = {id(record) for name in absent for record in ABSENT[name](path.name, records)}
        stay = [*records[:1], *(r for r in records if r.get("type") == "operation_begin")]
        stay += _of("startup", records, "operation_end")
        kept = [r for r in records if id(r) not in out and (r in stay or not others())]
        path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in kept))
        if not kept:
            path.unlink()


# But for a start of our own trainer of which nothing tells that it ended: see the last but one test.
KINDS = [name for name in ABSENT if name != "ends of starts"]


def marks(subset: Sequence[str]) -> list[pytest.MarkDecorator]:
    """A quick run takes each kind by itself; a pair shows besides that what two lack adds up, each kind in a pair with
    the next one. The others are nightly."""
    if len(subset) < 2:
        return []
    one, other = map(KINDS.index, subset)
    return [pytest.mark.slow, *([pytest.mark.nightly(minutes=4)] if other > one + 1 else [])]


SUBSETS = [
    pytest.param(subset, marks=marks(subset)) for size in (0, 1, 2) for subset in itertools.combinations(KINDS, size)
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


@pytest.mark.nightly(minutes=4)
@settings(max_examples=int(os.environ.get("EXAMPLES", "300")))
@given(st.sets(st.sampled_from(KINDS), min_size=1), st.sampled_from([0, 0.02, 0.1, 0.5, 0.9]), st.integers(0, 1 << 30))
def test_nor_if_any_others_are_absent_too(absent: set[str], share: float, seed: int) -> None:
    """Any kinds of records, and of the others each with a probability of `share`."""
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        write_trace(Path(directory))
        strip(Path(directory), sorted(absent), lambda: generator.random() < share)
        if not list(Path(directory).glob("rank_*")):
            return
        report = result(Path(directory))
    for path in {path for name in absent for path in DEPENDENT[name]}:
        assert set(map(str, values(report, path))) <= {"None"}, path


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


def rewrite(directory: Path, files: str, change: Callable[[str, list[Record]], list[Record]]) -> None:
    """Put `change` of the name and the records of each of these files into their place."""
    for path in directory.glob(files):
        records = change(path.name, [json.loads(line) for line in path.read_text().splitlines()])
        path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))


@pytest.mark.parametrize("files, lacking", [("rank_*_cycle_001.jsonl", [False, True]), ("rank_*", [False, False])])
def test_of_another_job_a_rank_is_missed_in_a_save_if_it_saves_with_others(
    tmp_path: Path, files: str, lacking: list[bool]
) -> None:
    """One that never does may belong to no process group that saves."""

    def without(name: str, records: list[Record]) -> list[Record]:
        out = {id(record) for record in _both_of("save", name, records)}
        return [record for record in records if id(record) not in out]

    write_trace(tmp_path, Options(instrument="hooks"))
    rewrite(tmp_path, files, without)
    assert [save["bytes"] is None for save in result(tmp_path)["saves"]] == lacking


def test_saves_that_each_rank_makes_by_itself_lack_no_rank(tmp_path: Path) -> None:
    """As of DCP with no_dist, each to a directory of its own."""

    def own_tags(name: str, records: list[Record]) -> list[Record]:
        for record in _of("save", records, "operation_begin"):
            record["tag"] = f"{record['tag']}-{name[:10]}"
        return records

    write_trace(tmp_path, Options(instrument="hooks"))
    rewrite(tmp_path, "rank_*", own_tags)
    saves = result(tmp_path)["saves"]
    assert len(saves) == 2 * RANKS and all(save["bytes"] for save in saves)


@pytest.mark.parametrize(("said", "lacks"), [(1, False), (RANKS, True)])
def test_a_save_lacks_no_rank_if_it_has_as_many_as_its_records_say(tmp_path: Path, said: int, lacks: bool) -> None:
    """As of DCP with no_dist on rank 0 alone, to where all saved before; RANKS: records of the others are lost."""
    write_trace(tmp_path, Options(instrument="hooks"))
    newest = result(tmp_path)["saves"][-1]["tag"]

    def saved_again(name: str, records: list[Record]) -> list[Record]:
        if not name.startswith("rank_00000"):
            return records
        begun = [r["op"] for r in _of("save", records, "operation_begin") if r.get("tag") == newest]
        again = [r | {"op": 99} for r in records if r.get("op") in begun]
        return [*records, *(r | {"ranks": said} if r.get("type") == "operation_begin" else r for r in again)]

    rewrite(tmp_path, "rank_*", saved_again)
    report = result(tmp_path)
    *by_all, alone = report["saves"]
    assert all(save["bytes"] and save["ranks"] == RANKS for save in by_all)
    assert (alone["tag"], alone["ranks"], alone["bytes"] is None) == (newest, 1, lacks)
    assert ("ranks_without_operation" in kinds(report)) is lacks


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
