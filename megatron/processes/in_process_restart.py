"""In-process restarts: after a failure the ranks that live leave the training and start it again in their processes.

The launcher has a connection to each rank. When a rank fails, it sends RETURN to the others. From then on they exchange
nothing new. The main thread of each leaves the script, undoes what was registered with `at_return`, sends RETURNED and
waits for the next start. If it has left between two exchanges, it shuts down the connections of the process itself;
otherwise it may wait for another rank, and a second thread shuts them down, once what is under way has arrived, so that
whatever waits there raises. A rank that cannot leave ends, or is killed after --return-timeout, and the launcher forks
it anew.

Nothing is raised in the main thread from outside: an exception between any two instructions could leave a lock taken or
a file half written in a process that lives on. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import queue
import signal
import socket
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from megatron.processes.telling import tell
from restart_trace import under_way
from restart_trace.clock import now_ns

RETURN, RETURNED, _START = b"return", b"returned", b"start"
REPORT_SIGNAL = signal.SIGRTMAX  # to the launcher, which waits for signals: a rank has sent RETURNED

_LONGEST = 100  # bytes of a message
_SHUT_AGAIN_S = 0.05  # connections may be made while the main thread leaves
_QUIET_S = 0.01  # at least without a transfer, before connections are shut
_QUIET_LOOKS = 4  # in that time
_TIME_SLICE_S = 0.003  # for which the kernel lets another thread run first
_SENT_S, _READ_S = 0.25, 2.0  # at most waited for what is sent to arrive, and what has arrived to be read
_LOST_AFTER = 2  # times that the same was sent again, which takes 0.6 s: then its host is lost
_STUCK_ROUNDS = 10  # of shutting connections, for a collective to end; more time where processors are busy
_THREADS_S = 5.0  # for threads of the start before to end
_MOST_GROWTH = 256 << 20  # bytes of memory between two returns, or a quarter if that is more
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def send_start(connection: socket.socket, environment: Mapping[str, str]) -> None:
    """To a rank that has returned: start again, with this environment. In a file, as that of many hosts fits in no
    message."""
    with os.fdopen(os.memfd_create("environment"), "w+") as file:
        json.dump(dict(environment), file)
        file.flush()
        socket.send_fds(connection, [_START], [file.fileno()])


class AskedToReturnError(Exception):
    """The launcher has asked this rank to return, since another one has failed.

    No OSError: a load that meets one takes the checkpoint for damaged, and goes to the one before.
    """


class InProcessRestarts:
    """Of a rank: its end of the connection to the launcher. `timeout_s`: --return-timeout."""

    def __init__(self, connection: socket.socket, launcher: int, timeout_s: float) -> None:
        self._connection = connection
        self._launcher = launcher
        self._timeout_s = timeout_s
        self._handlers = {number: signal.getsignal(number) for number in _HANDLED}
        self._excepthook = sys.excepthook
        self._asked, self._left = threading.Event(), threading.Event()
        self._starts: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # descriptors of files; None: it was lost
        self._undo: list[Callable[[], object]] = []
        self._when_shut: list[Callable[[], object]] = []
        self._has_lost_rank = False
        self._left_between = False  # two exchanges, and before an error
        self.exchanges: Callable[[], bool] = lambda: False  # with other ranks, as far as is known
        self.returns = 0
        self.started_ns: int | None = None
        self.phases: list[tuple[str, str | None, int, int]] = []
        self._left_ns = 0
        self._asked_ns: int | None = None
        self._error_ns: int | None = None
        self._has_stepped = False
        self._resident: int | None = None  # bytes of memory after the first return from a start with a step
        thread = threading.Thread(target=self._listen, name="in-process-restart", daemon=True)
        self._stays = {threading.main_thread(), thread}
        thread.start()
        _here.append(self)

    def follows(self, error: BaseException) -> bool:
        """Whether a restart in this process follows `error`, which has ended the script.

        Another rank may be missed before the launcher has seen its end: then the launcher's word is waited for. None
        follows a script that has registered nothing with `at_return`: it would find what its last start has built.
        """
        self.note_error()
        self._left_ns = now_ns()
        if not self._undo or isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code):
            return False
        self._restore_handlers()  # the script has ended: a signal has nothing to wait for any more
        if self._has_lost_rank:
            self._asked.wait(self._timeout_s)
        return self._asked.is_set()

    def wait_for_start(self) -> dict[str, str]:
        """Undo the start before, report, and wait for the next: its environment.

        No exception of the start before may be alive: it would keep what its frames hold. Raises SystemExit if
        something of that start stays.
        """
        undo_ns = now_ns()
        threads = self._other_threads()
        while self._undo:
            self._undo.pop()()
        self._when_shut.clear()
        under_way.clear()
        sys.excepthook = self._excepthook  # torch.distributed puts one around it in each start
        threads = (threads | self._other_threads()) - self._stays
        self._stays = {thread for thread in self._stays if thread.is_alive()}
        self._wait_for(threads)
        if threads:  # what they held is garbage since then, and the next start keeps the collector from what is there
            gc.collect()
        self._check_memory()
        left_ns = self._left_ns
        begun_ns = min(at_ns for at_ns in (self._asked_ns, self._error_ns, left_ns) if at_ns is not None)
        self._asked_ns = self._error_ns = None
        self._asked.clear()
        self._has_lost_rank = self._left_between = False
        self._left.set()
        undone_ns = now_ns()
        self._connection.send(RETURNED)
        os.kill(self._launcher, REPORT_SIGNAL)
        descriptor = self._starts.get()
        if descriptor is None:  # the kernel drops what a process has no room for
            _end("it has too many open files to be given its environment")
        with os.fdopen(descriptor) as file:
            file.seek(0)
            environment = json.load(file)
        self.returns += 1
        self.started_ns = now_ns()
        self.phases = [
            ("abort", None, begun_ns, left_ns),
            ("return", "barrier", left_ns, undo_ns),  # for the launcher's word
            ("return", "undo", undo_ns, undone_ns),
            ("return", "barrier", undone_ns, self.started_ns),
        ]
        return environment

    def note_error(self) -> None:
        """An error may end this start: what it is left for begins here, unless the launcher has asked before."""
        self._error_ns = self._error_ns or now_ns()

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            if handler is not None:
                signal.signal(number, handler)

    def _other_threads(self) -> set[threading.Thread]:
        """Those that do not stay; without a library's that has called Python once."""
        others = set(threading.enumerate()) - self._stays
        return {thread for thread in others if not isinstance(thread, threading._DummyThread)}

    def _wait_for(self, threads: Iterable[threading.Thread]) -> None:
        """A thread that outlives its start may hold its state, or write where the next start does."""
        for thread in threads:
            thread.join(_THREADS_S)
            if thread.is_alive():
                _end(f"the thread {thread.name} of its last start has not ended")

    def _check_memory(self) -> None:
        """A leak ends with its process; what allocators keep, and what differs from start to start, is none.

        A start without a step has not touched all memory that others keep: weights, gradients.
        """
        if not self._has_stepped:
            return
        self._has_stepped = False
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self._resident = first = self._resident or resident
        if resident > first + max(first // 4, _MOST_GROWTH):
            _end(f"it has grown from {first >> 20} to {resident >> 20} MiB since its first return after a step")

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are to wake the main thread
        with contextlib.suppress(ConnectionResetError):  # the launcher has ended, and this process with it
            while (received := socket.recv_fds(self._connection, _LONGEST, 1))[0]:
                message, files, *_ = received
                if message == RETURN:
                    self._leave()
                else:
                    self._starts.put(files[0] if files else None)

    def _leave(self) -> None:
        """Have the main thread leave its start, and return once it has."""
        self._left.clear()
        self._asked_ns = now_ns()
        self._asked.set()  # from here on nothing new is exchanged
        wait_for_transfers(self._left)
        if not self._left.is_set():
            shut_connections()
            while self._when_shut:
                _call_last_of(self._when_shut)
        rounds = 0
        while not self._left.wait(_SHUT_AGAIN_S):
            shut_connections()
            rounds = rounds + 1 if self.exchanges() else 0
            if rounds > _STUCK_ROUNDS:
                _tell_end("an exchange of which a part had arrived does not end with its connection")
                os._exit(1)  # the main thread would wait until --return-timeout


def _call_last_of(calls: list[Callable[[], object]]) -> None:
    """In a frame of its own, which keeps nothing of it. An error would end the thread that hears of the next start."""
    with contextlib.suppress(IndexError):  # the main thread has left, and cleared them
        call = calls.pop()
        try:
            call()
        except Exception:
            traceback.print_exc()


def _end(why: str) -> NoReturn:
    _tell_end(why)
    raise SystemExit(1)


def _tell_end(why: str) -> None:
    rank = os.environ.get("RANK")
    tell(f"rank {rank} ends instead of starting again in its process: {why}")


_here: list[InProcessRestarts] = []  # of this process, if it is a rank that returns
_spared: set[int] = set()  # ports of other hosts


def at_return(undo: Callable[[], object]) -> None:
    """Have `undo` called when this process returns, what was registered last first; nothing in other processes."""
    for restarts in _here:
        restarts._undo.append(undo)


def when_shut(call: Callable[[], object]) -> None:
    """Have `call` called on another thread once this rank's connections to others are shut, before it has left.

    For what would keep the main thread from leaving; it must return within moments and not raise. Nothing in other
    processes.
    """
    for restarts in _here:
        restarts._when_shut.append(call)


def let_stay(thread: threading.Thread) -> None:
    """Let `thread`, which keeps nothing of a start, outlive the starts of this process. Nothing in other processes."""
    for restarts in _here:
        restarts._stays.add(thread)


def spare_connections_to(url: str) -> None:
    """From now on leave connections to the port of this http or https URL alone: they are to no rank.

    By the port, since a name may stand for other addresses at each look-up.
    """
    parts = urlsplit(url)
    _spared.add(parts.port or (80 if parts.scheme == "http" else 443))


def note_step() -> None:
    """Note that a step is done: the memory of this process is comparable with that after other starts."""
    for restarts in _here:
        restarts._has_stepped = True


def another_rank_is_lost() -> None:
    """Note that the script is about to end because of another rank."""
    for restarts in _here:
        restarts._has_lost_rank = True


def is_possible() -> bool:
    """Whether this rank returns after the failure of another one."""
    return bool(_here)


def is_asked() -> bool:
    """Whether the launcher has asked this rank to return: it exchanges nothing more with the ranks of this start."""
    return any(restarts._asked.is_set() for restarts in _here)


def check_not_asked() -> None:
    """Raises AskedToReturnError if the launcher has asked this rank to return; to be called between exchanges."""
    for restarts in _here:
        if restarts._asked.is_set():
            restarts._left_between = restarts._error_ns is None  # after an error an exchange may have ended half way
            raise AskedToReturnError("another rank has failed: this one returns")


def know_exchanges(exchanges: Callable[[], bool]) -> None:
    """Set the function that tells whether a collective of this rank is under way."""
    for restarts in _here:
        restarts.exchanges = exchanges


def shut_if_nothing_is_exchanged() -> None:
    """Shut down the connections if no exchange with other ranks is under way, and none has ended half way.

    All that this rank has sent arrives before the connection ends, so no other rank is left with a part of a message.
    In the other cases the second thread shuts them down, once transfers have ended.
    """
    for restarts in _here:
        if restarts._left_between and not restarts.exchanges():
            _wait_until_sent()
            shut_connections()


def note_error() -> None:
    """Note when the script sees an error that may be of another rank, before it undoes anything."""
    for restarts in _here:
        restarts.note_error()


def started_ns() -> int | None:
    """When this start began (monotonic, ns), if this process has returned; None if its process began with it."""
    return _here[0].started_ns if _here else None


def returns() -> int:
    """How often this process has returned from a start."""
    return _here[0].returns if _here else 0


def phases() -> Sequence[tuple[str, str | None, int, int]]:
    """Phase, detail, begin and end (monotonic, ns) of what led from the start before to this one; none before it."""
    return _here[0].phases if _here else ()


def shut_connections() -> None:
    """Shut down the connected TCP sockets of this process: all waits of gloo or torch's store for other ranks raise."""
    for one in _connections():
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def _wait_until_sent() -> None:
    until = time.monotonic() + _SENT_S
    while time.monotonic() < until and any(_has_bytes(one, (termios.TIOCOUTQ,)) for one in _connections()):
        time.sleep(_QUIET_S / _QUIET_LOOKS)


def wait_for_transfers(left: threading.Event) -> None:
    """Wait until nothing has been under way in the TCP sockets of this process for a moment, or `left` is set.

    When a connection ends, gloo (seen with torch 2.13) does not wake a thread that waits for a message of which a part
    has arrived, or has been sent: such a rank would not return.
    """
    begun = time.monotonic()
    quiet_s = max(_QUIET_S, _turn_s())
    quiet = 0  # looks in a row: by the clock, a machine that stood still was quiet
    while (now := time.monotonic()) < begun + _READ_S and quiet < _QUIET_LOOKS:
        # What is sent to a host that is cut off never arrives.
        watched = (termios.FIONREAD, termios.TIOCOUTQ) if now < begun + _SENT_S else (termios.FIONREAD,)
        quiet = 0 if any(_has_bytes(one, watched) for one in _connections()) else quiet + 1
        if left.wait(quiet_s / _QUIET_LOOKS):
            return


def _turn_s() -> float:
    """How long a thread of another rank may wait for a processor before it goes on with a message (proc(5), loadavg).

    Threads and processors are those of the whole host. Where the kernel does not count the threads for this process
    (ProcSubset=pid of systemd.exec(5)), ten for each processor are assumed.
    """
    processors = os.cpu_count() or 1
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    except OSError:
        running = 10 * processors
    return _TIME_SLICE_S * running / processors


def _has_bytes(one: socket.socket, watched: Iterable[int]) -> bool:
    """Whether bytes have arrived that are not read, or have been sent and may still arrive (tcp(7), SIOCINQ)."""
    with contextlib.suppress(OSError):
        return any(
            any(fcntl.ioctl(one, request, bytes(4))) and (request == termios.FIONREAD or _is_answered(one))
            for request in watched
        )
    return False


def _is_answered(one: socket.socket) -> bool:
    """Whether its other end acknowledges. To a lost host the same is sent again and again (tcp(7), TCP_INFO)."""
    retransmits = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)[2]
    return retransmits < _LOST_AFTER


def _connections() -> Iterator[socket.socket]:
    """The connected TCP sockets of this process that are not spared.

    No listening one: without it gloo would abort the process.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copied = os.dup(int(name))
            try:
                one = socket.socket(fileno=copied)
            except OSError:  # another thread has closed it meanwhile, and opened something else
                os.close(copied)
                continue
            with one:
                of_network = one.family in (socket.AF_INET, socket.AF_INET6)
                listens = of_network and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if of_network and not listens and not _is_spared(one):
                    yield one


def _is_spared(one: socket.socket) -> bool:
    with contextlib.suppress(OSError):  # it is not connected yet
        return bool(_spared) and one.getpeername()[1] in _spared
    return False
