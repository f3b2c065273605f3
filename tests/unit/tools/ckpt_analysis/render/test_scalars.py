"""Metrics as TensorBoard's own reader reads them from the event file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT, result
from tests.unit.tools.ckpt_analysis.render.html.report_pages import analysis_of
from tests.unit.tools.ckpt_analysis.trace_factory import write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.render.scalars import scalars


@pytest.mark.slow
def test_tensorboard_reads_the_numbers_of_the_report(tmp_path: Path) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    trace, board = write_trace(tmp_path / "trace"), tmp_path / "board" / "a"
    assert main(["export", str(trace), "-o", str(board), "--format", "tensorboard", "--quiet"]) == 0
    read = accumulators.EventAccumulator(str(board))
    read.Reload()
    expected = dict(scalars(analysis_of(trace)))
    assert set(read.Tags()["scalars"]) == expected.keys()
    for name, value in expected.items():
        (event,) = read.Scalars(name)
        assert (event.step, event.value) == (12, pytest.approx(value, rel=1e-6)), name
    report = result(trace)
    assert expected["restart_trace/restart_seconds/max"] == report["restarts"][0]["restart_s"]
    assert expected["restart_trace/phase_seconds/save/flush/fsync/max"] == 0.24
    assert expected["restart_trace/wall_seconds/restarting"] == report["budget"]["restarting_s"]


@pytest.mark.slow
def test_what_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    trace = write_trace(tmp_path / "trace")
    (tmp_path / "file").write_text("")
    words = ["export", str(trace), "-o", str(tmp_path / "file"), "--format", "tensorboard"]
    assert main(words) == 2
    assert "file: cannot be written: File exists; give a directory" in capsys.readouterr().err
    assert main([*words, "--table", "spans"]) == 2
    assert "--format tensorboard writes no table" in capsys.readouterr().err


@pytest.mark.slow
def test_without_tensorboard_the_package_is_named(tmp_path: Path) -> None:
    """None in sys.modules is how Python itself says that a module is not to be had."""
    code = "import sys; sys.modules['tensorboard'] = None; from tools.ckpt_analysis.cli import main; sys.exit(main())"
    words = ["export", str(write_trace(tmp_path / "trace")), "-o", str(tmp_path / "a"), "--format", "tensorboard"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "`pip install tensorboard" in done.stderr
