"""Hooks of the steps of DeepSpeed's engines: when training begins, and when each iteration ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from restart_trace.clock import now_ns
from restart_trace.hooks.guard import Call, wrap
from restart_trace.hooks.session import Session


class Steps:
    """The iterations of one process. Each lasts from its first forward pass to the end of the optimizer's step."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._first_ns = 0  # begin of training
        self._begun_ns = 0  # begin of the current iteration; 0 between two

    @contextmanager
    def forward(self, call: Call) -> Iterator[None]:
        """Around a forward pass; those of an evaluation do not count."""
        if call.args[0].training:
            self._begin()
        yield

    @contextmanager
    def step(self, call: Call) -> Iterator[None]:
        """Around a call that may update the weights; with gradient accumulation most calls do not."""
        engine = call.args[0]
        before = engine.global_steps
        yield
        if self._begun_ns and engine.global_steps != before:
            self._session.iteration(engine.global_steps, self._first_ns, self._begun_ns, now_ns())
            self._begun_ns = 0

    @contextmanager
    def train_batch(self, call: Call) -> Iterator[None]:
        """Around one iteration of a PipelineEngine."""
        self._begin()
        with self.step(call):
            yield

    def _begin(self) -> None:
        self._begun_ns = self._begun_ns or now_ns()
        self._first_ns = self._first_ns or self._begun_ns


def hook(session: Session, deepspeed: ModuleType) -> None:
    """Hook the engines of deepspeed."""
    steps = Steps(session)
    wrap(deepspeed.DeepSpeedEngine, "forward", steps.forward)
    wrap(deepspeed.DeepSpeedEngine, "step", steps.step)
    wrap(deepspeed.PipelineEngine, "train_batch", steps.train_batch)
