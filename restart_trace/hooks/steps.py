"""Training steps: when training begins, and when each iteration ends.

DeepSpeed's engines tell it, or the program by `restart_trace.hooks.step`; in any other job torch's optimizers do. An
iteration begins with the first batch that is requested for it, or else with its first forward or backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

from restart_trace.clock import now_ns
from restart_trace.hooks.guard import Call, Hook, wrap
from restart_trace.hooks.session import Session
from restart_trace.schema import COUNT, ENGINE, OPTIMIZER, PROGRAM, TRAINER


class Steps:
    """The iterations of one process."""

    def __init__(self, session: Session) -> None:
        self.number_of: Callable[[], int] | None = None  # a trainer's number of the step that is under way
        self._session = session
        self._told_by = OPTIMIZER  # who ends iterations
        self._first_ns = 0  # begin of training
        self._begun_ns = 0  # begin of the current iteration; 0: not seen yet
        self._ended_ns = 0  # end of the previous one
        self.gathered = 1  # batches that a trainer requests before it computes the first of them
        self._loader = 0  # data loader iterator of the latest batch
        self._ahead = 0  # batches that are requested from it ahead of the one that is trained on
        self._next_ahead = 0  # the same of the next data loader iterator
        self._batches: list[int] = []  # begins of its requests since the previous iteration; in the start-up of all
        self._optimizer: Callable[[], Any] = lambda: None  # the optimizer whose steps count, while it exists
        self._count = 0

    def begin(self) -> None:
        """The training thread begins to compute: the first call of an iteration counts."""
        if self._begun_ns or not self._session.computes():
            return
        self._begun_ns = self._requested_ns() if self._batches else now_ns()
        self._first_ns = self._first_ns or self._begun_ns

    def _requested_ns(self) -> int:
        """When the first batch was requested that is trained on; those before it were skipped."""
        requested, self._batches = self._batches, []
        skipped = max(len(requested) - self.gathered - self._ahead, 0) if self._session.is_starting() else 0
        if skipped:
            self._session.data_skip(requested[0], requested[skipped], skipped)
        return requested[skipped]

    def end(self, step: int, source: str) -> None:
        """Iteration `step` has ended."""
        start_ns = self._begun_ns or self._ended_ns
        self._ended_ns, self._begun_ns, self._batches = now_ns(), 0, []
        if start_ns:  # else nothing says when it began
            self._session.iteration(step, source, self._first_ns or start_ns, start_ns, self._ended_ns)

    def told(self, step: int) -> None:
        """The program says that it has finished `step`."""
        self._told_by = PROGRAM
        if self._session.is_training_thread():
            self.end(step, PROGRAM)

    def forward(self, call: Call) -> None:
        """Before the forward pass of a module; those of an evaluation do not count."""
        if not self._begun_ns and call.args[0].training:
            self.begin()

    def backward(self, call: Call) -> AbstractContextManager[None] | None:
        """Around a backward pass."""
        if not self._begun_ns:
            self.begin()
        return self._session.backward()

    def batch(self, call: Call) -> None:
        """Before a request of a batch. Those of another data loader, such as an evaluation's, do not count."""
        if not self._begun_ns and self._session.is_training_thread():
            if id(call.args[0]) != self._loader:
                self._loader, self._batches = id(call.args[0]), []
                self._ahead, self._next_ahead = self._next_ahead, 0
            self._batches.append(now_ns())

    def iterator_ahead(self, call: Call) -> None:
        """Before the beginning of an iteration that requests each batch while the one before is trained on."""
        if self._session.is_training_thread():
            self._next_ahead = 1

    @contextmanager
    def prefetched(self, call: Call) -> Iterator[None]:
        """Around the begin of an iteration by Lightning, which requests batches then if their number is not known."""
        yield
        if self._session.is_training_thread():
            self._ahead = len(call.args[0].batches)

    def optimizer_step(self, call: Call) -> None:
        """At the end of a step of a torch optimizer. Of several optimizers the first counts while it exists."""
        optimizer = call.args[0]
        if self._told_by != OPTIMIZER or not self._session.is_training_thread():
            return
        counting = self._optimizer()
        if counting is None:
            self._optimizer = weakref.ref(optimizer)
        elif counting is not optimizer:
            return
        self._count += 1
        self.end(*self._number(optimizer))

    def _number(self, optimizer: Any) -> tuple[int, str]:
        if self.number_of is not None:
            return self.number_of(), TRAINER
        number = _number_in_state(optimizer)
        return (self._count, COUNT) if number is None else (number, OPTIMIZER)

    @contextmanager
    def engine_step(self, call: Call) -> Iterator[None]:
        """Around a call that may update the weights; with gradient accumulation most calls do not."""
        engine = call.args[0]
        self._told_by = ENGINE
        before = engine.global_steps
        yield
        if self._begun_ns and engine.global_steps != before:
            self.end(engine.global_steps, ENGINE)

    @contextmanager
    def train_batch(self, call: Call) -> Iterator[None]:
        """Around one iteration of a PipelineEngine."""
        self.begin()
        with self.engine_step(call):
            yield


