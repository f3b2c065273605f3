"""The numbers of the analysis against traces whose truth is known (trace_factory)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.unit.tools.ckpt_analysis import trace_factory
from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT, file_of, kinds, result
from tests.unit.tools.ckpt_analysis.trace_factory import (
    ITERATION_MS,
    MS,
    RANKS,
    RUN_ID,
    Options,
    RankLog,
    dump,
    rank_log,
    write_trace,
)
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.problems import KINDS, number_list
from tools.ckpt_analysis.metrics.failures import failure_of
from tools.ckpt_analysis.metrics.lost_work import lost_work_s, reached_step

GOLDEN = ROOT / "tests" / "golden" / "trace_tp2_pp2_dp2"
TOTAL_BYTES = 2 * 500_000 * sum(range(1, RANKS + 1))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return result(write_trace(tmp_path_factory.mktemp("sound")))


def test_a_sound_trace_has_no_problems(sound: dict[str, Any]) -> None:
    assert sound["problems"] == []
    assert sound["run_id"] == RUN_ID
    assert sound["ranks"] == {"expected": RANKS, "present": RANKS}
    assert [cycle["layout"] for cycle in sound["cycles"]] == [{"tp": 2, "pp": 2, "dp": 2}] * 2


def test_save_numbers(sound: dict[str, Any]) -> None:
    assert [(save["tag"], save["cycle"]) for save in sound["saves"]] == [("global_step5", 0), ("global_step10", 1)]
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
        assert save["critical_rank"] == 5 and save["wall"]["max_s"] == pytest.approx(0.383, abs=1e-9)


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
    assert load["load_s"] == pytest.approx(0.131, abs=1e-9) and load["critical_rank"] == 6
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
    assert restart["critical_rank"] == 2
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
    assert restart["failure"] == {"fault": "sigkill", "detected_s": 0.5, "stopped_s": 0.8, "relaunched_s": 1.0}


INJECTED_MS = 2 + 3500 + 750 + 25 + 800 + 381 + 30


def test_ranks_that_return(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their start begins with their abort: rank 2 is critical, rank 5 is new."""
    trace = write_trace(tmp_path, Options(returned=(0, 1, 2, 3, 4, 6, 7)))
    (restart,) = result(trace)["restarts"]
    asked_ms = INJECTED_MS + 540
    assert (restart["returned_ranks"], restart["new_ranks"]) == ([0, 1, 2, 3, 4, 6, 7], [5])
    assert restart["return_s"] == pytest.approx(0.25)
    assert restart["time_to_first_step_s"] == pytest.approx((20_002 + 4456 - asked_ms) / 1000)
    assert restart["restart_s"] == pytest.approx((20_002 + 4456 - INJECTED_MS) / 1000)
    assert (restart["critical_rank"], restart["critical_phase"]) == (2, "return")
    assert restart["phases"]["abort"]["at_critical_s"] == pytest.approx(0.09)
    assert restart["phases"]["return"]["details"]["undo"]["ranks"] == 7
    assert restart["coverage_min"] > 0.99
    main(["--all", str(trace)])
    shown = capsys.readouterr().out
    assert "ranks 0-4, 6-7 returned, after 0.250 s at most; new: 5" in shown
    waterfall = shown.partition("to first step, critical")[2].splitlines()[1:9]
    rows = {line.split()[0]: line.split()[1:3] for line in waterfall}
    assert rows["stop"] == ["0.040", "0.540"] and rows["abort"] == ["0.090", "0.630"], "with the failure"
    (launch,) = result(trace)["launches"]
    assert (launch["returned_ranks"], launch["new_ranks"], launch["return_s"]) == ([], None, None)


def test_a_rank_that_was_killed_before_its_first_record_is_not_told_of_as_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path, Options(returned=(0, 1, 2, 3, 4, 6, 7)))
    (trace / "rank_00005_cycle_001.jsonl").unlink()
    (restart,) = result(trace)["restarts"]
    assert restart["returned_ranks"] and restart["new_ranks"] is None
    main(["--all", str(trace)])
    shown = capsys.readouterr().out
    assert "ranks 0-4, 6-7 returned, after 0.250 s at most; not all others have left a record" in shown


def test_a_new_rank_is_not_late_because_it_was_not_there_before(tmp_path: Path) -> None:
    (restart,) = result(write_trace(tmp_path, Options(returned=(0, 1))))["restarts"]
    assert (restart["critical_rank"], restart["critical_phase"]) == (2, "imports")


