"""The benchmark compares like with like: plain pandas and the analysis give the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.analysis_speed.__main__ import main
from benchmarks.analysis_speed.measure import Row, compare
from benchmarks.analysis_speed.naive import summary
from benchmarks.analysis_speed.table import table
from benchmarks.synthetic_traces.shape import Shape
from benchmarks.synthetic_traces.write import write_run
from tests.unit.tools.ckpt_analysis.analysis_helpers import result


@pytest.mark.slow
def test_pandas_gives_the_same_numbers(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Shape(ranks=9, saves=3))
    saves = result(tmp_path / "run")["saves"]
    naive = summary(tmp_path / "run")
    assert len(naive) == 3 and compare(naive, saves) == ""
    naive[1]["details"]["flush/fsync"]["median_s"] += 1e-6
    assert compare(naive, saves).startswith("flush/fsync median_s of ")
    assert compare(naive[:2], saves) == "not the same saves"


def test_table_says_what_was_met() -> None:
    rows = [
        Row("summary", "1.50 s", "< 2 s", True, 3 << 30, 2.5, (1.4, 1.5, 1.6)),
        Row("growth", "1.30", "< 1.2", False),
    ]
    assert table(rows).splitlines()[2:] == [
        "| summary | 1.50 s | < 2 s | yes | 2.5 s | 3.00 GiB | 1.40, 1.50, 1.60 |",
        "| growth | 1.30 | < 1.2 | **no** |  |  |  |",
    ]


def test_a_directory_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file" / "bench")]) == 2
    assert capsys.readouterr().err.startswith("bench: ")
