"""What --dry-run shows: the defaults of a matrix, a soak and stops, whose own runs are for the night."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.restart_drill import cli
from tools.restart_drill.injection_points import MID_RETURN
from tools.restart_drill.matrix import INJECTION_POINTS, cells
from tools.restart_drill.options import ENGINES, MATRIX, SOAK
from tools.restart_drill.soak.schedule import possible_faults
from tools.restart_drill.soak.stops import parse_stop


def shown(out: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Lines of a dry run, which writes nothing."""
    assert cli.main([*words, "--out", str(out), "--dry-run"]) == 0
    assert not out.exists()
    return capsys.readouterr().out.splitlines()


def test_of_a_matrix_every_cell_is_in_a_sequence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *sequences, numbers, limits = shown(tmp_path / "out", capsys, "--matrix")
    chosen = cells(("relaunch", "torchrun"), ENGINES[MATRIX], None)
    assert {cell.injection_point for cell in chosen} == set(INJECTION_POINTS) - {MID_RETURN}
    assert {cell.injection_point for cell in cells(("in-process",), ("lazy",), None)} == set(INJECTION_POINTS)
    assert numbers == f"{len(chosen)} cells in {len(sequences)} sequences, and a reference run"
    assert limits == "A launch fails after 300 s, or after 5 s without an iteration."
    text = "\n".join(sequences) + "\n"
    for supervisor in ("relaunch", "torchrun"):
        for engine in ENGINES[MATRIX]:
            mine = [line for line in sequences if f": {supervisor}, engine {engine}: " in line]
            planned = [injection for line in mine for injection in line.split(": ", 2)[2].split(", ")]
            expected = [c for c in chosen if (c.supervisor, c.engine) == (supervisor, engine)]
            assert planned == [f"{cell.fault} {cell.injection_point}" for cell in expected]
    assert text.count("\n") == len(sequences)


def test_a_sample_of_a_matrix_is_drawn_by_its_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampled = [
        shown(tmp_path / "out", capsys, "--matrix", "--sample", "7", *seed)
        for seed in ([], ["--seed", "1"], ["--seed", "2"])
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    assert all(lines[-2].startswith("7 cells in ") for lines in sampled)


def test_of_a_matrix_on_nodes_a_sequence_loses_a_node_for_each_spare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--matrix",
        "--nodes-command",
        "mine",
        "--supervisors",
        "launch",
        "--engines",
        "lazy",
        "--faults",
        "node-loss",
    ]
    *one, _, _ = shown(tmp_path / "out", capsys, *words)
    *two, _, _ = shown(tmp_path / "out", capsys, *words, "--spares", "2")
    *pairs, _, _ = shown(tmp_path / "out", capsys, *words, "--spares", "2", "--node=0,1")
    assert max(line.count("node-loss") for line in one) == max(line.count("node-loss") for line in pairs) == 1
    assert max(line.count("node-loss") for line in two) == 2


def test_of_a_soak_every_engine_has_a_goal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *engines, limits = shown(tmp_path / "out", capsys, "--soak")
    assert limits == "A launch fails after 300 s, or after 3 s without an iteration."
    names, saves, injected = [], 0, []
    for line in engines:
        goal, faults = line.split("; ")
        _, name, _, _, number, _ = goal.replace(":", "").split()
        names, saves, injected = [*names, name], saves + int(number), [*injected, *faults.split(", ")]
    assert tuple(names) == ENGINES[SOAK] and saves >= 200 and len(injected) == 50
    assert set(injected) == set(possible_faults(on_nodes=False, fills_disk=False))


def test_a_soak_of_given_duration_is_divided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, _ = shown(tmp_path / "out", capsys, "--soak", "--minutes", "5", "--engines", "lazy,torch")
    assert first.startswith("engine lazy: for 2.5 minutes, beginning with ")
    assert second.startswith("engine torch: for 2.5 minutes, beginning with ")


def test_stops_are_shown_as_the_option_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(tmp_path / "out", capsys, "--stops", "5")
    assert [str(parse_stop(line)) for line in lines] == lines and len(set(lines)) == 5
    given = "launcher=torchrun,workers=0,engine=lazy,signal=SIGTERM,target=all,moment=training,next=later"
    assert shown(tmp_path / "out", capsys, "--stops", "2", "--stop", given) == [given, given]


def test_a_command_that_cannot_be_carried_out_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--fault", "sigterm", "--supervisor", "torchrun", "--at", "iteration:5", "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--dry-run", "--", "python", "pretrain_gpt.py"]) == 2
    assert "--supervisor torchrun: the command does not start torchrun" in capsys.readouterr().err


def test_of_one_fault_its_point_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(tmp_path / "out", capsys, "--fault", "sigkill-one", "--at", "mid-load", "tiny_tp2_pp2_dp2")
    assert lines == [
        "sigkill-one mid-load, 1 time, restarted by relaunch",
        "A launch fails after 300 s, or after 30 s without an iteration.",
    ]