def test_who_has_returned_is_not_known_of_traces_that_do_not_say_it(sound: dict[str, Any]) -> None:
    (restart,) = sound["restarts"]
    assert restart["returned_ranks"] is restart["new_ranks"] is restart["return_s"] is None


def test_ranks_that_return_before_the_last_record_were_never_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_factory, "ASKED_AFTER_MS", -50)
    (restart,) = result(write_trace(tmp_path, Options(returned=(0, 1, 2, 3))))["restarts"]
    assert restart["down_s"] == 0


def test_traces_of_the_version_before_are_read_as_before(tmp_path: Path, sound: dict[str, Any]) -> None:
    """It had nothing that has another meaning now."""
    assert result(write_trace(tmp_path, Options(version=15))) == sound


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


def test_bytes_that_a_load_reads_and_verifies_count_once(tmp_path: Path) -> None:
    """In the load, and in the start-up around it."""
    log = RankLog(Options(), 0, 1, 0)
    log.process()
    startup = log.begin("startup")
    startup.span("engine_init", None, 10)
    op = log.begin("load", tag="global_step5", step=5)
    op.span("load", "read", 20, file="a.pt", bytes=1000)
    op.span("load", "read", 20, file="b.pt", bytes=500)
    for name, num_bytes in (("a.pt", 1000), ("b.pt", 500)):
        op.span("load", "verify", 5, file=name, bytes=num_bytes)
        op.span("load", "host_to_device", 5, file=name, bytes=num_bytes)
    op.span("redistribute", "reshard", 5, bytes=700)
    op.end(bytes=1500, num_files=2)
    log.iteration(6)
    startup.at(log.now_ms - ITERATION_MS, ITERATION_MS, "first_step", None)
    startup.end()
    dump(file_of(tmp_path, 0, 1), log.records)
    report = result(tmp_path)
    (load,), (restart,) = report["loads"], report["restarts"]
    moved = {"load": (1500, 2), "redistribute": (700, None)}
    assert {name: (p["bytes"], p["num_files"]) for name, p in load["phases"].items()} == moved
    inside = restart["phases"]["load"]
    assert (inside["bytes"], inside["num_files"]) == (1500, None)
    assert {name: (p["bytes"], p["num_files"]) for name, p in inside["details"].items()} == moved


def test_phases_and_rest_add_up_to_the_wall_time(sound: dict[str, Any]) -> None:
    for operation in [*sound["saves"], *sound["loads"]]:
        for rank in operation["per_rank"]:
            named = sum(s for name, s in rank["phases"].items() if "/" not in name)
            assert named + rank["unattributed_s"] == pytest.approx(rank["wall_s"], abs=1e-9)


def test_several_hosts_give_the_same_numbers(tmp_path: Path, sound: dict[str, Any]) -> None:
    report = result(write_trace(tmp_path, Options(hosts=2)))
    assert kinds(report) == ["several_clocks"]
    assert report["saves"] == sound["saves"] and report["restarts"] == sound["restarts"]
    assert main(["--strict", str(tmp_path)]) == 0  # a note does not count


