"""One altered field of one record costs that record, in every command, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from restart_trace.schema import check_record, type_of
from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT, file_of, kinds
from tests.unit.tools.ckpt_analysis.trace_factory import dump, write_trace
from tools.ckpt_analysis.cli import main

pytestmark = pytest.mark.slow  # each runs every command

GOLDEN = ROOT / "tests" / "golden" / "trace_tp2_pp2_dp2" / "restart_trace"
COMMANDS: dict[str, list[str]] = {
    "report": ["-o", "out.html"], "summary": [], "validate": [], "export": ["-o", "out.csv"],
    "probes": ["-o", "out.parquet", "--table", "probes"], "timeline": ["-o", "out.json"],
    "project": ["--nodes", "4", "--mtbf-hours", "9"], "compare": [str(GOLDEN)],
}  # fmt: skip
NAMES = {"probes": "export"}

Records = list[dict[str, Any]]
Without = Callable[[pytest.CaptureFixture[str], str, Sequence[int]], dict[str, Any]]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("altered") / "logs")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("golden") / "logs"
    shutil.copytree(GOLDEN, place)
    return place


def records_of(path: Path) -> Records:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["summary", str(directory), "--format", "json", "--quiet"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def numbers_without(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Without:
    """What the trace says where some records of one file are not there; each such trace is analysed once."""
    found: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def look(capsys: pytest.CaptureFixture[str], name: str, places: Sequence[int]) -> dict[str, Any]:
        key = name, tuple(places)
        if key not in found:
            directory = tmp_path_factory.mktemp("without") / "logs"
            shutil.copytree(trace, directory)
            dump(directory / name, [r for i, r in enumerate(records_of(trace / name)) if i not in places])
            found[key] = numbers(summary(directory, capsys))
        return found[key]

    return look


def numbers(report: dict[str, Any]) -> dict[str, Any]:
    return {name: report[name] for name in ("saves", "loads", "restarts", "launches")}


def place_of(records: Records, kind: str, **fields: Any) -> int:
    return next(i for i, r in enumerate(records) if type_of(r) == kind and fields.items() <= r.items())


# (kind of record, what tells it, what is altered)
ALTERED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a flush under the start-up": ("span", {"phase": "flush"}, {"op": 0}),
    "an end of another operation": ("operation_end", {"op": 1}, {"op": 0}),
    "a phase that is a list": ("span", {"phase": "flush"}, {"phase": ["flush"]}),
    "a tag that is a number": ("operation_label", {}, {"tag": 5}),
    "a label of no operation": ("operation_label", {}, {"op": 9}),
    "a file that is a bool": ("span", {"phase": "flush"}, {"file": True}),
    "an error that is null": ("operation_end", {"op": 1}, {"error": None}),
    "a negative start": ("span", {"phase": "collect"}, {"start_ns": -5}),
    "a phase of an event that is a number": ("event", {}, {"phase": 5}),
    "a detail of an event that is an object": ("event", {}, {"detail": {"a": 1}}),
    "a moment beyond any uptime": ("event", {}, {"time_ns": (1 << 63) - 1}),
    "more than 64 bits": ("span", {"phase": "collect"}, {"end_ns": 1 << 70}),
    "an end before the start": ("iteration", {}, {"end_ns": 1}),
    "an operation that ends before it starts": ("operation_end", {"op": 1}, {"end_ns": 1}),
    "a loss that is no number": ("iteration", {}, {"loss": float("nan")}),
    "a loss without bounds": ("iteration", {}, {"loss": float("inf")}),
    "a loss of 400 digits": ("iteration", {}, {"loss": 10**400}),
    "bytes less than none": ("span", {"phase": "flush", "detail": "write"}, {"bytes": -1}),
    "bytes of no disk": ("span", {"phase": "flush", "detail": "write"}, {"bytes": (1 << 63) - 1}),
    "an op of no operation": ("span", {"phase": "collect"}, {"op": (1 << 63) - 1}),
    "an outcome that is none": ("operation_end", {"op": 1}, {"outcome": "perhaps"}),
    "a type that is a list": ("span", {"phase": "collect"}, {"type": ["span"]}),
    "a type of another record": ("span", {"phase": "collect"}, {"type": "process"}),
}  # fmt: skip
# An operation_begin that is altered costs the records of its operation, too: nothing else says what they are of.
ALTERED_BEGINS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an unknown operation": ({"operation": "save"}, {"operation": "safe"}),
    "an operation that is an object": ({"operation": "save"}, {"operation": {}}),
    "a start beyond any uptime": ({"operation": "save"}, {"start_ns": (1 << 63) - 1}),
    "a tag that is a list": ({"operation": "save"}, {"tag": ["global_step5"]}),
    "another begin": ({"operation": "save"}, {"op": 0}),
}


@pytest.mark.parametrize(("which", "change"), ALTERED_BEGINS.values(), ids=ALTERED_BEGINS)
def test_an_altered_begin_costs_its_operation(
    tmp_path: Path, trace: Path, numbers_without: Without, capsys: pytest.CaptureFixture[str], which: Any, change: Any
) -> None:
    directory = tmp_path / "logs"
    shutil.copytree(trace, directory)
    path = file_of(directory, 5, 0)
    records = records_of(path)
    place = place_of(records, "operation_begin", **which)
    of_the_operation = [i for i, r in enumerate(records) if r.get("op") == records[place]["op"]]
    dump(path, [*records[:place], records[place] | change, *records[place + 1 :]])
    report = summary(directory, capsys)
    (invalid,) = [p for p in report["problems"] if p["kind"] == "invalid_record"]
    assert invalid["data"] == {"file": path.name, "count": len(of_the_operation)}
    assert numbers(report) == numbers_without(capsys, path.name, of_the_operation)
    assert main(["validate", str(directory)]) == 1
    assert f"{path.name}:{place + 1}: " in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "which", "change"), ALTERED.values(), ids=ALTERED)
def test_an_altered_record_costs_that_record(
    tmp_path: Path,
    trace: Path,
    numbers_without: Without,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    which: Any,
    change: Any,
) -> None:
    directory = tmp_path / "logs"
    shutil.copytree(trace, directory)
    name = "supervisor_000.jsonl" if kind == "event" else file_of(directory, 5, int(kind == "operation_label")).name
    path = directory / name
    records = records_of(path)
    place = place_of(records, kind, **which)
    dump(path, [*records[:place], records[place] | change, *records[place + 1 :]])
    report = summary(directory, capsys)
    invalid = [p for p in report["problems"] if p["kind"] == "invalid_record"]
    assert [(p["data"]["file"], p["data"]["count"]) for p in invalid] == [(name, 1)]
    assert numbers(report) == numbers_without(capsys, name, [place])
    assert main(["validate", str(directory)]) == 1
    assert f"{name}:{place + 1}: " in capsys.readouterr().out


VALUES = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(max_size=5),
    st.integers(-3, 12), st.sampled_from([1 << 53, 1 << 61, (1 << 63) - 1, 1 << 64, -(1 << 63), 10**400]),
    st.sampled_from(["save", "load", "startup", "failure", "flush", "write", "global_step5", "ok", "start", "5", "[1]",
                     "\x1b]0;x\x07", "\ud800", "span", "process", "event"]),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip


@st.composite
def alterations(draw: Any) -> tuple[str, int, str, Any]:
    """(file, line, field, value) of the golden trace."""
    path = draw(st.sampled_from(sorted(GOLDEN.glob("*.jsonl"))))
    records = records_of(path)
    kind = draw(st.sampled_from(sorted({type_of(record) for record in records})))
    place = draw(st.sampled_from([i for i, record in enumerate(records) if type_of(record) == kind]))
    field = draw(st.sampled_from(sorted(records[place])))
    value = records[place][field]
    if isinstance(value, dict) and value and draw(st.booleans()):
        return path.name, place, field, value | {draw(st.sampled_from(sorted(value))): draw(VALUES)}
    return path.name, place, field, draw(VALUES)


@settings(
    max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(alteration=alterations())
@example(("rank_00003_cycle_001.jsonl", 0, "process_start_ns", -1))
@example(("rank_00000_cycle_000.jsonl", 0, "versions", {"torch": []}))
def test_no_altered_field_stops_any_command(
    golden: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any, alteration: tuple[str, int, str, Any]
) -> None:
    name, place, field, value = alteration
    path = golden / name
    before = path.read_bytes()
    records = records_of(path)
    altered = records[place] | {field: value}
    records[place] = altered
    monkeypatch.chdir(golden.parent)
    try:
        dump(path, records)
        for command, flags in COMMANDS.items():
            status = main([NAMES.get(command, command), str(golden), *flags, "--quiet", "--no-cache"])
            assert status == (1 if command == "validate" and check_record(altered) else status), command
            assert status in (0, 1), command
        if check_record(altered):
            assert {"invalid_record", "no_process_record", "unknown_schema_version"} & set(
                kinds(summary(golden, capsys))
            )
    finally:
        path.write_bytes(before)