def _number_in_state(optimizer: Any) -> int | None:
    """The number of steps in the optimizer's state, which a checkpoint restores; None if it holds none on the host."""
    state = next(iter(optimizer.state.values()), None)
    number = state.get("step") if isinstance(state, dict) else None
    device = getattr(number, "device", None)
    if number is None or (device is not None and device.type != "cpu"):  # reading it would wait for the device
        return None
    return int(number)


def hook_engines(steps: Steps, deepspeed: ModuleType) -> None:
    """Hook the engines of deepspeed."""
    wrap(deepspeed.DeepSpeedEngine, "forward", steps.forward)
    wrap(deepspeed.DeepSpeedEngine, "step", steps.engine_step)
    wrap(deepspeed.PipelineEngine, "train_batch", steps.train_batch)


def hook_optimizers(steps: Steps, module: ModuleType) -> None:
    """Hook torch.optim.optimizer: the steps of all optimizers."""
    hook = Hook("torch.optim.Optimizer.step", steps.optimizer_step)

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not hook.off:
            hook.enter(Call(_no_signature, (optimizer,), {}))

    module.register_optimizer_step_post_hook(stepped)


def hook_backward(steps: Steps, module: ModuleType) -> None:
    """Hook torch.autograd."""
    wrap(module, "backward", steps.backward)


def hook_data(steps: Steps, module: ModuleType) -> None:
    """Hook torch.utils.data.dataloader."""
    wrap(module._BaseDataLoaderIter, "__next__", steps.batch)


def hook_accelerate_data(steps: Steps, module: ModuleType) -> None:
    """Hook accelerate.data_loader, whose data loaders look one batch ahead to see where the data end."""
    wrap(module.DataLoaderShard, "__iter__", steps.iterator_ahead)
    wrap(module.DataLoaderDispatcher, "__iter__", steps.iterator_ahead)


def hook_lightning_data(steps: Steps, module: ModuleType) -> None:
    """Hook Lightning's module of data fetchers."""
    wrap(module._PrefetchDataFetcher, "__iter__", steps.prefetched)


def hook_ddp(steps: Steps, module: ModuleType) -> None:
    """Hook torch.nn.parallel.distributed."""
    wrap(module.DistributedDataParallel, "forward", steps.forward)


def hook_transformers(steps: Steps, module: ModuleType) -> None:
    """Hook transformers.trainer: while a Trainer trains, its global_step numbers the steps."""

    @contextmanager
    def train(call: Call) -> Iterator[None]:
        trainer = call.args[0]
        steps.number_of = lambda: trainer.state.global_step + 1  # raised after the optimizer's step
        steps.gathered = trainer.args.gradient_accumulation_steps
        try:
            yield
        finally:
            steps.number_of, steps.gathered = None, 1

    wrap(module.Trainer, "train", train)


def _no_signature() -> Any:
    raise AssertionError("an optimizer's step has no arguments that a hook looks at")
