"""Where loads read, by host, how copies went to other hosts, and the restarts that a projection starts from."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from restart_trace.schema import RANK_FILE_PATTERN
from tests.unit.tools.ckpt_analysis.trace_factory import RANKS, Options, RankLog, dump, rank_log
from tools.ckpt_analysis.common.errors import CouldNotRunError
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.project.inputs import Given, gather
from tools.ckpt_analysis.render.json_output import to_json
from tools.ckpt_analysis.render.terminal import render
from tools.ckpt_analysis.report import Report, analyse
from tools.common.tables import Style

MB = 1_000_000
ENGINE = "MemoryEngine"


def memory_save(log: RankLog, step: int, *, at_once: int = 0, wire: int | None = None) -> None:
    """100 ms, then a copy of 10 MB in 200 ms on most ranks, 300 ms on rank 5; all agree after 500 ms."""
    op = log.begin("save", ENGINE, tag=f"global_step{step}", step=step)
    op.span("device_to_host", None, 100)
    took = 300 if log.rank == 5 else 200
    op.at(log.now_ms, took, "replicate", None, blocking=False, bytes=10 * MB)
    log.now_ms += 400
    op.end(durable=False, bytes=10 * MB, num_files=1)
    values = {"replicate_waited_s": 0.01 * log.rank, "replicate_at_once_bytes": at_once}
    values |= {} if wire is None else {"replicate_wire_bytes": wire, "replicate_compress_s": 0.02}
    log.write("probe", op=op.op_id, at="end", time_ns=log.ns(log.now_ms), values=values)


def memory_load(log: RankLog, tier: str) -> None:
    op = log.begin("load", ENGINE)
    op.label(tag="global_step8", step=8, tier=tier)
    if tier == "peer":
        op.span("load", "download", 60 + log.rank, bytes=10 * MB)
    op.span("load", "read", 10, bytes=10 * MB)
    op.end(bytes=10 * MB, num_files=1)


def report_of(directory: Path, tiers: dict[int, str], at_once: int = 0, wire: int | None = None) -> Report:
    """A run of four hosts with two ranks each; in cycle 1 a rank reads from its tier, others from local memory."""
    directory.mkdir()
    options = Options(hosts=4)
    for rank in range(RANKS):
        log = RankLog(options, rank, 0, 0)
        log.process()
        log.iteration(1)
        for step in (7, 8):
            memory_save(log, step, at_once=at_once, wire=wire)
        dump(directory / RANK_FILE_PATTERN.format(rank=rank, cycle=0), log.records)
        again = RankLog(options, rank, 1, 20_000)
        again.process()
        op = again.begin("startup")
        again.now_ms += 100
        memory_load(again, tiers.get(rank, "local_memory"))
        again.iteration(9)
        op.span("first_step", None, 10)
        op.end()
        dump(directory / RANK_FILE_PATTERN.format(rank=rank, cycle=1), again.records)
    return analyse(load_trace(directory)).report


def test_what_each_host_read_from_which_tier(tmp_path: Path) -> None:
    report = report_of(tmp_path / "run", {6: "peer", 7: "peer", 1: "storage"})
    (load,) = json.loads(to_json(report))["loads"]
    assert [(t["tier"], t["host"], t["ranks"], t["bytes"]) for t in load["tiers"]] == [
        ("local_memory", "node0", [0], 10 * MB),
        ("local_memory", "node1", [2, 3], 20 * MB),
        ("local_memory", "node2", [4, 5], 20 * MB),
        ("peer", "node3", [6, 7], 20 * MB),
        ("storage", "node0", [1], 10 * MB),
    ]
    assert [t["seconds"] for t in load["tiers"]] == pytest.approx([0.01, 0.01, 0.01, 0.067, 0.01])
    text = render(report, Style(io.StringIO()), show_all=True)
    assert re.search(r"^  peer +node3 +6-7 +20.0 MB +0.067$", text, re.MULTILINE), text


def test_a_run_that_names_no_tier_has_none(tmp_path: Path) -> None:
    for cycle in (0, 1):
        for rank in range(RANKS):
            path = tmp_path / RANK_FILE_PATTERN.format(rank=rank, cycle=cycle)
            dump(path, rank_log(Options(), rank, cycle).records)
    found = json.loads(to_json(analyse(load_trace(tmp_path)).report))
    assert found["loads"][0]["tiers"] == [] and {save["replication"] for save in found["saves"]} == {None}


def test_copies_of_a_save(tmp_path: Path) -> None:
    report = report_of(tmp_path / "run", {}, at_once=MB)
    sent = json.loads(to_json(report))["saves"][-1]["replication"]
    assert sent == pytest.approx(
        {"ranks": 8, "bytes": 80 * MB, "seconds": 0.3, "slowest_rank": 5, "waited_s": 0.07, "at_once_bytes": 8 * MB,
         "wire_bytes": None, "compress_s": None}
    )  # fmt: skip
    assert "copies to other hosts: 80.0 MB of 8 ranks in 0.300 s (rank 5), 8.0 MB of them at once" in render(
        report, Style(io.StringIO()), show_all=True
    )


def test_compressed_copies_of_a_save(tmp_path: Path) -> None:
    report = report_of(tmp_path / "run", {}, at_once=MB, wire=8 * MB)
    sent = json.loads(to_json(report))["saves"][-1]["replication"]
    assert (sent["bytes"], sent["wire_bytes"], sent["compress_s"]) == (80 * MB, 64 * MB, pytest.approx(0.16))
    text = render(report, Style(io.StringIO()), show_all=True)
    assert "(rank 5), compressed to 64.0 MB in 0.160 s of processor time, 8.0 MB of them at once" in " ".join(
        text.split()
    )
    (late,) = [finding for finding in report.findings if finding.rule == "copies_late"]
    assert late.data["bytes"] == 64 * MB, "what went at once is a share of what went"


def test_a_projection_starts_from_restarts_of_one_tier(tmp_path: Path) -> None:
    report = report_of(tmp_path / "run", {7: "peer"})
    inputs = gather(report, Given(blocked_s=0.1, tier="peer"))
    assert inputs.restart_s.note.startswith("median of 1 restarts from peer (")
    assert inputs.durable_s.value == pytest.approx(0.5) and "agreed on it in memory" in inputs.durable_s.note
    with pytest.raises(CouldNotRunError, match="^--tier storage: its restarts read from peer; name one that there is"):
        gather(report, Given(blocked_s=0.1, durable_s=1, tier="storage"))
    with pytest.raises(CouldNotRunError, match="^--tier peer: chooses among the restarts of a run; give a LOGDIR"):
        gather(None, Given(1, 1, 1, 1, 1, tier="peer"))


def test_restarts_of_several_tiers_are_not_mixed(tmp_path: Path) -> None:
    report = report_of(tmp_path / "run", {7: "peer"})
    (load,) = report.loads
    other = report_of(tmp_path / "other", {1: "storage"})
    cycle = {"cycle": 2}
    loads = [load, replace(other.loads[0], **cycle)]
    mixed = replace(report, loads=loads, starts=[*report.starts, replace(other.starts[-1], **cycle)])
    with pytest.raises(CouldNotRunError, match="^--tier is missing: restarts of this run read from peer, storage"):
        gather(mixed, Given(blocked_s=0.1, durable_s=1))
    assert gather(mixed, Given(blocked_s=0.1, durable_s=1, tier="storage")).restart_s.value > 0
    assert gather(mixed, Given(blocked_s=0.1, durable_s=1, restart_s=5)).restart_s.value == 5
