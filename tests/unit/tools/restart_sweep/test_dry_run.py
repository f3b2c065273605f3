"""--dry-run, --models and --engines of restart-sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.restart_sweep.cells import cells_of
from tools.restart_sweep.cli import main
from tools.restart_sweep.sizes import Sizes
from tools.restart_sweep.sweep_file import read_sweep

FILE = """\
name: parts
repeats: 2
storage_bytes: 2MiB
time_limit: 1800
runs:
  - {mode: replay, models: [tiny, 1b], engines: [torch, lazy], limit_bytes: 1MiB}
  - {mode: train, models: [1b], engines: [none, lazy], layouts: [tp2_pp2], iterations: 5, save_interval: 2}
  - {mode: scaled, models: [tiny], engines: [torchsnapshot]}
"""


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "parts.yaml"
    path.write_text(FILE)
    return path


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    assert main(["--dry-run", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_it_ends_with_what_all_cells_take(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capsys, asked)
    assert lines[-4] == "parts: 16 cells in 2 repeats: 2 storage, 8 replay, 4 train, 2 scaled"
    full = plan_of(asked, "1b_tp2_pp2_dp1_lazy")["total_bytes"]
    # Storage, replays of a limited rank with a warm-up, and three saves of a training of five iterations.
    num_bytes = 2 * ((2 << 20) + 4 * 2 * (1 << 20) + 3 * full)
    assert lines[-3].startswith(f"bytes: {num_bytes / 1e9:.1f} GB, and what 2 cells write, which is not known before;")
    assert lines[-2] == "hours: at most 8, with time_limit 1800 s for each cell"
    assert lines[-1] == "GPU-hours: at most 16: 4 cells in allocations of whole nodes, at most 8 GPUs at a time"
    (reason,) = [line for line in lines if line.startswith("no plan of")]
    assert reason.startswith("no plan of 1 layout: ckpt-plan: error: --engine torchsnapshot: ")


def plan_of(asked: Path, name: str) -> dict[str, Any]:
    sizes = Sizes(None)
    cells = [cell for cell in cells_of(read_sweep(asked)) if cell.plan_name == name]
    sizes.make(cells)
    return sizes.of(cells[0])


def test_all_saves_that_a_replay_keeps_are_counted(asked: Path) -> None:
    kept = "limit_bytes: 1MiB, operations: saves_then_loads, saves: 7}"
    asked.write_text(FILE.replace("limit_bytes: 1MiB}", kept))
    cells = [cell for cell in cells_of(read_sweep(asked)) if cell.mode == "replay" and cell.engine == "torch"]
    sizes = Sizes(None)
    sizes.make(cells)
    assert {sizes.written(cell) for cell in cells} == {7 << 20}


def test_the_plan_of_a_training_is_none_of_a_replay_with_another_sharding(
    asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked.write_text(FILE.replace("limit_bytes: 1MiB}", "limit_bytes: 1MiB, flags: --sharding full}"))
    lines = dry_run(capsys, asked, "--models", "1b", "--engines", "lazy")
    (reason,) = [line for line in lines if line.startswith("no plan of")]
    assert reason == "no plan of 1 layout: --sharding full: ckpt-plan knows the files of ZeRO-1 alone"
    cells = {cell[3]: cell[-3:] for cell in (line.split() for line in lines if line[:1].isdigit())}
    assert cells["replay"] == ["-", "-", "-"] and "-" not in cells["train"]  # files, bytes, what it writes


def test_a_part_of_it(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capsys, asked, "--models", "1b", "--engines", "lazy, none")
    assert lines[-4] == "parts: 8 cells in 2 repeats: 2 storage, 2 replay, 4 train"
    cells = [line.split() for line in lines if line[:1].isdigit()]
    assert [(" ".join(cell[1:4]), cell[6]) for cell in cells if cell[3] != "the"] == [
        ("x 2 replay", "lazy"), ("x 2 train", "none"), ("x 2 train", "lazy"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("--models", "tinny", "has it; did you mean tiny?; there are tiny, 1b"),
        ("--engines", "lazy,fastpersist", "--engines fastpersist: no cell of"),
        ("--models", "", "--models : no cell of"),
        # The file has both, but not together: only models 1b and tiny by engine torch are there.
        ("--engines", "torch,torchsnapshot --models 1b", "--engines torchsnapshot: "),
        (
            "--models",
            "1b --engines torchsnapshot",
            "parts.yaml has it, but no cell of it is left with the other options",
        ),
    ],
)
def test_a_name_of_which_no_cell_is_left(
    asked: Path, capsys: pytest.CaptureFixture[str], option: str, name: str, said: str
) -> None:
    assert main(["--dry-run", str(asked), option, *(name.split() or [name])]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err


@pytest.mark.slow
def test_a_bound_is_never_rounded_down(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked.write_text(FILE.replace("time_limit: 1800", "time_limit: 100"))
    lines = dry_run(capsys, asked)
    assert [line.split(",")[0].split(":")[1] for line in lines[-2:]] == [" at most 0.5", " at most 0.9"]


def test_a_reduced_sweep_knows_the_names_of_the_file(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked.write_text(FILE.replace("[tiny, 1b]", "[tiny, 3b, 1b]"))
    assert main(["--dry-run", "--reduced", str(asked), "--models", "3b"]) == 2
    assert "has it, but no cell of it is left with the other options" in capsys.readouterr().err
