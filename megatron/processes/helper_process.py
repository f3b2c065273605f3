"""A process that serves this one over a connection, and whose end is noticed whoever holds the other end of that.

It begins with an interpreter of its own (subprocess): multiprocessing would import the training script in it, which
then needs a main guard, and keep a process that tracks resources.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

from megatron.processes.in_process_restart import let_stay
from megatron.processes.parent_process import stop_signals_blocked

logger = logging.getLogger(__name__)

_END_S = 5.0  # for what is about to end
_ASK_S = 0.05


def helper_command(module: str, *arguments: object) -> list[str]:
    """What runs `main(*arguments)` of the module in a new interpreter, which imports from where this one does."""
    path = [entry for entry in sys.path if isinstance(entry, str)]  # a Path, say, is passed over here, too
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; from {module} import main; main{arguments!r}"]


class _WatchedConnection(Connection):
    """One that says that it is closed as soon as it is, also to a thread that got hold of it while it was freed: the
    number of its file may then be another file's. `closing` is held while that must not change."""

    def __init__(self, handle: int) -> None:
        self.closing = threading.Lock()
        super().__init__(handle)

    def close(self) -> None:
        with self.closing:
            super().close()

    def __del__(self) -> None:
        self.close()


class HelperProcess:
    """Runs `main(FD, *arguments)` of a module, where FD is the process's end of `connection`.

    `main` calls parent_process.ignore_stop_signals first: the signals are blocked until then.
    """

    def __init__(
        self, module: str, *arguments: object, pass_fds: Sequence[int] = (), env: Mapping[str, str] | None = None
    ) -> None:
        """Raises OSError if the process cannot be started. It inherits the open files `pass_fds`."""
        ours, theirs = socket.socketpair()
        with theirs, stop_signals_blocked():
            self.connection = _WatchedConnection(ours.detach())
            self._process = subprocess.Popen(
                helper_command(module, theirs.fileno(), *arguments),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *pass_fds),
                env=env,
            )
        self._is_killed = False
        watched = (self.pid, weakref.ref(self.connection))
        self._watch = threading.Thread(target=_hang_up_after, args=watched, name="helper-watch", daemon=True)
        self._watch.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it serves: it has not ended, nor been killed, which takes a while."""
        return not self._is_killed and self._process.poll() is None

    def stay(self) -> bool:
        """Have it outlive this start of a rank that returns, or return False if it ends. It must be at rest."""
        if not self.is_alive():
            return False
        let_stay(self._watch)
        return True

    def wait_for_word(self, unless: Callable[[], bool]) -> bool:
        """Wait until it has said something, or has ended; returns False if `unless()` becomes true before."""
        while not self.connection.poll(_ASK_S):
            if unless():
                return False
        return True

    def describe_end(self) -> str:
        """ "(process N) ended with exit code ...", for messages: call `is_alive`, `end` or `kill` before."""
        code = self._process.returncode
        if code is None:
            return f"(process {self.pid}) was killed and does not end"
        if code < 0:
            return f"(process {self.pid}) was killed by {signal.Signals(-code).name}, exit code {code}"
        return f"(process {self.pid}) ended with exit code {code}"

    def end(self) -> None:
        """Wait for the end that is coming; make it come if it does not."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it. One that waits for storage ends when that answers; this waits some seconds at most."""
        self._is_killed = True
        self._process.kill()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            logger.warning("process %d was killed and does not end: it waits for storage", self.pid)
            _hang_up(self.connection)  # for what waits for it

    def kill_soon(self) -> None:
        """Have it end, and wake what waits for it; `close` or `end` waits for the end."""
        self._is_killed = True
        self._process.kill()
        _hang_up(self.connection)

    def close(self) -> None:
        """Close the connection, at which the process ends, and wait for that as `end` does."""
        self.connection.close()
        self.end()


def _hang_up_after(pid: int, connection: weakref.ref[_WatchedConnection]) -> None:
    """Hang up when the process has ended. Its end of the connection may outlive it: a process that was forked while
    this one was started has that, too."""
    with contextlib.suppress(ChildProcessError):  # it has been reaped
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ours = connection()
    if ours is not None:
        _hang_up(ours)


def _hang_up(connection: _WatchedConnection) -> None:
    """Wake what waits to read or to write. What the process has sent can still be read."""
    with connection.closing:
        if connection.closed:
            return
        ours = socket.socket(fileno=connection.fileno())  # a second file could be one too many
        try:
            ours.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end is closed everywhere
            logger.debug("the connection with a helper process is over already", exc_info=True)
        finally:
            ours.detach()
