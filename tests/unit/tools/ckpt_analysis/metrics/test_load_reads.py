"""How often a load asked its storage for the bytes of a checkpoint."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from restart_trace.schema import RANK_FILE_PATTERN
from tests.unit.tools.ckpt_analysis.trace_factory import RANKS, Options, RankLog, dump
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.render.json_output import to_json
from tools.ckpt_analysis.render.terminal import render
from tools.ckpt_analysis.report import analyse
from tools.common.tables import Style

MB = 1_000_000


def load(
    log: RankLog,
    details: tuple[str, ...] = ("read",),
    checkpoint_bytes: int | None = 40 * MB,
    fetched: int | None = None,
    tier: str | None = None,
) -> None:
    """10 MB by each of `details`."""
    op = log.begin("load", "TorchCheckpointEngine", tag="global_step5", step=5)
    if tier is not None:
        op.label(tag="global_step5", step=5, tier=tier)

    def probe(at: str, counter: int, **more: int) -> None:
        values = {"rss_bytes": 1, **({} if fetched is None else {"io_read_storage_bytes": 777 + counter}), **more}
        log.write("probe", op=op.op_id, at=at, time_ns=log.ns(log.now_ms), values=values)

    probe("start", 0)
    for detail in details:
        op.span("load", detail, 10, bytes=10 * MB)
    op.span("load", "verify", 10, bytes=10 * MB)  # the same bytes once more
    op.end(bytes=10 * MB, num_files=1)
    probe("end", fetched or 0, **({} if checkpoint_bytes is None else {"checkpoint_bytes": checkpoint_bytes}))


def reads(directory: Path, make: Any) -> tuple[Any, str]:
    """Of the one load of a run of four hosts with two ranks each; and the text of the report."""
    directory.mkdir()
    for rank in range(RANKS):
        log = RankLog(Options(hosts=4), rank, 0, 0)
        log.process()
        make(log)
        log.iteration(6)
        dump(directory / RANK_FILE_PATTERN.format(rank=rank, cycle=0), log.records)
    report = analyse(load_trace(directory)).report
    return json.loads(to_json(report))["loads"][0]["reads"], render(report, Style(io.StringIO()), show_all=True)


def test_bytes_of_all_ranks_over_those_of_the_checkpoint(tmp_path: Path) -> None:
    found, text = reads(tmp_path / "run", lambda log: load(log, fetched=MB * log.rank))
    assert (found["checkpoint_bytes"], found["bytes"], found["amplification"]) == (40 * MB, 80 * MB, 2)
    assert [tuple(host.values()) for host in found["hosts"]] == [
        ("node0", 2, 20 * MB, 1 * MB),
        ("node1", 2, 20 * MB, 5 * MB),
        ("node2", 2, 20 * MB, 9 * MB),
        ("node3", 2, 20 * MB, 13 * MB),
    ]
    said = " ".join(text.split())
    assert "read amplification 2.00: 80.0 MB asked for, 40.0 MB in the checkpoint; 20.0 MB on host node0, the" in said
    assert "28.0 MB of them fetched by the kernel" in said


def test_what_was_downloaded_and_then_read_counts_once(tmp_path: Path) -> None:
    """Rank 0 downloads for its host, on which both ranks read."""
    found, _ = reads(tmp_path / "run", lambda log: load(log, ("read",) if log.rank else ("download", "read")))
    assert (found["bytes"], found["amplification"]) == (10 * MB, 0.25)


def test_counters_that_a_rank_lacks_are_not_guessed(tmp_path: Path) -> None:
    found, text = reads(tmp_path / "run", lambda log: load(log, fetched=None if log.rank == 3 else 0))
    assert [host["storage_bytes"] for host in found["hosts"]] == [0, None, 0, 0]
    assert "fetched by the kernel" not in text


def test_a_load_that_recorded_no_size_or_read_memory_has_none(tmp_path: Path) -> None:
    assert reads(tmp_path / "older", lambda log: load(log, checkpoint_bytes=None))[0] is None
    assert reads(tmp_path / "memory", lambda log: load(log, tier="local_memory"))[0] is None


@pytest.mark.parametrize("lacks", ["bytes", "end", "file"])
def test_what_a_rank_does_not_tell_is_not_nothing(tmp_path: Path, lacks: str) -> None:
    """Its reads, the end of its load, or all of it."""

    def make(log: RankLog) -> None:
        load(log, ("verify",) if log.rank == 3 and lacks == "bytes" else ("read",))
        if log.rank == 3 and lacks == "end":
            log.records = [record for record in log.records if record.get("type") != "operation_end"]

    directory = tmp_path / "run"
    reads(directory, make)
    if lacks == "file":
        (directory / RANK_FILE_PATTERN.format(rank=3, cycle=0)).unlink()
    report = analyse(load_trace(directory)).report
    assert [load["reads"] for load in json.loads(to_json(report))["loads"]] == [None]
    assert "read amplification" not in render(report, Style(io.StringIO()), show_all=True)


def test_a_load_of_which_ranks_read_memory_has_none(tmp_path: Path) -> None:
    make = lambda log: load(log, tier="local_memory" if log.rank < 6 else None)  # noqa: E731
    assert reads(tmp_path / "run", make)[0] is None
