"""What a user sets reaches the ranks of every node, under every launcher; and rank 0 is where srun starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.script_helpers import BENCH, ROOT, TINY, dry_run, run_script
from tools.restart_bench.launcher_entries import LAUNCHERS, ON_EACH_NODE

# Values that a shell would take apart, if it were let.
NASTY = {
    "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
    "NCCL_DEBUG_FILE": '/logs/it\'s a "file" of $HOME and `id`, 100% \\ !x *.txt',
    "GLOO_SOCKET_IFNAME": "ib0; exit 3",
    "FI_PROVIDER": "efa&&verbs|tcp>out <in",
    "UCX_TLS": "rc, sm  (two blanks) ~ #",
    "TORCH_NCCL_TRACE": "",
    "LD_LIBRARY_PATH": "/opt/a b/lib:/opt/c",
    "HF_HOME": "$(touch broken)",
    "MEGATRON_TLS_CERT_FILE": "/certificates/this host's.pem",
    "AWS_ENDPOINT_URL": "https://store:9000",
    "MEGATRON_OBJECT_STORE": "google",
    "MY_SETTING": "{a,b} [c]\\",
}
LINES = {"TORCH_LOGS": "one\n  two'\n", "OMP_PLACES": " {0},\t{1} "}
SECRETS = {
    "HF_TOKEN": "hf_'x' $y",
    "WANDB_API_KEY": "k 9\nz",
    "ALL_PROXY": "http://me:pass@host",
    "AWS_ACCESS_KEY_ID": "AKIA_ours",
    "AWS_SECRET_ACCESS_KEY": "s3/cret+ 'x'",
    "AWS_SESSION_TOKEN": "t0ken==",
}
EXPORT = "MY_SETTING WANDB_API_KEY ALL_PROXY"
NOT_SENT = {"TORCH_INDEX_URL": "https://packages", "EDITOR": "ed", "AWS_EXECUTION_ENV": "here"}

# Stand-in for ssh: the login shell of a node that has nothing of this environment.
SSH = """#!/usr/bin/env bash
printf '%s\\n' "$@" >>"$0.seen"
while [[ $1 == -* ]]; do [[ $1 != -o ]] || shift; shift; done
exec env -i PATH=/usr/bin:/bin HOME="$HOME" {shell} -c "$2"
"""
# Stand-in for the interpreter: notes what it was given.
PYTHON = """#!/usr/bin/env bash
[[ $* != *check_run* && $* != *check_hosts* ]] || exit 0
while (($#)); do
    case $1 in --node_rank | --node-rank) node=$2 ;; esac
    shift
done
env -0 >"${0%/*}/seen_$node.env"
"""
# Stand-in for pdsh: exports what DeepSpeed's launcher tells each node to, in a shell that has nothing else.
PDSH = """#!/usr/bin/env bash
command=$*
exports=${command#*export }
env -i PATH=/usr/bin:/bin bash -c "export ${exports%%; cd /*}; env -0" >"${0%/*}/seen_0.env"
stat -c %a "$DS_ENV_FILE" >"${0%/*}/mode"
"""
# Stand-in for a pdsh that is connected to two hosts, on the first of which the launch ends; and for what DeepSpeed's
# launcher has it do when it gets SIGTERM. The interpreter is named so that ps shows the name of the script.
PDSH_OF_TWO_HOSTS = """#!/bin/bash
[[ $* != *pkill* ]] || { touch "${0%/*}/pkill"; exit; }
trap 'kill $(jobs -p); wait; exit 1' TERM
ssh ends & ssh hangs & wait
"""
# The launch ends on both hosts at once, however slow this machine is, and some seconds later pdsh ends well.
PDSH_THAT_LINGERS = """#!/bin/bash
[[ $* != *pkill* ]] || { touch "${0%/*}/pkill"; exit; }
ssh ends & ssh ends & sleep 3
kill -KILL $(jobs -p); wait
sleep 4
"""
SSH_OF_TWO_HOSTS = """#!/bin/bash
trap 'kill $!; exit 1' TERM
case $1 in ends) sleep 4 ;; hangs) sleep 900 & wait ;; esac
"""
SCONTROL = """#!/usr/bin/env bash
# Stand-in for Slurm's
[[ "$*" == "show hostnames n[4-5]" ]] && printf 'n4\\nn5\\n'
"""


def stand_in(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def path_with(directory: Path) -> str:
    return f"{directory}:/usr/bin:/bin"


def seen_by(bin_dir: Path, node: int) -> dict[str, str]:
    found = (bin_dir / f"seen_{node}.env").read_bytes().decode().split("\0")
    return dict(variable.split("=", 1) for variable in found if variable)


def settings(tmp_path: Path, launcher: str, python: str) -> dict[str, str]:
    """Of a launch of the tiny preset over two other nodes."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("nodeA slots=4\nnodeB slots=4\n")
    return {
        "LAUNCHER": launcher,
        "HOSTFILE": str(hostfile),
        "DEVICE": "cpu",
        "SKIP_SETUP": "1",
        "PYTHON": python,
        "DATA_PATH": "/given",
        "KILL_AT": "none",
        "WORK_DIR": str(tmp_path / "work"),
        "PATH": path_with(tmp_path / "bin"),
    }


