"""What the drill puts into a training command, and what it refuses before anything is launched."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools.restart_bench.places import PACKAGE, PROGRAM, SCRIPTS
from tools.restart_drill import command as commands
from tools.restart_drill.command import Sizes
from tools.restart_drill.launch import DrillError
from tools.restart_drill.output import tolerances_of
from tools.restart_drill.plan import Saves
from tools.restart_drill.preset import expanded

FLAGS = [
    "--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32", "--bf16",
    "--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "9",
    "--lr", "1e-3", "--data-path", "data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100",
    "--distributed-backend", "gloo", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size=2",
    "--save-interval", "5", "--save", "save",
]  # fmt: skip

FORK = ["python", "-m", "megatron.launch"]
MODULE = ["env", "A=torch", "python", "-m", "torch.distributed.run"]


def training(*launcher: str) -> list[str]:
    return [*(launcher or ("torchrun", "--nproc_per_node=8")), "dir/pretrain_gpt.py", *FLAGS]


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        (["torchrun", "--nproc-per-node", "8"], 8),
        ([*MODULE, "--nnodes=2", "--nproc_per_node", "4"], 8),
        (["/opt/bin/torchrun"], 1),
        (["python", "-m", "megatron.launch", "--nproc-per-node", "4"], 4),
        (["python", "/somewhere/megatron/launch", "--nproc_per_node=2"], 2),
        (["torchrun", "--nproc-per-node", "auto"], None),
        (["deepspeed", "--num_gpus", "8"], None),
    ],
)
def test_ranks_of_a_command(launcher: list[str], ranks: int | None) -> None:
    assert commands.world_size(training(*launcher)) == ranks


def test_restarts_go_to_the_launcher_that_restarts() -> None:
    command = [*MODULE, "--max_restarts", "0", "--nnodes", "1", "t.py", "x"]
    assert commands.supervised(command, "torchrun", 3, 30.0) == [
        *MODULE, "--max-restarts", "3", "--nnodes", "1", "t.py", "x",
    ]  # fmt: skip
    assert commands.supervised(["torchrun", "--max-restarts=7", "t.py"], "torchrun", 1, 30.0) == [
        "torchrun", "--max-restarts", "1", "t.py",
    ]  # fmt: skip
    for command in (
        ["deepspeed", "pretrain_gpt.py"],
        [*FORK, "pretrain_gpt.py"],
        ["python", "pretrain_gpt.py", "--data-path", "torchrun"],
    ):
        with pytest.raises(DrillError, match="--supervisor torchrun: the command does not start torchrun"):
            commands.supervised(command, "torchrun", 1, 30.0)
    assert commands.supervised([*FORK, "t.py"], "launch", 2, 30.0) == [*FORK, "--max-restarts", "2", "t.py"]
    once = [*FORK, "--in-process-restart", "--max-restarts", "2", "t.py"]
    assert commands.supervised([*FORK, "t.py"], "in-process", 2, 30.0) == once
    again = commands.supervised([*FORK, "--in-process-restart", "t.py"], "in-process", 2, 30.0)
    assert again.count("--in-process-restart") == 1
    with pytest.raises(
        DrillError, match=r"--supervisor launch: the command does not start megatron\.launch, .*: torch"
    ):
        commands.supervised(["torchrun", "t.py"], "launch", 1, 30.0)


def test_what_the_command_says_of_its_saves() -> None:
    flags = [*FLAGS[:-7], "--save-interval", "3"]
    words = [*FORK, "pretrain_gpt.py", *flags]

    def saves(launcher: list[str], engine: str, every: int | None = None) -> Saves:
        training = [*launcher, "pretrain_gpt.py", *flags]
        return commands.saves_of(commands.completed(training, Path("a"), Path("b"), engine, every))

    assert saves(FORK, "memory") == Saves(3, 1, True)
    assert saves(FORK, "memory", 5) == Saves(3, 5, True)
    assert saves(FORK, "lazy", 5) == Saves(3, 1, False), "only engine memory takes the interval"
    assert commands.saves_of(["bash", "train.sh"]) == Saves()
    assert "--persist-interval" in commands.completed(words, Path("a"), Path("b"), None, 5)
    with pytest.raises(DrillError, match=r"--checkpoint-engine memory: the command does not start megatron\.launch"):
        saves(["torchrun", "--nproc-per-node", "2"], "memory")


def test_what_a_preset_on_nodes_says_of_its_saves() -> None:
    """Its launcher is in a script, and the number of its ranks."""
    command = ["env", "MAX_RESTARTS=3", *training("bash", "run_preset.sh")]
    completed = commands.completed(command, Path("a"), Path("b"), "memory", 4)
    assert commands.saves_of(completed, on_nodes=True) == Saves(5, 4, True)
    assert commands.saves_of(completed) == Saves()


def test_no_launcher_restarts_what_the_drill_relaunches() -> None:
    for launcher in (["torchrun"], FORK):
        wanted = [*launcher, "--max-restarts", "0", "t.py"]
        assert commands.supervised([*launcher, "--max_restarts=3", "t.py"], "relaunch", 3, 30.0) == wanted
    assert commands.supervised(["deepspeed", "t.py"], "relaunch", 3, 30.0) == ["deepspeed", "t.py"]


def test_another_layout_under_each_launcher() -> None:
    changed = commands.on_layout(training(*FORK, "--nproc-per-node", "8"), Sizes(dp=1))
    assert changed[: len(FORK) + 2] == [*FORK, "--nproc-per-node", "4"]


def test_another_layout() -> None:
    changed = commands.on_layout(training(), Sizes(tp=1, pp=4, dp=1))
    config = commands.configuration(changed)
    assert config is not None and commands.world_size(changed) == 4
    parallel = config.parallel
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (1, 4)
    assert "--nproc_per_node=8" not in changed and changed.count("--tensor-model-parallel-size") == 1
    kept = commands.configuration(commands.on_layout(training(), Sizes(dp=1)))
    assert kept is not None
    assert (kept.parallel.tensor_model_parallel_size, kept.parallel.pipeline_model_parallel_size) == (2, 2)
    assert kept.parallel.data_parallel_size == 1


@pytest.mark.parametrize(
    ("command", "sizes", "message"),
    [
        (
            training(),
            Sizes(tp=8),
            "--resume-tp 8 --resume-pp 2 --resume-dp 2: .*--num-attention-heads 4: not divisible",
        ),
        (training(), Sizes(pp=8), "--num-layers 4: is less than --pipeline-model-parallel-size 8"),
        (training(), Sizes(dp=3), "--global-batch-size 4: not divisible"),
        ([*training(), "--checkpoint-engine", "dcp"], Sizes(dp=1), "--checkpoint-engine dcp cannot be loaded onto"),
        (["deepspeed", "pretrain_gpt.py"], Sizes(dp=1), "by torchrun or megatron.launch on one node"),
        (training("torchrun", "--nnodes", "2", "--nproc-per-node", "4"), Sizes(dp=1), "megatron.launch on one node"),
        (["torchrun", "wrapper.sh"], Sizes(dp=1), "starts pretrain_gpt.py by torchrun or megatron.launch on one node"),
    ],
)
def test_a_layout_that_does_not_fit(command: list[str], sizes: Sizes, message: str) -> None:
    with pytest.raises(DrillError, match=message):
        commands.on_layout(command, sizes)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The training on a machine with two GPUs; nvidia-smi is a stand-in: such a machine cannot be had here."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: A'\necho 'GPU 1: A'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return [word if word != "gloo" else "nccl" for word in training()]


def test_a_layout_that_this_machine_has_too_few_gpus_for(two_gpus: list[str]) -> None:
    with pytest.raises(DrillError, match="--resume-tp 1 --resume-pp 2 --resume-dp 2: needs 4 GPUs, sees 2"):
        commands.on_layout(two_gpus, Sizes(tp=1))
    assert commands.on_layout(two_gpus, Sizes(tp=1, dp=1))
    assert commands.on_layout(["env", "DS_ACCELERATOR=cpu", *two_gpus], Sizes(tp=1))


def test_a_training_on_gpus_is_made_to_repeat_its_losses(
    two_gpus: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    places = (Path("/s"), Path("/t"), None)
    added = commands.completed(two_gpus, *places)
    config = commands.configuration(added)
    assert config is not None and config.training.deterministic
    assert tolerances_of(added) == (2e-2, 0.0)
    off = commands.completed([*two_gpus, "--deterministic", "off"], *places)
    assert off.count("--deterministic") == 1
    assert capsys.readouterr().err == ""
    assert tolerances_of(off) == (2e-2, 2e-2)
    assert "(--deterministic off): compared within 0.02" in capsys.readouterr().err
    on_cpus = commands.completed(training(), *places)
    assert "--deterministic" not in on_cpus and tolerances_of(on_cpus) == (2e-2, 0.0)
    assert tolerances_of(["bash", "train.sh"]) == (2e-2, 2e-2), "what cannot be seen may run on the GPUs"


def test_flags_that_the_training_would_refuse_are_refused_before() -> None:
    with pytest.raises(DrillError, match="the training command on 8 ranks: unknown flag --lunch"):
        commands.configuration([*training(), "--lunch"])
    assert commands.configuration(["bash", "train.sh"]) is None


def test_directories_and_engine_are_appended() -> None:
    command = commands.completed(training(), Path("/s"), Path("/t"), "lazy")
    config = commands.configuration(command)
    assert config is not None
    assert (config.checkpoint.save, config.checkpoint.load, config.trace.restart_trace_dir) == ("/s", "/s", "/t")
    assert config.checkpoint.checkpoint_engine == "lazy" and config.checkpoint.verify_restored_state
    assert config.training.allow_injected_faults
    assert "--checkpoint-engine" not in commands.completed(["train"], Path("/s"), Path("/t"), None)


def test_a_command_of_several_words_is_no_preset() -> None:
    assert expanded(["tiny_tp2_pp2_dp2", "x"]) == ["tiny_tp2_pp2_dp2", "x"]
    assert expanded(["true"]) == ["true"]
    with pytest.raises(DrillError, match="lunch: no program and no preset; there are .*tiny_tp2_pp2_dp2"):
        expanded(["lunch"])


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings with which a preset makes no environment and no data."""
    for name, value in {
        "SKIP_SETUP": "1", "PYTHON": "python3", "DATA_PATH": "/given", "DEVICE": "cpu", "WORK_DIR": str(tmp_path),
        "MASTER_PORT": "29511",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.parametrize("word", ["tiny_tp2_pp2_dp2", str(SCRIPTS / "run_tiny_tp2_pp2_dp2.sh")])
def test_a_preset_tells_its_command(word: str, settings: Path) -> None:
    command = expanded([word])
    assert commands.world_size(command) == 8 and commands.launcher_of(command) is not None
    assert not any(entry.startswith("RESTART_TRACE_LAUNCH_ID=") for entry in command)
    config = commands.configuration(command)
    assert config is not None and config.data.data_path == ("/given",)
    assert list(settings.iterdir()) == []  # neither launched nor prepared to


def test_a_preset_that_fails(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DP", "two")
    with pytest.raises(DrillError, match="tiny_tp2_pp2_dp2: DP=two: give a whole number"):
        expanded(["tiny_tp2_pp2_dp2"])


def test_a_script_that_is_no_preset(tmp_path: Path) -> None:
    script = tmp_path / "run_mine.sh"
    script.touch()
    with pytest.raises(DrillError, match="run_mine.sh: no program and no preset"):
        expanded([str(script)])


def test_the_script_of_another_checkout_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "run_1b_tp1_pp1.sh"
    script.touch()
    with pytest.raises(DrillError, match="run_1b_tp1_pp1.sh: is not a script of this checkout, whose 1b_tp1_pp1 "):
        expanded([str(script)])


def test_nodes_that_take_a_command_each(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUS_PER_NODE", "4")
    with pytest.raises(DrillError, match="COMMAND_TO: 2 nodes take a command each with LAUNCHER=torchrun"):
        expanded(["tiny_tp2_pp2_dp2"])


@pytest.mark.slow
def test_a_preset_over_hosts_tells_a_command_that_takes_flags(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of megatron.launch with spares: it starts the preset again, with the flags of the training behind it."""
    hosts = settings / "hosts"
    hosts.write_text(f"{socket.gethostname()} slots=8\nlocalhost slots=8\n")
    monkeypatch.setenv("HOSTFILE", str(hosts))
    monkeypatch.setenv("LAUNCHER", "fork")
    monkeypatch.setenv("MAX_RESTARTS", "1")
    command = expanded(["tiny_tp2_pp2_dp2"])
    again = [sys.executable, "-ES", str(PACKAGE), "run", "tiny_tp2_pp2_dp2", PROGRAM]
    assert command[:6] == again and "--num-layers" in command
    assert commands.supervised(command, "launch", 3, 30.0, on_nodes=True) == [
        "env", "MAX_RESTARTS=3", *command, "--distributed-timeout-minutes", "0.5",
    ]  # fmt: skip
    environment = os.environ | {"DRY_RUN": "1"}
    argv = [*again, "--train-iters", "7"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all(line.endswith("pretrain_gpt.py --train-iters 7") for line in lines)
