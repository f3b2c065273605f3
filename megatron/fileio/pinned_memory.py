"""Host memory that a device copies to and from by itself: touched, then pinned, in few large pieces.

Pinning 15.7 GB takes seconds, most of them for touching its pages, and each pinned allocation takes a lock of the
driver. So what saves and loads need is made once, while a process starts: `PinnedAhead` does it in a thread of its own.

The memory is ours and registered with the driver (cuMemHostRegister): torch rounds each allocation of its own pinned
memory up to a power of two.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from megatron.fileio.direct_files import ALIGNMENT, align_up, aligned_memory
from megatron.fileio.host_memory import available_memory
from restart_trace.clock import now_ns
from restart_trace.device_threads import device_thread
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)

PIECE = 1 << 30  # bytes
_TOUCHED_AT_ONCE = 64 << 20  # bytes, between two looks at whether to stop
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for every context of the process
_PAGE = 4096


class PinningError(RuntimeError):
    """Host memory could not be had or pinned; the message says why and what to change."""


class Pins(Protocol):
    """What pins memory for a device."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Raises PinningError with the driver's reason."""
        ...

    def unpin(self, address: int) -> None: ...


class CudaPins:
    """The CUDA driver's, called directly: torch's binding of cudaHostRegister keeps other threads from running.

    Signatures after the CUDA Driver API, "Memory Management", "Primary Context Management" and "Context Management".
    """

    def __init__(self, device: Any, library: str = "libcuda.so.1") -> None:
        """`device`: torch.device with an index. The driver is initialised. Raises PinningError as `pin`."""
        self._driver = ctypes.CDLL(library)
        self._register = self._driver.cuMemHostRegister_v2
        self._register.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._driver.cuMemHostUnregister.argtypes = (ctypes.c_void_p,)
        self._driver.cuCtxSetCurrent.argtypes = (ctypes.c_void_p,)
        self._driver.cuGetErrorName.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
        handle, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self._driver.cuDeviceGet(ctypes.byref(handle), int(device.index)))
        self._check(self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), handle))  # torch's own

    def pin(self, address: int, num_bytes: int) -> None:
        self._enter_context()
        self._check(self._register(address, num_bytes, _PORTABLE))

    def unpin(self, address: int) -> None:
        self._enter_context()
        self._check(self._driver.cuMemHostUnregister(address))

    def _enter_context(self) -> None:
        """A thread begins without a context.

        torch.cuda.set_device would not do: some versions of torch return at once where the device is the one that a
        thread begins with, 0, and the driver then refuses with CUDA_ERROR_INVALID_CONTEXT.
        """
        self._check(self._driver.cuCtxSetCurrent(self._context))

    def _check(self, code: int) -> None:
        if code:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(name))
            raise PinningError((name.value or b"unknown error").decode() + f" ({code})")


