"""The directory of a sweep: what is refused before anything in it is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from restart_trace.schema import READABLE_VERSIONS
from tests.unit.tools.restart_sweep.test_sweep_file import GOOD, written
from tools.common.sweep_files import CELLS
from tools.restart_sweep.cells import cells_of
from tools.restart_sweep.cli import main
from tools.restart_sweep.directory import SweepError, opened
from tools.restart_sweep.sizes import Sizes
from tools.restart_sweep.sweep_file import read_sweep


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"trace_format": READABLE_VERSIONS[0] - 1},
            f"its traces have format {READABLE_VERSIONS[0] - 1}, and this program writes format",
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


@pytest.mark.slow
def test_what_the_storage_has_no_room_for_is_refused_before_a_cell_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "sweep.yaml", tmp_path / "out"
    runs = "runs:\n  - {mode: replay, models: [tiny], engines: [lazy], cache: [warm], limit_bytes: 1MiB}\n"
    file.write_text(f"name: large\nrepeats: 1\nstorage_bytes: 1024TiB\n{runs}")
    assert main(["--dir", str(tmp_path), "--out", str(out), str(file)]) == 2
    said = capsys.readouterr().err
    assert f"restart-sweep: {tmp_path}: " in said and "the storage itself, writes 1125.9 TB; free space" in said
    assert not any((out / CELLS).iterdir())


@pytest.mark.slow
def test_what_a_cell_writes_is_known_from_its_plan(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    replayed = "{mode: replay, models: [7b], engines: [lazy], cache: [warm], ranks: 0-1, limit_bytes: MOST}"
    file.write_text(
        "name: planned\nrepeats: 1\nstorage_bytes: 3MiB\nruns:\n"
        + "".join(f"  - {replayed.replace('MOST', most)}\n" for most in ("1MiB", "none"))
    )
    sizes = Sizes(None)
    cells = cells_of(read_sweep(file))
    sizes.make(cells)
    full = sum(sizes.of(cells[-1])["bytes_per_rank"][:2])
    assert sorted(sizes.written(cell) or 0 for cell in cells) == [2 << 20, 3 << 20, full]
