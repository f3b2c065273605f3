"""What saves with compressed files say of it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from restart_trace.schema import RANK_FILE_PATTERN
from tests.unit.tools.ckpt_analysis.trace_factory import RANKS, Options, RankLog, dump
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.render.json_output import to_json
from tools.ckpt_analysis.render.terminal import render
from tools.ckpt_analysis.report import Report, analyse
from tools.common.tables import Style

MB = 1_000_000


def save(log: RankLog, step: int, compressed: bool) -> None:
    op = log.begin("save", "LazyEngine", tag=f"global_step{step}", step=step)
    op.span("flush", "write", 100, bytes=8 * MB)
    op.end(durable=True, bytes=8 * MB, num_files=1)
    values = {"original_bytes": 10 * MB, "compress_s": 0.02} if compressed else {"rss_bytes": MB}
    log.write("probe", op=op.op_id, at="end", time_ns=log.ns(log.now_ms), values=values)


def report_of(directory: Path, *steps: bool) -> Report:
    for rank in range(RANKS):
        log = RankLog(Options(), rank, 0, 0)
        log.process()
        log.iteration(1)
        for step, compressed in enumerate(steps, 1):
            save(log, step, compressed)
        dump(directory / RANK_FILE_PATTERN.format(rank=rank, cycle=0), log.records)
    return analyse(load_trace(directory)).report


def test_bytes_before_and_after(tmp_path: Path) -> None:
    report = report_of(tmp_path, True, False)
    first, second = json.loads(to_json(report))["saves"]
    assert first["compression"] == pytest.approx(
        {"ranks": RANKS, "bytes": RANKS * 10 * MB, "stored_bytes": RANKS * 8 * MB, "compress_s": RANKS * 0.02}
    )
    assert second["compression"] is None, "nothing was measured"
    text = render(report, Style(io.StringIO()), show_all=True)
    assert text.count("compressed files: 80.0 MB of 8 ranks are 64.0 MB, by 0.160 s of processor time") == 1
