"""Where a run saves to and loads from, with the file systems, in every output."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tools.ckpt_analysis.analysis_helpers import file_of, result
from tests.unit.tools.ckpt_analysis.trace_factory import RANKS, Options, RankLog, dump, write_trace
from tools.ckpt_analysis.cli import main

MOUNT = "10.0.0.1@tcp:/fs on /scratch type lustre (rw,flock)"


def test_directories_and_mounts_of_the_newest_cycle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cycle in (0, 1):
        for rank in range(RANKS):
            log = RankLog(Options(), rank, cycle, 1000 * cycle)
            log.process()
            save_dir = f"/scratch/{'old' if cycle == 0 else 'new'}"
            loads = {"load_dir": "/mnt/one", "load_mount": "disk on / type xfs (ro)"} if rank == 3 else {}
            log.write("runtime", engine_used="TorchEngine", save_dir=save_dir, save_mount=MOUNT, **loads)
            dump(file_of(tmp_path, rank, cycle), log.records)
    assert result(tmp_path)["storage"] == [
        {"use": "save", "directory": "/scratch/new", "mount": MOUNT, "ranks": 8},
        {"use": "load", "directory": "/mnt/one", "mount": "disk on / type xfs (ro)", "ranks": 1},
    ]
    assert main(["--all", str(tmp_path), "-o", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"  save        /scratch/new on 8 ranks: {MOUNT}\n" in text
    assert "  load        /mnt/one on 1 rank: disk on / type xfs (ro)\n" in text
    page = (tmp_path / "ckpt_report.html").read_text()
    assert f"<dt>Save</dt><dd>/scratch/new on 8 ranks: {MOUNT}</dd>" in page


def test_the_last_record_of_a_process_counts(tmp_path: Path) -> None:
    """Hooks write another once they see a directory."""
    for rank in range(RANKS):
        log = RankLog(Options(), rank, 0, 0)
        log.process()
        log.write("runtime", engine_used="TorchEngine", parameters=1000)
        log.write("runtime", engine_used="TorchEngine", parameters=1000, save_dir="/scratch", save_mount=MOUNT)
        dump(file_of(tmp_path, rank, 0), log.records)
    found = result(tmp_path)
    assert found["storage"] == [{"use": "save", "directory": "/scratch", "mount": MOUNT, "ranks": 8}]
    assert found["model"] == "4 k parameters"  # of the ranks with dp 0, each once


def test_ranks_that_share_sequences_hold_the_same_parameters(tmp_path: Path) -> None:
    for rank in range(RANKS):
        log = RankLog(Options(), rank, 0, 0)
        log.process()
        log.write("runtime", engine_used="TorchEngine", parameters=1000)
        first = log.records[0]
        first |= {"cp": first["dp"], "dp": 0, "layout": {"tp": 2, "pp": 2, "dp": 1, "cp": 2}}
        dump(file_of(tmp_path, rank, 0), log.records)
    assert result(tmp_path)["model"] == "4 k parameters"


def test_what_was_not_recorded_is_not_guessed(tmp_path: Path) -> None:
    assert result(write_trace(tmp_path))["storage"] == []
