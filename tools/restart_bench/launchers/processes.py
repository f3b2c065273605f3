"""The commands of a launch that is started from here on several hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ..environment import is_secret, quoted, write_private
from ..interpreter import replace_process
from ..nodes import is_this_host
from .launch import Launch, Launcher, with_secret


class Processes:
    """Started commands. When the block ends, or this process gets SIGTERM, SIGINT or SIGHUP, the rest is ended."""

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, words: list[str], launch: Launch, stdin: int | None = None) -> subprocess.Popen[bytes]:
        """In the background: it does not get the SIGINT of the terminal, but is ended when this process is."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process = subprocess.Popen(words, stdin=stdin, env=dict(launch.run.environ))
        finally:
            signal.signal(signal.SIGINT, before)
        self._running[process.pid] = process
        return process

    def start_node(self, launcher: Launcher, launch: Launch, node: int) -> None:
        """The command of a node, on its host."""
        words, host = launcher.command(launch, node), launch.run.nodes.hosts.names[node]
        if is_this_host(host):
            self.start(words, launch)
            return
        secrets = f"&& . {quoted(str(launch.secrets))} " if launch.secrets else ""
        there = f"cd {quoted(os.getcwd())} {secrets}&& exec {quoted(*words)}"
        # With a terminal (-tt), the remote processes end with the connection.
        self.start(["ssh", "-tt", "-o", "BatchMode=yes", host, there], launch, stdin=subprocess.DEVNULL)

    def wait_for_one(self) -> tuple[subprocess.Popen[bytes], int] | None:
        """The next that ends, and its exit status as a shell has it; None if none is running."""
        while self._running:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            process = self._running.pop(ended.si_pid, None)
            if process is None:
                os.waitpid(ended.si_pid, 0)  # not one of these
                continue
            return process, exit_status(process.wait())
        return None

    def end(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait()
        self._running.clear()


def exit_status(returncode: int) -> int:
    """That of a shell: 128 + N for a process that signal N has ended."""
    return returncode if returncode >= 0 else 128 - returncode


class _Stopped(BaseException):
    def __init__(self, signum: int) -> None:
        self.signum = signum


def _stop(signum: int, frame: object) -> None:
    raise _Stopped(signum)


@contextlib.contextmanager
def processes(secrets: Path | None = None) -> Iterator[Processes]:
    """Processes of a launch. `secrets`: a file that is removed with them."""
    mine = Processes()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, _stop)
    stopped = None
    try:
        yield mine
    except _Stopped as by:
        stopped = by.signum
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        if secrets is not None:
            secrets.unlink(missing_ok=True)
        mine.end()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        if stopped is not None:
            os.kill(os.getpid(), stopped)


def carrying_user_env(launch: Launch) -> Launch:
    """The launch with the user's variables for other hosts: secrets in a file, since process lists show commands."""
    launch = with_secret(launch)
    variables = launch.run.user_env
    hidden = [variable for variable in variables if is_secret(variable)]
    shown = [variable for variable in variables if not is_secret(variable)]
    if not hidden:
        return launch.carrying(shown)
    secrets = launch.run.work_dir.absolute() / "launch_secrets"
    write_private(secrets, f"export {quoted(*hidden)}\n")
    return launch.carrying(shown, secrets)


def launch_per_node(launcher: Launcher, launch: Launch) -> int:
    """Start the command of each host of HOSTFILE, or become the command of this node. Returns the exit status."""
    run = launch.run
    if run.over_hosts:
        return _launch_over_hosts(launcher, launch)
    replace_process(launcher.command(launch, int(run.given.node_rank or 0)), run.environ)


def _launch_over_hosts(launcher: Launcher, launch: Launch) -> int:
    """Node 0 is the first host. If the command of one node fails, the commands of the others are ended."""
    launch = carrying_user_env(launch)
    with processes(launch.secrets) as mine:
        for node in range(launch.run.nodes.number):
            mine.start_node(launcher, launch, node)
        while (ended := mine.wait_for_one()) is not None:
            if ended[1] != 0:
                return ended[1]
    return 0
