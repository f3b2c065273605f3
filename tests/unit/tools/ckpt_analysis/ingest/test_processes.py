"""Files that several processes read and measure: what comes out is what one process finds."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from benchmarks.synthetic_traces.shape import PLANTS, Shape
from benchmarks.synthetic_traces.write import write_run
from tests.unit.tools.ckpt_analysis.trace_factory import write_trace
from tools.ckpt_analysis.common.errors import CouldNotRunError
from tools.ckpt_analysis.ingest.discover import list_trace
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.ingest.records import Records, read_records
from tools.ckpt_analysis.metrics.span_times import span_times
from tools.ckpt_analysis.render.json_output import to_dict
from tools.ckpt_analysis.report import analyse

pytestmark = pytest.mark.slow  # processes are started


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, however little there is to read, and a batch of each few files."""
    monkeypatch.setattr("tools.ckpt_analysis.ingest.records.PROCESSES_FROM_BYTES", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("tools.ckpt_analysis.ingest.files.BATCH_BYTES", 20_000)


def test_several_processes_find_what_one_finds(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every problem planted, then also files of a second run between those of the first."""
    write_run(tmp_path, Shape(ranks=24, saves=4, plants=frozenset(PLANTS)))
    alone = to_dict(analyse(load_trace(tmp_path)).report)
    request.getfixturevalue("several")
    shared = load_trace(tmp_path, measure=span_times)
    assert shared.measured is not None and len(shared.measured) > 3
    assert to_dict(analyse(shared).report) == alone
    # Two runs in one directory: what was measured of both is of no use.
    for path in tmp_path.glob("rank_0000[3-9]_*.jsonl"):
        path.write_bytes(path.read_bytes().replace(b'"run_id":"5eed', b'"run_id":"beef', 1))
    chosen = to_dict(analyse(load_trace(tmp_path, "5eed5eed5eed", measure=span_times)).report)
    request.getfixturevalue("monkeypatch").undo()
    assert chosen == to_dict(analyse(load_trace(tmp_path, "5eed5eed5eed")).report)
    assert chosen["saves"] != alone["saves"]


def own_pid(records: Records) -> int:
    return os.getpid()


def end_by_signal(records: Records) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("several")
def test_files_are_read_elsewhere_and_a_killed_process_is_told_of(tmp_path: Path) -> None:
    files = list_trace(write_trace(tmp_path)).files
    sizes = [file.size() for file in files]
    *_, measured = read_records(files, sizes, own_pid)
    assert measured is not None and os.getpid() not in {pid for _, pid in measured}
    with pytest.raises(CouldNotRunError, match="a process that read trace files was killed"):
        read_records(files, sizes, end_by_signal)
