"""DeepSpeed's launcher. One command, which starts the ranks on the other nodes itself."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from ..errors import SettingsError
from ..interpreter import replace_process
from ..launcher_entries import ON_EACH_NODE, setting_of
from ..places import PROGRAM, working_directory
from ..run import Run
from .launch import Launch, Launcher
from .processes import Processes, processes

_HOST_GRACE_S = 30


class DeepSpeed(Launcher):
    """Variables reach remote ranks through the file that DS_ENV_FILE names."""

    def num_commands(self, run: Run) -> int:
        return 1

    def starts_all(self, run: Run) -> bool:
        return run.nodes.number == 1 and not run.over_hosts  # its file of variables would be that of the first launch

    def command(self, launch: Launch, node: int) -> list[str]:
        run, nodes = launch.run, launch.run.nodes
        hosts: list[str] = []
        file: list[str] = []
        if nodes.hosts.names:
            hosts = ["--hostfile", nodes.hosts.file, "--num_nodes", str(nodes.number)]
        if run.over_hosts:
            variables_for_file(launch)  # which refuses what cannot be carried
            # Without --force_multi the ranks of a single host would start here.
            hosts += ["--force_multi"] if nodes.number == 1 else []
            file = [f"DS_ENV_FILE={launch.secrets or run.work_dir / 'deepspeed_env'}"]
        return [
            *launch.prefix, *file, run.interpreter.path, "-m", "deepspeed.launcher.runner", *hosts,
            "--num_gpus", str(nodes.gpus_per_node), "--master_addr", nodes.master_addr, "--master_port", launch.port,
            PROGRAM, *launch.flags,
        ]  # fmt: skip

    def launch(self, launch: Launch) -> int:
        run = launch.run
        if run.nodes.hosts.names:
            _write_hosts(run)
        if not run.over_hosts:
            replace_process(self.command(launch, 0), run.environ)
        with processes() as mine:
            variables = "".join(f"{line}\n" for line in variables_for_file(launch))
            file = mine.private_file(run.work_dir.absolute(), "deepspeed_env.", variables)
            launch = launch.carrying((), file)
            return _status_of_runner(mine.start(self.command(launch, 0), launch), mine, run)
        raise AssertionError("a signal that ends the block ends this process")


def _write_hosts(run: Run) -> None:
    """The file of a job's hosts, which there is not yet."""
    hosts = run.nodes.hosts
    if run.given.hostfile:
        return
    try:
        lines = [f"{name} slots={slots}\n" for name, slots in zip(hosts.names, hosts.slots, strict=True)]
        Path(hosts.file).write_text("".join(lines))
    except OSError:
        raise SettingsError(f"{hosts.named_by}: its hosts cannot be written to {hosts.file}") from None


def variables_for_file(launch: Launch) -> list[str]:
    """Lines of our file: the user's variables, ours, and the lines of the user's own files.

    DeepSpeed would read those if DS_ENV_FILE did not name ours. The last line of a variable takes effect. Raises
    SettingsError for a line or a value that DeepSpeed cannot carry.
    """
    environ = launch.run.environ
    lines = []
    for variable in (*launch.run.user_env, *launch.environment):
        if variable.startswith("PYTHONPATH="):
            variable = f"PYTHONPATH={working_directory()}:{variable.partition('=')[2]}"  # as DeepSpeed does
        lines.append(_line(variable))
    name = environ.get("DS_ENV_FILE") or ".deepspeed_env"
    for directory in (environ.get("HOME", ""), "."):
        path = Path(name) if name.startswith("/") else Path(f"{directory}/{name}")
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text(errors="surrogateescape").splitlines(), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            if "=" not in line:
                raise SettingsError(f"{path}: line {number} is not of the form NAME=VALUE")  # it may be a secret
            lines.append(line)
    return lines


def _line(variable: str) -> str:
    """NAME=VALUE as DeepSpeed reads it.

    It strips the line, and quotes the value with " for the other node's shell if the value contains other characters
    than those below.
    """
    name, _, value = variable.partition("=")
    if "\n" in value or value != value.strip():
        raise SettingsError(
            f"{name}: DeepSpeed's launcher cannot carry a value with a line break, or with white space at an end, to "
            f"another node; use {setting_of(ON_EACH_NODE)}"
        )
    if re.search(r"[^a-zA-Z0-9_@%+=:,./-]", value):
        value = re.sub(r'([\\"$`])', r"\\\1", value)
    return f"{name}={value}"


def _status_of_runner(runner: subprocess.Popen[bytes], mine: Processes, run: Run) -> int:
    """Wait for DeepSpeed's launcher. HOST_GRACE seconds after the launch on one host has ended, it gets SIGTERM.

    pdsh waits for every host even if the launch on one has failed; at SIGTERM DeepSpeed's launcher ends those on all
    hosts. When all have ended, nothing is left to end: the launcher's own end, which takes seconds, decides.
    """
    grace = int(run.given.host_grace or _HOST_GRACE_S)
    most, fewer_since, told = 0, None, False
    while (ended := mine.wait_for_one(1)) is None:
        now = connections(runner.pid)
        most = max(most, now)
        if not 0 < now < most:
            continue
        fewer_since = fewer_since or time.monotonic()
        if not told and time.monotonic() - fewer_since >= grace:
            message = f"the launch on {most - now} of {most} hosts ended {grace} s ago: ending the others"
            print(message, file=sys.stderr, flush=True)
            runner.terminate()
            told = True
    return ended[1]


def connections(runner: int) -> int:
    """The number of hosts to which pdsh, a child of DeepSpeed's launcher, is connected."""
    pdsh = _children(runner, "pdsh", "pdsh.bin")
    return len(_children(pdsh[0], "ssh")) if pdsh else 0


def _children(parent: int, *names: str) -> list[int]:
    """Processes whose command has one of these names, by proc(5): pgrep is not on every machine."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = file.read_text(errors="replace").partition(" (")
        except OSError:  # it has ended meanwhile
            continue
        name, _, fields = rest.rpartition(") ")
        if name in names and int(fields.split()[1]) == parent:
            found.append(int(pid))
    return found
