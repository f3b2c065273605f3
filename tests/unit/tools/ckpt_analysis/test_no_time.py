"""What took no time by the clock, or moved no bytes, stops no command: no number is divided by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from restart_trace.schema import type_of
from tests.unit.tools.ckpt_analysis.trace_factory import dump, write_trace
from tools.ckpt_analysis.cli import main

pytestmark = pytest.mark.slow  # each runs two commands

Record = dict[str, Any]


def _at_once(record: Record) -> None:
    record["end_ns"] = record["start_ns"]
    record.pop("duration_ns", None)


def _spans(record: Record, begin: Record) -> None:
    if type_of(record) == "span":
        _at_once(record)


def _first_steps(record: Record, begin: Record) -> None:
    if record.get("phase") == "first_step":
        _at_once(record)


def _ends(record: Record, begin: Record) -> None:
    if type_of(record) == "operation_end":
        record["end_ns"] = begin["start_ns"]


def _bytes(record: Record, begin: Record) -> None:
    if "bytes" in record:
        record["bytes"] = 0


@pytest.mark.parametrize("ranks", [range(8), [0]], ids=["all ranks", "rank 0"])
@pytest.mark.parametrize("nothing", [_spans, _first_steps, _ends, _bytes])
def test_stops_no_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nothing: Callable[[Record, Record], None],
    ranks: range | list[int],
) -> None:
    trace = write_trace(tmp_path / "logs")
    for path in (path for rank in ranks for path in trace.glob(f"rank_{rank:05}_*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        begins = {record["op"]: record for record in records if type_of(record) == "operation_begin"}
        for record in records:
            if record.get("op") in begins:
                nothing(record, begins[record["op"]])
        dump(path, records)
    monkeypatch.chdir(tmp_path)
    for command in (["report", "-o", "out"], ["summary", "--all"]):
        assert main([*command[:1], str(trace), *command[1:], "--quiet", "--no-cache"]) == 0
        assert not {"nan", "inf"} & set(capsys.readouterr().out.split())