@pytest.mark.parametrize(("launcher", "shell"), [("torchrun", "bash"), *((name, "sh") for name in ON_EACH_NODE)])
def test_variables_reach_other_nodes_through_ssh(launcher: str, shell: str, tmp_path: Path) -> None:
    bin_dir = tmp_path / "bin"
    ssh = stand_in(bin_dir / "ssh", SSH.format(shell=shell))
    python = stand_in(bin_dir / "py", PYTHON)
    there = tmp_path / "it's here"
    there.mkdir()
    mine = NASTY | LINES | SECRETS
    given = settings(tmp_path, launcher, str(python)) | mine | NOT_SENT
    done = run_script(TINY, there, EXPORT=EXPORT, **given)
    assert done.returncode == 0, done.stderr
    for node in (0, 1):
        seen = seen_by(bin_dir, node)
        assert {name: seen.get(name) for name in mine} == mine
        assert not NOT_SENT.keys() & seen.keys()
        assert seen["PWD"] == str(there) and seen["DS_ACCELERATOR"] == "cpu"
    # No secret in what `ps` shows, nor in a file that stays. One is made for each launch.
    shown = (bin_dir / "ssh.seen").read_text()
    assert "nodeA" in shown and "nodeB" in shown
    (made,) = {seen_by(bin_dir, node)["MEGATRON_LAUNCH_SECRET"] for node in (0, 1)}
    assert re.fullmatch("[0-9a-f]{64}", made) and made not in shown + done.stdout + done.stderr
    assert not [value for value in SECRETS.values() if value.split("\n")[0] in shown]
    assert "WANDB_API_KEY" not in shown and not list((tmp_path / "work").glob("launch_secrets*"))
    assert ssh.exists() and list(there.iterdir()) == []


def test_a_secret_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    bin_dir = tmp_path / "bin"
    stand_in(
        bin_dir / "ssh", '#!/usr/bin/env bash\nstat -c %a "$NOTES"/work/launch_secrets.* >>"$NOTES/modes" || true\n'
    )
    given = settings(tmp_path, "torchrun", str(stand_in(bin_dir / "py", PYTHON))) | {
        "HF_TOKEN": "t",
        "NOTES": str(tmp_path),
    }
    assert run_script(TINY, tmp_path, **given).returncode == 0
    assert set((tmp_path / "modes").read_text().split()) == {"600"}


def test_two_launches_with_one_work_dir_have_their_own_secrets(tmp_path: Path) -> None:
    """The second one begins and ends while the first starts its nodes."""
    first = '[[ $* == *launch_secrets* ]] && mkdir "$NOTES/second" 2>/dev/null'
    second = f'{first} && bash {BENCH / TINY} 2>"$NOTES/said" && touch "$NOTES/second/ended"\n'
    ssh = SSH.format(shell="sh").replace("exec env", second + "exec env")
    stand_in(tmp_path / "bin" / "ssh", ssh)
    given = settings(tmp_path, "torchrun", str(stand_in(tmp_path / "bin" / "py", PYTHON)))
    done = run_script(TINY, tmp_path, CUDA_VISIBLE_DEVICES="", HF_TOKEN="t", NOTES=str(tmp_path), **given)
    assert done.returncode == 0, done.stderr + (tmp_path / "said").read_text()
    assert (tmp_path / "second" / "ended").exists(), (tmp_path / "said").read_text()


@pytest.mark.slow
def test_when_the_launch_on_one_host_ends_deepspeed_ends_those_on_others(tmp_path: Path) -> None:
    done = run_deepspeed_on_two_hosts(tmp_path, PDSH_OF_TWO_HOSTS)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "the launch on 1 of 2 hosts ended 1 s ago: ending the others" in done.stderr
    assert (tmp_path / "bin" / "pkill").exists()  # on all hosts


