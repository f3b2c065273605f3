"""In-process restarts: after a failure the ranks that live leave the training and start it again in their processes.

The launcher has a connection to each rank. When a rank fails, it sends RETURN to the others. In each of them a thread
shuts down all connections of the process, so that whatever waits there raises; the main thread leaves the script,
undoes what was registered with `at_return`, sends RETURNED and waits for the next start. A rank that cannot do that
ends, or is killed after --return-timeout, and the launcher forks it anew.

Nothing is raised in the main thread from outside: an exception between any two instructions could leave a lock taken or
a file half written in a process that lives on. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable

from restart_trace import under_way
from restart_trace.clock import now_ns

RETURN, RETURNED = b"return", b"returned"
REPORT_SIGNAL = signal.SIGRTMAX  # to the launcher, which waits for signals: a rank has sent RETURNED
RETURNS_VARIABLE = "MEGATRON_IN_PROCESS_RESTARTS"  # of a rank: how often its process has returned; unset: never

_LONGEST = 100  # bytes of a message
_SHUT_AGAIN_S = 0.05  # connections may be made while the main thread leaves
_THREADS_S = 5.0  # for threads of the start before to end
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def start_message(restart: int, port: int) -> bytes:
    """To a rank that has returned: start again, as this restart, with the rendezvous at this port."""
    return f"{restart} {port}".encode()


class InProcessRestarts:
    """Of a rank: its end of the connection to the launcher. `timeout_s`: --return-timeout."""

    def __init__(self, connection: socket.socket, launcher: int, timeout_s: float) -> None:
        self._connection = connection
        self._launcher = launcher
        self._timeout_s = timeout_s
        self._handlers = {number: signal.getsignal(number) for number in _HANDLED}
        self._excepthook = sys.excepthook
        self._asked, self._left = threading.Event(), threading.Event()
        self._starts: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._undo: list[Callable[[], object]] = []
        self._has_lost_rank = False
        self.returns = 0
        self.started_ns: int | None = None
        thread = threading.Thread(target=self._listen, name="in-process-restart", daemon=True)
        self._stays = {threading.main_thread(), thread}
        thread.start()
        _here.append(self)

    def follows(self, error: BaseException) -> bool:
        """Whether a restart in this process follows `error`, which has ended the script.

        Another rank may be missed before the launcher has seen its end: then the launcher's word is waited for. None
        follows a script that has registered nothing with `at_return`: it would find what its last start has built.
        """
        if not self._undo or isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code):
            return False
        self._restore_handlers()  # the script has ended: a signal has nothing to wait for any more
        if self._has_lost_rank:
            self._asked.wait(self._timeout_s)
        return self._asked.is_set()

    def wait_for_start(self) -> tuple[int, int]:
        """Undo the start before, report, and wait for the next: its number of restarts, and the rendezvous's port.

        No exception of the start before may be alive: it would keep what its frames hold. Raises SystemExit if
        something of that start stays.
        """
        while self._undo:
            self._undo.pop()()
        under_way.clear()
        sys.excepthook = self._excepthook  # torch.distributed puts one around it in each start
        self._check_threads()
        self._asked.clear()
        self._has_lost_rank = False
        self._left.set()
        self._connection.send(RETURNED)
        os.kill(self._launcher, REPORT_SIGNAL)
        restart, port = map(int, self._starts.get().split())
        self.returns += 1
        self.started_ns = now_ns()
        return restart, port

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            if handler is not None:
                signal.signal(number, handler)

    def _check_threads(self) -> None:
        """A thread that outlives its start may hold its state, or write where the next start does."""
        for thread in set(threading.enumerate()) - self._stays:
            if isinstance(thread, threading._DummyThread):  # one of a library's that has called Python once
                continue
            thread.join(_THREADS_S)
            if thread.is_alive():
                print(
                    f"rank {os.environ.get('RANK')} ends instead of starting again in its process: the thread "
                    f"{thread.name} of its last start has not ended",
                    file=sys.stderr,
                    flush=True,
                )
                raise SystemExit(1)

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are to wake the main thread
        while message := self._connection.recv(_LONGEST):
            if message != RETURN:
                self._starts.put(message)
                continue
            self._left.clear()
            self._asked.set()
            shut_connections()
            while not self._left.wait(_SHUT_AGAIN_S):
                shut_connections()


_here: list[InProcessRestarts] = []  # of this process, if it is a rank that returns


def at_return(undo: Callable[[], object]) -> None:
    """Have `undo` called when this process returns, what was registered last first; nothing in other processes."""
    for restarts in _here:
        restarts._undo.append(undo)


def another_rank_is_lost() -> None:
    """Note that the script is about to end because of another rank."""
    for restarts in _here:
        restarts._has_lost_rank = True


def is_possible() -> bool:
    """Whether this rank returns after the failure of another one."""
    return bool(_here)


def started_ns() -> int | None:
    """When this start began (monotonic, ns), if this process has returned; None if its process began with it."""
    return _here[0].started_ns if _here else None


def shut_connections() -> None:
    """Shut down all connected TCP sockets of this process: every wait of gloo or torch's store for another rank raises.

    Not a listening one: gloo would abort the process.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                of_network = one.family in (socket.AF_INET, socket.AF_INET6)
                if of_network and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    one.shutdown(socket.SHUT_RDWR)
