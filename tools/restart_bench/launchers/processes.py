"""The commands of a launch that is started from here on several hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from ..environment import is_secret, new_private, quoted
from ..interpreter import exit_status, replace_process
from ..nodes import is_this_host
from ..places import working_directory
from .launch import Launch, Launcher, with_secret

# What a terminal, a scheduler or a user sends to a launch that it wants to end
_END_SIGNALS = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip
_LEADER_S = 60  # the coordinator waits for ranks that save: 30 s (--shutdown-timeout), and then until each has ended


class _Stopped(BaseException):
    """A signal asks this process to end."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


class Processes:
    """Commands that are ended when the block of `processes` is left.

    Signals that ask this process to end are blocked, and taken by `start` and `wait_for_one`, which raise _Stopped. So
    none comes between the start of a command and the note that it runs.
    """

    def __init__(self) -> None:
        # What is to be ignored (nohup) stays so: once it is blocked and waited for, it would be no more.
        self._stopping = {signum for signum in _END_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._stopping | {signal.SIGCHLD})
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._leader: subprocess.Popen[bytes] | None = None
        self._files: list[Path] = []

    def start(
        self, words: list[str], launch: Launch, stdin: int | None = None, *, leads: bool = False
    ) -> subprocess.Popen[bytes]:
        """In the background. `leads`: this command has the others end, so it is ended before them."""
        process = subprocess.Popen(words, stdin=stdin, env=dict(launch.run.environ), preexec_fn=self._in_child)
        self._running[process.pid] = process
        self._leader = process if leads else self._leader
        if (found := signal.sigtimedwait(self._stopping, 0)) is not None:
            raise _Stopped(found.si_signo)
        return process

    def _in_child(self) -> None:
        """The terminal's signals are for this process, which ends the child in its turn."""
        for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def start_node(self, launcher: Launcher, launch: Launch, node: int) -> None:
        """The command of a node, on its host."""
        words, host = launcher.command(launch, node), launch.run.nodes.hosts.names[node]
        if is_this_host(host):
            self.start(words, launch)
            return
        secrets = f"&& . {quoted(str(launch.secrets))} " if launch.secrets else ""
        there = f"cd {quoted(working_directory())} {secrets}&& exec {quoted(*words)}"
        # With a terminal (-tt), the remote processes end with the connection.
        self.start(["ssh", "-tt", "-o", "BatchMode=yes", host, there], launch, stdin=subprocess.DEVNULL)

    def wait_for_one(self, seconds: float | None = None) -> tuple[subprocess.Popen[bytes], int] | None:
        """The next that ends, and its exit status as a shell has it; None after `seconds`, or if none is running."""
        until = None if seconds is None else time.monotonic() + seconds
        while self._running:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is None:
                if until is not None and time.monotonic() >= until:
                    return None
                self._raise_if_stopped(None if until is None else until - time.monotonic())
                continue
            process = self._running.pop(ended.si_pid, None)
            if process is None:
                os.waitpid(ended.si_pid, 0)  # not one of these
                continue
            return process, exit_status(process.wait())
        return None

    def _raise_if_stopped(self, seconds: float | None) -> None:
        """Wait for a signal that asks this process to end, but not after a child has ended, or after `seconds`."""
        waited_for = self._stopping | {signal.SIGCHLD}
        found = signal.sigwaitinfo(waited_for) if seconds is None else signal.sigtimedwait(waited_for, max(seconds, 0))
        if found is not None and found.si_signo in self._stopping:
            raise _Stopped(found.si_signo)

    def private_file(self, directory: Path, prefix: str, text: str) -> Path:
        """A new file that only this user may read, and that is removed before the commands are ended."""
        file = new_private(directory, prefix, text)
        self._files.append(file)
        return file

    def end(self) -> None:
        """End what runs: the leader first, since without their terminals the other hosts' commands get SIGHUP."""
        for file in self._files:
            file.unlink(missing_ok=True)
        if self._leader is not None and self._leader.pid in self._running:
            self._leader.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._leader.wait(_LEADER_S)
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait()
        self._running.clear()

    def release(self, stopped: int | None) -> None:
        """Signals have their effect again. `stopped`: the one that this process ends by."""
        if stopped is not None:
            signal.signal(stopped, signal.SIG_DFL)
            os.kill(os.getpid(), stopped)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


@contextlib.contextmanager
def processes() -> Iterator[Processes]:
    """Processes of a launch. A signal that asks this process to end does so when they have ended."""
    mine = Processes()
    stopped = None
    try:
        yield mine
    except _Stopped as by:
        stopped = by.signum
    finally:
        mine.end()
        mine.release(stopped)


def carrying_user_env(launch: Launch, mine: Processes) -> Launch:
    """The launch with the user's variables for other hosts: secrets in a file, since process lists show commands."""
    launch = with_secret(launch)
    variables = launch.run.user_env
    hidden = [variable for variable in variables if is_secret(variable)]
    shown = [variable for variable in variables if not is_secret(variable)]
    if not hidden:
        return launch.carrying(shown)
    text = f"export {quoted(*hidden)}\n"
    return launch.carrying(shown, mine.private_file(launch.run.work_dir.absolute(), "launch_secrets.", text))


def launch_per_node(launcher: Launcher, launch: Launch) -> int:
    """Start the command of each host of HOSTFILE, or become the command of this node. Returns the exit status."""
    run = launch.run
    if run.over_hosts:
        return _launch_over_hosts(launcher, launch)
    replace_process(launcher.command(launch, int(run.given.node_rank or 0)), run.environ)


def _launch_over_hosts(launcher: Launcher, launch: Launch) -> int:
    """Node 0 is the first host. If the command of one node fails, the commands of the others are ended."""
    with processes() as mine:
        launch = carrying_user_env(launch, mine)
        for node in range(launch.run.nodes.number):
            mine.start_node(launcher, launch, node)
        while (ended := mine.wait_for_one()) is not None:
            if ended[1] != 0:
                return ended[1]
    return 0