@pytest.mark.slow
def test_a_launch_that_ended_on_all_hosts_is_not_ended_again(tmp_path: Path) -> None:
    done = run_deepspeed_on_two_hosts(tmp_path, PDSH_THAT_LINGERS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ending the others" not in done.stderr and not (tmp_path / "bin" / "pkill").exists()


def run_deepspeed_on_two_hosts(tmp_path: Path, pdsh: str) -> subprocess.CompletedProcess[str]:
    """DeepSpeed's own launcher with HOST_GRACE=1 and this stand-in for pdsh."""
    stand_in(tmp_path / "bin" / "pdsh", pdsh)
    stand_in(tmp_path / "bin" / "ssh", SSH_OF_TWO_HOSTS)
    data = ROOT / "tests" / "golden" / "upstream_run" / "data"
    given = settings(tmp_path, "deepspeed", sys.executable) | {"HOST_GRACE": "1", "DS_ACCELERATOR": "cpu"}
    given |= {"DATA_PATH": str(data / "corpus_text_document"), "TOKENIZER_MODEL": str(data / "tokenizer.model")}
    return run_script(TINY, tmp_path, **given)


@pytest.mark.slow
def test_variables_reach_other_nodes_through_deepspeed(tmp_path: Path) -> None:
    """DeepSpeed's own launcher, up to the command that it gives to pdsh; its files of variables are merged."""
    bin_dir, home, here = tmp_path / "bin", tmp_path / "home", tmp_path / "here"
    stand_in(bin_dir / "pdsh", PDSH)
    stand_in(bin_dir / "ssh", "#!/usr/bin/env bash\ntrue\n")
    for directory, lines in (
        (home, "# of every run\n\nNCCL_ALGO=Ring\nNCCL_PROTO=LL\nUCX_TLS=of the file"),
        (here, "NCCL_PROTO=Simple\n"),
    ):
        directory.mkdir()
        (directory / ".deepspeed_env").write_text(lines)
    given = settings(tmp_path, "deepspeed", sys.executable) | NASTY | {"HF_TOKEN": "hf_'x' $y"}
    data = ROOT / "tests" / "golden" / "upstream_run" / "data"
    given |= {"DATA_PATH": str(data / "corpus_text_document"), "TOKENIZER_MODEL": str(data / "tokenizer.model")}
    given |= {"HOME": str(home), "PYTHONPATH": "/mine", "DS_ACCELERATOR": "cpu"}
    done = run_script(TINY, here, EXPORT="MY_SETTING", **given)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = seen_by(bin_dir, 0)
    expected = NASTY | {"HF_TOKEN": "hf_'x' $y", "UCX_TLS": "of the file"}
    assert {name: seen.get(name) for name in expected} == expected
    assert (seen["NCCL_ALGO"], seen["NCCL_PROTO"]) == ("Ring", "Simple")  # the working directory's counts
    assert seen["PYTHONPATH"] == f"{here}:/mine" and seen["DS_ACCELERATOR"] == "cpu"
    assert (bin_dir / "mode").read_text() == "600\n" and not list((tmp_path / "work").glob("deepspeed_env*"))


@pytest.mark.parametrize(
    ("given", "lines", "message"),
    [
        ({}, "NCCL_ALGO", "/.deepspeed_env: line 1 is not of the form NAME=VALUE"),
        ({"DS_ENV_FILE": "other"}, "", ""),
        ({"NCCL_X": "a\nb"}, "", "NCCL_X: DeepSpeed's launcher cannot carry a value with a line break"),
        (
            {"MEGATRON_LAUNCH_SECRET": "5" * 64},
            "",
            "MEGATRON_LAUNCH_SECRET: DeepSpeed's launcher would put it on command",
        ),
        ({"NCCL_X": "a "}, "", "NCCL_X: DeepSpeed's launcher cannot carry a value with a line break"),
    ],
)
def test_what_deepspeed_cannot_carry_is_named(given: dict[str, str], lines: str, message: str, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text(lines)
    (tmp_path / "other").write_text("A=1\n")
    common = settings(tmp_path, "deepspeed", "py") | {"HOME": str(tmp_path), "DRY_RUN": "1"}
    done = run_script(TINY, tmp_path, **common, **given)
    assert done.returncode == (2 if message else 0), done.stderr
    assert message in done.stderr and "5" * 64 not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_dry_run_prints_variables_and_no_secret(launcher: str, tmp_path: Path) -> None:
    mine = NASTY | SECRETS
    commands = dry_run("run_7b_tp4_pp2.sh", tmp_path, LAUNCHER=launcher, EXPORT=EXPORT, **mine, **NOT_SENT)
    for command in commands:
        assert {name: command.environment[name] for name in NASTY} == NASTY
        assert {name: command.environment[name] for name in SECRETS} == dict.fromkeys(SECRETS, "***")
        assert not NOT_SENT.keys() & command.environment.keys()
    done = run_script(TINY, tmp_path, DRY_RUN="1", LAUNCHER=launcher, **SECRETS)
    assert " HF_TOKEN=*** " in done.stdout and "hf_" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("export", "message"),
    [
        ("MINE NOT_THERE", "EXPORT: NOT_THERE is not set; set it, or leave it out"),
        ("MINE=1", "EXPORT: a word that begins with MINE is not the name of a variable; give names only"),
    ],
)
def test_bad_names_are_named(export: str, message: str, tmp_path: Path) -> None:
    done = run_script(TINY, tmp_path, DRY_RUN="1", EXPORT=export, MINE="x")
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize("script", [TINY, "submit.sh"])
@pytest.mark.parametrize("misspelt", ["MEGATRON_LAUNCH_SECRT", "EXPORT", "argument", "second argument"])
def test_no_message_has_the_value_of_a_secret_in_the_wrong_place(script: str, misspelt: str, tmp_path: Path) -> None:
    """A misspelt name, a value where names belong, and an assignment after the command."""
    value = "0123456789abcdef" * 4
    given = {"EXPORT": {"EXPORT": f"HF_TOKEN={value}"}}.get(misspelt, {misspelt: value})
    given = {} if misspelt.endswith("argument") else given
    arguments = [] if misspelt == "argument" or script == TINY else ["7b_tp4_pp2"]
    arguments += [] if given else [f"HF_TOKEN={value}"]
    arguments += ["--scheduler", "slurm"] * (script != TINY)
    done = run_script(script, tmp_path, *arguments, DRY_RUN="1", **given)
    assert done.returncode == 2 and value not in done.stdout + done.stderr, done.stderr
    assert (misspelt if given else "HF_TOKEN") in done.stderr


def master_of(tmp_path: Path, **given: str) -> str:
    (command,) = dry_run("run_7b_tp4_pp2.sh", tmp_path, LAUNCHER="srun", GPUS_PER_NODE="4", **given)
    return command.environment["MASTER_ADDR"]


@pytest.mark.slow
def test_srun_starts_rank_0_on_the_first_host_of_the_allocation(tmp_path: Path) -> None:
    """Not where salloc leaves the user, which may be a login node."""
    stand_in(tmp_path / "bin" / "scontrol", SCONTROL)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[4-5]", "PATH": path_with(tmp_path / "bin")}
    assert master_of(tmp_path, **job) == "n4"
    assert master_of(tmp_path, **job, MASTER_ADDR="n5-ib") == "n5-ib"
    assert master_of(tmp_path) == "FIRST_HOST_OF_THE_ALLOCATION"  # DRY_RUN before there is one
    (one_node,) = dry_run("run_7b_tp4_pp2.sh", tmp_path, LAUNCHER="srun", GPUS_PER_NODE="8", **job)
    assert one_node.environment["MASTER_ADDR"] == "127.0.0.1"


def path_without(command: str, directory: Path) -> str:
    """A PATH with the system's commands but this one, which may be installed here: links in `directory`."""
    directory.mkdir()
    for path in (*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()):
        if path.name != command and not (directory / path.name).is_symlink():
            (directory / path.name).symlink_to(path)
    return str(directory)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[4-5]"}, "is not on PATH; set MASTER_ADDR"),
        ({}, "LAUNCHER=srun: no allocation; start within one"),
        ({"HOSTFILE": "hosts"}, "HOSTFILE=hosts: srun starts the ranks on the hosts of the allocation"),
    ],
)
def test_what_srun_lacks_is_said(given: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n4 slots=4\nn5 slots=4\n")
    common = {"LAUNCHER": "srun", "GPUS_PER_NODE": "4", "PATH": path_without("scontrol", tmp_path / "bin")}
    done = run_script("run_7b_tp4_pp2.sh", tmp_path, **common, **given)
    assert done.returncode == 2 and message in done.stderr, done.stderr
