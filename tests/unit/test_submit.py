"""submit.sh: the job that it writes, how it hands it over, and what it refuses. tests/cluster runs one by a real Slurm.

No PBS can be had here: what a job's script must hold, and that qsub prints the job's number, is from OpenPBS's
documentation (https://openpbs.org, qsub(1B)); tests/unit/test_launch_pbs.py runs presets in environments of its jobs.
"""

from __future__ import annotations

import re
import shlex
import shutil
import stat
import sys
from pathlib import Path

import pytest

from megatron.processes.parent_process import SHUTDOWN_TIMEOUT_VARIABLE
from restart_trace.cycles import LAUNCHER_VARIABLES
from tests.unit.script_helpers import BENCH, ROOT, TINY, commands_of_nodes, run_script
from tools.restart_bench import submit
from tools.restart_bench.errors import SettingsError
from tools.restart_bench.nodes import hosts_of
from tools.restart_bench.schedulers import COMMANDS, SCHEDULERS, Resources, Scheduler
from tools.restart_bench.settings import Settings

SECRET = "s3cr;et"
TOOLS = (
    "bash", "env", "dirname", "basename", "sed", "grep", "sort", "hostname", "nproc", "tail", "cat", "cp", "rm",
    "mkdir", "mktemp", "chmod", "awk", "date", "realpath",
)  # fmt: skip
# Prints what schedulers print of a job that they take, and keeps it as they do.
TAKES = """#!/usr/bin/env bash
printf '%s\\n' "$@" >{notes}/arguments
cp "${{!#}}" {notes}/job
echo {number}
"""
REFUSES = """#!/usr/bin/env bash
echo "{command}: this is printed first" >&2
echo "{command}: error: invalid account or account/partition combination specified" >&2
exit 1
"""


def job_of(script: str) -> tuple[list[str], dict[str, str], str]:
    """(directives, variables, last line) of a job's script."""
    lines = script.splitlines()
    directives = [line.partition(" ")[2] for line in lines if re.match("#[A-Z]+ -", line)]
    words = [shlex.split(line)[1] for line in lines if line.startswith("export ")]
    return directives, dict(word.split("=", 1) for word in words), lines[-1]


def path_with(directory: Path, name: str | None = None, body: str = "") -> str:
    """A PATH on which no scheduler is but the command `name`: this machine may have one."""
    programs = directory / "bin"
    programs.mkdir()
    for tool in TOOLS:
        (programs / tool).symlink_to(shutil.which(tool) or tool)
    if name is not None:
        (programs / name).write_text(body)
        (programs / name).chmod(0o755)
    return str(programs)


