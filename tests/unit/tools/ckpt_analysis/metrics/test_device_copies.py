"""Copies to the host: two hosts of four ranks, each rank with a bus of 20 GB/s, rank 6 slower than the others.

The first step of rank 4 takes 10 ms more, so its host copies for longer.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from restart_trace.schema import RANK_FILE_PATTERN
from tests.unit.tools.ckpt_analysis.trace_factory import RANKS, Options, RankLog, dump
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.render.json_output import to_json
from tools.ckpt_analysis.report import analyse

BYTES = 2_000_000_000
DEVICE_S = {rank: 0.125 for rank in range(RANKS)} | {6: 0.2}  # 16 GB/s, and 10


def rank_log(rank: int) -> RankLog:
    log = RankLog(Options(hosts=2), rank, 0, 0.0)
    log.process()
    op = log.begin("startup")
    op.span("process_start", None, 10)
    op.span("host_memory", "bus", 1)
    op.span("first_step", None, 100)
    op.end()
    log.write("probe", op=op.op_id, at="end", time_ns=log.ns(log.now_ms), values={"bus_to_host_bytes_per_s": 20e9})
    log.iteration(1)
    op = log.begin("save", "LazyEngine", tag="global_step1", step=1)
    op.at(log.now_ms, 250 + rank, "device_to_host", None, busy_ms=1000 * DEVICE_S[rank], blocking=False, bytes=BYTES)
    log.now_ms += 500
    op.end(bytes=BYTES, num_files=1, durable=True)
    values = {
        "device_to_host_bytes": BYTES,
        "device_to_host_device_s": DEVICE_S[rank],
        "device_to_host_before_release_bytes": BYTES if rank else 0,
        "device_peak_allocated_bytes": 40_000_000_000 + rank * 1_000_000_000,
    }
    log.write("probe", op=op.op_id, at="end", time_ns=log.ns(log.now_ms), values=values)
    return log


def test_copies_are_told_by_rank_and_by_host_against_the_bus(tmp_path: Path) -> None:
    for rank in range(RANKS):
        dump(tmp_path / RANK_FILE_PATTERN.format(rank=rank, cycle=0), rank_log(rank).records)
    report = analyse(load_trace(tmp_path)).report
    found = json.loads(to_json(report))["saves"][0]["device_copies"]
    hosts = found.pop("hosts")
    assert found == pytest.approx(
        {
            "ranks": RANKS, "bytes": RANKS * BYTES, "device_s": 0.2, "slowest_rank": 6, "slowest_GBps": 10.0,
            "median_GBps": 16.0, "bus_share": 0.5, "overlapped": 7 / 8,
        }
    )  # fmt: skip
    assert [(host["host"], host["ranks"], host["bytes"], host["bus_GBps"]) for host in hosts] == [
        ("node0", 4, 4 * BYTES, 80.0), ("node1", 4, 4 * BYTES, 80.0),
    ]  # fmt: skip
    assert [host["GBps"] for host in hosts] == pytest.approx([8 / 0.253, 8 / 0.264])
