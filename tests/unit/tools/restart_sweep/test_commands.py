"""What a cell runs, and with which settings."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools.common.sweep_files import Cell, cell_of
from tools.restart_bench.places import PROGRAM
from tools.restart_drill.cli import parse_arguments as parse_drill
from tools.restart_sweep.cli import main
from tools.restart_sweep.commands import Places, command_of, environment, refused_setting

CELL = Cell(3, 1, "scaled", "3b", 4, 1, 2, "lazy", "warm", "sigkill-all@iteration:3", 2, {"iterations": 6})


def dry_run(preset: str, told: dict[str, str], *flags: str) -> str:
    words = [sys.executable, "-m", "tools.restart_bench", "run", preset, *flags]
    env = told | {"DRY_RUN": "1"}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.fixture
def places(tmp_path: Path) -> Places:
    found = Places(tmp_path / "cell", tmp_path / "storage", tmp_path / "work")
    found.cell.mkdir()
    return found


def test_a_cell_is_what_its_json_says() -> None:
    assert cell_of(CELL.to_json()) == CELL
    assert CELL.name == "0003_r1_scaled_3b_tp4_pp1_dp2_lazy_warm_sigkill-all_iteration_3_every_2"


def test_a_fault_is_drilled_on_a_preset_of_that_very_layout(places: Places) -> None:
    command = command_of(replace(CELL, tp=2, cache="cold"), places, 60)
    drill = parse_drill(command.words[3:])
    assert (drill.fault, drill.at.iteration, drill.cold_cache, drill.no_reference) == ("sigkill-all", 3, True, True)
    assert isinstance(places.storage, Path)
    assert (drill.out, drill.checkpoints) == (places.cell / "drill", places.storage / "checkpoints")
    (preset,) = drill.command
    shown = dry_run(preset, environment(command.settings))
    for flag in ("--tensor-model-parallel-size 2", "--train-iters 6", "--save-interval 2", "--checkpoint-engine lazy"):
        assert flag in shown
    assert "RESTART_TRACE_LABEL=Scaled" in shown
    assert command.settings["DP"] == "2"


def test_without_a_fault_the_preset_trains(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE", "torch")  # of the user's shell: no cell takes it
    command = command_of(replace(CELL, mode="train", model="tiny", fault="none", save_interval=None), places, 60)
    told = environment(command.settings)
    assert command.words[1:] == ["-m", "tools.restart_bench", "run", "tiny_tp4_pp1"] and command.trace == "trace"
    assert (told["MODE"], told["ENGINE"], told["KILL_AT"]) == ("train", "lazy", "none")
    assert "SAVE_INTERVAL" not in told


def test_a_launcher_of_the_environment_starts_trainings(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER", "srun")
    train = replace(CELL, mode="train", fault="none")
    assert environment(command_of(train, places, 60).settings)["LAUNCHER"] == "srun"
    drilled = replace(CELL, mode="restart")
    assert environment(command_of(drilled, places, 60).settings)["LAUNCHER"] == "srun"
    assert "LAUNCHER" not in environment(command_of(CELL, places, 60).settings)  # scaled ranks are on this host
    assert refused_setting([train, drilled, CELL]) is None
    assert "no cell has one of them" in (refused_setting([CELL]) or "")
    own = replace(train, settings={"launcher": "fork"})
    assert environment(command_of(own, places, 60).settings)["LAUNCHER"] == "fork"
    assert refused_setting([train, own]) == "LAUNCHER=srun: the file has launcher: fork; leave it out"
    of_node = refused_setting([replace(drilled, fault="node-loss@mid-step")])
    assert of_node == "LAUNCHER=srun: node-loss@mid-step takes launcher fork; leave it out"


def test_gpus_per_node_reaches_what_is_launched_on_nodes_alone(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scaled training is on this host, whatever the nodes of the sweep's other cells have."""
    monkeypatch.setenv("GPUS_PER_NODE", "4")
    scaled = replace(CELL, model="tiny", tp=2, pp=2, dp=2, fault="none")  # eight ranks
    command = command_of(scaled, places, 60)
    assert "NODE_RANK" not in dry_run("tiny_tp2_pp2", environment(command.settings))
    for mode in ("train", "restart"):
        assert environment(command_of(replace(CELL, mode=mode), places, 60).settings)["GPUS_PER_NODE"] == "4"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ENGINE", "use the file's key engines"), ("DP", "use the file's key layouts"), ("SAVE_DIR", "use --dir"),
        ("ITERS", "use the file's key iterations"), ("EXTRA_ARGS", "use the file's key flags"),
        ("MAX_RESTARTS", "leave it out"), ("DRY_RUN", "use --dry-run"),
    ],
)  # fmt: skip
def test_a_setting_that_no_cell_takes_is_refused(
    name: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "sweep.yaml"
    asked.write_text("name: one\nruns:\n  - {mode: train, models: [tiny], engines: [torch]}\n")
    monkeypatch.setenv(name, "3")
    assert main(["--out", str(tmp_path / "out"), str(asked)]) == 2
    said = capsys.readouterr().err
    assert f"{name}=3: a sweep does not take this setting from the environment or --config; {instead}" in said
    assert list(tmp_path.iterdir()) == [asked]


def test_a_fault_of_a_node_is_drilled_through_the_agents(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODES_COMMAND", "python -m harm --now")
    settings = {"iterations": 6, "nodes_command": "$NODES_COMMAND"}
    cell = replace(CELL, fault="node-loss@mid-step", settings=settings)
    command = command_of(cell, places, 60)
    drill = parse_drill(command.words[3:])
    assert (drill.supervisor, drill.nodes_command) == ("launch", "python -m harm --now")
    assert (command.settings["LAUNCHER"], int(command.settings["MAX_RESTARTS"]) > 0) == ("fork", True)
    # With this launcher the preset is what the drill launches, with flags of its own in place of the preset's.
    (preset,) = drill.command
    assert "--train-iters 77" in dry_run(preset, environment(command.settings), PROGRAM, "--train-iters", "77")


def test_a_replay_that_keeps_its_saves_does_as_many_as_the_file_asks_for(places: Places) -> None:
    settings = {"ranks": "0", "limit_bytes": "1MiB", "operations": "saves_then_loads", "saves": 7}
    words = command_of(replace(CELL, mode="replay", fault="none", settings=settings), places, 60).words
    assert (words[words.index("--repeat") + 1], words[words.index("--operations") + 1]) == ("7", "saves_then_loads")


def test_only_a_striped_replay_is_given_what_sets_the_stripes(places: Places) -> None:
    settings = {"ranks": "0", "limit_bytes": "1MiB", "stripe_command": "stripe", "operations": "load"}
    plain = replace(CELL, mode="replay", fault="none", settings=settings)
    words = command_of(plain, places, 60).words
    assert "--stripe-command" not in words and words[words.index("--operations") + 1] == "load"
    words = command_of(replace(plain, settings=settings | {"striping": "8"}), places, 60).words
    assert (words[words.index("--striping") + 1], words[words.index("--stripe-command") + 1]) == ("8", "stripe")
