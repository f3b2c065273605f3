"""The analysis against traces whose truth is known (trace_factory), sound and damaged."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trace_factory import MS, RANKS, RUN_ID, Options, dump, rank_log, write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.discover import LogDirectoryError
from tools.ckpt_analysis.json_output import to_dict
from tools.ckpt_analysis.load import load_trace
from tools.ckpt_analysis.problems import KINDS, number_list
from tools.ckpt_analysis.report import analyse

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "trace_tp2_pp2_dp2"
TOTAL_BYTES = 2 * 500_000 * sum(range(1, RANKS + 1))


def result(directory: Path, **asked: Any) -> dict[str, Any]:
    return to_dict(analyse(load_trace(directory), **asked))


def kinds(report: dict[str, Any]) -> list[str]:
    return [problem["kind"] for problem in report["problems"]]


def problem(report: dict[str, Any], kind: str) -> dict[str, Any]:
    found = [p for p in report["problems"] if p["kind"] == kind]
    assert len(found) == 1, report["problems"]
    return found[0]


def file_of(directory: Path, rank: int, cycle: int) -> Path:
    return directory / f"rank_{rank:05d}_cycle_{cycle:03d}.jsonl"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return result(write_trace(tmp_path_factory.mktemp("sound")))


# ---------------------------------------------------------------- the numbers of a sound trace


def test_a_sound_trace_has_no_problems(sound: dict[str, Any]) -> None:
    assert sound["problems"] == []
    assert sound["run_id"] == RUN_ID
    assert sound["ranks"] == {"expected": RANKS, "present": RANKS}
    assert [cycle["layout"] for cycle in sound["cycles"]] == [{"tp": 2, "pp": 2, "dp": 2}] * 2


def test_save_numbers(sound: dict[str, Any]) -> None:
    assert [(save["tag"], save["cycle"]) for save in sound["saves"]] == [
        ("global_step5", 0),
        ("global_step10", 1),
    ]
    for save in sound["saves"]:
        assert save["engine"] == "TorchCheckpointEngine"
        assert save["outcome"] == "ok"
        assert (save["bytes"], save["num_files"]) == (TOTAL_BYTES, 2 * RANKS)
        # collect 10 + device_to_host 20 + windows 100 + fsync and barrier 241 + commit or barrier 9
        assert save["blocked_s"] == pytest.approx(0.380, abs=1e-9)
        # rank 0 starts first; its prune (1 ms) comes after the commit
        assert save["durable_s"] == pytest.approx(0.379, abs=1e-9)
        assert save["committed_s"] == save["durable_s"]
        assert save["blocked_GBps"] == pytest.approx(TOTAL_BYTES / 1e9 / 0.380)
        assert save["io_GBps"] == pytest.approx(TOTAL_BYTES / 1e9 / 0.300)
        assert save["slowest_rank"] == 5 and save["wall"]["max_s"] == pytest.approx(0.383, abs=1e-9)


def test_save_coverage_counts_a_shared_window_once(sound: dict[str, Any]) -> None:
    save = sound["saves"][0]
    # Rank 3: serialize 25 and write 60 of the 100 ms in which they alternate, and 1 ms at the end.
    assert save["coverage_rank"] == 3
    assert save["coverage_min"] == pytest.approx(365 / 381)
    assert save["unattributed_s"] == pytest.approx(0.016, abs=1e-9)
    by_rank = {entry["rank"]: entry for entry in save["per_rank"]}
    assert by_rank[0]["coverage"] == pytest.approx(370 / 381)
    assert by_rank[5]["unattributed_s"] == pytest.approx(0.013, abs=1e-9)
    assert by_rank[0]["phases"]["flush/write"] == pytest.approx(0.060, abs=1e-9)


@pytest.mark.parametrize(
    ("phase", "expected_ms", "slowest_rank"),
    [
        ("collect", (10, 10, 10), 0),
        ("device_to_host", (20, 20, 20), 0),
        ("serialize", (30, 30, 25), 0),
        ("flush", (300, 100, 100), 5),
        ("flush/write", (60, 60, 60), 0),
        ("flush/fsync", (240, 40, 40), 5),
        ("barrier", (210, 210, 10), 1),
        ("commit", (9, 0, 0), 0),
        ("commit/publish", (3, 0, 0), 0),
    ],
)
def test_save_phases(
    sound: dict[str, Any], phase: str, expected_ms: tuple[float, float, float], slowest_rank: int
) -> None:
    name, _, detail = phase.partition("/")
    entry = sound["saves"][1]["phases"][name]
    entry = entry["details"][detail] if detail else entry
    found_ms = tuple(1000 * entry[key] for key in ("max_s", "median_s", "min_s"))
    assert found_ms == pytest.approx(expected_ms, abs=1e-6)
    assert entry["slowest_rank"] == slowest_rank
    assert entry["spread_s"] == pytest.approx(entry["max_s"] - entry["min_s"])


def test_phase_volumes(sound: dict[str, Any]) -> None:
    phases = sound["saves"][0]["phases"]
    write = phases["flush"]["details"]["write"]
    assert (write["bytes"], write["num_files"]) == (TOTAL_BYTES, 16)
    # fsync counts the same bytes again: they are those of the phase once
    assert phases["flush"]["details"]["fsync"]["bytes"] == phases["flush"]["bytes"] == TOTAL_BYTES
    assert write["GBps"] == pytest.approx(TOTAL_BYTES / 1e9 / 0.060)
    assert phases["commit"]["ranks"] == 1 and phases["collect"]["ranks"] == RANKS
    assert phases["collect"]["bytes"] is None and phases["collect"]["GBps"] is None


def test_load_numbers(sound: dict[str, Any]) -> None:
    (load,) = sound["loads"]
    assert (load["tag"], load["step"], load["cycle"]) == ("global_step5", 5, 1)
    assert load["load_s"] == pytest.approx(0.131, abs=1e-9) and load["slowest_rank"] == 6
    assert (load["bytes"], load["num_files"]) == (TOTAL_BYTES, 16)
    assert load["coverage_min"] == pytest.approx(80 / 81)
    assert load["phases"]["load"]["max_s"] == pytest.approx(0.115, abs=1e-9)
    assert load["phases"]["load"]["details"]["read"]["max_s"] == pytest.approx(0.090, abs=1e-9)
    assert load["io_GBps"] == pytest.approx(TOTAL_BYTES / 1e9 / 0.090)


def test_restart_numbers(sound: dict[str, Any]) -> None:
    (restart,) = sound["restarts"]
    assert restart["cycle"] == 1
    # Rank 2: 40 + 3500 + 100 + 50 + 200 + 60 + 300, load 81, gap 25, first step 100
    assert restart["time_to_first_step_s"] == pytest.approx(4.456, abs=1e-9)
    assert restart["slowest_rank"] == 2
    assert restart["caught_up_s"] == pytest.approx(4.656, abs=1e-9)
    assert (restart["resumed_step"], restart["reached_step"], restart["lost_steps"]) == (5, 8, 3)
    assert restart["lost_work_s"] == pytest.approx(0.330, abs=1e-9)  # rank 4: 3 x 110
    assert restart["unattributed_s"] == pytest.approx(0.025, abs=1e-9)
    assert restart["coverage_min"] == pytest.approx(1 - 25 / 3956)


def test_restart_time_since_the_failure(sound: dict[str, Any]) -> None:
    (restart,) = sound["restarts"]
    # The slowest rank of cycle 0 is rank 2: it starts at 2, start-up 4375 with one step, 7 steps, save 381.
    end_of_cycle_0 = 2 + 3500 + 750 + 25 + 800 + 381
    assert restart["down_s"] == pytest.approx((20_000 - end_of_cycle_0) / 1000, abs=1e-9)
    injected = end_of_cycle_0 + 30
    assert restart["restart_s"] == pytest.approx((20_000 + 2 + 4456 - injected) / 1000, abs=1e-9)
    assert restart["failure_to_caught_up_s"] == pytest.approx((20_000 + 2 + 4656 - injected) / 1000, abs=1e-9)
    assert restart["failure"] == {
        "fault": "sigkill",
        "detected_s": 0.5,
        "stopped_s": 0.8,
        "relaunched_s": 1.0,
    }


def test_first_launch_is_no_restart(sound: dict[str, Any]) -> None:
    (launch,) = sound["launches"]
    assert launch["cycle"] == 0 and launch["resumed_step"] == 0
    assert launch["time_to_first_step_s"] == pytest.approx(4.375, abs=1e-9)
    assert launch["lost_steps"] is None and launch["restart_s"] is None and launch["caught_up_s"] is None
    assert "load" not in launch["phases"]


@pytest.mark.parametrize("inside", [False, True])
def test_load_counts_once_in_a_restart(tmp_path: Path, inside: bool) -> None:
    report = result(write_trace(tmp_path, Options(load_inside_engine_init=inside)))
    (restart,) = report["restarts"]
    assert report["problems"] == []
    assert restart["time_to_first_step_s"] == pytest.approx(4.456, abs=1e-9)
    assert restart["phases"]["engine_init"]["max_s"] == pytest.approx(0.300, abs=1e-9)
    load = restart["phases"]["load"]
    assert load["max_s"] == pytest.approx(0.131, abs=1e-9) and load["slowest_rank"] == 6
    assert load["details"]["load"]["max_s"] == pytest.approx(0.115, abs=1e-9)
    for rank in restart["per_rank"]:
        named = sum(s for name, s in rank["phases"].items() if "/" not in name and name != "caught_up")
        assert named + rank["unattributed_s"] == pytest.approx(rank["wall_s"], abs=1e-9)
        assert rank["coverage"] <= 1


def test_phases_and_rest_add_up_to_the_wall_time(sound: dict[str, Any]) -> None:
    for operation in [*sound["saves"], *sound["loads"]]:
        for rank in operation["per_rank"]:
            named = sum(s for name, s in rank["phases"].items() if "/" not in name)
            assert named + rank["unattributed_s"] == pytest.approx(rank["wall_s"], abs=1e-9)


def test_several_hosts_give_the_same_numbers(tmp_path: Path, sound: dict[str, Any]) -> None:
    report = result(write_trace(tmp_path, Options(hosts=2)))
    assert kinds(report) == ["several_clocks"]
    assert report["saves"] == sound["saves"] and report["restarts"] == sound["restarts"]
    assert main(["--strict", str(tmp_path)]) == 0  # a note is no finding


def test_background_flush_does_not_block(tmp_path: Path) -> None:
    report = result(write_trace(tmp_path, Options(background_flush=True)))
    save = report["saves"][0]
    # On rank 5 the barrier is 1 ms, on the others 201: their blocked time is the longest.
    assert save["blocked_s"] == pytest.approx(0.340, abs=1e-9)
    assert save["phases"]["flush"]["blocking"] == "some"
    assert save["phases"]["flush"]["details"]["fsync"]["blocking"] == "none"
    assert save["coverage_min"] == pytest.approx(365 / 381)


def test_not_durable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save = result(write_trace(tmp_path, Options(durable=False)))["saves"][0]
    assert save["durable_s"] is None
    assert save["committed_s"] == pytest.approx(0.379, abs=1e-9)
    assert main([str(tmp_path)]) == 0
    assert "committed, not durable" in capsys.readouterr().out


def test_without_supervisor(tmp_path: Path, sound: dict[str, Any]) -> None:
    (restart,) = result(write_trace(tmp_path, Options(supervisor=False)))["restarts"]
    assert restart["restart_s"] is None and restart["failure"] is None
    assert restart["down_s"] == sound["restarts"][0]["down_s"]


def test_background_threads_count_a_moment_once(tmp_path: Path) -> None:
    log = rank_log(Options(), 0, 0)
    op = log.begin("save", tag="global_step9", step=9)
    for thread in range(4):  # four writers at once, each 50 ms, starting 10 ms apart
        op.at(log.now_ms + 10 * thread, 50, "flush", "write", file=f"f{thread}", bytes=10)
    log.now_ms += 80
    op.end(bytes=40, num_files=4, durable=False)
    dump(file_of(tmp_path, 0, 0), log.records)
    save = result(tmp_path)["saves"][-1]
    assert save["phases"]["flush"]["max_s"] == pytest.approx(0.080, abs=1e-9)
    assert save["coverage_min"] == 1.0


def test_engine_that_writes_nothing(tmp_path: Path) -> None:
    log = rank_log(Options(), 0, 0)
    op = log.begin("save", "NullCheckpointEngine", tag="global_step9", step=9)
    op.span("collect", None, 10)
    op.end(bytes=0, num_files=0, durable=False)
    dump(file_of(tmp_path, 0, 0), log.records)
    save = result(tmp_path)["saves"][-1]
    assert (save["bytes"], save["num_files"], save["io_GBps"], save["blocked_GBps"]) == (0, 0, None, None)
    assert save["durable_s"] is None and save["committed_s"] is None and save["outcome"] == "ok"


def test_the_same_tag_saved_twice_is_two_saves(tmp_path: Path) -> None:
    for rank in range(2):
        log = rank_log(Options(), rank, 0)
        for _ in range(2):
            op = log.begin("save", tag="global_step9", step=9)
            op.span("collect", None, 10)
            op.end()
        dump(file_of(tmp_path, rank, 0), log.records)
    saves = result(tmp_path)["saves"]
    assert [(save["tag"], save["ranks"]) for save in saves] == [
        ("global_step5", 2),
        ("global_step9", 2),
        ("global_step9", 2),
    ]


# ---------------------------------------------------------------- what is wrong is named


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
    path.write_bytes(whole + b'{"v":1,"type":"span","run_id":"0123')
    report = result(tmp_path)
    assert problem(report, "torn_line")["data"] == {"file": path.name, "line": whole.count(b"\n") + 1}
    assert report["saves"] == sound["saves"] and report["restarts"] == sound["restarts"]


def test_a_last_line_that_lacks_only_its_newline_is_read(tmp_path: Path, sound: dict[str, Any]) -> None:
    write_trace(tmp_path)
    path = file_of(tmp_path, 2, 1)
    path.write_bytes(path.read_bytes()[:-1])
    assert result(tmp_path) == sound


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (b"\x00\x01\xff\xfe binary\n", "not a JSON record"),
        (b'{"v":1,"type":"span","ru\n', "not a JSON record"),
        (b"[1,2]\n", "not a JSON object"),
        (b"null\n", "not a JSON object"),
        (b'{"v":1,"type":"iteration","start_ns":"soon"}\n', "field start_ns is not int"),
        (b'{"v":1,"type":"iteration","step":123456789012345678901234}\n', "field step is out of range"),
        (b'{"v":1,"type":"nonsense"}\n', "unknown record type 'nonsense'"),
        (b'{"v":1,"type":"iteration","step":4}\n', "missing field"),
        (b"{}\n", "unknown record type"),
    ],
)
def test_a_bad_line_costs_one_line(
    tmp_path: Path, garbage: bytes, reason: str, sound: dict[str, Any]
) -> None:
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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"phase": "colect"}, "unknown phase 'colect' of save"),
        ({"detail": "write"}, "phase collect of save has no details"),
        ({"duration_ns": -1}, "impossible times"),
        ({"duration_ns": 1 << 60}, "impossible times"),
        ({"end_ns": 0, "duration_ns": 0}, "impossible times"),
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
    assert "Is a directory" in problem(report, "unreadable_file")["message"]
    assert problem(report, "missing_ranks")["data"]["ranks"] == [7]


def test_no_process_record(tmp_path: Path) -> None:
    write_trace(tmp_path)
    path = file_of(tmp_path, 6, 1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    report = result(tmp_path)
    assert "line 1" in problem(report, "no_process_record")["message"]
    # One host: its clock is known all the same, and rank 6 still is the slowest reader.
    assert report["loads"][0]["slowest_rank"] == 6


def test_no_process_record_where_the_clock_is_unknown(tmp_path: Path) -> None:
    write_trace(tmp_path, Options(hosts=2))
    path = file_of(tmp_path, 6, 1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    report = result(tmp_path)
    messages = [p["message"] for p in report["problems"] if p["kind"] == "no_process_record"]
    assert any("which clock" in message for message in messages)
    assert report["loads"][0]["ranks"] == 7


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
    dump(file_of(tmp_path, 0, 2), rank_log(other, 0, 0).records)
    records = [json.loads(line) | {"cycle": 2} for line in file_of(tmp_path, 0, 2).read_text().splitlines()]
    dump(file_of(tmp_path, 0, 2), records)
    report = result(tmp_path)
    assert problem(report, "mixed_runs")["data"] == {"analysed": "ffffffffffff", "left_out": [RUN_ID]}
    assert report["run_id"] == "ffffffffffff"
    asked = to_dict(analyse(load_trace(tmp_path, RUN_ID)))
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
    dump(path, [r for r in records if r.get("operation") != "save"])
    report = result(tmp_path)
    assert problem(report, "ranks_without_operation")["data"] == {
        "cycle": 1,
        "operation": "save",
        "ranks": [1],
    }


def test_failed_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = result(write_trace(tmp_path, Options(save_fails_on=(2,))))
    found = problem(report, "failed_operation")
    assert "rank 2: OSError: [Errno 28] No space left on device" in found["message"]
    save = report["saves"][1]
    assert save["outcome"] == "failed" and save["durable_s"] is None and save["committed_s"] is None
    assert "No space left" in save["error"]
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "FAILED" in text and "1 of 2 saves did not complete" in text
    assert text.index("Problems (1)") < text.index("Restart of cycle 1")


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
        if record["type"] == "iteration" and record["step"] == 7:
            record["loss"] += 1e-12
    dump(path, records)
    report = result(tmp_path)
    assert problem(report, "losses_differ")["data"] == {"cycle": 1, "steps": [7]}
    assert report["restarts"][0]["equal_losses"] == 2


def test_bytes_that_disagree(tmp_path: Path) -> None:
    write_trace(tmp_path)
    records = [json.loads(line) for line in file_of(tmp_path, 0, 0).read_text().splitlines()]
    for record in records:
        if record["type"] == "operation_end" and record["operation"] == "save":
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
        path.write_text(path.read_text().replace('"tp":2,"pp":2,"dp":2', '"tp":1,"pp":4,"dp":2'))
    found = problem(result(tmp_path), "layout_changed")
    assert "from TP2 PP2 DP2 in cycle 0 to TP1 PP4 DP2 in cycle 1" in found["message"]


def test_lost_steps_look_back_past_a_cycle_without_iterations(tmp_path: Path) -> None:
    write_trace(tmp_path)
    for rank in range(RANKS):
        moved = [
            json.loads(line) | {"cycle": 2} for line in file_of(tmp_path, rank, 1).read_text().splitlines()
        ]
        dump(file_of(tmp_path, rank, 2), moved)
        dump(file_of(tmp_path, rank, 1), [record | {"cycle": 1} for record in moved[:3]])
    restart = result(tmp_path)["restarts"][-1]
    assert (restart["cycle"], restart["lost_steps"]) == (2, 3)
    assert restart["lost_work_s"] == pytest.approx(0.330, abs=1e-9)


# ---------------------------------------------------------------- command line


def run_cli(*arguments: str, cwd: Path = ROOT, module: bool = True) -> subprocess.CompletedProcess[str]:
    start = ["-m", "tools.ckpt_analysis"] if module else [str(ROOT / "tools" / "ckpt_analysis")]
    return subprocess.run(
        [sys.executable, *start, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_both_ways_to_run_it(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    as_module = run_cli("--format", "json", str(trace))
    as_directory = run_cli("--format", "json", str(trace), cwd=tmp_path, module=False)
    assert (as_module.returncode, as_directory.returncode) == (0, 0), as_module.stderr + as_directory.stderr
    assert as_module.stdout == as_directory.stdout
    assert json.loads(as_module.stdout) == result(trace)


def test_terminal_report(tmp_path: Path) -> None:
    # A name with glob characters is a name.
    trace = write_trace(tmp_path / "run[1]*" / "restart_trace")
    done = run_cli(str(trace.parent))
    assert done.returncode == 0, done.stderr
    assert "\033" not in done.stdout  # no colour where there is no terminal
    assert "Run 0123456789ab: TP2 PP2 DP2, 8 ranks on 1 host (node0), 2 cycles" in done.stdout
    assert "3 steps had to be trained again (0.330 s of work)" in done.stdout
    for heading in ("Restart of cycle 1", "Load global_step5", "Save global_step10", "Saves (2)"):
        assert f"\n{heading}" in done.stdout
    assert "\nSave global_step5" not in done.stdout
    row = next(line for line in done.stdout.splitlines() if re.match(r"\s+fsync ", line))
    assert row.split() == [
        "fsync",
        "0.2400",
        "5",
        "0.0400",
        "0.0400",
        "0.2000",
        "0.2400",
        "36.0",
        "MB",
        "0.150",
        "yes",
    ]
    assert "\nSave global_step5" in run_cli("--all", str(trace)).stdout


def test_strict(tmp_path: Path) -> None:
    trace = write_trace(tmp_path)
    assert main(["--strict", str(trace)]) == 0
    file_of(trace, 3, 1).unlink()
    assert main(["--strict", str(trace)]) == 1
    assert main([str(trace)]) == 0


def not_a_directory(path: Path) -> None:
    path.write_text("x")


def something_else(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("x")


def only_garbage(path: Path) -> None:
    path.mkdir()
    file_of(path, 0, 0).write_bytes(b"\x00" * 100)


def only_empty(path: Path) -> None:
    path.mkdir()
    file_of(path, 0, 0).write_bytes(b"")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such directory"),
        (not_a_directory, "cannot be read as a directory: Not a directory"),
        (lambda path: path.mkdir(), "no restart trace here (it is empty)"),
        (something_else, "no restart trace here (it holds other things)"),
        (only_garbage, "can be analysed: rank_00000_cycle_000.jsonl: line 1: not a JSON record"),
        (only_empty, "can be analysed: rank_00000_cycle_000.jsonl: has no records"),
    ],
)
def test_could_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, message: str) -> None:
    make(tmp_path / "logs")
    assert main([str(tmp_path / "logs")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and str(tmp_path / "logs") in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from tools.ckpt_analysis.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "took = time.perf_counter() - start\n"
        "print(took, [m for m in ('torch', 'polars', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    took, imported = done.stdout.splitlines()[-1].split(" ", 1)
    assert imported == "[]" and float(took) < 0.3
    assert "examples:" in done.stdout and "exit status" in done.stdout


def test_never_imports_torch_and_of_the_project_only_the_schema(tmp_path: Path) -> None:
    write_trace(tmp_path)
    code = (
        "import sys; from tools.ckpt_analysis.cli import main\n"
        f"main([{str(tmp_path)!r}]); main(['--format', 'json', {str(tmp_path)!r}])\n"
        "print(sorted(m for m in sys.modules if m == 'torch' or m.startswith('megatron')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == str(
        ["megatron", "megatron.restart_trace", "megatron.restart_trace.schema"]
    ), done.stderr


# ---------------------------------------------------------------- contract


def keys_of(value: Any) -> set[str]:
    """Every key of the JSON but those that are names of phases, versions or the like."""
    named_by_data = {"phases", "details", "versions", "data", "layout"}
    if isinstance(value, dict):
        inner: set[str] = set()
        for key, child in value.items():
            grandchildren = child.values() if key in named_by_data and isinstance(child, dict) else [child]
            inner |= {key}.union(*(keys_of(grandchild) for grandchild in grandchildren))
        return inner
    return set().union(*(keys_of(child) for child in value)) if isinstance(value, list) else set()


def test_every_key_and_kind_is_documented(sound: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"`([A-Za-z_]+)`", text))
    assert keys_of(sound) - documented == set()
    assert set(KINDS) - documented == set()


def test_golden_trace_still_reads_the_same() -> None:
    """A recorded trace of schema version 1 keeps its numbers, whatever the tool becomes."""
    expected = json.loads((GOLDEN / "summary.json").read_text())
    assert result(GOLDEN / "restart_trace") == expected


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([5, 7, 6, 1, 1], "1, 5-7")]
)
def test_number_list(numbers: list[int], text: str) -> None:
    assert number_list(numbers) == text
