"""The memory that loads of engine `lazy` read into."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from megatron.fileio.direct_files import ALIGNMENT, align_up, aligned_memory
from megatron.fileio.pinned_memory import pinned_memory, pins_of
from restart_trace.devices import accelerator_in_use


class Arena:
    """The memory that loads read into, reused by the next load; pinned if there is a CUDA device.

    `take` returns it as a numpy array. Every tensor that is a view of that array keeps the array alive, so once the
    array is gone, no tensor of an earlier load is left and the memory may be overwritten.
    """

    def __init__(self) -> None:
        self._memory: np.ndarray[Any, Any] | None = None
        self._lent: weakref.ref[Any] | None = None

    def take(self, size: int) -> np.ndarray[Any, Any]:
        """`size` bytes at an aligned address; what they hold is undefined."""
        lent = self._lent() if self._lent is not None else None
        memory = self._memory
        if lent is not None or memory is None or len(memory) < size:
            self._memory = memory = None  # freed first, so that there are never two allocations at once
            self._memory = memory = _host_memory(size)
        owner = np.frombuffer(memory.data, dtype=np.uint8)
        self._lent = weakref.ref(owner)
        return owner[:size]

    def clear(self) -> None:
        """Free the memory as soon as no tensor needs it."""
        self._memory = self._lent = None


def _host_memory(size: int) -> np.ndarray[Any, Any]:
    size = max(align_up(size), ALIGNMENT)
    kind = accelerator_in_use()
    if kind is not None:
        return pinned_memory(size, pins_of(torch.device(kind, torch.accelerator.current_device_index())))
    return np.frombuffer(aligned_memory(size), dtype=np.uint8)
