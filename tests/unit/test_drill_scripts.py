"""kill_resume.sh, and the scripts within a Slurm allocation."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.script_helpers import TINY, run_script, split_command


def test_kill_resume_passes_its_arguments_on(tmp_path: Path) -> None:
    done = run_script("kill_resume.sh", tmp_path, DRY_RUN="1", OUT_DIR="/o ut", SKIP_SETUP="1", PYTHON="py")
    assert done.returncode == 0, done.stderr
    first, preset = done.stdout.splitlines()
    assert shlex.split(first) == [
        "py", "-m", "megatron_restart_tools.restart_drill", "--fault", "sigkill-all", "--at", "mid-save-write",
        "--cycles", "2", "--out",
        "/o ut", "--", "tiny_tp2_pp2_dp2",
    ]  # fmt: skip
    assert split_command(preset).option("--nproc_per_node") == "8"

    arguments = ["--fault", "sigstop", "--at", "random:7", "--", "my program", "--flag"]
    done = run_script("kill_resume.sh", tmp_path, *arguments, DRY_RUN="1", SKIP_SETUP="1", PYTHON="py")
    (line,) = done.stdout.splitlines()
    words = shlex.split(line)
    assert words[-len(arguments) :] == arguments and "tiny_tp2_pp2_dp2" not in words
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fault", "nope"), "restart-drill: error: argument --fault: invalid choice: 'nope'"),
        (("7b_tp4_pp2",), "error: 7b_tp4_pp2: give a preset after --"),
        (("1b_tp1_pp1", "--", "3b_tp4_pp1"), "error: 1b_tp1_pp1: give a preset after --"),
        (("--", "9b_tp1_pp1"), "error: 9b_tp1_pp1: no program and no preset; there are 13b_tp4_pp4, "),
        (("--", "13b_tp4_pp4"), "COMMAND_TO: 2 nodes take a command each with LAUNCHER=torchrun"),
    ],
)
def test_a_dry_run_refuses_what_the_drill_would(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    given = {"DRY_RUN": "1", "SKIP_SETUP": "1", "PYTHON": sys.executable, "OUT_DIR": str(tmp_path / "out")}
    done = run_script("kill_resume.sh", tmp_path, *arguments, **given)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_kill_resume_drills(tmp_path: Path) -> None:
    """It ends as the drill does, here with what the drill says of its command line."""
    done = run_script("kill_resume.sh", tmp_path, "--cycles", "0", SKIP_SETUP="1", PYTHON=sys.executable)
    assert done.returncode == 2 and "--cycles 0: must be at least 1" in done.stderr


@pytest.mark.parametrize("script", ["kill_resume.sh", "drill_slurm.sh"])
@pytest.mark.parametrize("line", ["DRY_RUN=1", "KILL_AT=3", "REPEAT=2", "BLOCKED_TARGET=3", "MODE=replay"])
def test_a_setting_without_effect_on_a_drill_is_refused_by_file_and_line(
    line: str, script: str, tmp_path: Path
) -> None:
    file = tmp_path / "my.conf"
    file.write_text(f"ENGINE=lazy\n{line}\n")
    done = run_script(script, tmp_path, "--config", str(file), SKIP_SETUP="1", PYTHON=sys.executable)
    name = line.partition("=")[0]
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{script}: error: {file}:2: {name}: has no effect here; leave it out\n"


def test_kill_resume_takes_its_directory_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "my.conf"
    file.write_text("OUT_DIR=/of/file\n")
    done = run_script(
        "kill_resume.sh", tmp_path, "--config", str(file), DRY_RUN="1", SKIP_SETUP="1", PYTHON=sys.executable
    )
    assert done.returncode == 0, done.stderr
    assert "--out /of/file" in done.stdout.splitlines()[0]


SCONTROL = """#!/usr/bin/env bash
# Stands in for Slurm's, which cannot be had here.
[[ "$*" == "show hostnames n[4-5]" ]] && printf 'n4\nn5\n'
"""


def test_drill_within_an_allocation(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    arguments = ["--fault", "sigkill-one", "--at", "mid-step", "--", "13b_tp4_pp4"]
    done = run_script(
        "drill_slurm.sh",
        tmp_path,
        *arguments,
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        DRY_RUN="1",
        SLURM_JOB_ID="7",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_NODELIST="n[4-5]",
        SLURM_TASKS_PER_NODE="8(x2)",
        SKIP_SETUP="1",
        PYTHON="py",
    )
    assert done.returncode == 0, done.stderr
    job, drill, preset = done.stdout.splitlines()
    assert job == "# job 7: 2 nodes, rank 0 on n4, 8 tasks per node"
    assert shlex.split(drill)[-len(arguments) :] == arguments
    words = shlex.split(preset)
    srun = words.index("srun")
    step = ["--nodes", "2", "--ntasks", "16", "--ntasks-per-node", "8", "--export=ALL", "--kill-on-bad-exit=1"]
    assert words[srun + 1 : srun + 1 + len(step)] == step
    assert {"MASTER_ADDR=n4", "WORLD_SIZE=16", "LOCAL_WORLD_SIZE=8"} <= set(words[:srun])


SRUN = """#!/usr/bin/env bash
# Stands in for Slurm's, which cannot be had here: starts the tasks, and ends all of them when one fails.
tasks=0
while [[ $1 == --* ]]; do
    case $1 in
    --ntasks) tasks=$2 && shift 2 ;;
    --nodes | --ntasks-per-node) shift 2 ;;
    *) shift ;;
    esac
done
for ((task = 0; task < tasks; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
done
status=0
while [[ -n $(jobs -pr) ]]; do
    wait -n || { status=$? && kill $(jobs -pr); }
done
exit "$status"
"""


def test_srun_gives_every_task_its_rank(tmp_path: Path) -> None:
    """Through COMMAND_TO, as the drill gets the command."""
    told, program = tmp_path / "command", tmp_path / "python"
    (tmp_path / "srun").write_text(SRUN)
    program.write_text('#!/usr/bin/env bash\necho "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR" >"$NOTES/rank_$RANK"\n')
    for path in (program, tmp_path / "srun"):
        path.chmod(0o755)
    done = run_script(
        TINY,
        tmp_path,
        COMMAND_TO=str(told),
        LAUNCHER="srun",
        DEVICE="cpu",
        SKIP_SETUP="1",
        PYTHON=str(program),
        DATA_PATH="/given",
        MASTER_PORT="29500",
    )
    assert done.returncode == 0, done.stderr
    command = told.read_bytes().decode().split("\0")[:-1]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NOTES": str(tmp_path)}
    subprocess.run(command, env=environment, check=True, timeout=300)
    found = sorted(path.read_text().split() for path in tmp_path.glob("rank_*"))
    assert found == [[str(rank), str(rank), "8", "127.0.0.1"] for rank in range(8)]
