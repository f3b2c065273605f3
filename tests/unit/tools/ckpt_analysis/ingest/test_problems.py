"""Damaged traces and runs in trouble: each problem is named, and the rest is analysed all the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from restart_trace.schema import type_of
from tests.unit.tools.ckpt_analysis.analysis_helpers import file_of, kinds, problem, result
from tests.unit.tools.ckpt_analysis.trace_factory import MS, RANKS, RUN_ID, Options, dump, rank_log, write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.ingest.discover import LogDirectoryError
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.render.json_output import to_dict
from tools.ckpt_analysis.report import analyse

TOTAL_BYTES = 2 * 500_000 * sum(range(1, RANKS + 1))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return result(write_trace(tmp_path_factory.mktemp("sound")))


def test_missing_rank(tmp_path: Path) -> None:
    write_trace(tmp_path)
    file_of(tmp_path, 3, 1).unlink()
    report = result(tmp_path)
    assert problem(report, "missing_ranks")["data"] == {"cycle": 1, "ranks": [3]}
    assert report["ranks"] == {"expected": 8, "present": 7}
    assert report["saves"][1]["ranks"] == 7 and report["saves"][0]["ranks"] == 8


def test_missing_cycle(tmp_path: Path) -> None:
    write_trace(tmp_path)
    for rank in range(RANKS):
        file_of(tmp_path, rank, 1).unlink()
    report = result(tmp_path)
    assert problem(report, "missing_cycle")["data"] == {"cycle": 1}
    assert report["restarts"] == []


def test_torn_last_line(tmp_path: Path, sound: dict[str, Any]) -> None:
    write_trace(tmp_path)
    path = file_of(tmp_path, 2, 1)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op":1,"pha')
    report = result(tmp_path)
    assert problem(report, "torn_line")["data"] == {"file": path.name, "line": whole.count(b"\n") + 1}
    assert report["saves"] == sound["saves"] and report["restarts"] == sound["restarts"]


def test_a_last_line_that_lacks_only_its_newline_is_read(tmp_path: Path, sound: dict[str, Any]) -> None:
    write_trace(tmp_path)
    path = file_of(tmp_path, 2, 1)
    path.write_bytes(path.read_bytes()[:-1])
    assert result(tmp_path) == sound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (b"\x00\x01\xff\xfe binary\n", "not a JSON record"),
        (b'{"op\n', "not a JSON record"),
        (b"[1,2]\n", "not a JSON object"),
        (b"null\n", "not a JSON object"),
        (b'{"type":"iteration","start_ns":"soon"}\n', "field start_ns is not int"),
        (b'{"type":"iteration","step":123456789012345678901234}\n', "field step is out of range"),
        (b'{"type":"nonsense"}\n', "unknown record type 'nonsense'"),
        (b'{"type":"iteration","step":4}\n', "missing field"),
        (b"{}\n", "missing field op"),
        (b'{"type":null}\n', "unknown record type None"),
    ],
)
def test_a_bad_line_costs_one_line(tmp_path: Path, garbage: bytes, reason: str, sound: dict[str, Any]) -> None:
    write_trace(tmp_path)
    path = file_of(tmp_path, 4, 0)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], garbage, *lines[5:]]))
    report = result(tmp_path)
    found = problem(report, "invalid_record")
    assert found["data"] == {"file": path.name, "count": 1}
    assert reason in found["message"]
    assert report["saves"] == sound["saves"] and report["restarts"] == sound["restarts"]


def change_one_span(path: Path, phase: str, changes: dict[str, Any]) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    span = next(r for r in records if r.get("phase") == phase)
    span.update(changes)
    dump(path, records)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"phase": "colect"}, "unknown phase 'colect' of save"),
        ({"detail": "write"}, "phase collect of save has no details"),
        ({"duration_ns": -1}, "field duration_ns is out of range: -1"),
        ({"duration_ns": 1 << 60}, "is not from 0 to end_ns - start_ns"),
        ({"end_ns": 0, "duration_ns": 0}, "before it starts"),
    ],
)
def test_spans_that_cannot_be(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    write_trace(tmp_path)
    change_one_span(file_of(tmp_path, 1, 0), "collect", changes)
    assert reason in problem(result(tmp_path), "invalid_record")["message"]


def test_empty_file(tmp_path: Path) -> None:
    write_trace(tmp_path)
    file_of(tmp_path, 7, 0).write_bytes(b"")
    report = result(tmp_path)
    assert {"empty_file", "missing_ranks"} <= set(kinds(report))
    assert problem(report, "empty_file")["data"] == {"file": "rank_00007_cycle_000.jsonl"}


def test_unreadable_file(tmp_path: Path) -> None:
    write_trace(tmp_path)
    path = file_of(tmp_path, 7, 0)
    path.unlink()
    path.mkdir()
    report = result(tmp_path)
    assert "is a directory" in problem(report, "unreadable_file")["message"]
    assert problem(report, "missing_ranks")["data"]["ranks"] == [7]


def test_no_process_record(tmp_path: Path) -> None:
    write_trace(tmp_path)
    path = file_of(tmp_path, 6, 1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    report = result(tmp_path)
    assert "line 1" in problem(report, "no_process_record")["message"]
    assert problem(report, "missing_ranks")["data"] == {"cycle": 1, "ranks": [6]}
    assert report["loads"][0]["ranks"] == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ({"run_id": "ffffffffffff"}, "mixed_runs"),
        ({"pid": 7}, "invalid_record"),
        ({"v": 1}, "unknown_schema_version"),
        ({"rank": "6"}, "invalid_record"),
    ],
)
def test_a_second_process_in_one_file(tmp_path: Path, sound: dict[str, Any], other: dict[str, Any], kind: str) -> None:
    write_trace(tmp_path)
    path = file_of(tmp_path, 6, 1)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    dump(path, [*records, records[0] | other, *records[1:]])
    report = result(tmp_path)
    found = problem(report, kind)
    assert kinds(report) == [kind] and path.name in found["message"] and str(len(records)) in found["message"]
    assert report["saves"] == sound["saves"] and report["restarts"] == sound["restarts"]


def test_a_lost_begin_costs_its_operation(tmp_path: Path) -> None:
    """Nothing else says what its records are of."""
    write_trace(tmp_path)
    path = file_of(tmp_path, 6, 1)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    begin = next(r for r in records if type_of(r) == "operation_begin" and r["operation"] == "save")
    dump(path, [r for r in records if r is not begin])
    report = result(tmp_path)
    of_it = sum(r.get("op") == begin["op"] for r in records) - 1
    assert problem(report, "invalid_record")["data"] == {"file": path.name, "count": of_it}
    assert problem(report, "ranks_without_operation")["data"]["ranks"] == [6]
    assert report["saves"][1]["ranks"] == 7 and report["loads"][0]["ranks"] == 8


def test_unknown_schema_version(tmp_path: Path) -> None:
    write_trace(tmp_path)
    dump(file_of(tmp_path, 5, 1), rank_log(Options(version=99), 5, 1).records)
    report = result(tmp_path)
    found = problem(report, "unknown_schema_version")
    assert found["data"]["version"] == 99 and found["data"]["files"] == ["rank_00005_cycle_001.jsonl"]
    assert problem(report, "missing_ranks")["data"]["ranks"] == [5]
    assert "invalid_record" not in kinds(report) and "no_process_record" not in kinds(report)


def test_copied_file(tmp_path: Path) -> None:
    write_trace(tmp_path)
    shutil.copy(file_of(tmp_path, 2, 1), file_of(tmp_path, 3, 1))
    report = result(tmp_path)
    assert problem(report, "wrong_file_name")["data"] == {
        "file": "rank_00003_cycle_001.jsonl", "rank": 2, "cycle": 1,
    }  # fmt: skip
    assert problem(report, "missing_ranks")["data"]["ranks"] == [3]
    assert report["saves"][1]["ranks"] == 7


def test_two_runs_in_one_directory(tmp_path: Path, sound: dict[str, Any]) -> None:
    write_trace(tmp_path)
    other = Options(run_id="ffffffffffff", wall_ns=Options().wall_ns + 3600 * 1000 * MS)
    process, *records = rank_log(other, 0, 0).records
    dump(file_of(tmp_path, 0, 2), [process | {"cycle": 2}, *records])
    report = result(tmp_path)
    assert problem(report, "mixed_runs")["data"] == {"analysed": "ffffffffffff", "left_out": [RUN_ID]}
    assert report["run_id"] == "ffffffffffff"
    asked = to_dict(analyse(load_trace(tmp_path, RUN_ID)).report)
    assert asked["saves"] == sound["saves"]
    with pytest.raises(LogDirectoryError, match="--run-id nope: no such run"):
        load_trace(tmp_path, "nope")


def test_save_killed_on_all_ranks(tmp_path: Path) -> None:
    report = result(write_trace(tmp_path, Options(save_killed_on=tuple(range(RANKS)))))
    found = problem(report, "unfinished_operation")
    assert found["data"]["tag"] == "global_step10" and found["data"]["ranks"] == list(range(RANKS))
    assert found["data"]["last_phases"] == {"flush/write": list(range(RANKS))}
    assert "all 8 ranks" in found["message"] and "flush/write" in found["message"]
    save = report["saves"][1]
    assert (save["outcome"], save["finished_ranks"]) == ("unfinished", 0)
    assert save["durable_s"] is None and save["blocked_s"] is None and save["coverage_min"] is None
    assert save["phases"]["collect"]["max_s"] == pytest.approx(0.010, abs=1e-9)


def test_save_killed_on_one_rank(tmp_path: Path) -> None:
    report = result(write_trace(tmp_path, Options(save_killed_on=(4,))))
    assert problem(report, "unfinished_operation")["data"]["ranks"] == [4]
    save = report["saves"][1]
    assert (save["outcome"], save["finished_ranks"]) == ("unfinished", 7)
    assert save["blocked_s"] == pytest.approx(0.380, abs=1e-9)


def test_rank_without_the_operation(tmp_path: Path) -> None:
    write_trace(tmp_path)
    path = file_of(tmp_path, 1, 1)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    saves = {r["op"] for r in records if r.get("operation") == "save"}
    dump(path, [r for r in records if r.get("op") not in saves])
    report = result(tmp_path)
    assert problem(report, "ranks_without_operation")["data"] == {"cycle": 1, "operation": "save", "ranks": [1]}


def test_failed_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = result(write_trace(tmp_path, Options(save_fails_on=(2,))))
    found = problem(report, "failed_operation")
    assert "rank 2: OSError: [Errno 28] No space left on device" in found["message"]
    save = report["saves"][1]
    assert save["outcome"] == "failed" and save["durable_s"] is None and save["committed_s"] is None
    assert "No space left" in save["error"]
    assert main(["--all", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "FAILED" in text and "1 of 2 saves did not complete" in text
    assert "failed_operation: " in text.partition("Restart of cycle 1: ")[0]  # on the first screen, before all numbers


def test_notices_are_problems(tmp_path: Path) -> None:
    report = result(write_trace(tmp_path, Options(reject_newest=True)))
    found = problem(report, "notice")
    assert found["data"]["phase"] == "checkpoint_rejected" and found["data"]["ranks"] == list(range(RANKS))
    assert "rank_0_0.pt has 12 of 500000 bytes" in found["message"]


def test_losses_of_repeated_steps(tmp_path: Path, sound: dict[str, Any]) -> None:
    (restart,) = sound["restarts"]
    assert (restart["repeated_steps"], restart["equal_losses"]) == (3, 3)
    write_trace(tmp_path)
    path = file_of(tmp_path, 0, 1)  # the lowest rank speaks for all
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if type_of(record) == "iteration" and record["step"] == 7:
            record["loss"] += 1e-12
    dump(path, records)
    report = result(tmp_path)
    assert problem(report, "losses_differ")["data"] == {"cycle": 1, "steps": [7]}
    assert report["restarts"][0]["equal_losses"] == 2


def test_bytes_that_disagree(tmp_path: Path) -> None:
    write_trace(tmp_path)
    records = [json.loads(line) for line in file_of(tmp_path, 0, 0).read_text().splitlines()]
    for record in records:
        if type_of(record) == "operation_end" and "bytes" in record:
            record["bytes"] += 1
    dump(file_of(tmp_path, 0, 0), records)
    found = problem(result(tmp_path), "bytes_disagree")
    assert found["data"] == {"cycle": 0, "bytes": TOTAL_BYTES + 1, "in_spans": TOTAL_BYTES}


def test_engines_that_disagree(tmp_path: Path) -> None:
    write_trace(tmp_path)
    path = file_of(tmp_path, 0, 0)
    path.write_text(path.read_text().replace('"engine_used":"Torch', '"engine_used":"Other'))
    assert problem(result(tmp_path), "ranks_disagree")["data"]["field"] == "engine_used"


def test_clock_step(tmp_path: Path) -> None:
    write_trace(tmp_path)
    dump(file_of(tmp_path, 1, 1), rank_log(Options(wall_ns=Options().wall_ns + 2000 * MS), 1, 1).records)
    found = problem(result(tmp_path), "clock_step")
    assert found["data"] == {"hosts": ["node0"], "step_s": 2.0}


def test_low_coverage_of_a_long_operation(tmp_path: Path) -> None:
    log = rank_log(Options(), 0, 0)
    op = log.begin("save", tag="global_step9", step=9)
    op.span("collect", None, 1900)
    log.now_ms += 100
    op.end()
    dump(file_of(tmp_path, 0, 0), log.records)
    assert problem(result(tmp_path), "low_coverage")["data"]["coverage"] == pytest.approx(0.95)


def test_layout_change(tmp_path: Path) -> None:
    write_trace(tmp_path)
    for rank in range(RANKS):
        path = file_of(tmp_path, rank, 1)
        process, *records = [json.loads(line) for line in path.read_text().splitlines()]
        dump(path, [process | {"layout": {"tp": 1, "pp": 4, "dp": 2}, "tp": 0}, *records])
    found = problem(result(tmp_path), "layout_changed")
    assert "from TP2 PP2 DP2 in cycle 0 to TP1 PP4 DP2 in cycle 1" in found["message"]