@pytest.mark.parametrize(("hosts", "corrected", "trusted"), [(2, ["node0", "node1"], []), (4, ["node1", "node3"], [2])])
def test_a_clock_that_barriers_correct_is_none_of_those_that_are_trusted(
    tmp_path: Path, hosts: int, corrected: list[str], trusted: list[int]
) -> None:
    """The last host is 2 s ahead. Of two, barriers correct both; of four, another one is late in the trace as it is."""
    write_trace(tmp_path, Options(hosts=hosts))
    wrong = Options(hosts=hosts, wall_ns=Options().wall_ns + 2000 * MS)
    for rank in range(RANKS - RANKS // hosts, RANKS):
        for cycle in (0, 1):
            dump(file_of(tmp_path, rank, cycle), rank_log(wrong, rank, cycle).records)
    found = {problem["kind"]: problem["data"] for problem in result(tmp_path)["problems"]}
    assert found["clock_offset"]["hosts"] == corrected
    assert [data["clocks"] for kind, data in found.items() if kind == "several_clocks"] == trusted


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
    assert "committed, not durable" in " ".join(capsys.readouterr().out.split())


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
    for rank in range(RANKS):
        log = rank_log(Options(), rank, 0)
        op = log.begin("save", "NullCheckpointEngine", tag="global_step9", step=9)
        op.span("collect", None, 10)
        op.end(bytes=0, num_files=0, durable=False)
        dump(file_of(tmp_path, rank, 0), log.records)
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


def test_lost_steps_look_back_past_a_cycle_without_iterations(tmp_path: Path) -> None:
    write_trace(tmp_path)
    for rank in range(RANKS):
        moved = [json.loads(line) | {"cycle": 2} for line in file_of(tmp_path, rank, 1).read_text().splitlines()]
        dump(file_of(tmp_path, rank, 2), moved)
        dump(file_of(tmp_path, rank, 1), [record | {"cycle": 1} for record in moved[:3]])
    restart = result(tmp_path)["restarts"][-1]
    assert (restart["cycle"], restart["lost_steps"]) == (2, 3)
    assert restart["lost_work_s"] == pytest.approx(0.330, abs=1e-9)


def test_lost_work_counts_a_step_as_the_newest_cycle_ran_it() -> None:
    rows = [(0, 0, step, 0, 100 * MS) for step in range(1, 9)] + [(1, 0, step, 0, 10 * MS) for step in (6, 7)]
    iterations = pl.DataFrame(rows, schema=["cycle", "rank", "step", "start_ns", "end_ns"], orient="row")
    assert reached_step(iterations, 2) == 7 and reached_step(iterations, 1) == 8
    # Cycle 2 starts over: steps 1 to 5 as cycle 0 ran them, 6 and 7 as cycle 1 did.
    assert lost_work_s(iterations, 2, resumed_step=0, reached=7) == pytest.approx(0.520)
    assert lost_work_s(iterations, 2, resumed_step=7, reached=7) == 0.0


def test_the_last_injected_fault_is_the_one_that_ended_the_cycle() -> None:
    rows = [(0, "injected", "bitflip", 10), (0, "detected", None, 20), (0, "injected", "sigkill", 50)]
    rows += [(0, "detected", None, 80), (0, "detected", None, 90), (1, "injected", "sigkill", 99)]
    events = failures([(*row, "node0") for row in rows])
    failure = failure_of(events, 0)
    assert failure is not None and failure.began_ns == 50 * MS
    assert (failure.times.fault, failure.times.detected_s) == ("sigkill", 0.03)
    assert failure_of(events, 2) is None
    seen = failure_of(events.filter(pl.col("phase") == "detected"), 0)  # nobody injected it
    assert seen is not None and seen.began_ns == 20 * MS
    assert (seen.times.fault, seen.times.detected_s) == (None, 0)


def test_of_several_hosts_the_last_that_stopped_counts() -> None:
    rows = [("injected", 10, "login"), ("detected", 30, "login"), ("detected", 32, "node0"), ("stopped", 50, "node0")]
    rows += [
        ("detected", 40, "node1"),
        ("stopped", 45, "node1"),
        ("relaunched", 61, "node0"),
        ("relaunched", 60, "node2"),
    ]
    failure = failure_of(failures([(0, phase, None, ms, host) for phase, ms, host in rows]), 0)
    assert failure is not None
    times = failure.times
    assert (times.detected_s, times.stopped_s, times.relaunched_s) == (0.02, 0.04, 0.05)
    assert {host.host: (host.detected_s, host.stopped_s, host.relaunched_s) for host in times.hosts} == {
        "login": (0.02, None, None), "node0": (0.022, 0.04, 0.051), "node1": (0.03, 0.035, None),
        "node2": (None, None, 0.05),
    }  # fmt: skip
    # A host that was cut off stops its ranks when it finds that, perhaps after the others were started again.
    late = failures([(0, "detected", None, 10, "node0"), (0, "stopped", None, 20, "node0"),
                     (0, "stopped", None, 90, "node1"), (0, "relaunched", None, 30, "node0")])  # fmt: skip
    found = failure_of(late, 0)
    assert found is not None and (found.times.stopped_s, found.times.relaunched_s) == (0.02, 0.02)


def failures(rows: list[tuple[int, str, str | None, int, str]]) -> pl.DataFrame:
    """Events of supervisors: (cycle, phase, detail, time in ms, host)."""
    return pl.DataFrame(
        [(cycle, -1, "failure", phase, detail, ms * MS, host) for cycle, phase, detail, ms, host in rows],
        schema=["cycle", "rank", "operation", "phase", "detail", "time_ns", "host"],
        orient="row",
    )


def keys_of(value: Any) -> set[str]:
    """Every key of the JSON but those that are names of phases, versions or the like."""
    named_by_data = {"phases", "details", "parts", "versions", "data", "layout"}
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
    """A recorded trace keeps its numbers, whatever the tool becomes."""
    expected = json.loads((GOLDEN / "summary.json").read_text())
    assert result(GOLDEN / "restart_trace") == expected


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([5, 7, 6, 1, 1], "1, 5-7")]
)
def test_number_list(numbers: list[int], text: str) -> None:
    assert number_list(numbers) == text
