"""`validate` finds nothing in a sound run, and lists everything that is wrong with another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic_traces.shape import Shape
from benchmarks.synthetic_traces.write import write_run
from restart_trace.schema import SCHEMA_VERSION, type_of
from tests.unit.tools.ckpt_analysis.analysis_helpers import file_of
from tests.unit.tools.ckpt_analysis.trace_factory import Options, dump, write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.ingest.lines import READ

pytestmark = pytest.mark.slow  # each reads whole traces


def output(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(list(arguments)) == status
    return capsys.readouterr().out


def test_a_sweep_that_is_not_there_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mlperf.zip"
    assert main(["validate", "--mlperf", str(path)]) == 2
    assert f"--mlperf {path}: does not exist" in capsys.readouterr().err


def test_validate_finds_nothing_in_a_sound_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    write_run(run, Shape(ranks=16, saves=4, asynchronous=True))
    text = output(capsys, "validate", str(run))
    assert text.splitlines() == [f"{run}: 33 files, {text.split(' files, ')[1].split()[0]} records: no problems"]


def test_ranks_that_are_a_share_of_their_layout_are_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tools.ckpt_replay plays a few ranks of a large layout."""
    run = write_trace(tmp_path / "run")
    for path in run.glob("rank_*"):
        path.write_bytes(path.read_bytes().replace(b'"dp":2}', b'"dp":16}'))
        assert b'"layout":{"tp":2,"pp":2,"dp":16}' in path.read_bytes()
    assert "no problems" in output(capsys, "validate", str(run))
    output(capsys, "summary", str(run))


def records_with(change: Any) -> Any:
    def damage(path: Path) -> None:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        change(records)
        dump(path, records)

    return damage


def set_of(kind: str, **fields: Any) -> Any:
    return records_with(lambda records: next(r for r in records if type_of(r) == kind).update(fields))


def without(kind: str, field: str) -> Any:
    return records_with(lambda records: next(r for r in records if type_of(r) == kind).pop(field))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (set_of("span", phase="colect"), "unknown phase 'colect' of startup"),
        (set_of("span", surprise=1), "unknown field surprise"),
        (set_of("span", bytes=1.5), "field bytes is not int: 1.5"),
        (set_of("span", file=5), "field file is not str: 5"),
        (set_of("iteration", loss="low"), "field loss is not float: 'low'"),
        (set_of("span", duration_ns=1 << 60), "is not from 0 to end_ns - start_ns"),
        (set_of("operation_end", end_ns=5), "before it starts"),
        (set_of("span", op=77), "span of operation 77, which has no operation_begin before this"),
        (set_of("process", v=SCHEMA_VERSION + 5), f"schema version {SCHEMA_VERSION + 5}, not {READ}"),
        (set_of("process", rank=5, tp=1, dp=0, pp=1), "is of rank 5, cycle 0, which the name of the file is not"),
        (set_of("iteration", rank=5), "unknown field rank"),
        (without("operation_end", "outcome"), "missing field outcome"),
        (without("process", "argv"), "missing field argv"),
        (lambda path: path.write_bytes(b""), "rank_00003_cycle_000.jsonl: has no records"),
        (lambda path: path.write_bytes(path.read_bytes() + b'{"ty'), "cut short"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\x00\xff\n"), "not a JSON record"),
        (lambda path: path.write_bytes(path.read_bytes() + b"[]\n"), "not a JSON object"),
        (records_with(lambda records: records.pop(0)), ":1: the first record of a file, and no other"),
        (records_with(lambda records: records.append(records[1])), "operation 0 begins a second time"),
        (
            records_with(lambda rs: rs.append(next(r for r in rs if type_of(r) == "operation_end"))),
            "operation 0 ends a second time",
        ),
        (lambda path: path.unlink(), "missing_ranks: cycle 0: 1 of 8 ranks left no usable trace (3)"),
        (
            lambda path: path.with_name("rank_0000003_cycle_000.jsonl").write_bytes(path.read_bytes()),
            "duplicate_file: rank_0000003_cycle_000.jsonl",
        ),
    ],
)
def test_validate_lists_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, said: str
) -> None:
    write_trace(tmp_path)
    damage(file_of(tmp_path, 3, 0))
    text = output(capsys, "validate", str(tmp_path), status=1)
    assert said in text and "no problems" not in text.splitlines()[-1]


def test_validate_lists_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path)
    path = file_of(tmp_path, 3, 0)
    path.write_bytes(path.read_bytes() + b"x\n" * 20)
    lines = output(capsys, "validate", str(tmp_path), status=1).splitlines()
    count = path.read_bytes().count(b"\n")
    assert lines[:-1] == [f"{path.name}:{n}: not a JSON record" for n in range(count - 19, count + 1)]
    assert lines[-1].endswith("20 problems")


def test_validate_tells_of_killed_operations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path, Options(save_killed_on=(4,)))
    text = output(capsys, "validate", str(tmp_path), status=1)
    assert "rank_00004_cycle_001.jsonl: save 2 has no operation_end" in text


def test_validate_in_several_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("tools.ckpt_analysis.commands.validate.PROCESSES_FROM_BYTES", 0)
    write_trace(tmp_path)
    set_of("span", surprise=1)(file_of(tmp_path, 3, 0))
    text = output(capsys, "validate", str(tmp_path), status=1)
    assert "rank_00003_cycle_000.jsonl:3: unknown field surprise" in text and "17 files" in text
