"""Asynchronous saves between begin_save and their commit: one thread each, and how training hears of them.

The training thread begins a save, has its state released before the optimizer steps, and asks at its iterations
whether it is over. A thread of its own waits for the files, agrees with the other ranks and lets rank 0 commit; it
ends the operation. At most one save is pending.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from megatron.checkpointing.engines.base import PendingSave
from restart_trace.clock import now_ns
from restart_trace.device_threads import device_thread
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)

THREAD_NAME = "ckpt-commit"


class BackgroundSave:
    """One save that goes on while training does. All methods but `_run` are for the training thread.

    `finish` is called on the background thread: it returns when the save is committed (None) or has failed (why).
    `pending` is None if the save could not even be begun on this rank; the others must hear of that, too. `on_storage`:
    it is to be a checkpoint there, not only in memory.
    """

    def __init__(
        self,
        step: int,
        op: Operation,
        pending: PendingSave | None,
        finish: Callable[[], str | None],
        start_ns: int,
        on_storage: bool = True,
    ) -> None:
        self.step = step
        self.on_storage = on_storage
        self.error: str | None = None  # valid once the save is over
        self.blocked_ns = 0  # what training has waited for this save
        self.total_ns = 0  # from `start_ns` to the commit; valid once the save is over
        self._op = op
        self._pending = pending
        self._set_waiting = (lambda _: None) if pending is None else pending.set_waiting
        self.give_up = (lambda _: None) if pending is None else pending.give_up
        self._finish = finish
        self._start_ns = start_ns
        self._decided = threading.Event()
        self._over = threading.Event()
        # Held while a blocking span of this save is open, and by the end of the operation, which must come after.
        self._spans = threading.Lock()

    @property
    def durable(self) -> bool:
        """Whether the files were synchronised to storage, as the engine says; valid once the save is over."""
        return bool(self._op.durable)

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def start(self) -> None:
        # A daemon: a rank that is gone must not keep this process from ending.
        device_thread(self._run, name=THREAD_NAME).start()

    def _run(self) -> None:
        try:
            self.error = self._finish()
        except BaseException as exc:  # training waits to hear of it, whatever it is
            self.error = f"{type(exc).__name__}: {exc}"
            logger.exception("the commit thread failed")
        finally:
            self.total_ns = now_ns() - self._start_ns
            self._decided.set()
            with self._spans:
                self._end_operation()
                self._over.set()

    def _end_operation(self) -> None:
        try:
            self._op.end(None if self.error is None else f"CheckpointSaveError: {self.error}")
        except Exception:  # the save is what it is without its record
            logger.exception("the end of the save of step %d is missing in the trace", self.step)

    def release_state(self) -> None:
        """Return when the live state may change."""
        with self._spans:
            pending, self._pending = self._pending, None
            if pending is None or self._decided.is_set():
                return
            start = now_ns()
            pending.release_state()
            self.blocked_ns += now_ns() - start

    def wait_in(self, op: Operation) -> None:
        """Wait for the end, as a part of the operation `op` that cannot begin before."""
        with op.span("wait_previous"), self._waiting():
            self.release_state()
            self._over.wait()

    def wait(self, phase: str = "wait_previous") -> None:
        """Wait for the end, as a part of this save's own operation."""
        self.release_state()
        with self._spans:
            if not self._over.is_set():
                start = now_ns()
                with self._op.span(phase), self._waiting():
                    self._decided.wait()
                self.blocked_ns += now_ns() - start
        self._over.wait()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._set_waiting(True)
        try:
            yield
        finally:
            self._set_waiting(False)

    def join(self) -> None:
        """Wait for the end on a thread other than the training thread: records no wait."""
        self._over.wait()

    def wait_at_most(self, seconds: float) -> bool:
        """Wait for the end after an error in training; False if it did not come in time.

        The state will not change any more. An engine may rely on hearing so, but must not keep the process up: so
        it is told on another thread.
        """
        device_thread(self.release_state, name="ckpt-release").start()
        return self._over.wait(seconds)


class BackgroundSaves:
    """The pending save, if there is one, and the ended ones that `finished` has not returned yet."""

    def __init__(self) -> None:
        self.pending: BackgroundSave | None = None
        self.unreleased: BackgroundSave | None = None  # the pending one until its state may change
        self.steps = 0  # of the optimizer since the pending save was begun
        self._finished: list[BackgroundSave] = []

    def begin(self, save: BackgroundSave) -> None:
        save.start()  # if no thread can be started, there is none to wait for
        self.pending = self.unreleased = save
        self.steps = 0

    def release_state(self) -> None:
        """Return when the live state may change. Costs nothing if no save needs it."""
        save, self.unreleased = self.unreleased, None
        if save is not None:
            save.release_state()

    def wait_previous(self, op: Operation) -> None:
        """Before the next save, in its operation: wait for the pending one."""
        if self.pending is not None:
            self.pending.wait_in(op)
            self._finish()

    def drain(self) -> None:
        """Before the state changes otherwise than by training, or training ends: wait for the pending one."""
        if self.pending is not None:
            self.pending.wait()
            self._finish()

    def agree(self) -> None:
        """Before a step that is not to be done until all ranks have agreed on the pending save: wait for that."""
        if self.pending is not None:
            self.pending.wait("barrier")  # it holds training up, which a wait at the end of training does not
            self._finish()

    def drain_after_error(self, seconds: float) -> bool:
        """As `drain`, but not for ever: False if the save is still not over after `seconds`."""
        if self.pending is None:
            return True
        ended = self.pending.wait_at_most(seconds)
        if ended:
            self._finish()
        return ended

    def finished(self) -> list[BackgroundSave]:
        """The saves that are over since the last call, oldest first. Waits for nothing."""
        if self.pending is not None and self.pending.over:
            self._finish()
        finished, self._finished = self._finished, []
        return finished

    def _finish(self) -> None:
        if self.pending is not None:
            self._finished.append(self.pending)
        self.pending = self.unreleased = None


def release_before_steps(
    engine: Any, saves: BackgroundSaves, over_within: int | None = None, check: Callable[[], None] = lambda: None
) -> None:
    """From now on the optimizer of the DeepSpeed `engine` steps only when no save needs the present state.

    Forward and backward passes change nothing that is saved; weights, master weights, moments, loss scale, schedule
    and counters all change in the optimizer's step or after it. Nothing is patched but this one object.

    `over_within`: a save is to be over, not only released, before that many steps have followed it. With the number of
    iterations between saves, a save is whole before the last step that the next one is to save is done: a failure then
    loses at most what was trained between two saves, and the step in flight. Then `check` is called, which may raise:
    ranks that have lost each other are to do no step more.
    """
    step = engine.optimizer.step

    @functools.wraps(step)
    def step_on_released_state(*args: Any, **kwargs: Any) -> Any:
        if saves.unreleased is not None:
            saves.release_state()
        saves.steps += 1
        if saves.steps == over_within:
            saves.agree()
            check()
        return step(*args, **kwargs)

    engine.optimizer.step = step_on_released_state
