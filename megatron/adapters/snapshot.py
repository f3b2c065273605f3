"""Which live tensors a save may read later, and until when: until the next step of any optimizer.

A save in somebody else's trainer is told nothing when the state is about to change. torch calls a hook before each step
of each optimizer; there every pending save copies what it has not read yet. So a tensor may be read later if nothing
but such a step changes it: a parameter in an optimizer, or a tensor of its state, and only of an optimizer that has
been seen to call the hook. Everything else, such as buffers, is copied at once.

Code that changes a parameter between steps, without an optimizer, breaks the promise: a save whose tensors were changed
so fails instead of being torn. torch counts changes of a tensor in place. A DTensor and its local part are counted
apart, and the local part of a DTensor in a state dict apart from that of the parameter: so those that the optimizer has
are looked at as well. Changes by way of `.data`, by `torch._foreach_*` of DTensors and by a replayed CUDA graph are not
counted: a few elements of each tensor are compared with what they were, which finds changes of the whole tensor.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron.checkpointing.engines.errors import CheckpointSaveError
from restart_trace.device_threads import device_selector
from restart_trace.devices import accelerator_in_use

SNAPSHOTS = ("lazy", "copy")
_SAMPLED = 64  # elements of a tensor that are compared, at most


class FileSave(Protocol):
    """A file that is written from live tensors."""

    def release_state(self) -> None:
        """Return when the tensors may change; must not raise."""
        ...


Save = TypeVar("Save", bound=FileSave)
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_pending: list[LiveSave[Any]] = []
# No optimizer steps while another thread, before the step of its own, copies what both may change. A handler of a
# signal may step within it.
_releasing = threading.RLock()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with _releasing:
        while _pending:
            _pending.pop(0).release_state()
        _stepped.add(optimizer)


register_optimizer_step_pre_hook(_before_step)


def check_snapshot(how: str, setting: str) -> None:
    """Raises ValueError naming the setting if `how` is not one of SNAPSHOTS."""
    if how not in SNAPSHOTS:
        raise ValueError(f"{setting} {how!r}: there is {' and '.join(SNAPSHOTS)}; use one of them")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this rank has; another tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():  # without autograd it is the very tensor, not a view
        return to_local()


def _storage(tensor: torch.Tensor) -> int:
    """Its address; 0 for a tensor that has none of plain elements: sparse, quantized, or a wrapper of other tensors."""
    local = local_part(tensor)
    if local.layout is not torch.strided or local.is_quantized:
        return 0
    try:
        return local.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, torch.Tensor):  # DeepSpeed's ZeRO-3 lends parameters to the groups only for a step
            yield parameter
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


@dataclass(frozen=True)
class Trained:
    """Parameters that are changed by a step of `optimizer`, after the hook, though it does not hold them."""

    optimizer: torch.optim.Optimizer
    parameters: Sequence[torch.Tensor]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of some elements from all over a tensor, [n] uint8, as a copy on its device."""
    each = max(1, int(_SAMPLED ** (1 / max(1, tensor.dim()))))  # in a dimension
    elements = tensor[tuple(slice(None, None, -(-size // each) or None) for size in tensor.shape)]
    return elements.resolve_conj().resolve_neg().flatten().clone().view(torch.uint8)


@dataclass(frozen=True)
class _Deferred:
    """A tensor that is read later.

    `sample`: of it, when it was taken; `counted`: how often all that stand for it had been changed then.
    """

    name: str
    local: torch.Tensor
    sample: torch.Tensor
    counted: list[tuple[torch.Tensor, int]]

    def was_changed(self) -> bool:
        if any(tensor._version != version for tensor, version in self.counted):
            return True
        return not torch.equal(_sample(self.local), self.sample)


class Snapshot:
    """The tensors of one save. `how`: "lazy", or "copy" to copy all of them at once."""

    def __init__(self, how: str, trained: Trained | None = None) -> None:
        with _releasing:
            stepped = list(_stepped) if how == "lazy" else []
        self._steady: set[int] = set()
        self._sharded: dict[int, list[torch.Tensor]] = {}  # storage -> DTensors of optimizers, and their local parts
        for tensor in (tensor for optimizer in stepped for tensor in _tensors_of(optimizer)):
            self._steady.add(_storage(tensor))
            if (local := local_part(tensor)) is not tensor:
                self._sharded.setdefault(_storage(tensor), []).extend((tensor, local))
        if trained is not None and any(optimizer is trained.optimizer for optimizer in stepped):
            self._steady |= {_storage(parameter) for parameter in trained.parameters}
        self._steady -= {0}
        self._deferred: list[_Deferred] = []

    def take(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor, to be read until the next step; or a copy of it if something else may change it."""
        alias = tensor.detach()
        local = local_part(alias)
        if _storage(alias) in self._steady:
            counted = [alias, local_part(tensor), *self._sharded.get(_storage(alias), ())]
            versions = [(tensor, tensor._version) for tensor in counted]
            self._deferred.append(_Deferred(name, local, _sample(local), versions))
            return alias
        if local is alias:
            return alias.to("cpu", copy=True)
        local.data = local.to("cpu", copy=True)
        return alias

    def copy_deferred(self) -> None:
        """Point the tensors that `take` returned at copies in host memory."""
        for deferred in self._deferred:
            deferred.local.data = deferred.local.to("cpu", copy=True)
        self.forget()

    def forget(self) -> None:
        """Let go of the tensors, which nothing reads any more."""
        self._deferred.clear()

    def changed(self) -> CheckpointSaveError | None:
        """The error to raise if a tensor was changed since it was taken."""
        for deferred in self._deferred:
            if deferred.was_changed():
                return CheckpointSaveError(
                    f"{deferred.name} was changed during the save, and by no optimizer's step: the checkpoint would be "
                    'torn; choose snapshot "copy"'
                )
        return None


class LiveSave(Generic[Save]):
    """A save of the tensors of `snapshot` to one file, from its beginning to the next step of an optimizer.

    It may step before the file is begun: then the tensors are copied first. Made on the training thread; the file may
    be begun on another one, which then works on the same device, after what training has queued there.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._select_device = device_selector()
        self._queued = None if accelerator_in_use() is None else torch.accelerator.current_stream().record_event()
        self._lock = threading.Lock()
        self._released = False
        self._save: Save | None = None
        self._error: Exception | None = None
        _pending.append(self)

    def begin(self, begin: Callable[[], Save]) -> Save:
        """Have `begin` take the tensors and begin the file; not while they are being copied.

        Raises CheckpointSaveError if they could not be copied, or were changed before that.
        """
        self._select_device()
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._queued is not None:
                torch.accelerator.current_stream().wait_event(self._queued)
            self._save = begin()
            return self._save

    def release_state(self) -> None:
        """Called on the training thread, before an optimizer's step.

        An error of the copying is the save's alone: the training goes on, unless it was interrupted.
        """
        with self._lock:
            self._released = True
            try:
                self._error = self._snapshot.changed()
                if self._save is None and self._error is None:
                    self._snapshot.copy_deferred()
                elif self._save is not None:
                    self._save.release_state()
            except BaseException as exc:
                reason = str(exc) or type(exc).__name__
                self._error = CheckpointSaveError(f"the state could not be copied before the next step: {reason}")
                self._snapshot.forget()
                if not isinstance(exc, Exception):
                    raise

    def check(self) -> None:
        """Called when the file is written. Raises CheckpointSaveError if a tensor was changed before it was read."""
        with self._lock:
            error = self._error if self._released else self._snapshot.changed()
            self._snapshot.forget()
        if error is not None:
            raise error
