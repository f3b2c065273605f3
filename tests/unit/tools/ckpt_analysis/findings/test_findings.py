"""Every rule with data that meets it and data just below its thresholds that does not."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.synthetic_traces.shape import Shape
from benchmarks.synthetic_traces.write import write_run
from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT, file_of
from tests.unit.tools.ckpt_analysis.trace_factory import Options, RankLog, dump
from tools.ckpt_analysis.findings import RULES, Finding, Rule
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.render.json_output import to_dict, to_json
from tools.ckpt_analysis.render.terminal import render
from tools.ckpt_analysis.report import analyse
from tools.common.tables import Style

SLOW = 5  # the rank or, of several, the first that does more


def findings(
    directory: Path,
    rule: str,
    make: Callable[[RankLog], None],
    ranks: int = 8,
    options: Options = Options(),  # noqa: B008  it is immutable
) -> list[Finding]:
    """What `rule` finds in a run of which `make` writes each rank's operations."""
    directory.mkdir(exist_ok=True)
    for rank in range(ranks):
        log = RankLog(options, rank, 0, 0)
        log.process()
        make(log)
        dump(file_of(directory, rank, 0), log.records)
    return [found for found in analyse(load_trace(directory)).report.findings if found.rule == rule]


def save(
    log: RankLog,
    work_ms: float,
    wait_ms: float = 0,
    *,
    detail: str = "write",
    num_bytes: int = 1000,
    error: str | None = None,
) -> None:
    """A save that only writes (or synchronises), and then waits."""
    op = log.begin("save", "TorchCheckpointEngine", tag="global_step5", step=5)
    op.span("flush", detail, work_ms, file="global_step5/a.pt", bytes=num_bytes)
    if wait_ms:
        op.span("barrier", None, wait_ms)
    op.end(error, bytes=num_bytes, num_files=1, durable=True)


@pytest.mark.parametrize(
    ("usual_ms", "slow_ms", "wall_ms", "met"),
    [
        (1000, 1500, 2000, True),
        (1000, 1499, 2000, False),  # ratio
        (1000, 1500, 5000, True),
        (1000, 1500, 5001, False),  # share of the wall time
        (100, 200, 500, True),
        (100, 199, 500, False),  # least_s
    ],
)
def test_straggling_rank(tmp_path: Path, usual_ms: float, slow_ms: float, wall_ms: float, met: bool) -> None:
    def make(log: RankLog) -> None:
        work_ms = slow_ms if log.rank == SLOW else usual_ms
        save(log, work_ms, wall_ms - work_ms)

    found = findings(tmp_path, "straggling_rank", make)
    assert len(found) == met
    if met:
        assert found[0].data["rank"] == SLOW and found[0].data["phase"] == "flush/write"
        assert found[0].cost_s == pytest.approx((slow_ms - usual_ms) / 1000)
        assert "Rank 5 on node0 is slower than the others in 1 of 1 save" in found[0].title
        assert "timeline" in found[0].advice


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("wait_ms", "met"), [(500, True), (499, False)])
def test_of_few_ranks_the_one_that_the_others_wait_for_is_the_straggler(
    tmp_path: Path, ranks: int, wait_ms: float, met: bool
) -> None:
    """Not the one that waits, though its save takes as long or longer; half of the excess is 0.5 s."""

    def make(log: RankLog) -> None:
        slow, waits_most = log.rank == 1, log.rank == 0 and ranks == 3
        save(log, 2000 if slow else 1000, 1 if slow else 1500 if waits_most else wait_ms)

    found = findings(tmp_path, "straggling_rank", make, ranks=ranks)
    assert [(f.data["rank"], f.data["median_s"]) for f in found] == [(1, 1.0)] * met
    compared = "the other rank" if ranks == 2 else "the median rank"
    assert all(f"it moved 1.0 times {compared}'s bytes" in f.evidence for f in found)
    assert all(f"2.000 s of its own against 1.000 s of {compared}" in f.evidence for f in found)


def test_ranks_of_an_operation_that_failed_are_not_compared(tmp_path: Path) -> None:
    """A rank may have done nothing of it when another one failed."""

    def make(log: RankLog) -> None:
        save(log, 2000 if log.rank == SLOW else 1000, error="OSError: no space left" if log.rank == 0 else None)

    assert findings(tmp_path, "straggling_rank", make) == []


