"""Asks the hosts of a launch before ranks are started: whether they are reached, and what each of them runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from .environment import quoted
from .errors import SettingsError
from .interpreter import Interpreter
from .launcher_entries import BY_SLURM
from .launchers.launch import DEFAULT_PORT
from .launchers.slurm_step import srun_shape
from .nodes import is_this_host
from .places import ROOT, working_directory
from .run import Run, Start

_CHECK_HOSTS = "megatron.launch.check_hosts"
_SRUN_WAIT_S = 60  # where the processors of the allocation are taken, as by a step that runs this script
_NOT_REACHED = 255  # ssh's own exit status
_NOT_COMPARED = "the hosts could not be compared"


def check_reach(run: Run) -> None:
    """Refuse hosts that ssh does not reach, or where this repository is not."""
    if run.over_hosts:
        _ask_hosts(run, ["true"])


def check_hosts(run: Run) -> None:
    """Compare all hosts before any rank starts: names, the port of the rendezvous, and the code and versions of each.

    Hosts on which this script is started by hand compare themselves with `meet` instead. A launcher that chooses a port
    itself finds a free one.
    """
    given, srun = run.given, run.launcher in BY_SLURM
    if given.node_rank or (srun and not run.environ.get("SLURM_JOB_ID")):
        return
    if not (run.nodes.number > 1 or run.over_hosts or srun or given.master_port or given.master_addr):
        return
    words = ["--address", f"MASTER_ADDR={run.nodes.master_addr}"]
    words += ["--port", f"MASTER_PORT={given.master_port or DEFAULT_PORT}"]
    if run.coordinates:
        words = ["--address", f"COORDINATOR_ADDR={run.nodes.coordinator_addr}"]
        words += ["--port", f"MASTER_PORT={given.master_port}"] if given.master_port else []
    tell = [*run.interpreter.module(_CHECK_HOSTS), "tell", *words]
    path = run.interpreter.environment()["PYTHONPATH"]
    elsewhere = ["env", "PYTHONSAFEPATH=1", f"PYTHONPATH={path}", *tell]
    if srun:
        answers = _ask_allocation(run, elsewhere)
    elif run.over_hosts:
        answers = _ask_hosts(run, elsewhere)
    else:
        told = run.interpreter.run(_CHECK_HOSTS, "tell", *words, stdout=subprocess.PIPE)
        if told.returncode != 0:
            raise SettingsError("the port and the address of rank 0 could not be checked")
        answers = told.stdout
    judged = run.interpreter.run(_CHECK_HOSTS, "judge", input=answers, stdout=subprocess.PIPE)
    if judged.returncode != 0:
        raise SettingsError(judged.stdout.strip() or _NOT_COMPARED)


def _ask_hosts(run: Run, command: Sequence[str]) -> str:
    """Output of a command on all hosts, run at the same time, with --place and the host's number as last arguments.

    Raises SettingsError: one message that names all hosts that fail.
    """
    hosts = run.nodes.hosts
    names = hosts.names[: run.nodes.used]
    path = run.environ.get("PATH")
    if not all(map(is_this_host, names)) and shutil.which("ssh", path=path) is None:
        raise SettingsError(f"{hosts.named_by}: its hosts are reached through ssh, and ssh is not on PATH; install it")
    asked = [
        subprocess.Popen(
            _on_host(host, [*command, "--place", str(place)]),
            env=dict(run.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for place, host in enumerate(names)
    ]
    failed, advice, answers = [], "", []
    for host, process in zip(hosts.names, asked, strict=False):
        answer, said = process.communicate()  # a line of each
        answers.append(answer)
        if process.returncode != 0:
            last = said.strip().replace("\r", "").rpartition("\n")[2]
            failed.append(f"{host} ({last or 'ssh said nothing'})")
        if process.returncode == _NOT_REACHED:
            advice = ". 'ssh HOST true' must work without a password from here"
    if failed:
        raise SettingsError(f"{hosts.named_by}: no ranks can be started through ssh on {'; '.join(failed)}{advice}")
    return "".join(answers)


def _on_host(host: str, command: Sequence[str]) -> list[str]:
    """The command on a host where the repository must be."""
    if is_this_host(host):
        return list(command)
    there = quoted(str(ROOT / "pretrain_gpt.py"))
    missing = quoted(f"{ROOT} is not there; it must be on a file system that all nodes share")
    directory = quoted(working_directory())
    script = f"test -f {there} || {{ echo {missing} >&2; exit 1; }}; cd {directory} && exec {quoted(*command)}"
    return ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, script]


def _ask_allocation(run: Run, command: Sequence[str]) -> str:
    """Output of a command on the nodes of the ranks, with --place and the node's number as last arguments.

    The step requests the nodes and tasks of the ranks, so that Slurm refuses here what it cannot give them.
    """
    once = '((SLURM_LOCALID > 0)) || exec "$@" --place "$SLURM_NODEID"'
    words = ["srun", *srun_shape(run), f"--immediate={_SRUN_WAIT_S}", "bash", "-c", once, "node", *command]
    try:
        asked = subprocess.run(
            words, env=dict(run.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
        status, said = asked.returncode, asked.stderr
    except OSError as error:
        status, said = 127, f"srun: {error.strerror}"
    if status != 0:
        last = said.strip().rpartition("\n")[2].removeprefix("srun: error: ")
        raise SettingsError(
            f"srun does not start {run.layout.world_size} tasks, {run.nodes.gpus_per_node} on each of "
            f"{run.nodes.number} nodes, in allocation {run.environ['SLURM_JOB_ID']}: {last}; allocate what the ranks "
            "take, and start the script outside any step"
        )
    return asked.stdout


def meet(run: Run) -> None:
    """Wait for the launches that are started by hand on the other hosts, and compare these hosts."""
    given = run.given
    words = ["--place", given.node_rank, "--nodes", str(run.nodes.number), "--timeout", given.meet_timeout or "600"]
    words += ["--address", f"MASTER_ADDR={run.nodes.master_addr}"]
    words += ["--port", f"MASTER_PORT={given.master_port or DEFAULT_PORT}"]
    met = run.interpreter.run(_CHECK_HOSTS, "meet", *words, stdout=subprocess.PIPE)
    if met.returncode != 0:
        raise HostsDifferError(met.stdout.strip() or _NOT_COMPARED)


class HostsDifferError(SettingsError):
    """Found at the meeting of the hosts, which has told all of them."""


def tell_refusal(start: Start, run: Run | None, why: str) -> None:
    """Tell the other hosts, which wait in `meet`, that this one was refused. `run`: None: before it was settled."""
    given = start.given
    first = given.node_rank.strip("0") == ""
    nodes = str(run.nodes.number) if run else given.nnodes
    address = run.nodes.master_addr if run else given.master_addr
    port = given.master_port or str(DEFAULT_PORT)
    if (not address and not first) or nodes == "1" or not port.isdigit():
        return
    words = ["--place", "0" if first else "1", *(["--nodes", nodes] if nodes.isdigit() and nodes[0] != "0" else [])]
    words += [
        "--why",
        f"NODE_RANK={given.node_rank} is refused on {os.uname().nodename}: {why or 'see its own messages'}",
    ]
    words += ["--address", f"MASTER_ADDR={address}", "--port", f"MASTER_PORT={port}"]
    interpreter = Interpreter.of(given, start.environ)
    if not interpreter.exists():  # any will do
        interpreter = Interpreter(sys.executable, None, start.environ)
    interpreter.run(_CHECK_HOSTS, "refuse", *words)
