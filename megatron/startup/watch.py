"""A watchdog thread of each rank: it ends a rank whose wait has timed out, and names what the rank waited for.

Gloo raises in a thread that has waited for --distributed-timeout-minutes; then pretrain() asks `Watch.verdict` whom it
waited for. NCCL, a file system that does not answer, and a rank that waits for one of those raise nothing: the thread
sees that something has been under way (restart_trace.under_way) past its deadline, prints one line and ends the
process. Nothing is sent and nothing is opened until something has been under way for half of its deadline.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import re
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

from megatron.config import Config
from megatron.processes.telling import tell
from megatron.startup import roll_call
from megatron.startup.roll_call import STUCK, WAITS, WORKS, Answer
from restart_trace.under_way import RANKS, READING, STORAGE, Entry, entries

_LONGEST_PAUSE_S = 0.25
_AFTER_GLOO_S = 0.5  # gloo's own error says more, so it comes first
_BEFORE_NCCL_S = 2.0  # whose own watchdog aborts the process, and says less
_ASKING_S = roll_call.CONNECT_S + roll_call.SETTLED_S + 0.5
_PRINTING_S = 1.0
_LONGEST_PAUSE_OF_STACKS_S = 1.0  # a look at them takes a millisecond or two, in which no thread runs Python
_LONGEST_GAP_S = 1.0  # that counts between two looks: a machine that stood still for a while proves nothing
_JOINS = 10
# As faulthandler prints it: a line for the thread, then one for each frame.
_STACK = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n((?:  [^\n]*\n)*)", re.MULTILINE)
_MAIN = threading.main_thread().ident or 0


class _Unmoved(NamedTuple):
    stack: str
    since: float  # watched, s


class Watch:
    """The watching thread of this rank. `close` it when the rank waits for nobody any more."""

    def __init__(self, config: Config) -> None:
        self._rank = config.parallel.rank
        self._world_size = config.parallel.world_size
        self._host = os.uname().nodename
        self._limit_s = 60 * config.parallel.distributed_timeout_minutes
        self._flag = f"--distributed-timeout-minutes {config.parallel.distributed_timeout_minutes:g}"
        on_cuda = os.environ.get("DS_ACCELERATOR") == "cuda"
        nccl = (config.parallel.distributed_backend or ("nccl" if on_cuda else "gloo")) == "nccl"
        self._wait_limit_s = self._limit_s + (-min(_BEFORE_NCCL_S, self._limit_s / 10) if nccl else _AFTER_GLOO_S)
        self._load_limit_s = config.checkpoint.load_timeout
        self._closed = threading.Event()
        self._listens = False
        self._last_doing = ""  # of the main thread
        self._unmoved: dict[int, _Unmoved] = {}  # by thread
        self._pause_of_stacks_s = min(_LONGEST_PAUSE_OF_STACKS_S, self._limit_s / 20)
        self._watched_s = 0.0  # for which this thread has watched; it stands still with the process and the machine
        self._began: dict[int, float] = {}  # what is under way, by number: when it was first seen (watched, s)
        self._stacks_noted = -math.inf  # watched, s
        self._called = threading.Event()  # by another rank
        self._told = threading.Lock()  # taken by the thread that prints the one line
        self._asked: Any = None  # the store, when the roll was called

    def start(self) -> Watch:
        threading.Thread(target=self._run, name="watch", daemon=True).start()
        return self

    def close(self) -> None:
        """To be called when the main thread has told of a `verdict`, too."""
        self._closed.set()
        self._leave()

    def verdict(self, doing: str) -> str:
        """For a thread whose wait has failed: whom the job waits for, as far as the other ranks tell. Tells it alone.

        The caller prints it and ends the process; the watching thread does neither any more. `doing`: what this rank
        waited in.
        """
        self._tell_alone()
        return self._ask(Answer(self._rank, self._host, doing, self._limit_s, WAITS))

    def wait_if_called(self) -> None:
        """For a thread that has lost its connections: do not return if that is because the roll was called.

        The listening thread says for whom, and ends the process. Gloo closes the connections of a rank whose wait has
        passed its deadline, before that rank can call: one that has itself waited for long gives it time to.
        """
        if self._listens and self._called.wait(roll_call.SETTLED_S):
            threading.Event().wait()

    def _tell_alone(self) -> None:
        if not self._told.acquire(blocking=False):
            threading.Event().wait()  # another thread is about to end the process

    def _run(self) -> None:
        pause, longest = min(_LONGEST_PAUSE_S, self._limit_s / 20), min(_LONGEST_GAP_S, self._limit_s / 10)
        looked = time.monotonic()
        while not self._closed.wait(pause):
            now = time.monotonic()
            self._watched_s += min(now - looked, longest)
            looked, numbered = now, entries()
            self._began = {number: self._began.get(number, self._watched_s) for number in numbered}
            under_way = numbered.values()
            oldest = max((entry.seconds for entry in under_way), default=0.0)
            if oldest > self._limit_s / 2 and not self._listens and self._world_size > 1:
                self._listens = True
                threading.Thread(target=self._listen, name="watch-listen", daemon=True).start()
            self._last_doing = _doing(_MAIN) or self._last_doing
            self._note_stacks([entry for entry in under_way if entry.depends_on == RANKS])
            for number, entry in numbered.items():
                why = self._too_long(entry, self._watched_s - self._began[number])
                if why is not None:
                    self._end(why, self._answer())

    def _note_stacks(self, waiting: list[Entry]) -> None:
        """Since when the threads that may wait for other ranks are at one place: a step, say, is more than a wait.

        Only of what has been under way for a while: most steps cost nothing.
        """
        now, before = self._watched_s, self._unmoved
        long = {entry.thread for entry in waiting if entry.seconds > self._pause_of_stacks_s}
        if not long:
            self._unmoved = {}
        if not long or now - self._stacks_noted < self._pause_of_stacks_s:
            return
        self._stacks_noted = now
        self._unmoved = {}
        for thread, stack in _stacks().items():
            if thread in long:
                known = before.get(thread)
                self._unmoved[thread] = known if known is not None and known.stack == stack else _Unmoved(stack, now)

    def _too_long(self, entry: Entry, watched_s: float) -> str | None:
        """Why the rank is to end because of `entry`; None if it is within its deadline, or has none.

        `watched_s`: for how long it was seen under way.
        """
        seconds = entry.seconds
        if entry.depends_on == STORAGE and watched_s > self._limit_s:
            return f"{entry.text} has not returned for {seconds:.1f} s ({self._flag}): the storage does not answer"
        if entry.depends_on == READING and self._load_limit_s is not None and watched_s > self._load_limit_s:
            return f"{entry.text} has taken {seconds:.1f} s, longer than --load-timeout {self._load_limit_s:g}"
        if entry.depends_on == RANKS and watched_s > self._wait_limit_s:
            unmoved = self._unmoved.get(entry.thread)
            still = 0.0 if unmoved is None else self._watched_s - unmoved.since
            if still > self._wait_limit_s:
                return f"{_doing(entry.thread)} waited {still:.1f} s for other ranks ({self._flag})"
        return None

    def _answer(self) -> Answer:
        """What this rank is at: storage that does not answer before anything else, then a wait for other ranks.

        Then what another thread has been at for long, as a save beside training is; then what its main thread does.
        """
        old = [entry for entry in entries().values() if entry.seconds > self._limit_s / 2]
        main = [entry for entry in entries().values() if entry.thread == _MAIN]
        for depends_on, state in ((STORAGE, STUCK), (RANKS, WAITS)):
            for entry in old:
                if entry.depends_on == depends_on:
                    return Answer(self._rank, self._host, _doing(entry.thread), entry.seconds, state)
        for entry in old:
            if entry.thread not in (_MAIN, 0):
                return Answer(self._rank, self._host, _doing(entry.thread), entry.seconds, WORKS)
        if not main:  # a wait of the main thread has just failed
            return Answer(self._rank, self._host, self._last_doing, self._limit_s, WAITS)
        state = WAITS if main[-1].depends_on == RANKS else WORKS
        return Answer(self._rank, self._host, _doing(_MAIN), main[-1].seconds, state)

    def _listen(self) -> None:
        """Until the roll is called, or nothing has been under way for long; then answer, and end as the caller does."""
        try:
            store = roll_call.connect()
            while not self._closed.is_set():
                with contextlib.suppress(RuntimeError):
                    roll_call.wait_for_call(store, timedelta(seconds=self._limit_s))
                    break
                store.add("alive", 0)  # raises if it was not the time that was up
        except Exception:  # nobody can call the roll then
            self._listens = False
            return
        if not self._closed.is_set():
            self._called.set()
            answer = self._answer()
            self._end(f"in {answer.doing}; another rank has waited longer than {self._flag}", answer)

    def _ask(self, answer: Answer) -> str:
        """Call the roll. On a thread, as a store whose process is stopped does not even refuse."""
        found: list[str] = []

        def ask() -> None:
            with contextlib.suppress(Exception):
                store = roll_call.connect()
                found.append(roll_call.call(store, answer, self._world_size))
                self._asked = store

        if self._world_size == 1:
            return "there is no other rank"
        thread = threading.Thread(target=ask, name="watch-ask", daemon=True)
        thread.start()
        for _ in range(_JOINS):  # as of _LONGEST_GAP_S
            thread.join(_ASKING_S / _JOINS)
        return found[0] if found else _store_is_silent()

    def _leave(self) -> None:
        """On a thread, as `_ask`."""
        if self._asked is not None:
            thread = threading.Thread(target=roll_call.leave, args=(self._asked,), name="watch-leave", daemon=True)
            thread.start()
            thread.join(2 * roll_call.LEAVE_S)

    def _end(self, why: str, answer: Answer) -> NoReturn:
        self._tell_alone()
        found = self._ask(answer)
        line = f"error on rank {self._rank}, {self._host}: {why}: {found}"
        # On a thread: what it prints to may be on the storage that does not answer.
        printing = threading.Thread(target=tell, args=(line,), daemon=True)
        printing.start()
        printing.join(_PRINTING_S)
        self._leave()
        os._exit(1)  # the main thread cannot be woken


def _store_is_silent() -> str:
    last = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
    ranks = f"the launcher of ranks 0 to {last}" if roll_call.launcher_serves_store() else "rank 0"
    return (
        f"{ranks}, which serves the rendezvous at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, does not "
        "answer: stopped or ended, or the host is down or cut off"
    )


def _doing(thread: int) -> str:
    """All that a thread is in the middle of, from the widest to the narrowest."""
    return ", ".join(entry.text for entry in entries().values() if entry.thread == thread)


def _stacks() -> dict[int, str]:
    """Thread -> the files and lines it is at, as text; of the latest 100 threads.

    By the interpreter's own printing, which holds every thread still: `sys._current_frames()` hands out frames of
    threads that go on, and to follow them crashes the process (CPython 3.11: a frame that ended meanwhile).
    """
    fd = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(fd)
        text = os.pread(fd, os.fstat(fd).st_size, 0).decode("ascii", "replace")
    finally:
        os.close(fd)
    return {int(thread, 16): stack for thread, stack in _STACK.findall(text)}