class NoPins:
    """For devices other than CUDA's, whose drivers copy through memory of their own: nothing is pinned."""

    def pin(self, address: int, num_bytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...


def pins_of(device: torch.device) -> Pins:
    """What pins memory for copies from and to `device`, which has an index.

    The first time it warns if memory for this type of device stays unpinned: copies are slower then, and the thread
    that queues one waits for it. Raises PinningError.
    """
    if device.type == "cuda" and torch.version.hip is None:
        return CudaPins(device)
    _warn_of_no_pins("ROCm" if device.type == "cuda" else device.type)
    return NoPins()


@functools.cache
def _warn_of_no_pins(kind: str) -> None:
    logger.warning("host memory is pinned for CUDA devices alone: copies from and to %s devices are slower", kind)


def pinned_memory(num_bytes: int, pins: Pins) -> np.ndarray[Any, Any]:
    """`num_bytes` of touched and pinned memory at an aligned address; unpinned when its last view is gone."""
    return _pin(_touched(num_bytes, lambda: False), pins)


class PinnedMapping:
    """A mapping of a file in memory whose first bytes are pinned, in pieces that end at multiples of `piece_bytes`.

    A copy must not cross such a multiple: the driver knows each piece as memory of its own. If the file is cut off and
    grows again, it gets new pages, while the device would go on writing into the old ones: `pin` renews those pins.
    All pins end with the last view of `array`. For one thread at a time.
    """

    def __init__(self, array: np.ndarray[Any, Any], pins: Pins, piece_bytes: int) -> None:
        """`array`: the mapping, from its first byte on, not cut from another array."""
        self._address = array.ctypes.data
        self._pins = pins
        self._piece_bytes = piece_bytes
        self._pinned: dict[int, int] = {}  # start -> bytes
        self._kept = 0  # up to here the pages of the file are those that were pinned
        weakref.finalize(array, _unpin_all, self._address, pins, self._pinned).atexit = False

    def cut_off(self, num_bytes: int) -> None:
        """The file had only so many bytes since the last call of `pin`, a multiple of the page size."""
        self._kept = min(self._kept, num_bytes)

    def pin(self, num_bytes: int) -> Iterator[int]:
        """Pin the first bytes of the mapping, which the file has, as far as they are not pinned.

        Yields the bytes of each piece once it is pinned. Raises PinningError.
        """
        for start in range(0, num_bytes, self._piece_bytes):
            stop = min(start + self._piece_bytes, num_bytes)
            present = self._pinned.get(start, 0)
            if start + present >= stop and self._kept >= stop:
                continue
            if present:
                self._pins.unpin(self._address + start)
                del self._pinned[start]
            self._pins.pin(self._address + start, stop - start)
            self._pinned[start] = stop - start
            yield stop - start
        self._kept = max(self._kept, num_bytes)


def _unpin_all(address: int, pins: Pins, pinned: dict[int, int]) -> None:
    for start in pinned:
        pins.unpin(address + start)


class PinnedAhead:
    """Memory made ready in the background, piece by piece, each handed to `take` once it is pinned."""

    def __init__(
        self,
        num_bytes: int,
        pins: Pins,
        take: Callable[[np.ndarray[Any, Any]], None],
        op: Operation,
        *,
        piece_bytes: int = PIECE,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins at once, and records it as background spans of `op`, a start-up, which may have ended before.

        `take` runs in the thread, as does `ended`, once no piece is left or one could not be pinned.
        """
        self._num_bytes = num_bytes
        self._piece_bytes = piece_bytes
        self._pins = pins
        self._take = take
        self._op = op
        self._stop = threading.Event()
        self._ended = ended
        self.error: Exception | None = None
        self.done = False
        self.pinned_bytes = 0
        self._thread = device_thread(self._run, name="host-memory")
        self._thread.start()

    def wait(self) -> None:
        """Return when all is pinned; what that takes is a span of its own. Raises PinningError."""
        if self._thread.is_alive():
            with self._op.span("host_memory", "wait"):
                self._thread.join()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def waited_since(self, began_ns: int) -> None:
        """Record that a thread of a save, the caller, has waited for a piece since then."""
        self._add("wait", began_ns, now_ns(), None)

    def stop(self) -> None:
        """End after the piece that is under way."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self.pinned_bytes < self._num_bytes and not self._stop.is_set():
                self._next_piece(min(self._piece_bytes, self._num_bytes - self.pinned_bytes))
        except Exception as exc:
            self.error = exc
        self.done = True
        self._ended()

    def _next_piece(self, size: int) -> None:
        free = available_memory()
        if free < size:  # better than to be killed by the kernel
            raise PinningError(
                f"{free / 2**30:.2f} GiB of host memory are free, and {size / 2**30:.2f} GiB more are needed"
            )
        began = now_ns()
        memory = _touched(size, self._stop.is_set)
        touched = now_ns()
        self._add("allocate", began, touched, size)
        memory = _pin(memory, self._pins)
        self._add("pin", touched, now_ns(), size)
        self.pinned_bytes += size
        self._take(memory)

    def _add(self, detail: str, start: int, end: int, size: int | None) -> None:
        self._op.add("host_memory", detail, start, end, num_bytes=size, blocking=False)


def why_pinning_failed(error: Exception, pinned_bytes: int, wanted_bytes: int) -> str:
    """What a user needs to know of a PinningError: how far it came, and which limits there are."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:g} MiB"
    advice = (
        ""
        if soft == resource.RLIM_INFINITY
        else " (raise it: ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity for slurmd)"
    )
    progress = f"{pinned_bytes / 2**30:.2f} of {wanted_bytes / 2**30:.2f} GiB"
    return f"{error}, after {progress}; RLIMIT_MEMLOCK is {locked}{advice}"


def _touched(num_bytes: int, stop: Callable[[], bool]) -> np.ndarray[Any, Any]:
    """Memory whose pages are there, or fewer of them if `stop()` becomes true. A forked process does not have it.

    Otherwise pages would be shared with the data workers that a rank forks, and on kernels that copy a page at the next
    write, pinned or not (before Linux 5.12), the device would read the old page and this process write the new one.
    """
    view = aligned_memory(max(align_up(num_bytes), ALIGNMENT))
    view.obj.madvise(mmap.MADV_DONTFORK)  # pyright: ignore[reportAttributeAccessIssue]  it is a view of a mapping
    memory = np.frombuffer(view, dtype=np.uint8)
    for start in range(0, len(memory), _TOUCHED_AT_ONCE):
        if stop():
            break
        memory[start : start + _TOUCHED_AT_ONCE : _PAGE] = 0  # other Python threads run meanwhile
    return memory[:num_bytes]


def _pin(memory: np.ndarray[Any, Any], pins: Pins) -> np.ndarray[Any, Any]:
    address = memory.ctypes.data
    pins.pin(address, len(memory))
    # Views keep this array alive, not the one that it was cut from: numpy lets views refer to what owns the memory.
    owner = np.frombuffer(memory.data, dtype=np.uint8)
    weakref.finalize(owner, pins.unpin, address).atexit = False  # the driver does it at the end of a process
    return owner
