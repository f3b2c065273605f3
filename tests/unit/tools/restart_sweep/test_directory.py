"""The directory of a sweep: what is refused before anything in it is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from restart_trace.schema import SCHEMA_VERSION
from tests.unit.tools.restart_sweep.test_sweep_file import GOOD, written
from tools.restart_sweep.cells import cells_of
from tools.restart_sweep.directory import SweepError, opened
from tools.restart_sweep.sweep_file import read_sweep


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"trace_format": SCHEMA_VERSION - 1},
            f"its traces are of format {SCHEMA_VERSION - 1}, and this program writes format",
        ),
        ({"format": 9}, "holds a sweep of format 9, not 1"),
        (None, "sweep.json: is damaged"),
    ],
)
def test_a_sweep_of_another_program_is_not_resumed(tmp_path: Path, change: dict[str, int] | None, message: str) -> None:
    sweep, out = read_sweep(written(tmp_path, GOOD)), tmp_path / "out"
    with opened(out, sweep, cells_of(sweep), None):
        pass
    with opened(out, sweep, cells_of(sweep), None) as directory:  # the same sweep is
        assert directory.id
    kept = out / "sweep.json"
    kept.write_text("{" if change is None else json.dumps(json.loads(kept.read_text()) | change))
    with pytest.raises(SweepError, match=message), opened(out, sweep, cells_of(sweep), None):
        pass


def test_an_error_of_another_place_is_not_blamed_on_the_directory(tmp_path: Path) -> None:
    sweep, elsewhere = read_sweep(written(tmp_path, GOOD)), tmp_path / "scratch" / "gone"
    with (
        pytest.raises(FileNotFoundError, match="scratch/gone"),
        opened(tmp_path / "out", sweep, cells_of(sweep), tmp_path / "scratch"),
    ):
        elsewhere.mkdir()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    sweep, out = read_sweep(written(tmp_path, GOOD)), tmp_path / ("n" * 300)
    with (
        pytest.raises(SweepError, match="--out .*: cannot be written: File name too long"),
        opened(out, sweep, [], None),
    ):
        pass
