"""The launch scripts: what they would run, what they refuse, and how they start several nodes."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.published.__main__ import parse_arguments as parse_arguments_of_published
from benchmarks.restart_scoreboard.cli import parse_arguments as parse_arguments_of_scoreboard
from megatron.checkpointing.engines.registry import builtin_engines
from megatron.launch.cli import parse_arguments
from tests.cluster.__main__ import parse_arguments as parse_arguments_of_cluster
from tests.faults.sweep import parse_arguments as parse_arguments_of_faults
from tests.mutation import parse as parse_arguments_of_mutation
from tests.unit.script_helpers import (
    BENCH,
    NODE_RANK,
    ROOT,
    TINY,
    commands_of_nodes,
    configuration,
    dry_run,
    run_script,
    split_command,
)
from tools.ckpt_replay.options import ALL
from tools.ckpt_replay.options import parse_arguments as parse_arguments_of_replay
from tools.ckpt_replay.plan import LAZY_SHARED, LAZY_ZSTD, LIBRARIES, MEMORY_PEER, RAW
from tools.restart_bench.cli import main
from tools.restart_bench.launcher_entries import BY_SLURM, FROM_ONE_NODE, LAUNCHERS, ON_EACH_NODE
from tools.restart_bench.settings import DECLARATIONS
from tools.restart_drill.cli import parse_arguments as parse_arguments_of_drill
from tools.restart_drill.own_shm import may_mount


class Preset(NamedTuple):
    script: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    tp: int
    pp: int


PRESETS = [
    Preset("run_1b_tp1_pp1.sh", 2048, 5632, 22, 32, 4, 1, 1),
    Preset("run_3b_tp4_pp1.sh", 3072, 8192, 28, 24, 8, 4, 1),
    Preset("run_7b_tp4_pp2.sh", 4096, 14336, 32, 32, 8, 4, 2),
    Preset("run_13b_tp4_pp4.sh", 5120, 13824, 40, 40, 40, 4, 4),
    Preset("run_33b_tp4_pp8.sh", 6656, 17920, 60, 52, 4, 4, 8),
    Preset("run_70b_tp4_pp20.sh", 8192, 28672, 80, 64, 8, 4, 20),
    Preset("run_70b_tp8_pp8.sh", 8192, 28672, 80, 64, 8, 8, 8),
]
SCRIPTS = [preset.script for preset in PRESETS]
FORK = {"LAUNCHER": "fork", "MAX_RESTARTS": "1"}


def test_no_script_is_forgotten() -> None:
    assert {path.name for path in BENCH.glob("run_*.sh")} == {*SCRIPTS, TINY}


SHELL = [
    *sorted(BENCH.rglob("*.sh")), *sorted((ROOT / "tests").rglob("*.sh")), ROOT / "run_tests.sh", ROOT / ".ci" / "run",
    ROOT / ".ci" / "nightly",
]  # fmt: skip


@pytest.mark.parametrize("path", SHELL, ids=str)
def test_scripts_are_valid_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=300)
    if path.name.startswith("run") or path.name in ("setup_env.sh", "cuda_build.sh", "nightly"):
        assert os.access(path, os.X_OK)


def test_scheduled_checks_are_those_of_the_document() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("### Longer than a test")[2].partition("### ")[0]
    command = r"-m tools.restart_drill [\w-]+|-m (?:tools|tests)[\w.]+"
    told = set(re.findall(command + r"|\b[A-Z_]+=\w+|\btests/\w+/\w+\.py|--minutes|-k \w+", text))
    assert {"-m tools.restart_drill --soak", "-m tools.restart_drill --matrix", "-m tests.cluster", "KILLS=200"} <= told
    run = (ROOT / ".ci" / "nightly").read_text()
    assert not [words for words in told if words not in run]


PARSERS = {
    "benchmarks.published": parse_arguments_of_published,
    "benchmarks.restart_scoreboard": parse_arguments_of_scoreboard,
    "tests.cluster": parse_arguments_of_cluster,
    "tests.faults.sweep": parse_arguments_of_faults,
    "tests.mutation": parse_arguments_of_mutation,
    "tools.restart_drill": parse_arguments_of_drill,
}


def check_command(words: list[str]) -> None:
    """That a command of .ci/nightly would begin: its files are there, and its options are known."""
    if words[0] == "env":
        words = [word for word in words[1:] if not re.match("[A-Z_]+=", word)]
    if words[0] != "PYTHON":
        assert os.access(ROOT / words[0], os.X_OK)
    elif words[2] == "pytest":
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
    elif words[2] != "pip":
        parsed = PARSERS[words[2]](words[3:])
        if words[2] == "tests.cluster":
            check_command(shlex.split(parsed.command[2].replace("$PYTHON", "PYTHON")))


def test_scheduled_commands_would_begin(tmp_path: Path) -> None:
    text = (ROOT / ".ci" / "nightly").read_text()
    checks = text.partition("\nmount_small_disk 2>/dev/null\n")[2].partition("((${#failed")[0]
    assert checks.count("check ") > 10
    settings = f"python=PYTHON minutes=10 out={tmp_path}/out on_small=(--checkpoints {tmp_path})"
    told = run_script_text(f"{settings}\ncheck() {{ shift; printf '%s\\0' \"$@\"; printf '\\n\\0'; }}\n{checks}")
    for words in told.split("\n\0")[:-1]:
        check_command(words.split("\0")[:-1])


def run_script_text(text: str) -> str:
    return subprocess.run(["bash", "-euc", text], check=True, capture_output=True, text=True, timeout=300).stdout


@pytest.mark.slow
def test_commands_that_these_tests_fork_say_what_those_that_are_started_say(tmp_path: Path) -> None:
    """The command of the script, and those that it asks about the flags, the memory and the checkpoint."""

    def said(*wrapper: str) -> list[tuple[int, str, str]]:
        given = {"DRY_RUN": "1", "GPUS_PER_NODE": "1"}
        runs = [
            run_script("run_1b_tp1_pp1.sh", tmp_path, wrapper=wrapper, **given, EXTRA_ARGS=arguments)
            for arguments in ("", "--no-such-flag")
        ]
        free, launch_id = r"; [\d.]+ GB are free .*", r"LAUNCH_ID=\S+"
        return [(run.returncode, re.sub(launch_id, "", run.stdout), re.sub(free, "", run.stderr)) for run in runs]

    forked = said()
    assert forked == said("bash")
    assert [status for status, _, _ in forked] == [0, 2] and "unknown flag --no-such-flag" in forked[1][2]
    for answer in ("checks passed: settings, flags", "the fullest device holds", "a checkpoint: "):
        assert answer in forked[0][2]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.script)
def test_presets_describe_the_models_of_the_study(preset: Preset, tmp_path: Path) -> None:
    dp = max(2, 8 // (preset.tp * preset.pp))
    world_size = preset.tp * preset.pp * dp
    commands = dry_run(preset.script, tmp_path, DP=str(dp))
    assert len(commands) == world_size / 8
    config = configuration(commands[0], world_size)
    model, parallel = config.model, config.parallel
    assert preset[1:] == (
        model.hidden_size,
        model.ffn_hidden_size,
        model.num_layers,
        model.num_attention_heads,
        model.num_key_value_heads,
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
    )
    assert parallel.data_parallel_size == dp
    assert (model.seq_length, config.training.micro_batch_size, config.training.train_iters) == (2048, 16, 15)
    assert config.training.global_batch_size == 16 * dp
    assert model.swiglu and model.use_rotary_position_embeddings and model.untie_embeddings_and_output_weights
    assert model.normalization == "rmsnorm" and not model.add_bias_linear
    assert not model.checkpoint_activations and not model.recomputes_selectively  # all fits into 80 GB
    assert (model.params_dtype, parallel.zero_stage) == ("bf16", 1)
    # NullTokenizer adds the id that ends documents: 50257 as in GPT-2's vocabulary.
    assert (config.data.tokenizer_type, config.data.vocab_size) == ("NullTokenizer", 50256)
    assert config.checkpoint.save == config.checkpoint.load == str(tmp_path / "work" / "checkpoints")
    assert config.trace.restart_trace_dir == str(tmp_path / "work" / "checkpoints" / "restart_trace")


@pytest.mark.slow
@pytest.mark.parametrize("preset", [p for p in PRESETS if p.tp * p.pp % 4 == 0], ids=lambda preset: preset.script)
def test_one_command_per_node_in_one_launch(preset: Preset, tmp_path: Path) -> None:
    given = {"GPUS_PER_NODE": "4", "RECOMPUTE": "none"}
    commands = dry_run(preset.script, tmp_path, **given, MASTER_ADDR="node0")
    assert len(commands) == preset.tp * preset.pp / 4
    assert [command.option("--node_rank") for command in commands] == [str(i) for i in range(len(commands))]
    assert {command.option("--nproc_per_node") for command in commands} == {"4"}
    assert {command.option("--nnodes") for command in commands} == {str(len(commands))}
    assert {command.option("--master_addr") for command in commands} == {"node0"}
    assert len({command.environment["RESTART_TRACE_LAUNCH_ID"] for command in commands}) == 1
    again = dry_run(preset.script, tmp_path, **given)
    assert again[0].environment["RESTART_TRACE_LAUNCH_ID"] not in {
        command.environment["RESTART_TRACE_LAUNCH_ID"] for command in commands
    }


@pytest.mark.parametrize(
    ("settings", "expected", "reason"),
    [
        ({}, "selective", "with none, 53.7 GB with selective; 80% of 80 GB may be used"),
        ({"MICRO_BATCH": "8"}, "none", "with none; 80% of 80 GB may be used"),
        ({"DEVICE_GB": "48"}, "full", "with full; 80% of 48 GB may be used"),
        ({"DEVICE_GB": "24"}, "full", "with full: more than 80% of 24 GB even so; lower the micro batch"),
        ({"RECOMPUTE": "none"}, "none", "RECOMPUTE=none"),
        ({"RECOMPUTE": "full"}, "full", "RECOMPUTE=full"),
        ({"EXTRA_ARGS": "--recompute-activations"}, "selective", "by RECOMPUTE; EXTRA_ARGS says what is"),
    ],
)
def test_activations_are_recomputed_as_far_as_memory_requires(
    settings: dict[str, str], expected: str, reason: str, tmp_path: Path
) -> None:
    done = run_script("run_1b_tp1_pp1.sh", tmp_path, DRY_RUN="1", GPUS_PER_NODE="1", **settings)
    assert done.returncode == 0, done.stderr
    model = configuration(split_command(done.stdout.splitlines()[0]), 1).model
    assert (model.checkpoint_activations, model.recomputes_selectively) == (expected == "full", expected == "selective")
    shown = re.findall(r"recomputed activations: (\w+) \((.*)\)", done.stderr)
    assert [mode for mode, _ in shown] == ["none" if reason.startswith("by") else expected] and reason in shown[0][1]


def test_settings_reach_the_command_line(tmp_path: Path) -> None:
    save = str(tmp_path / "with a space" / "it's")
    command = dry_run(
        "run_7b_tp4_pp2.sh",
        tmp_path,
        ENGINE="none",
        ITERS="7",
        SAVE_INTERVAL="3",
        MICRO_BATCH="2",
        GLOBAL_BATCH="8",
        SAVE_DIR=save,
        TRACE_DIR="/t",
        DATA_PATH="0.3 /d/one 0.7 /d/two",
        VOCAB_FILE="/v.json",
        MERGE_FILE="/m.txt",
        EXTRA_ARGS="--seed 5  --keep-last 2",
        VENV_DIR="/none",  # nothing that could look for the files
    )[0]
    config = configuration(command, 8)
    assert (config.checkpoint.checkpoint_engine, config.checkpoint.save_interval) == ("none", 3)
    assert (config.checkpoint.save, config.trace.restart_trace_dir) == (save, "/t")
    assert (config.training.train_iters, config.training.num_micro_batches) == (7, 4)
    assert (config.training.seed, config.checkpoint.keep_last) == (5, 2)
    assert config.data.data_path == ("0.3", "/d/one", "0.7", "/d/two")
    assert config.data.tokenizer_type == "GPT2BPETokenizer"
    assert (config.data.vocab_file, config.data.merge_file) == ("/v.json", "/m.txt")


def test_tiny_runs_on_cpus(tmp_path: Path) -> None:
    (command,) = dry_run(TINY, tmp_path)
    config = configuration(command, 8)
    parallel = config.parallel
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (2, 2)
    assert (parallel.data_parallel_size, parallel.distributed_backend) == (2, "gloo")
    assert (config.training.train_iters, config.checkpoint.save_interval) == (12, 5)
    assert command.option("--nproc_per_node") == "8"
    assert command.environment["DS_ACCELERATOR"] == "cpu"
    assert command.environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.slow
def test_a_dry_run_says_what_saves_in_memory_take_of_a_host(tmp_path: Path) -> None:
    settings = {"DRY_RUN": "1", "ENGINE": "memory", "LAUNCHER": "fork", "WORK_DIR": str(tmp_path / "work")}
    python = {"SKIP_SETUP": "1", "PYTHON": sys.executable}
    done = run_script("run_70b_tp8_pp8.sh", tmp_path, **settings, **python)
    assert done.returncode == 0, done.stderr
    assert len(commands_of_nodes(done.stdout)) == 8
    assert "saves in host memory, the fullest of 8 hosts, 8 ranks: " in done.stderr
    assert "no copies of other hosts'" in done.stderr  # only a coordinator has hosts hold copies
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"node{node} slots=8\n" for node in range(9)))
    over = {"HOSTFILE": str(hostfile), "MAX_RESTARTS": "3"}
    coordinated = run_script("run_70b_tp8_pp8.sh", tmp_path, **settings, **python, **over)
    assert coordinated.returncode == 0 and "for copies of other hosts' (--replicas 2)" in coordinated.stderr
    hostfile.unlink()
    none = run_script("run_70b_tp8_pp8.sh", tmp_path, **settings, VENV_DIR=str(tmp_path / "none"))
    assert none.returncode == 0 and f"there is no {tmp_path}/none/bin/python yet" in none.stderr
    assert len(commands_of_nodes(none.stdout)) == 8 and list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_was_checked_and_what_runs_where(tmp_path: Path) -> None:
    save_dir = tmp_path / "mounted" / "elsewhere"
    given = {"DRY_RUN": "1", "SKIP_SETUP": "1", "PYTHON": sys.executable, "SAVE_DIR": str(save_dir)}
    done = run_script("run_70b_tp8_pp8.sh", tmp_path, **given, ENGINE="lazy", GPUS_PER_NODE="8", DEVICE="cuda")
    assert done.returncode == 0 and list(tmp_path.iterdir()) == []
    said = [line.removeprefix("[70b_tp8_pp8_dp1] ") for line in done.stderr.splitlines()]
    assert said[1:4] == [
        "checks passed: settings, flags",
        "8 nodes x 8 ranks: 64 ranks (TP8 PP8 DP1), cuda, launcher torchrun, engine lazy",
        "a checkpoint: 970.2 GB of tensors, at most 15.7 GB of a rank",
    ]
    free = rf"storage: {save_dir}; [\d.]+ GB are free in {tmp_path} on this host, room for \d+ checkpoints"
    assert re.fullmatch(free, said[4]) and said[-1] == "each node runs, with NODE_RANK=0..7:"
    no_room = f"SAVE_DIR={save_dir}: is not there on this host; the hosts of the run need 970.2 GB"
    assert said[5:-1] == ([no_room] if "room for 0 checkpoints" in said[4] else [])
    (line,) = done.stdout.splitlines()
    assert f'--node_rank "{NODE_RANK}" --nproc_per_node 8' in line
    shell = f'NODE_RANK=5; printf "%s\\n" {line.removeprefix("env ")}'
    words = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[words.index("--node_rank") + 1] == "5"


@pytest.mark.slow
def test_a_dry_run_without_room_in_the_save_dir_ends_with_1_as_its_run_would(tmp_path: Path) -> None:
    """With checkpoints of a PB and more, for which no machine that runs this has room."""
    given = {"DRY_RUN": "1", "SKIP_SETUP": "1", "PYTHON": sys.executable, "GPUS_PER_NODE": "4", "DEVICE": "cuda"}
    given |= {"EXTRA_ARGS": "--ffn-hidden-size 286720000", "WORK_DIR": str(tmp_path / "work")}
    save_dir = tmp_path / "save"
    refused = run_script("run_7b_tp4_pp2.sh", tmp_path, **given, SAVE_DIR=str(save_dir))
    assert refused.returncode == 1 and len(commands_of_nodes(refused.stdout)) == 2, refused.stderr
    said = refused.stderr.splitlines()[-1]
    assert re.search(rf"error: SAVE_DIR={save_dir}: [\d.]+ GB are free, and a checkpoint is [\de.+]+ GB: ", said)
    assert said.endswith("no save could succeed; free space, or give another SAVE_DIR")
    job = run_script("submit.sh", tmp_path, "7b_tp4_pp2", "--scheduler", "slurm", **given, SAVE_DIR=str(save_dir))
    assert job.returncode == 1 and "no save could succeed" in job.stderr and "sbatch " in job.stdout
    without = run_script("run_7b_tp4_pp2.sh", tmp_path, **given)
    assert without.returncode == 0 and "no room in the default directory: give the run a SAVE_DIR" in without.stderr
    save_dir.mkdir()
    (save_dir / "latest").touch()
    empty = run_script("run_7b_tp4_pp2.sh", tmp_path, **given, SAVE_DIR=str(save_dir))
    assert empty.returncode == 1 and "no save could succeed" in empty.stderr
    another = tmp_path / "another" / "global_step5"
    another.mkdir(parents=True)
    (another / "manifest.json").touch()
    from_another = {**given, "EXTRA_ARGS": f"{given['EXTRA_ARGS']} --load {another.parent}"}
    resumed = run_script("run_7b_tp4_pp2.sh", tmp_path, **from_another, SAVE_DIR=str(save_dir))
    assert resumed.returncode == 0 and "room for 0 checkpoints" in resumed.stderr and "error" not in resumed.stderr
    from_another["EXTRA_ARGS"] += " --finetune"
    anew = run_script("run_7b_tp4_pp2.sh", tmp_path, **from_another, SAVE_DIR=str(save_dir))
    assert anew.returncode == 1 and "no save could succeed" in anew.stderr
    another.rename(save_dir / "global_step5")
    resumed = run_script("run_7b_tp4_pp2.sh", tmp_path, **given, SAVE_DIR=str(save_dir))
    assert resumed.returncode == 0 and "room for 0 checkpoints" in resumed.stderr and "error" not in resumed.stderr
    none = run_script("run_7b_tp4_pp2.sh", tmp_path, **given, SAVE_DIR=str(tmp_path / "new"), ENGINE="none")
    assert none.returncode == 0 and "engine none saves nothing" in none.stderr, none.stderr


@pytest.mark.parametrize("dry_run", ["1", pytest.param("plan", marks=pytest.mark.slow)])
def test_a_dry_run_refuses_a_save_dir_in_which_nothing_can_be_made(tmp_path: Path, dry_run: str) -> None:
    file = tmp_path / "file"
    file.touch()
    given = {"DRY_RUN": dry_run, "SKIP_SETUP": "1", "PYTHON": sys.executable, "DEVICE": "cpu", "ENGINE": "lazy"}
    for save_dir in (file, file / "below" / "it")[dry_run == "plan" :]:
        done = run_script("run_tiny_tp2_pp2_dp2.sh", tmp_path, **given, SAVE_DIR=str(save_dir))
        assert done.returncode == 2, done.stderr
        assert f"{file} is no directory; give another" in done.stderr and str(save_dir) in done.stderr.splitlines()[-1]


def test_a_dry_run_over_hosts_says_who_starts_the_command(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"node{node} slots=8\n" for node in range(2)))
    given = {"DRY_RUN": "1", "VENV_DIR": str(tmp_path / "none"), "HOSTFILE": str(hostfile), "RECOMPUTE": "none"}
    done = run_script("run_13b_tp4_pp4.sh", tmp_path, **given, SAVE_DIR="s3://bucket/x")
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stderr
    assert "flags are not checked before the launch: there is no" in done.stderr
    assert f"checks passed: settings, slots of HOSTFILE={hostfile}\n" in done.stderr
    assert "storage: s3://bucket/x, which only the launch asks\n" in done.stderr and "GB of tensors" not in done.stderr
    assert "the script starts on each host through ssh, with NODE_RANK=0..1:\n" in done.stderr
    lost = run_script("run_13b_tp4_pp4.sh", tmp_path, **given, LAUNCHER="fork", MAX_RESTARTS="1")
    assert lost.returncode == 0 and len(lost.stdout.splitlines()) == 3, lost.stderr  # each has an address of its own
    assert NODE_RANK not in lost.stdout


@pytest.mark.slow
def test_a_dry_run_shows_the_plan_of_its_own_settings(tmp_path: Path) -> None:
    settings = {
        "SKIP_SETUP": "1",
        "PYTHON": sys.executable,
        "MICRO_BATCH": "1",
        "DRY_RUN": "plan",
        "DURABLE_TARGET": "20",
    }
    settings |= {
        "SEQ_LENGTH": "120000",
        "ENGINE": "lazy",
        "EXTRA_ARGS": "--keep-last 2",
        "WORK_DIR": str(tmp_path / "work"),
    }
    done = run_script("run_3b_tp4_pp1.sh", tmp_path, **settings)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert "the fullest device, rank 0: " in done.stderr
    assert done.stderr.count("; fits 80 GB, does not fit 40 GB\n") == 1
    shown = re.search(r"^(\d+) files, (\d+) bytes", done.stderr, re.MULTILINE)
    assert shown and "configuration, where" not in done.stderr  # the command is above
    assert len(done.stderr.splitlines()) <= 30
    assert "host memory, 4 ranks a host: " in done.stderr
    assert "storage: 3 saves, of which at most 3 are there at once: " in done.stderr
    assert (
        f" are free in {tmp_path}\n" in done.stderr
        and "blocked for at most 10 s: nothing of the storage" in done.stderr
    )
    assert f"durable within 20 s: the storage must take {int(shown[2]) / 20e9:.3g} GB/s" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_deepspeed_launcher(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two nodes\nnode0 slots=4\n\nnode1 slots=4\n")
    (single,) = dry_run("run_3b_tp4_pp1.sh", tmp_path, LAUNCHER="deepspeed")
    assert single.launcher[1:3] == ["-m", "deepspeed.launcher.runner"]
    assert single.option("--num_gpus") == "4"
    (over_hosts,) = dry_run("run_7b_tp4_pp2.sh", tmp_path, LAUNCHER="deepspeed", HOSTFILE=str(hostfile))
    assert over_hosts.option("--hostfile") == str(hostfile)
    assert (over_hosts.option("--num_nodes"), over_hosts.option("--master_addr")) == ("2", "node0")
    hostfile.write_text("node0 slots=8\n")
    (other_host,) = dry_run("run_7b_tp4_pp2.sh", tmp_path, LAUNCHER="deepspeed", HOSTFILE=str(hostfile))
    assert "--force_multi" in other_host.launcher and "--force_multi" not in over_hosts.launcher
    assert configuration(over_hosts, 8).parallel.data_parallel_size == 1


@pytest.mark.slow
def test_fork_launcher(tmp_path: Path) -> None:
    (single,) = dry_run(TINY, tmp_path, LAUNCHER="fork", MAX_RESTARTS="3", KILL_AT="none")
    plan = parse_arguments([*single.launcher[2:], str(ROOT / "pretrain_gpt.py"), *single.training])
    assert single.launcher[1] == str(ROOT / "megatron" / "launch")
    assert (plan.nproc_per_node, plan.nnodes, plan.max_restarts, plan.master_port) == (8, 1, 3, None)
    assert configuration(single, 8).parallel.data_parallel_size == 2
    (standby,) = dry_run(TINY, tmp_path, LAUNCHER="fork", MAX_RESTARTS="1", STANDBY="1", KILL_AT="none")
    assert parse_arguments([*standby.launcher[2:], str(ROOT / "pretrain_gpt.py")]).standby and not plan.standby
    (loads,) = dry_run(TINY, tmp_path, LAUNCHER="fork", MAX_RESTARTS="1", STANDBY="load", KILL_AT="none")
    assert "--standby-load" in loads.launcher and "--standby-load" not in standby.launcher
    returning = {"LAUNCHER": "fork", "MAX_RESTARTS": "1", "IN_PROCESS_RESTART": "1"}
    one = dry_run(TINY, tmp_path, **returning, KILL_AT="none")[0]
    assert parse_arguments([*one.launcher[2:], str(ROOT / "pretrain_gpt.py")]).in_process_restart
    nodes = dry_run("run_7b_tp4_pp2.sh", tmp_path, LAUNCHER="fork", GPUS_PER_NODE="4", MASTER_ADDR="node0")
    plans = [parse_arguments([*node.launcher[2:], str(ROOT / "pretrain_gpt.py")]) for node in nodes]
    assert [(plan.node_rank, plan.nnodes, plan.rank(1)) for plan in plans] == [(0, 2, 1), (1, 2, 5)]
    assert {(plan.master_addr, plan.master_port) for plan in plans} == {("node0", 29500)}
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node0 slots=4\nnode1 slots=4")
    over = dry_run(TINY, tmp_path, HOSTFILE=str(hostfile), DEVICE="cpu", KILL_AT="none", **returning)
    assert ["--in-process-restart" in command.launcher for command in over] == [True, True, False], "the coordinator"


def test_hostfile_gives_the_nodes(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node0 slots=4\nnode1 slots=4")
    commands = dry_run("run_7b_tp4_pp2.sh", tmp_path, HOSTFILE=str(hostfile))
    assert len(commands) == 2
    assert {command.option("--master_addr") for command in commands} == {"node0"}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.script)
def test_too_few_gpus_are_counted(preset: Preset, tmp_path: Path) -> None:
    needed = preset.tp * preset.pp * 3
    done = run_script(preset.script, tmp_path, DP="3", WORK_DIR=str(tmp_path / "work"))
    assert done.returncode == 2
    assert f"needs {needed} GPUs (TP{preset.tp} PP{preset.pp} DP3), sees 0" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_too_few_gpus_name_what_can_be_done_with_them(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node0 slots=8\nnode1 slots=8\n")
    done = run_script("run_70b_tp8_pp8.sh", tmp_path, HOSTFILE=str(hostfile), DP="2")
    assert done.returncode == 2
    assert "The largest preset that fits: DP=1 bash " in done.stderr and "run_13b_tp4_pp4.sh." in done.stderr
    for mode in ("replay", "scaled"):
        assert f"'MODE={mode} DP=2 bash {BENCH / 'run_70b_tp8_pp8.sh'}'" in done.stderr


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.script)
def test_a_scaled_preset_keeps_layers_and_layout(preset: Preset, tmp_path: Path) -> None:
    (command,) = dry_run(preset.script, tmp_path, MODE="scaled", DP="2")
    world_size = preset.tp * preset.pp * 2
    assert command.option("--nproc-per-node") == str(world_size)
    config = configuration(command, world_size)
    parallel, model = config.parallel, config.model
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (preset.tp, preset.pp)
    assert model.num_layers == preset.layers and model.hidden_size <= 128
    assert (model.num_key_value_heads < model.num_attention_heads) <= (preset.kv_heads < preset.heads)
    label = command.environment["RESTART_TRACE_LABEL"]
    assert label.startswith("Scaled: ") and f"hidden size {model.hidden_size} in place of {preset.hidden}" in label


def test_more_scaled_ranks_than_memory_holds_are_refused(tmp_path: Path) -> None:
    settings = {"MODE": "scaled", "SKIP_SETUP": "1", "PYTHON": sys.executable, "WORK_DIR": str(tmp_path / "work")}
    done = run_script("run_70b_tp4_pp20.sh", tmp_path, DP="1000000", **settings)
    assert done.returncode == 2 and list(tmp_path.iterdir()) == []
    assert "MODE=scaled: 80000000 ranks (TP4 PP20 DP1000000) take about 14400000000 MiB" in done.stderr
    assert "The largest preset that fits: DP=" in done.stderr


def test_replay_is_of_the_preset_s_layout(tmp_path: Path) -> None:
    settings = {"MODE": "replay", "ENGINE": "lazy,torch", "RANKS": "0,63", "LIMIT_BYTES": "1MiB", "REPEAT": "2"}
    done = run_script("run_70b_tp8_pp8.sh", tmp_path, DRY_RUN="1", WORK_DIR=str(tmp_path / "work"), **settings)
    assert done.returncode == 0 and list(tmp_path.iterdir()) == []
    words = shlex.split(done.stdout)
    arguments = parse_arguments_of_replay(words[words.index("megatron_restart_tools.ckpt_replay") + 1 :])
    assert (arguments.model, arguments.tp, arguments.pp, arguments.dp) == ("70b", 8, 8, 1)
    assert (arguments.engine, arguments.ranks, arguments.limit_bytes) == ("lazy,torch", (0, 63), 1 << 20)
    assert arguments.repeat == 2


def test_a_label_of_the_user_reaches_the_ranks(tmp_path: Path) -> None:
    (command,) = dry_run(TINY, tmp_path, DEVICE="cpu", RESTART_TRACE_LABEL="new switch")
    assert command.environment["RESTART_TRACE_LABEL"] == "new switch"


def test_too_few_gpus_in_an_allocation_name_srun_first(tmp_path: Path) -> None:
    done = run_script("run_7b_tp4_pp2.sh", tmp_path, SLURM_JOB_ID="7")
    assert done.returncode == 2
    said = done.stderr.partition("). ")[2]
    assert said.startswith(
        "In this Slurm allocation LAUNCHER=srun starts the ranks on all of its nodes. Otherwise name"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"GLOBAL_BATCH": "10"}, "error: --global-batch-size 10: not divisible by --micro-batch-size 16"),
        ({"EXTRA_ARGS": "--no-such-flag"}, "error: unknown flag --no-such-flag"),
        ({"SAVE_DIR": "gs://bucket/p"}, "error: --save gs://bucket/p: gs:// is not supported"),
        ({"DATA_PATH": "/no/data"}, "error: --data-path: /no/data.idx: No such file or directory"),
        ({"ENGINE": "fastpersist", "SAVE_DIR": "s3://bucket/p"}, "fastpersist: does not save to object storage"),
    ],
)
def test_what_the_ranks_would_refuse_is_refused_in_a_dry_run_and_before_a_job(
    settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    given = {"WORK_DIR": str(tmp_path / "work"), "SKIP_SETUP": "1", "PYTHON": sys.executable, "DRY_RUN": "1"}
    for script, *words in (["run_7b_tp4_pp2.sh"], ["submit.sh", "7b_tp4_pp2", "--scheduler", "slurm"]):
        done = run_script(script, tmp_path, *words, **given | settings)
        assert done.returncode == 2 and message in done.stderr and done.stdout == "", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_flags_are_not_checked_without_an_interpreter_and_that_is_told(tmp_path: Path) -> None:
    given = {"WORK_DIR": str(tmp_path / "work"), "VENV_DIR": str(tmp_path / "none"), "DRY_RUN": "1"}
    done = run_script("run_7b_tp4_pp2.sh", tmp_path, **given, EXTRA_ARGS="--no-such-flag")
    assert done.returncode == 0 and f"flags are not checked before the launch: there is no {tmp_path}" in done.stderr


def test_a_dry_run_of_a_drill_is_the_command_of_the_drill(tmp_path: Path) -> None:
    given = {"WORK_DIR": str(tmp_path / "work"), "SKIP_SETUP": "1", "PYTHON": sys.executable, "DRY_RUN": "1"}
    done = run_script(TINY, tmp_path, **given, KILL_AT="7", HF_TOKEN="s3cret")
    assert done.returncode == 0 and "s3cret" not in done.stdout and list(tmp_path.iterdir()) == [], done.stderr
    words = shlex.split(done.stdout)
    assert words[:3] == [sys.executable, "-m", "megatron_restart_tools.restart_drill"]
    drill = parse_arguments_of_drill(words[3:])
    assert (drill.fault, drill.at.iteration, drill.no_reference) == ("sigkill-all", 7, True)
    assert drill.out.parent == tmp_path / "work" and drill.checkpoints == drill.out / "checkpoints"
    assert drill.command[0] == "env" and str(ROOT / "pretrain_gpt.py") in drill.command


def test_too_few_gpus_in_the_hostfile_are_counted(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node0 slots=4\nnode1 slots=2\n")
    done = run_script("run_13b_tp4_pp4.sh", tmp_path, HOSTFILE=str(hostfile))
    assert done.returncode == 2
    assert "needs 16 GPUs (TP4 PP4 DP1), sees 6 (2 hosts in" in done.stderr


@pytest.mark.parametrize(
    ("script", "settings", "message"),
    [
        ("run_7b_tp4_pp2.sh", {"DP": "two"}, "DP=two: give a whole number"),
        ("run_7b_tp4_pp2.sh", {"LAUNCHER": "mpirun"}, f"LAUNCHER=mpirun: use {', '.join([*LAUNCHERS][:-1])} or "),
        ("run_7b_tp4_pp2.sh", {"MODE": "simulate"}, "MODE=simulate: use train, restart, replay or scaled"),
        ("run_7b_tp4_pp2.sh", {"DRY_RUN": "memory"}, "DRY_RUN=memory: use 1 or plan"),
        ("run_7b_tp4_pp2.sh", {"DRY_RUN": "plan", "MODE": "replay"}, "DRY_RUN=plan: shows what a training needs"),
        (
            "run_7b_tp4_pp2.sh",
            {"BLOCKED_TARGET": "5"},
            "BLOCKED_TARGET=5 DURABLE_TARGET=: are used only by DRY_RUN=plan",
        ),
        ("run_7b_tp4_pp2.sh", {"RECOMPUTE": "some"}, "RECOMPUTE=some: use auto, none, selective or full"),
        ("run_7b_tp4_pp2.sh", {"RECOMPUTE": "full", "DEVICE_GB": "40"}, "DEVICE_GB=40: has an effect only with RECOMP"),
        ("run_7b_tp4_pp2.sh", {"DEVICE_GB": "40.5"}, "DEVICE_GB=40.5: give a whole number"),
        (TINY, {"DEVICE_GB": "40"}, "DEVICE_GB=40: has an effect only with RECOMPUTE=auto on GPUs"),
        ("run_7b_tp4_pp2.sh", {"KILL_AT": "3"}, "KILL_AT=3: MODE=train injects no fault; use MODE=restart"),
        ("run_7b_tp4_pp2.sh", {"KILL_AT": "3", "MODE": "replay"}, "KILL_AT=3: MODE=replay injects no fault"),
        ("run_7b_tp4_pp2.sh", {"COMMAND_TO": "/c", "MODE": "replay"}, "COMMAND_TO: MODE=replay trains nothing"),
        (TINY, {"MAX_RESTARTS": "1"}, "MAX_RESTARTS=1: only LAUNCHER=fork restarts in place"),
        (TINY, {"LAUNCHER": "fork", "STANDBY": "1"}, "STANDBY=1: needs MAX_RESTARTS, and one node (no HOSTFILE)"),
        (
            TINY,
            {"LAUNCHER": "fork", "STANDBY": "1", "MAX_RESTARTS": "0"},
            "STANDBY=1: needs MAX_RESTARTS, and one node",
        ),
        (TINY, FORK | {"STANDBY": "1", "MASTER_PORT": "9"}, "MASTER_PORT=9: standby ranks rendezvous while"),
        (TINY, {"LAUNCHER": "fork", "IN_PROCESS_RESTART": "1"}, "IN_PROCESS_RESTART=1: needs MAX_RESTARTS"),
        (TINY, FORK | {"STANDBY": "1", "IN_PROCESS_RESTART": "1"}, "IN_PROCESS_RESTART=1: both decide which ranks"),
        (TINY, FORK | {"IN_PROCESS_RESTART": "1", "DEVICE": "cuda"}, "IN_PROCESS_RESTART=1: ranks on CUDA devices"),
        (TINY, FORK | {"STANDBY": "1", "DEVICE": "cuda"}, "STANDBY=1: standby ranks would take memory of the devices"),
        (TINY, FORK, "MAX_RESTARTS=1: MODE=restart starts a new launch after the kill"),
        (TINY, FORK | {"MAX_RESTARTS": "one"}, "MAX_RESTARTS=one: give a whole number"),
        (TINY, FORK | {"ALLOW_SHRINK": "0"}, "ALLOW_SHRINK=0: use 1, or leave it out"),
        (TINY, FORK | {"HEARTBEAT_TIMEOUT": "1s"}, "HEARTBEAT_TIMEOUT=1s: give seconds"),
        (TINY, FORK | {"HEARTBEAT_TIMEOUT": "0"}, "HEARTBEAT_TIMEOUT=0: give seconds, as 2 or 0.5, at least 0.1"),
        (TINY, FORK | {"HEARTBEAT_TIMEOUT": "0.09"}, "HEARTBEAT_TIMEOUT=0.09: give seconds, as 2 or 0.5, at least 0.1"),
        (
            TINY,
            {"SAVE_DIR": "s3:/b/p"},
            "SAVE_DIR=s3:/b/p: a URI has two slashes: give s3://BUCKET/PREFIX, or ./s3:/b/p",
        ),
        (TINY, {"DRY_RUN": "1", "ITERS": "8"}, "KILL_AT=8: must be less than ITERS=8"),
        (TINY, {"DRY_RUN": "1", "TRACE_DIR": "/t"}, "TRACE_DIR=/t: MODE=restart writes its trace to a new directory"),
        (TINY, FORK | {"DRY_RUN": "1"}, "MAX_RESTARTS=1: MODE=restart starts a new launch after the kill"),
        ("run_70b_tp8_pp8.sh", {"DRY_RUN": "1", "MODE": "restart"}, "take a command each with LAUNCHER=torchrun"),
        (TINY, {"MEET_TIMEOUT": "0"}, "MEET_TIMEOUT=0: give whole seconds, at least 1"),
        (TINY, {"ENGINE": "memory"}, "ENGINE=memory: megatron.launch holds the memory of its saves; use LAUNCHER=fork"),
        (TINY, {"IMAGE": "x.sif"}, "IMAGE=x.sif: submit.sh runs ranks with the Python of an image"),
        (TINY, {"TOKENIZER_MODEL": "/m"}, "TOKENIZER_MODEL=/m: has an effect only with DATA_PATH"),
        (TINY, {"STANDBY": "yes"}, "STANDBY=yes: use 1 or load, or leave it out"),
        (TINY, {"HOST_GRACE": "soon"}, "HOST_GRACE=soon: give whole seconds"),
        (TINY, {"MASTER_PORT": "rendezvous"}, "MASTER_PORT=rendezvous: give the number of a port, 1 to 65535"),
        (
            "run_7b_tp4_pp2.sh",
            {"DRY_RUN": "1", "GPUS_PER_NODE": "4", "NODE_RANK": "2"},
            "NODE_RANK=2: 8 ranks (TP4 PP2",
        ),
        (
            TINY,
            {"NNODES": "2", "GPUS_PER_NODE": "4", "KILL_AT": "none", "DATA_PATH": "/d"},
            "2 nodes without HOSTFILE: start",
        ),
        (TINY, {"COORDINATOR_PORT": "65536"}, "COORDINATOR_PORT=65536: give the number of a port, 1 to 65535"),
        ("run_7b_tp4_pp2.sh", {"DEVICE": "cpu"}, "DEVICE=cpu: the 7b preset needs GPUs"),
        ("run_7b_tp4_pp2.sh", {"HOSTFILE": "/no/such"}, "HOSTFILE=/no/such: cannot be read"),
        ("run_7b_tp4_pp2.sh", {"DRY_RUN": "1", "GPUS_PER_NODE": "3"}, "set GPUS_PER_NODE to a divisor of 8"),
        ("run_7b_tp4_pp2.sh", {"DRY_RUN": "1", "GPUS_PER_NODE": "4", "NNODES": "4"}, "set NNODES=2"),
        (TINY, {"ITERS": "8"}, "KILL_AT=8: must be less than ITERS=8"),
        (TINY, {"KILL_AT": "5"}, "KILL_AT=5: must be more than SAVE_INTERVAL=5"),
        (TINY, {"TRACE_DIR": "/t"}, "TRACE_DIR=/t: MODE=restart writes its trace to a new directory"),
        (TINY, {"LAUNCHER": "srun", "DATA_PATH": "/d", "KILL_AT": "none"}, "no allocation; start within"),
        ("drill_slurm.sh", {}, "SLURM_JOB_ID is not set: start within an allocation"),
        ("drill_slurm.sh", {"SLURM_JOB_ID": "7"}, "SLURM_JOB_NUM_NODES=: the allocation must say"),
    ],
)
def test_bad_settings_are_named(script: str, settings: dict[str, str], message: str, tmp_path: Path) -> None:
    done = run_script(script, tmp_path, WORK_DIR=str(tmp_path / "work"), **settings)
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        ("a slots=4\nb slots=4\na slots=4\n", {}, "names a twice; give each host one line"),
        ("a slots=4\n", {}, "names 1 hosts, and 8 ranks (TP2 PP2 DP2) with 4 per node take 2"),
        ("a slots=4\nb slots=3\n", {}, "b has slots=3, and every host gets 4 ranks"),
        ("a slots=4\nb slots=x\n", {}, "'b slots=x' is not of the form HOST slots=N"),
        ("a\nb\n", {"GPUS_PER_NODE": "2"}, "names 2 hosts, and 8 ranks"),
        ("a slots=4\nb\n", {"LAUNCHER": "deepspeed"}, "'b' has no slots=N, without which DeepSpeed's launcher reads"),
    ],
)
def test_bad_hostfiles_are_named(lines: str, settings: dict[str, str], message: str, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(lines)
    given = {"DEVICE": "cpu", "KILL_AT": "none", "SKIP_SETUP": "1", "WORK_DIR": str(tmp_path / "work")}
    done = run_script(TINY, tmp_path, HOSTFILE=str(hostfile), **given, **settings)
    assert done.returncode == 2 and f"HOSTFILE={hostfile}: " in done.stderr and message in done.stderr, done.stderr
    shown = run_script(TINY, tmp_path, HOSTFILE=str(hostfile), DRY_RUN="1", **given, **settings)
    assert (shown.returncode, shown.stdout, shown.stderr) == (2, "", done.stderr)
    assert list(tmp_path.iterdir()) == [hostfile]


@pytest.mark.parametrize(
    ("slurm", "message"),
    [
        ({"SLURM_JOB_NUM_NODES": "two"}, "SLURM_JOB_NUM_NODES=two: must be a number of nodes; unset"),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "4"}, "SLURM_NNODES=4 contradict each other"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "=2: 8 ranks (TP2 PP2 DP2) with 2 per node take 4 nodes"),
        (
            {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_CPUS_PER_NODE": "4(x3),1"},
            "SLURM_JOB_CPUS_PER_NODE=4(x3),1: 8 ranks (TP2 PP2 DP2) with 2 per node take 4 nodes with a "
            "processor for each rank, and the allocation has 3 such nodes; allocate them (--nodes 4 --ntasks-per-",
        ),
        (
            {"SLURM_JOB_CPUS_PER_NODE": "many"},
            "SLURM_JOB_CPUS_PER_NODE=many: must be numbers of processors, as 8(x2),4",
        ),
        ({"DEVICE": "cuda", "SLURM_GPUS_ON_NODE": "1"}, "SLURM_GPUS_ON_NODE=1: 8 ranks (TP2 PP2 DP2) with 2 per"),
        ({"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-3]"}, "names 3 hosts, SLURM_JOB_NUM_NODES=4"),
    ],
)
def test_slurm_variables_that_contradict_are_named(slurm: dict[str, str], message: str, tmp_path: Path) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text("#!/bin/bash\nprintf 'n1\\nn2\\nn3\\n'\n")
    scontrol.chmod(0o755)
    given = {"DEVICE": "cpu", "KILL_AT": "none", "SKIP_SETUP": "1", "LAUNCHER": "srun", "GPUS_PER_NODE": "2"}
    given |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "PATH": f"{scontrol.parent}:/usr/bin:/bin"}
    done = run_script(TINY, tmp_path, WORK_DIR=str(tmp_path / "work"), **given | slurm)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_no_setting_is_evaluated(tmp_path: Path) -> None:
    """Neither here nor by a shell: bash evaluates the subscript of a name in an arithmetic expression."""
    evaluated = tmp_path / "evaluated"
    value = f"BASH_VERSINFO[$(touch {evaluated})0]"
    given = {"DRY_RUN": "1", "SKIP_SETUP": "1", "PYTHON": "/no/such", "WORK_DIR": str(tmp_path / "work")}
    for name in [*DECLARATIONS, "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", "SLURM_LOCALID"]:
        done = run_script("run_7b_tp4_pp2.sh", tmp_path, **given | {name: value})
        assert not evaluated.exists(), (name, done.stderr)
    for name in ("--nodes", "--time"):
        run_script("submit.sh", tmp_path, "7b_tp4_pp2", "--scheduler", "slurm", name, value, **given)
        assert not evaluated.exists(), name


@pytest.mark.parametrize("name", ["MODEL", "TP", "PP", "NUM_LAYERS", "HIDDEN_SIZE", "FFN_HIDDEN_SIZE"])
@pytest.mark.parametrize("script", ["run_7b_tp4_pp2.sh", TINY, "kill_resume.sh"])
def test_what_a_preset_fixes_is_refused_as_a_setting(script: str, name: str, tmp_path: Path) -> None:
    done = run_script(script, tmp_path, DRY_RUN="1", SKIP_SETUP="1", PYTHON=sys.executable, **{name: "4"})
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and f"error: {name}=4: the preset fixes it" in line, done.stderr


WithoutIt = Callable[[str], tuple[Path, dict[str, str], subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def without_it(tmp_path_factory: pytest.TempPathFactory) -> WithoutIt:
    """Of a launcher over two hosts: the directory, the settings and the result of a dry run, one for all tests."""
    directory = tmp_path_factory.mktemp("hosts")
    hostfile = directory / "hosts"
    hostfile.write_text("".join(f"{host} slots=4\n" for host in "abcd"))

    @functools.cache
    def dry_run_over_hosts(launcher: str) -> tuple[Path, dict[str, str], subprocess.CompletedProcess[str]]:
        given = {"DRY_RUN": "1", "SKIP_SETUP": "1", "WORK_DIR": str(directory / "work"), "RECOMPUTE": "none"}
        given |= {"RESTART_TRACE_LAUNCH_ID": "id", "GPUS_PER_NODE": "4"}
        given |= {"LAUNCHER": {"restarts": "fork", "by hand": "torchrun"}.get(launcher, launcher)}
        given |= {} if launcher in BY_SLURM else {"HOSTFILE": str(hostfile)}
        given |= {"NODE_RANK": "0"} if launcher == "by hand" else {}
        given |= {"MAX_RESTARTS": "3"} if launcher == "restarts" else {}
        return directory, given, run_script("run_7b_tp4_pp2.sh", directory, **given)

    return dry_run_over_hosts


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [*LAUNCHERS, "restarts", "by hand"])
@pytest.mark.parametrize(
    "settings",
    [
        {"ALLOW_SHRINK": "1"}, {"HEARTBEAT_TIMEOUT": "5"}, {"COORDINATOR_ADDR": "a"}, {"COORDINATOR_PORT": "9"},
        {"SPARES": "1"}, {"HOST_GRACE": "5"}, {"MEET_TIMEOUT": "5"}, {"MAX_RESTARTS": "1"}, {"MASTER_ADDR": "x"},
        {"MASTER_PORT": "9"}, {"NODE_RANK": "1"}, {"IN_PROCESS_RESTART": "1"},
    ],
    ids=lambda settings: "".join(settings),
)  # fmt: skip
def test_a_setting_has_its_effect_or_is_refused_by_name(
    launcher: str, settings: dict[str, str], without_it: WithoutIt
) -> None:
    """Over two hosts. What has an effect is in the commands, or decides how long the script itself waits."""
    directory, given, before = without_it(launcher)
    after = run_script("run_7b_tp4_pp2.sh", directory, **given | settings)
    ((name, value),) = settings.items()
    assert before.returncode == 0, before.stderr
    decides = {("MEET_TIMEOUT", "by hand"), *(("HOST_GRACE", name) for name in FROM_ONE_NODE)}
    decides |= {("NODE_RANK", name) for name in (*ON_EACH_NODE, "by hand")}  # which command is run here
    if (name, launcher) in decides:
        assert after.returncode == 0, after.stderr
    elif after.returncode == 0:
        assert after.stdout != before.stdout, f"{name} does nothing"
    else:
        (line,) = after.stderr.splitlines()
        assert after.returncode == 2 and (f"error: {name}={value}: " in line or "MAX_RESTARTS=3: " in line), line


@pytest.mark.slow
def test_what_a_mode_takes_no_notice_of_is_refused(tmp_path: Path) -> None:
    """All of the settings that there are: a replay has an effect of those that the table of the modes names."""
    work = {"WORK_DIR": str(tmp_path / "work"), "DRY_RUN": "1", "SKIP_SETUP": "1", "PYTHON": sys.executable}
    effective = {
        "MODE", "ENGINE", "SAVE_DIR", "DP", "VOCAB_SIZE", "WORK_DIR", "RANKS", "LIMIT_BYTES", "REPEAT", "STEPS_BETWEEN",
        "RESTART_TRACE_LABEL", "EXPORT", "DRY_RUN", "SKIP_SETUP", "PYTHON", "TORCH_VARIANT", "TORCH_VERSION",
        "TORCH_INDEX_URL", "VENV_DIR", "EXTRAS", "MEGATRON_LAUNCH_SECRET",
        "BLOCKED_TARGET", "DURABLE_TARGET",  # refused with DRY_RUN=1, whatever the mode
    }  # fmt: skip
    for name in DECLARATIONS.keys() - effective:
        done = run_script("run_7b_tp4_pp2.sh", tmp_path, **work, MODE="replay", **{name: "1"})
        assert done.returncode == 2 and f"error: {name}" in done.stderr, (name, done.stderr)
    for mode in ("train", "restart", "scaled"):
        for name in ("RANKS", "LIMIT_BYTES", "REPEAT", "STEPS_BETWEEN"):
            done = run_script("run_7b_tp4_pp2.sh", tmp_path, **work, MODE=mode, **{name: "1"})
            assert done.returncode == 2 and f"{name}=1: has an effect only with MODE=replay" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"KILL_AT": "none", "TIME_LIMIT": "5"},
            "TIME_LIMIT=5: with KILL_AT=none there is one launch, without a limit",
        ),
        ({"KILL_AT": "3"}, "KILL_AT=3: SAVE_DIR={save} holds a checkpoint, which is resumed without a fault"),
        ({"COMMAND_TO": "/c", "KILL_AT": "3"}, "KILL_AT=3: with COMMAND_TO another program launches the command"),
    ],
)
def test_a_fault_that_would_not_come_is_refused(settings: dict[str, str], message: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    save.mkdir()
    (save / "latest").touch()
    done = run_script(TINY, tmp_path, SAVE_DIR=str(save), WORK_DIR=str(tmp_path / "work"), **settings)
    assert done.returncode == 2 and message.format(save=save) in done.stderr, done.stderr


def test_a_label_of_the_user_does_not_replace_that_of_a_scaled_preset(tmp_path: Path) -> None:
    (command,) = dry_run("run_3b_tp4_pp1.sh", tmp_path, MODE="scaled", RESTART_TRACE_LABEL="new switch")
    label = command.environment["RESTART_TRACE_LABEL"]
    assert label.startswith("Scaled: ") and label.endswith(" new switch")


# In place of the interpreter: notes its arguments; node FAIL_NODE fails, the others wait to be stopped.
STAND_IN = """#!/usr/bin/env bash
[[ $* != *check_run* && $* != *check_hosts* ]] || exit 0
while (($#)); do
    case $1 in --node_rank | --node-rank) node=$2 ;; esac
    shift
done
echo "$$" >"$NOTES/started_$node"
until [[ -e $NOTES/started_$((1 - node)) ]]; do sleep 0.02; done
[[ $node != "${FAIL_NODE:-}" ]] || exit 3
[[ -z ${FAIL_NODE:-} ]] || exec sleep 600  # longer than the test waits
"""


@pytest.mark.parametrize(
    ("launcher", "fail_node"), [("torchrun", ""), ("torchrun", "0"), *((name, "1") for name in ON_EACH_NODE)]
)
def test_one_launcher_per_host_of_a_hostfile(launcher: str, fail_node: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=4\n127.0.0.1 slots=4\n")
    done = run_script(
        TINY,
        tmp_path,
        DEVICE="cpu",
        HOSTFILE=str(hostfile),
        SKIP_SETUP="1",
        PYTHON=str(python),
        DATA_PATH="/given",
        KILL_AT="none",
        LAUNCHER=launcher,
        SAVE_DIR=str(tmp_path / "save"),
        NOTES=str(tmp_path),
        FAIL_NODE=fail_node,
    )
    assert sorted(path.name for path in tmp_path.glob("started_*")) == ["started_0", "started_1"]
    assert done.returncode == (3 if fail_node else 0), done.stderr
    for path in tmp_path.glob("started_*"):
        assert not is_running(path.read_text().strip())


def is_running(pid: str) -> bool:
    """Whether the stand-in of this process id runs; one that has ended may wait for init to collect its status."""
    try:
        return b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()  # which is empty once it has ended
    except FileNotFoundError:
        return False


def ask_for(tmp_path: Path, mode: str, *wrapper: str, **settings: str) -> list[str]:
    """What the tiny preset, on data that is there, says on stderr before it is refused, but for its progress."""
    golden = ROOT / "tests" / "golden" / "upstream_run" / "data"
    data = {"DATA_PATH": str(golden / "corpus_text_document"), "TOKENIZER_MODEL": str(golden / "tokenizer.model")}
    given = data if mode != "replay" else {}  # which reads none
    given |= {"MODE": mode, "SKIP_SETUP": "1", "PYTHON": sys.executable, "WORK_DIR": str(tmp_path / "work")}
    if mode == "train":
        given["KILL_AT"] = "none"
    done = run_script(TINY, tmp_path, wrapper=wrapper, **given | settings)
    assert done.returncode == 2 and done.stdout == "", (done.stdout, done.stderr)
    assert not list(tmp_path.rglob("*.jsonl"))  # no rank has started
    return [line for line in done.stderr.splitlines() if not line.startswith("[tiny_")]


def test_a_model_that_there_is_not_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "9b_tp1_pp1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: 9b_tp1_pp1: there is no such preset; give one of 13b_tp4_pp4 1b_tp1_pp1 " in line


def test_a_layout_without_a_script_is_a_preset_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    environ = {"DRY_RUN": "1", "VENV_DIR": str(tmp_path), "WORK_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    assert main(["run", "3b_tp2_pp2"], environ) == 0
    parallel = configuration(split_command(capfd.readouterr().out.splitlines()[0]), 4).parallel
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (2, 2)
    assert main(["submit", "3b_tp2_pp2", "--scheduler", "slurm"], environ) == 0
    assert f"exec bash {BENCH}/run.sh 3b_tp2_pp2\n" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "restart", "scaled", "replay"])
def test_what_cannot_be_is_one_message_before_any_rank_is_started(mode: str, tmp_path: Path) -> None:
    (said,) = ask_for(tmp_path, mode, ENGINE="nope")
    assert f"error: ENGINE=nope: there is no engine nope; give one of {' '.join(builtin_engines())}" in said
    (tmp_path / "file").touch()
    (said,) = ask_for(tmp_path, mode, SAVE_DIR=str(tmp_path / "file" / "save"))
    assert f"{tmp_path}/file/save: cannot be " in said
    (said,) = ask_for(tmp_path, mode, WORK_DIR=str(tmp_path / "file" / "work"))
    assert f"WORK_DIR={tmp_path}/file/work: cannot be written to; set another" in said


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "replay"])
def test_an_engine_that_there_is_not_is_not_printed_or_submitted(mode: str, tmp_path: Path) -> None:
    given = {"MODE": mode, "DRY_RUN": "1", "WORK_DIR": str(tmp_path / "work")}
    replayed = [LAZY_SHARED, LAZY_ZSTD, MEMORY_PEER, *RAW, *LIBRARIES, ALL]
    known = [*builtin_engines(), *(replayed if mode == "replay" else [])]
    for script, *words in (["run_7b_tp4_pp2.sh"], ["submit.sh", "7b_tp4_pp2", "--scheduler", "slurm"]):
        done = run_script(script, tmp_path, *words, ENGINE="nope", **given)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.endswith(f"ENGINE=nope: there is no engine nope; give one of {' '.join(known)}\n")
        several = run_script(script, tmp_path, *words, ENGINE=",".join(known), **given)
        assert several.returncode == (0 if mode == "replay" else 2), several.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "restart", "replay"])
def test_storage_without_room_is_one_message_before_any_rank_is_started(mode: str, tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("a file system of its own takes root")
    full = tmp_path / "full"
    full.mkdir()
    mount = f'mount -t tmpfs -o size=64k none {full} && head -c 64K /dev/zero >{full}/all; exec bash "$@"'
    wrapper = ("unshare", "--mount", "bash", "-c", mount, "bash")
    (said,) = ask_for(tmp_path, mode, *wrapper, SAVE_DIR=str(full))
    assert str(full) in said and ("No space left on device" in said or "has 0 bytes free" in said)