def test_a_rank_that_others_only_wait_for(tmp_path: Path) -> None:
    def make(log: RankLog) -> None:
        op = log.begin("save", "TorchCheckpointEngine", tag="global_step5", step=5)
        op.span("flush" if log.rank == 0 else "barrier", "write" if log.rank == 0 else None, 1000)
        op.end(bytes=1000, num_files=1, durable=True)

    (found,) = findings(tmp_path, "straggling_rank", make, ranks=2)
    assert "1.000 s of its own against 0.000 s of the other rank" in found.evidence


def test_own_time_and_its_phase_are_compared_with_the_same_median(tmp_path: Path) -> None:
    """The lower one: the mean of the two ranks in the middle is no rank's."""
    (found,) = findings(tmp_path, "straggling_rank", lambda log: save(log, (1000, 1100, 1400, 3000)[log.rank]), ranks=4)
    assert found.data["median_s"] == pytest.approx(1.1)
    assert "3.000 s of its own against 1.100 s of the median rank" in found.evidence
    assert "most of it in flush/write (3.000 s against 1.100 s)" in found.evidence


@pytest.mark.parametrize(("ranks", "slow", "met"), [(4, 1, True), (3, 1, False), (2, 1, False), (8, 2, False)])
def test_few_or_many_slow_ranks_are_no_stragglers(tmp_path: Path, ranks: int, slow: int, met: bool) -> None:
    def make(log: RankLog) -> None:
        save(log, 2000 if log.rank < slow else 1000)

    assert len(findings(tmp_path, "straggling_rank", make, ranks=ranks)) == met


def test_a_rank_with_more_bytes_has_more_to_do(tmp_path: Path) -> None:
    def make(log: RankLog) -> None:
        more = log.rank == SLOW
        save(log, 2000 if more else 1000, num_bytes=2000 if more else 1000)

    (found,) = findings(tmp_path, "straggling_rank", make)
    assert "2.0 times the median rank's bytes" in found.evidence and "more to do" in found.advice