def test_a_slurm_job_has_the_nodes_of_the_layout_and_the_settings(tmp_path: Path) -> None:
    path = path_with(tmp_path, "sbatch", TAKES.format(notes=tmp_path, number="4711"))
    settings = {"WORK_DIR": str(tmp_path / "work"), "ENGINE": "lazy", "EXTRA_ARGS": "--seed 5  --keep-last 2"}
    secret = {"HF_TOKEN": SECRET, "EXPORT": "MINE", "MINE": "a 'b'"}
    arguments = ("70b_tp8_pp8", "--scheduler", "slurm", "--time", "1:30:00", "--", "--account", "physics")
    done = run_script("submit.sh", tmp_path, *arguments, PATH=path, DP="2", **settings, **secret)
    assert (done.returncode, done.stdout) == (0, "4711\n"), done.stderr
    handed = (tmp_path / "arguments").read_text().splitlines()
    written = tmp_path / "work" / "job.slurm"
    assert handed == ["--parsable", "--account", "physics", str(written)]
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    directives, variables, last = job_of((tmp_path / "job").read_text())
    asked = {"--nodes=16", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=1:30:00", "--requeue"}
    assert asked < set(directives)
    settings["EXTRA_ARGS"] += " --exit-signal-handler"  # Slurm signals the ranks before the time limit
    assert variables.items() >= (settings | secret | {"LAUNCHER": "srun", "DP": "2", "GPUS_PER_NODE": "8"}).items()
    assert "--signal=SIGTERM@120" in directives
    assert variables[SHUTDOWN_TIMEOUT_VARIABLE] == "120"
    assert f"ckpt_analysis {tmp_path / 'work' / 'checkpoints' / 'restart_trace'}\n" in done.stderr
    assert last == f"exec bash {BENCH / 'run_70b_tp8_pp8.sh'}"


@pytest.mark.parametrize(
    ("mode", "preset"), [("restart", "7b_tp4_pp2"), ("scaled", "7b_tp4_pp2"), ("replay", "7b_tp4_pp2")]
)
def test_where_a_job_leaves_its_report(mode: str, preset: str, tmp_path: Path) -> None:
    path = path_with(tmp_path, "sbatch", TAKES.format(notes=tmp_path, number="4711"))
    done = run_script("submit.sh", tmp_path, preset, PATH=path, MODE=mode, WORK_DIR=str(tmp_path / "work"))
    assert done.returncode == 0, done.stderr
    assert f"Afterwards {tmp_path}/work/{mode}-DATE has the report (ckpt_report.html, report.txt)" in done.stderr
    assert "checkpoints/restart_trace" not in done.stderr
    _, variables, _ = job_of((tmp_path / "job").read_text())
    assert "--exit-signal-handler" not in variables.get("EXTRA_ARGS", "")  # the drill kills, and a replay has no ranks


def test_options_may_be_one_word(tmp_path: Path) -> None:
    given = {"DRY_RUN": "1", "WORK_DIR": str(tmp_path / "work")}
    done = run_script("submit.sh", tmp_path, "--scheduler=slurm", "13b_tp4_pp4", "--nodes=4", "--time=0:30:00", **given)
    assert done.returncode == 0, done.stderr
    directives, _, _ = job_of(done.stdout.rpartition("sbatch")[0])
    assert {"--nodes=4", "--ntasks-per-node=4", "--time=0:30:00"} < set(directives)


@pytest.mark.slow
def test_a_plan_is_shown_beside_the_job(tmp_path: Path) -> None:
    given = {"DRY_RUN": "plan", "WORK_DIR": str(tmp_path / "work"), "SKIP_SETUP": "1", "PYTHON": sys.executable}
    done = run_script("submit.sh", tmp_path, "1b_tp1_pp1", "--scheduler", "slurm", **given)
    assert done.returncode == 0 and "#SBATCH --nodes=1" in done.stdout, done.stderr
    assert "checks passed: settings, flags\n" in done.stderr and "durable within 60 s" in done.stderr


@pytest.mark.parametrize(
    ("nodes", "spares", "refused"), [("3", "1", ""), ("2", "1", "SPARES=1: --nodes 2 names 0 hosts")]
)
def test_restarts_in_place_are_a_job_of_pbs(nodes: str, spares: str, refused: str, tmp_path: Path) -> None:
    restarts = {"LAUNCHER": "fork", "MAX_RESTARTS": "3", "ENGINE": "memory", "SPARES": spares}
    given = {"DRY_RUN": "1", "WORK_DIR": str(tmp_path / "work"), "SKIP_SETUP": "1", "PYTHON": sys.executable}
    done = run_script("submit.sh", tmp_path, "13b_tp4_pp4", "--scheduler", "pbs", "--nodes", nodes, **given | restarts)
    if refused:
        assert done.returncode == 2 and refused in done.stderr, done.stderr
        return
    assert done.returncode == 0 and "copies of other hosts' (--replicas 2)" in done.stderr, done.stderr
    _, variables, _ = job_of(done.stdout.rpartition("qsub")[0])
    assert variables.items() >= restarts.items()


def test_a_pbs_job_spreads_the_ranks_over_the_nodes(tmp_path: Path) -> None:
    path = path_with(tmp_path, "qsub", TAKES.format(notes=tmp_path, number="4711.pbs"))
    arguments = ("13b_tp4_pp4", "--nodes", "4", "--", "-q", "debug")
    done = run_script("submit.sh", tmp_path, *arguments, PATH=path, WORK_DIR=str(tmp_path / "work"))
    assert (done.returncode, done.stdout) == (0, "4711.pbs\n"), done.stderr
    assert (tmp_path / "arguments").read_text().splitlines() == ["-q", "debug", str(tmp_path / "work" / "job.pbs")]
    directives, variables, _ = job_of((tmp_path / "job").read_text())
    asked = {"-l select=4:ncpus=4:mpiprocs=4:ngpus=4", "-l place=scatter", "-l walltime=4:00:00", "-r y"}
    assert asked < set(directives)
    assert variables["GPUS_PER_NODE"] == "4" and "LAUNCHER" not in variables


def test_a_job_of_a_mode_without_gpus_is_of_one_node(tmp_path: Path) -> None:
    for mode in ("replay", "scaled"):
        work = {"WORK_DIR": str(tmp_path / "work"), "MODE": mode, "DRY_RUN": "1"}
        done = run_script("submit.sh", tmp_path, "70b_tp8_pp8", "--scheduler", "slurm", **work)
        assert done.returncode == 0, done.stderr
        directives, variables, _ = job_of(done.stdout.rpartition("sbatch")[0])
        assert {"--nodes=1", "--ntasks-per-node=1"} < set(directives) and variables["DEVICE"] == "cpu"
        assert not any("gpus" in directive for directive in directives)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_dry_run_shows_the_job_and_no_secret(scheduler: str, tmp_path: Path) -> None:
    settings = {"DRY_RUN": "1", "WORK_DIR": str(tmp_path / "work"), "HF_TOKEN": SECRET, "DEVICE": "cuda"}
    settings |= {"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": "https://store", "SAVE_DIR": "s3://bucket/run"}
    done = run_script("submit.sh", tmp_path, TINY[4:-3], "--scheduler", scheduler, "--", "-x", "a b", **settings)
    assert done.returncode == 0 and list(tmp_path.iterdir()) == [], done.stderr
    script, _, submitted = done.stdout.rstrip("\n").rpartition("\n")
    assert SECRET not in done.stdout and "export HF_TOKEN=***" in script
    assert "export AWS_SECRET_ACCESS_KEY=***" in script
    assert {"export AWS_ENDPOINT_URL=https://store", "export SAVE_DIR=s3://bucket/run"} < set(script.splitlines())
    assert shlex.split(submitted)[-3:] == ["-x", "a b", str(tmp_path / "work" / f"job.{scheduler}")]


def test_an_image_becomes_the_ranks_python(tmp_path: Path) -> None:
    path = path_with(tmp_path, "sbatch", TAKES.format(notes=tmp_path, number="7"))
    image = tmp_path / "restart.sif"
    given = {"PATH": path, "WORK_DIR": str(tmp_path / "work"), "SAVE_DIR": str(tmp_path / "save"), "IMAGE": str(image)}
    refused = run_script("submit.sh", tmp_path, "3b_tp4_pp1", **given)
    assert refused.returncode == 2 and f"IMAGE={image}: there is no such file" in refused.stderr
    image.touch()
    assert run_script("submit.sh", tmp_path, "3b_tp4_pp1", **given).returncode == 0
    _, variables, _ = job_of((tmp_path / "job").read_text())
    python = Path(variables["PYTHON"])
    assert variables["SKIP_SETUP"] == "1" and f"--bind {ROOT} " in python.read_text()
    assert python.stat().st_mode & stat.S_IXUSR and str(image) in python.read_text()
    assert f"--bind {tmp_path / 'save'} {image} " in python.read_text() and (tmp_path / "save").is_dir()
    assert run_script("submit.sh", tmp_path, "3b_tp4_pp1", **given | {"SAVE_DIR": "s3://bucket/run"}).returncode == 0
    assert "s3:" not in python.read_text() and not (tmp_path / "s3:").exists()


def test_without_a_scheduler_the_preset_runs_here(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node0 slots=4\nnode1 slots=4\n")
    settings = {"WORK_DIR": str(tmp_path / "work"), "HOSTFILE": str(hostfile), "DRY_RUN": "1"}
    done = run_script("submit.sh", tmp_path, "7b_tp4_pp2", "--scheduler", "none", **settings)
    assert done.returncode == 0 and len(commands_of_nodes(done.stdout)) == 2, done.stderr


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((), {}, "PRESET is missing; give one of 13b_tp4_pp4 "),
        (("9b",), {}, "PRESET 9b: there is no such preset; give one of 13b_tp4_pp4 "),
        (("3b_tp4_pp1", "7b_tp4_pp2"), {}, "7b_tp4_pp2: a job runs one preset, and 3b_tp4_pp1 is already given"),
        (("3b_tp4_pp1", "--account", "me"), {}, f"--account: unknown option; options of {COMMANDS} come after --"),
        (("3b_tp4_pp1", "--nodes"), {}, "--nodes: give its value"),
        (("3b_tp4_pp1", "--nodes", "0"), {}, "--nodes 0: give a whole number, at least 1"),
        (("3b_tp4_pp1", "--time", "4h"), {}, "--time 4h: give hours, minutes and seconds"),
        (("3b_tp4_pp1", "--time", "2:00"), {}, "--time 2:00: give hours, minutes and seconds"),
        (("3b_tp4_pp1", "--account=me"), {}, f"--account=me: unknown option; options of {COMMANDS} come after --"),
        (("3b_tp4_pp1",), {}, f"no scheduler's command is on PATH ({COMMANDS})"),
        (("3b_tp4_pp1", "--scheduler", "at"), {}, "--scheduler at: use slurm, pbs"),
        (("3b_tp4_pp1", "--scheduler", "slurm"), {}, "--scheduler slurm: sbatch is not on PATH"),
        (("3b_tp4_pp1", "--scheduler", "none", "--nodes", "2"), {}, "--nodes 2: --scheduler none has no job"),
        (("3b_tp4_pp1", "--scheduler", "none", "--", "-q", "x"), {}, "-q x: --scheduler none submits nothing"),
        (("70b_tp8_pp8", "--nodes", "2"), {"DRY_RUN": "1"}, "--nodes 2: 64 ranks (TP8 PP8 DP1) with 8 per node"),
        (("70b_tp8_pp8", "--nodes", "9"), {"DRY_RUN": "1"}, "take 8 nodes, and the others would idle"),
        (("70b_tp8_pp8",), {"DRY_RUN": "1", "GPUS_PER_NODE": "6"}, "do not fill nodes of 6 GPUs"),
        (("70b_tp8_pp8",), {"DRY_RUN": "1", "HOSTFILE": "/h"}, "HOSTFILE=/h: slurm assigns the job's nodes"),
        (("70b_tp8_pp8",), {"DRY_RUN": "1", "LAUNCHER": "fork"}, "LAUNCHER=fork: in a Slurm job srun starts"),
        (("70b_tp8_pp8",), {"DRY_RUN": "1", "ENGINE": "memory"}, "In a Slurm allocation LAUNCHER=fork takes"),
        (("70b_tp8_pp8",), {"DRY_RUN": "1", "MAX_RESTARTS": "1"}, "MAX_RESTARTS=1: only LAUNCHER=fork restarts in"),
        (("70b_tp8_pp8",), {"DRY_RUN": "1", "ENGINE": "memory", "MODE": "restart"}, "ENGINE=memory: megatron.launch"),
        (("7b_tp4_pp2",), {"DRY_RUN": "1", "MODE": "restart", "KILL_AT": "3"}, "KILL_AT=3: must be more than SAVE_"),
        (("7b_tp4_pp2",), {"DRY_RUN": "1", "MODE": "scaled", "LAUNCHER": "srun"}, "LAUNCHER=srun: MODE=scaled starts"),
        (("7b_tp4_pp2",), {"DRY_RUN": "plan", "MODE": "replay"}, "DRY_RUN=plan: shows what a training needs"),
        (("70b_tp8_pp8",), {"DRY_RUN": "1", "MODE": "simulate"}, "MODE=simulate: use train, restart, replay or scaled"),
        (("70b_tp8_pp8", "--nodes", "2"), {"DRY_RUN": "1", "MODE": "scaled"}, "--nodes 2: MODE=scaled runs on one"),
        (("70b_tp8_pp8",), {"DRY_RUN": "1", "DP": "x"}, "DP=x: give a whole number"),
        (("70b_tp8_pp8",), {"DRY_RUN": "1", "WORK_DIR": "/a b"}, "WORK_DIR=/a b: slurm does not accept a path with"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_job_is_named(
    arguments: tuple[str, ...], settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    if "DRY_RUN" in settings and "--scheduler" not in arguments:
        arguments = (*arguments, "--scheduler", "slurm")
    given = {"WORK_DIR": str(tmp_path / "work"), "PATH": path_with(tmp_path)} | settings
    done = run_script("submit.sh", tmp_path, *arguments, **given)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "work").exists()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_what_the_scheduler_refuses_is_told_in_its_words(scheduler: str, tmp_path: Path) -> None:
    name = SCHEDULERS[scheduler].command[0]
    path = path_with(tmp_path, name, REFUSES.format(command=name))
    done = run_script("submit.sh", tmp_path, "3b_tp4_pp1", PATH=path, WORK_DIR=str(tmp_path / "work"))
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line == (
        f"submit.sh: error: {name} refused {tmp_path}/work/job.{scheduler}: {name}: error: invalid account or "
        "account/partition combination specified"
    )


def test_a_work_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    path = path_with(tmp_path, "sbatch", TAKES.format(notes=tmp_path, number="7"))
    (tmp_path / "file").touch()
    done = run_script("submit.sh", tmp_path, "3b_tp4_pp1", PATH=path, WORK_DIR=f"{tmp_path}/file/work")
    assert done.returncode == 2 and f"WORK_DIR={tmp_path}/file/work: cannot be written to" in done.stderr
    assert not (tmp_path / "arguments").exists()


def test_restarts_of_each_schedulers_job_are_told_apart() -> None:
    assert {scheduler.job_id for scheduler in SCHEDULERS.values()} < set(LAUNCHER_VARIABLES)


class Other(Scheduler):
    name, title, command, job_id, host_file = "other", "OTHER", ("osub",), "OTHER_JOB", "OTHER_HOSTS"

    def directives(self, asked: Resources) -> list[str]:
        return [f"#OTHER -n {asked.nodes * asked.tasks}"]


@pytest.mark.slow
def test_a_scheduler_is_one_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SCHEDULERS, "other", Other())
    hosts = tmp_path / "hosts"
    hosts.write_text("n1\nn1\nn2\nn2\n")
    given = {"DRY_RUN": "1", "WORK_DIR": str(tmp_path / "work"), "SKIP_SETUP": "1", "PYTHON": sys.executable}
    given |= {"OTHER_JOB": "7", "OTHER_HOSTS": str(hosts), "LAUNCHER": "fork", "MAX_RESTARTS": "3", "SPARES": "1"}
    arguments = ("13b_tp4_pp4", "--scheduler", "other", "--nodes", "3")
    assert submit.submit(arguments, given, lambda *_: 1) == 0
    script, _, submitted = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    directives, variables, _ = job_of(script)
    assert directives == ["-n 24"] and variables["SPARES"] == "1" and "--exit-signal-handler" not in script
    assert submitted == f"osub {tmp_path}/work/job.other"
    assert hosts_of(Settings(), given, "fork").slots == (2, 2)
    with pytest.raises(SettingsError, match="LAUNCHER=srun: is Slurm's, and this is a OTHER job"):
        submit.submit(arguments, given | {"LAUNCHER": "srun"}, lambda *_: 1)