@pytest.mark.parametrize(("ranks", "num_bytes", "uneven"), [(2, 1300, True), (2, 1050, False), (8, 1300, False)])
def test_of_few_ranks_one_with_more_bytes_is_not_called_slow(
    tmp_path: Path, ranks: int, num_bytes: int, uneven: bool
) -> None:
    """As rank 0 of plain data parallelism, which writes the model's states for all."""

    def make(log: RankLog) -> None:
        more = log.rank == 0
        save(log, 3000 if more else 1000, 0 if more else 2000, num_bytes=num_bytes if more else 1000)

    (found,) = findings(tmp_path, "straggling_rank", make, ranks=ranks)
    assert ("more to do" in found.advice and "host" not in found.advice) == uneven
    assert ("out of the job" in found.advice) != uneven and found.data["rank"] == 0


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("ranks", "slow"), [(2, 0), (8, SLOW)])
def test_only_a_pipeline_is_advised_to_spread_the_layers_of_its_stages(
    tmp_path: Path, stages: int, ranks: int, slow: int
) -> None:
    """In a job that hooks traced; this project's trainer has no such section of DeepSpeed's."""

    def make(log: RankLog) -> None:
        layout = {"tp": 1, "pp": stages, "dp": ranks // stages}
        place = {"tp": 0, "pp": log.rank // layout["dp"], "dp": log.rank % layout["dp"]}
        log.records[0] |= place | {"world_size": ranks, "layout": layout}
        more = 2 if log.rank == slow else 1
        save(log, 1000 * more, 1000 * (2 - more), num_bytes=1000 * more)

    (found,) = findings(tmp_path, "straggling_rank", make, ranks=ranks, options=Options(instrument="hooks"))
    assert found.data["rank"] == slow and "more to do" in found.advice
    assert ("pipeline_stage" in found.advice) == (stages > 1)


@pytest.mark.parametrize(("slow_ms", "met"), [(1300, True), (1299, False)])
def test_straggling_host(tmp_path: Path, slow_ms: float, met: bool) -> None:
    def make(log: RankLog) -> None:
        save(log, slow_ms if log.host() == 1 else 1000)

    found = findings(tmp_path, "straggling_host", make, options=Options(hosts=2))
    assert len(found) == met
    if met:
        assert found[0].data["host"] == "node1" and found[0].data["ranks"] == [4, 5, 6, 7]


def test_ranks_of_a_slow_host_are_not_named_one_by_one(tmp_path: Path) -> None:
    def make(log: RankLog) -> None:
        save(log, 3000 if log.host() == 3 else 1000)

    assert findings(tmp_path / "a", "straggling_rank", make, options=Options(hosts=4)) == []
    assert len(findings(tmp_path / "b", "straggling_host", make, options=Options(hosts=4))) == 1


@pytest.mark.parametrize(
    ("work_ms", "wait_ms", "met"), [(1000, 1000, True), (1001, 999, False), (100, 100, True), (50, 99, False)]
)
def test_barrier_skew(tmp_path: Path, work_ms: float, wait_ms: float, met: bool) -> None:
    def make(log: RankLog) -> None:
        late = log.rank == SLOW
        save(log, work_ms + wait_ms if late else work_ms, 0 if late else wait_ms)

    found = findings(tmp_path, "barrier_skew", make)
    assert len(found) == met
    if met:
        assert found[0].data["waited_for"] == SLOW and "flush/write" in found[0].evidence


def test_a_rank_that_comes_late_is_said_to(tmp_path: Path) -> None:
    def make(log: RankLog) -> None:
        late_ms = 900 if log.rank == SLOW else 0
        log.now_ms += late_ms
        save(log, 300, 900 - late_ms)

    (found,) = findings(tmp_path, "barrier_skew", make)
    assert "rank 5 waits least, so it was waited for: it began 0.900 s after the median rank" in found.evidence


def test_barriers_in_the_background_cost_training_nothing(tmp_path: Path) -> None:
    def make(log: RankLog) -> None:
        op = log.begin("save", tag="global_step5", step=5)
        op.span("collect", None, 100)
        op.span("barrier", None, 900, blocking=False)
        op.end()

    assert findings(tmp_path, "barrier_skew", make) == []


def test_ranks_that_did_nothing_but_wait_have_no_phase_to_name(tmp_path: Path) -> None:
    def make(log: RankLog) -> None:
        op = log.begin("save", "TorchCheckpointEngine", tag="global_step5", step=5)
        op.span("barrier", None, 10 if log.rank == SLOW else 1010)
        op.end(bytes=1000, num_files=1, durable=True)

    (found,) = findings(tmp_path, "barrier_skew", make)
    assert found.data["waited_for"] == SLOW and found.evidence.endswith("explains half of that")


@pytest.mark.parametrize(
    ("write_ms", "fsync_ms", "met"), [(500, 500, True), (500, 499, False), (100, 100, True), (50, 99, False)]
)
def test_fsync_dominates(tmp_path: Path, write_ms: float, fsync_ms: float, met: bool) -> None:
    def make(log: RankLog) -> None:
        op = log.begin("save", tag="global_step5", step=5)
        op.span("flush", "write", write_ms, bytes=100)
        op.span("flush", "fsync", fsync_ms)
        op.end(bytes=100)

    found = findings(tmp_path, "fsync_dominates", make)
    assert len(found) == met
    if met:
        assert found[0].data["share"] == pytest.approx(0.5) and "--checkpoint-engine lazy" in found[0].advice


@pytest.mark.parametrize(
    ("operation", "phases"),
    [("save", (("serialize", None), ("flush", "write"))), ("load", (("load", "deserialize"), ("load", "read")))],
)
@pytest.mark.parametrize(("objects_ms", "bytes_ms", "met"), [(500, 500, True), (499, 500, False), (99, 50, False)])
def test_serialization_bound(
    tmp_path: Path, operation: str, phases: list[tuple[str, str | None]], objects_ms: float, bytes_ms: float, met: bool
) -> None:
    def make(log: RankLog) -> None:
        op = log.begin(operation, tag="global_step5", step=5)
        op.span(phases[0][0], phases[0][1], objects_ms)
        op.span(phases[1][0], phases[1][1], bytes_ms, bytes=100)
        op.end(bytes=100)

    found = findings(tmp_path, "serialization_bound", make)
    assert len(found) == met
    if met:
        assert found[0].data["operation"] == operation


@pytest.mark.parametrize(("files", "small", "met"), [(100, 50, True), (99, 99, False), (100, 49, False)])
def test_small_files(tmp_path: Path, files: int, small: int, met: bool) -> None:
    def make(log: RankLog) -> None:
        op = log.begin("save", tag="global_step5", step=5)
        for index in range(log.rank, files, 4):
            size = 999_999 if index < small else 1_000_000
            op.span("flush", "write", 10, file=f"global_step5/{index}.pt", bytes=size)
        op.end(bytes=1)

    found = findings(tmp_path, "small_files", make, ranks=4)
    assert len(found) == met
    if met:
        assert (found[0].data["files"], found[0].data["small"]) == (100, 50)
        assert found[0].cost_s == pytest.approx(0.13)  # 13 small files on the first two ranks


@pytest.mark.parametrize(
    ("num_bytes", "num_files", "instrument", "met"),
    [
        (1_000_000, 2, "hooks", True),
        (499_999, 2, "hooks", False),
        (1_000_000, 3, "hooks", False),  # another file of the same name
        (1_000_000, 2, "trainer", False),  # whose engines write a file in parts
    ],
)
def test_a_file_that_is_written_twice(
    tmp_path: Path, num_bytes: int, num_files: int, instrument: str, met: bool
) -> None:
    def make(log: RankLog) -> None:
        log.records[0]["instrument"] = instrument
        op = log.begin("save", tag="global_step5", step=5)
        for name in ("a.pt", "b.pt", "a.pt"):
            op.span("serialize", None, 10, file=name)
            op.span("flush", "write", 10, file=name, bytes=num_bytes)
        op.end(bytes=3 * num_bytes, num_files=num_files)

    found = findings(tmp_path, "file_written_twice", make, ranks=2)
    assert len(found) == met
    if met:
        assert found[0].data == {"rank": 0, "files": ["a.pt"], "bytes": 2 * num_bytes}
        assert found[0].cost_s == pytest.approx(0.01)


def stored(log: RankLog, objects: list[tuple[int, float]], requests: int, throttled: int, request_s: float) -> None:
    """A save to object storage: (bytes, ms) of each object, and what the client counted."""
    op = log.begin("save", "TorchCheckpointEngine", tag="global_step5", step=5)
    for index, (num_bytes, took_ms) in enumerate(objects):
        op.span("flush", "upload", took_ms, file=f"global_step5/{index}.pt", bytes=num_bytes)
    op.end(bytes=1, num_files=len(objects), durable=True)
    values = {
        "store_requests": requests, "store_retries": throttled, "store_throttled": throttled,
        "store_request_s": request_s,
    }  # fmt: skip
    log.write("probe", op=op.op_id, at="end", time_ns=log.ns(log.now_ms), values=values)


@pytest.mark.parametrize(("throttled", "met"), [((1, 3), True), ((1, 2), False)])
def test_store_throttled(tmp_path: Path, throttled: tuple[int, int], met: bool) -> None:
    """4 of 400 requests, or 3."""
    found = findings(
        tmp_path, "store_throttled", lambda log: stored(log, [(1 << 30, 2000)], 200, throttled[log.rank], 16.0), ranks=2
    )
    assert len(found) == met
    if met:
        assert found[0].data["throttled"] == 4
        assert "4 of 400 requests, at 200 requests/s of 2 ranks" in found[0].evidence
    traffic = json.loads(to_json(analyse(load_trace(tmp_path)).report))["saves"][0]["store_traffic"]
    assert traffic["success"] == pytest.approx(1 - sum(throttled) / 400)
    assert traffic["connections"] == pytest.approx(8)


def test_store_throttled_of_a_save_that_failed_for_it(tmp_path: Path) -> None:
    """Nothing arrived, so nothing is said of its connections."""

    def make(log: RankLog) -> None:
        op = log.begin("save", "LazyEngine", tag="global_step5", step=5)
        op.span("flush", "upload", 20_000, file="a", error="ObjectStoreError: SlowDown")
        op.end(error="CheckpointSaveError: SlowDown")
        values = {"store_requests": 36, "store_retries": 35, "store_throttled": 36, "store_request_s": 0.2}
        log.write("probe", op=op.op_id, at="end", time_ns=log.ns(log.now_ms), values=values)

    (found,) = findings(tmp_path, "store_throttled", make, ranks=2)
    assert found.data["throttled"] == 72 and found.data["share"] == 1.0
    assert findings(tmp_path, "store_one_connection", make, ranks=2) == []


@pytest.mark.parametrize(
    ("small", "large", "took_ms", "met"), [(4, 4, 25, True), (3, 0, 100, False), (4, 5, 25, False), (4, 4, 24, False)]
)
def test_store_small_objects(tmp_path: Path, small: int, large: int, took_ms: float, met: bool) -> None:
    def make(log: RankLog) -> None:
        objects = [(8 << 20, took_ms)] * small + [((8 << 20) + 1, 100.0)] * large
        stored(log, objects, small + 4 * large, 0, 8.0)

    found = findings(tmp_path, "store_small_objects", make, ranks=2)
    assert len(found) == met
    if met:
        assert (found[0].data["objects"], found[0].data["small"]) == (16, 8)
        assert found[0].cost_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("took_ms", "request_s", "met"), [(1000, 1.4, True), (1000, 1.5, False), (99, 0.1, False), (100, 0.1, True)]
)
def test_store_one_connection(tmp_path: Path, took_ms: float, request_s: float, met: bool) -> None:
    def make(log: RankLog) -> None:
        stored(log, [(1 << 30, took_ms)], 130, 0, request_s if log.rank == 1 else 8 * took_ms / 1000)

    found = findings(tmp_path, "store_one_connection", make, ranks=2)
    assert len(found) == met
    if met:
        assert found[0].data["rank"] == 1 and found[0].cost_s == pytest.approx(took_ms / 1000)


@pytest.mark.parametrize(
    ("imports_ms", "rest_ms", "met"), [(4000, 6000, True), (3999, 6001, False), (1000, 500, True), (999, 500, False)]
)
def test_cold_imports(tmp_path: Path, imports_ms: float, rest_ms: float, met: bool) -> None:
    def make(log: RankLog) -> None:
        op = log.begin("startup")
        op.span("imports", None, imports_ms)
        op.span("first_step", None, rest_ms)
        op.end()

    found = findings(tmp_path, "cold_imports", make)
    assert len(found) == met
    if met:
        assert found[0].cost_s == pytest.approx(imports_ms / 1000)
        assert "megatron.launch" in found[0].remedy


def test_who_imports_once_is_not_told_to(tmp_path: Path) -> None:
    def make(log: RankLog) -> None:
        log.records[0]["environment"]["RESTART_TRACE_PRELOAD"] = "1"
        op = log.begin("startup")
        op.span("imports", None, 4000)
        op.span("first_step", None, 1000)
        op.end()

    (found,) = findings(tmp_path, "cold_imports", make)
    assert "megatron.launch" not in found.advice and "--max-restarts" in found.remedy


@pytest.mark.parametrize(
    ("undo_ms", "rest_ms", "met"), [(700, 1500, True), (699, 1500, False), (1200, 3500, True), (1200, 3501, False)]
)
def test_slow_return(tmp_path: Path, undo_ms: float, rest_ms: float, met: bool) -> None:
    def make(log: RankLog) -> None:
        op = log.begin("startup")
        op.span("abort", None, 300)
        op.span("return", "undo", undo_ms if log.rank == SLOW else 100)
        op.span("return", "barrier", 1000 if log.rank == SLOW else 900 + undo_ms)
        op.span("first_step", None, rest_ms - 1000)
        op.end()

    found = findings(tmp_path, "slow_return", make)
    assert len(found) == met
    if met:
        assert found[0].cost_s == pytest.approx((300 + undo_ms) / 1000) and "--return-timeout" in found[0].remedy
        assert f"return/undo, 0.{undo_ms}" in found[0].evidence or "return/undo, 1.2" in found[0].evidence
        assert f"on rank {SLOW}" in found[0].evidence


@pytest.mark.parametrize(
    ("rule", "phase", "took_ms", "met", "advice"),
    [
        ("slow_name_lookup", "name_lookup", 500, True, "/etc/hosts"),
        ("slow_name_lookup", "name_lookup", 499, False, ""),
        ("compiled_again", "compile", 1000, True, "TORCH_EXTENSIONS_DIR"),
        ("compiled_again", "compile", 999, False, ""),
    ],
)
def test_a_phase_of_a_start_that_need_not_be(
    tmp_path: Path, rule: str, phase: str, took_ms: float, met: bool, advice: str
) -> None:
    def make(log: RankLog) -> None:
        op = log.begin("startup")
        op.span(phase, None, took_ms)
        op.span("rendezvous", None, 100)
        op.span("first_step", None, 100)
        op.end()

    found = findings(tmp_path, rule, make)
    assert len(found) == met
    if met:
        assert found[0].cost_s == pytest.approx(took_ms / 1000) and advice in found[0].advice


@pytest.mark.parametrize(
    ("wait_ms", "collect_ms", "at_begin", "met"),
    [(100, 900, True, True), (99, 100, True, False), (100, 901, True, False), (900, 100, False, False)],
)
def test_wait_previous(tmp_path: Path, wait_ms: float, collect_ms: float, at_begin: bool, met: bool) -> None:
    def make(log: RankLog) -> None:
        op = log.begin("save", tag="global_step5", step=5)
        if at_begin:
            op.span("wait_previous", None, wait_ms)
        op.span("collect", None, collect_ms)
        if not at_begin:  # the end of training waits for its last save: that is no fault
            op.span("wait_previous", None, wait_ms)
        op.end()

    found = findings(tmp_path, "wait_previous", make)
    assert len(found) == met
    if met:
        assert found[0].data["waited_s"] == pytest.approx(0.1) and "--host-cache-size" in found[0].advice


@pytest.mark.parametrize(
    ("fetched", "loaded", "met"),
    [(4_999_992, 10_000_000, True), (5_000_000, 10_000_000, False), (0, 9_999_992, False), (None, 10_000_000, False)],
)
def test_page_cache_reads(tmp_path: Path, fetched: int | None, loaded: int, met: bool) -> None:
    def make(log: RankLog) -> None:
        def probe(at: str, counter: int) -> None:
            time_ns = log.ns(log.now_ms)
            values = {"rss_bytes": 1} | ({} if fetched is None else {"io_read_storage_bytes": 777 + counter})
            log.write("probe", op=0, at=at, time_ns=time_ns, values=values)

        op = log.begin("load", tag="global_step5", step=5)
        probe("start", 0)
        op.span("load", "read", 100, bytes=loaded // 8)
        op.end(bytes=loaded // 8)
        probe("end", (fetched or 0) // 8)

    found = findings(tmp_path, "page_cache_reads", make)
    assert len(found) == met
    if met:
        assert (found[0].data["storage_bytes"], found[0].data["read_bytes"]) == (fetched, loaded)


@pytest.mark.parametrize(("cores", "met"), [("0-6", True), ("0-7", False), ("0,2-7,9", False), ("", False)])
def test_more_ranks_than_cores(tmp_path: Path, cores: str, met: bool) -> None:
    """Where ranks share cores it is said once, and no rank is called slow for it."""

    def make(log: RankLog) -> None:
        for _ in range(2):
            save(log, 3000 if log.rank == SLOW else 1000)

    options = Options(cores=cores)
    found = findings(tmp_path / "a", "more_ranks_than_cores", make, options=options)
    assert len(found) == met
    assert len(findings(tmp_path / "b", "straggling_rank", make, options=options)) == (not met)
    if met:
        assert found[0].title == "8 ranks share 7 cores of host node0"
        assert (found[0].data["ranks"], found[0].data["cores"]) == (8, 7)


@pytest.mark.parametrize(("limit", "cores"), [(8.0, None), (2.5, "2.5 cores"), (0.25, "0.25 cores"), (1.0, "1 core")])
def test_more_ranks_than_a_quota_of_processor_time_allows(tmp_path: Path, limit: float, cores: str | None) -> None:
    options = Options(cores="0-15", cpu_limit=limit)
    found = findings(tmp_path, "more_ranks_than_cores", lambda log: save(log, 1000), options=options)
    assert [each.title for each in found] == ([] if cores is None else [f"8 ranks share {cores} of host node0"])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_has_a_remedy_in_one_short_imperative(rule: Rule) -> None:
    """It says what to do, with the engine that the advice begins with; to a job that hooks traced, no flag of ours."""
    for advice in filter(None, (rule.advice, rule.advice_for_hooks)):
        assert 10 < len(advice.remedy) <= 90 and advice.remedy[0].isupper() and "." not in advice.remedy[-1]
        if "--checkpoint-engine lazy" in advice.text.partition(". ")[0]:
            assert "--checkpoint-engine lazy" in advice.remedy
    assert rule.advice_for_hooks is None or "--" not in rule.advice_for_hooks.remedy


def test_findings_of_one_rule_with_the_same_advice_are_one(tmp_path: Path) -> None:
    def make(log: RankLog) -> None:
        save(log, 3000 if log.rank == SLOW else 1000)
        op = log.begin("load", tag="global_step5", step=5)
        op.span("load", "read", 2500 if log.rank == 2 else 500, bytes=1000)
        op.end(bytes=1000)

    (found,) = findings(tmp_path, "straggling_rank", make)
    assert found.data["rank"] == SLOW and [other["rank"] for other in found.data["others"]] == [2]
    assert "Also: rank 2 on node0 is slower than the others in 1 of 1 load" in found.evidence
    assert found.cost_s == pytest.approx(2 + 2)  # of the save, and of the load


def test_a_job_traced_by_hooks_is_advised_no_flag_of_ours(tmp_path: Path) -> None:
    """What helps there is said, whatever rule is met."""

    def make(log: RankLog) -> None:
        save(log, 2000 if log.rank == SLOW else 1000, 3000, detail="fsync")
        op = log.begin("startup")
        op.span("imports", None, 4000)
        op.span("first_step", None, 100)
        op.end()

    for instrument, ours in (("trainer", True), ("hooks", False)):
        directory = tmp_path / instrument
        findings(directory, "", make, options=Options(instrument=instrument))
        advice = {
            found.rule: f"{found.advice} {found.remedy}" for found in analyse(load_trace(directory)).report.findings
        }
        assert {"fsync_dominates", "cold_imports", "barrier_skew", "straggling_rank"} >= advice.keys() > {
            "cold_imports", "barrier_skew",
        }  # fmt: skip
        ours_named = [rule for rule, text in advice.items() if re.search("--[a-z]|megatron|MEGATRON", text)]
        assert bool([rule for rule in ours_named if rule != "straggling_rank"]) == ours


def test_findings_are_in_json_and_terminal_costliest_first(tmp_path: Path) -> None:
    def make(log: RankLog) -> None:
        save(log, 3000 if log.rank == SLOW else 1000, 0 if log.rank == SLOW else 2000, detail="fsync")

    findings(tmp_path, "", make)
    report = analyse(load_trace(tmp_path)).report
    content = to_dict(report)["findings"]
    assert [found["rule"] for found in content] == ["fsync_dominates", "straggling_rank", "barrier_skew"]
    assert [found["cost_s"] for found in content] == pytest.approx([3.0, 2.0, 2.0])
    text = " ".join(render(report, Style(io.StringIO()), show_all=True).split())
    for found in content:
        assert f"{found['title']} ({found['rule']})" in text and found["advice"] in text


def kept_save(log: RankLog, step: int, at_once: float = 0) -> None:
    """A save in memory with a copy of 1,000,000 bytes on another host, of which `at_once` went at once."""
    op = log.begin("save", "MemoryEngine", tag=f"global_step{step}", step=step)
    op.span("device_to_host", None, 10)
    op.at(log.now_ms, 2000, "replicate", None, blocking=False, bytes=1_000_000)
    log.now_ms += 2000
    op.end(bytes=1_000_000, num_files=1, durable=False)
    values = {"replicate_waited_s": 0.0, "replicate_at_once_bytes": at_once}
    log.write("probe", op=op.op_id, at="end", time_ns=log.ns(log.now_ms), values=values)


@pytest.mark.parametrize(
    ("at_once", "saves", "met"), [(100_000, 2, True), (99_999, 2, False), (100_000, 1, False), (0, 2, False)]
)
def test_copies_late(tmp_path: Path, at_once: int, saves: int, met: bool) -> None:
    def make(log: RankLog) -> None:
        for step in range(1, 4):
            kept_save(log, step, at_once if step <= saves else 0)

    found = findings(tmp_path, "copies_late", make)
    assert len(found) == met
    if met:
        assert found[0].title == "Training waited for copies of 2 of 3 saves" and "(10.00 %)" in found[0].evidence
        assert found[0].cost_s == pytest.approx(0.2)


@pytest.mark.parametrize("met", [True, False])
def test_copies_missing(tmp_path: Path, met: bool) -> None:
    def make(log: RankLog) -> None:
        kept_save(log, 1)
        if met and log.rank in (2, 3):
            log.event("save", "copy_missing", "node1 (10.0.0.1:5) did not answer", step=1)

    found = findings(tmp_path, "copies_missing", make)
    assert len(found) == met
    if met:
        assert found[0].title == "1 save had no copy on another host"
        assert "2 copies failed, the last of rank 3 at step 1: node1 (10.0.0.1:5) did not answer" in found[0].evidence


@pytest.mark.parametrize("met", [True, False])
def test_copies_rejected(tmp_path: Path, met: bool) -> None:
    def make(log: RankLog) -> None:
        op = log.begin("load", "MemoryEngine", tag="global_step1", step=1)
        if met and log.rank == 6:
            log.event("load", "copy_rejected", "copy of node2: tensor w has another checksum")
        op.end(bytes=1, num_files=1)

    found = findings(tmp_path, "copies_rejected", make)
    assert len(found) == met
    if met:
        assert found[0].title == "1 copy of saves in memory could not be used"
        assert "rank 6 went on to the next copy; the first of rank 6: copy of node2" in found[0].evidence


@pytest.mark.parametrize(
    ("step", "message", "met"),
    [(7, "token 12 of sample 3", True), (8, "token 11 of sample 2", False), (7, "another", False)],
)
def test_repeated_error(tmp_path: Path, step: int, message: str, met: bool) -> None:
    for cycle, (at, said) in enumerate([(7, "token 11 of sample 2"), (step, message)]):
        for rank in range(2):
            log = RankLog(Options(), rank, cycle, 20_000 * cycle)
            log.process()
            log.begin("startup").end()
            log.iteration(6)
            if rank == 1:
                log.event("failure", "training_error", f"ValueError: {said}", step=at)
            dump(file_of(tmp_path, rank, cycle), log.records)
    found = [one for one in analyse(load_trace(tmp_path)).report.findings if one.rule == "repeated_error"]
    assert len(found) == met
    if met:
        assert found[0].title == "The same error ended 2 cycles at iteration 7"
        assert "Cycles 0-1; the last on rank 1: ValueError: token 12 of sample 3" in found[0].evidence


@pytest.mark.parametrize(("tier", "cycle", "met"), [("storage", 1, True), ("peer", 1, False), ("storage", 0, False)])
def test_read_from_storage(tmp_path: Path, tier: str, cycle: int, met: bool) -> None:
    for rank in range(4):
        for launch in (0, 1):
            log = RankLog(Options(), rank, launch, 20_000 * launch)
            log.process()
            op = log.begin("startup")
            if launch == cycle:
                load = log.begin("load", "MemoryEngine", tag="global_step1", step=1)
                load.label(tier=tier)
                load.span("load", "read", 1500 if rank == 1 else 1000, bytes=500)
                load.end(bytes=500, num_files=1)
            log.iteration(2)
            op.end()
            dump(file_of(tmp_path, rank, launch), log.records)
    report = analyse(load_trace(tmp_path)).report
    found = [finding for finding in report.findings if finding.rule == "read_from_storage"]
    assert len(found) == met
    if met:
        assert found[0].title == "The restart of cycle 1 read 2.0 kB from storage"
        assert (
            found[0].cost_s == pytest.approx(1.5) and "the ranks of node0 read for 1.500 s at most" in found[0].evidence
        )


def test_planted_stragglers_are_found(tmp_path: Path) -> None:
    plants = ("straggler-rank", "straggler-host", "barrier-skew")
    truth = write_run(tmp_path / "run", Shape(ranks=64, saves=4, plants=frozenset(plants)))["planted"]
    found = analyse(load_trace(tmp_path / "run")).report.findings
    cases = [(f.rule, data) for f in found for data in (f.data, *f.data.get("others", []))]
    ranks = {(data["operation"], data["rank"]) for rule, data in cases if rule == "straggling_rank"}
    assert ranks == {("save", truth["straggler-rank"])}
    hosts = {(data["operation"], data["host"]) for rule, data in cases if rule == "straggling_host"}
    assert hosts == {("load", f"node{truth['straggler-host']:04}")}
    waited_for = {data["waited_for"] for rule, data in cases if rule == "barrier_skew" and data["operation"] == "save"}
    assert waited_for == {truth["barrier-skew"]}


def test_every_rule_and_threshold_is_documented() -> None:
    rows = {
        cells[1].strip(" `"): cells
        for line in (ROOT / "docs" / "findings.md").read_text().partition("\n## ")[0].splitlines()
        if line.startswith("| `") and len(cells := line.split("|")) == 5
    }
    assert set(rows) == {rule.name for rule in RULES}
    for rule in RULES:
        stated = dict(re.findall(r"`(\w+)` ([\d.]+)", rows[rule.name][3]))
        assert {name: float(value) for name, value in stated.items()} == pytest.approx(dict(rule.thresholds))
