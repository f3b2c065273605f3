"""States in memory that two processes share: the training process writes them, the writing process restores them.

The memory is an anonymous file (memfd_create(2)): it has no name in /dev/shm, and the kernel frees it when the last of
the two processes has ended, whatever ended it. Tensors lie in it one after another; everything else is pickled, with
the place of the tensor in that memory instead of each tensor.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron.checkpointing.engines.base import FileState
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.engines.host_staging import check_loadable, is_part_of_storage, survey
from megatron.fileio.host_memory import available_memory

_ALIGNMENT = 64
_GROWTH = 1 << 21  # a huge page
_STEP = 1 << 28
_LEFT_FREE = 1 << 29  # for everything else on the host


class TensorLocation(NamedTuple):
    """A tensor in the memory. Tensors of one storage have the same `offset`."""

    offset: int  # of its storage, bytes
    num_bytes: int  # of its storage; 0 for an empty tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int  # elements


class SharedMemory:
    """The memory, which grows to the largest snapshot and is kept for the next: its pages are made once."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd` in the process that was given it; without, new memory."""
        self.fd = os.memfd_create("checkpoint-snapshot", os.MFD_CLOEXEC) if fd is None else fd
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> None:
        """Make it at least that large. Raises OSError (ENOMEM) if there is too little memory; then it is as it was.

        The memory is taken here, in steps: the system does not refuse too much of it, it ends processes.
        """
        held = self._bytes.numel()
        if num_bytes <= held:
            return
        size = -(-num_bytes // _GROWTH) * _GROWTH
        try:
            for start in range(held, size, _STEP):
                length = min(_STEP, size - start)
                # Other ranks may be taking theirs; at the first step, look at the whole.
                if available_memory() - _LEFT_FREE < (size - start if start == held else length):
                    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
                os.posix_fallocate(self.fd, start, length)
        except OSError as exc:
            os.ftruncate(self.fd, held)
            what = f"{exc.strerror}, for a snapshot of {num_bytes} bytes in host memory"
            raise OSError(exc.errno, what) from exc
        self.map()

    def map(self) -> None:
        """Map as much as there is. Tensors that were made out of it before stay valid."""
        size = os.fstat(self.fd).st_size
        if size != self._bytes.numel():
            self._bytes = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)

    def bytes(self, offset: int, num_bytes: int) -> torch.Tensor:
        return self._bytes[offset : offset + num_bytes]

    def storage(self, offset: int, num_bytes: int) -> torch.UntypedStorage:
        """A storage of exactly these bytes."""
        memory: Any = self.bytes(offset, num_bytes).numpy()
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def give_back(self) -> None:
        """Have no more than `reserve` takes again. The other process must be done with it."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.ftruncate(self.fd, 0)

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)


class PickledState(NamedTuple):
    """A state in the memory, without its tensors."""

    name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class _Copy:
    tensor: torch.Tensor
    offset: int
    num_bytes: int
    whole: bool  # its storage as it is; otherwise the elements, in row-major order


class Capture:
    """States to be copied. Nothing is read from their tensors before copy_into."""

    def __init__(self, files: Sequence[FileState]) -> None:
        """Raises CheckpointSaveError for a tensor that is not plain strided numbers, and for what no load accepts:

        to pickle other classes could mean to call whatever they ask for when the other process unpickles them.
        """
        for file in files:
            check_loadable(survey(file.state), file.name)
        self.tensor_bytes = 0
        self._copies: list[_Copy] = []
        self._offsets: dict[Any, int] = {}
        # So that nothing else gets the identity or address of one of them.
        self._held: list[torch.Tensor] = []
        self._pickles = [(file.name, self._pickle(file)) for file in files]

    def _pickle(self, file: FileState) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, self, file.name).dump(file.state)
        return buffer.getvalue()

    def place(self, original: torch.Tensor, name: str) -> TensorLocation:
        """Where `original`, a tensor of the state `name`, will be: once, however often it occurs."""
        tensor = _plain(original, name)
        shape = tuple(tensor.shape)
        num_bytes = tensor.numel() * tensor.element_size()
        if not num_bytes:
            return TensorLocation(0, 0, tensor.dtype, shape, _row_major(shape), 0)
        whole = not is_part_of_storage(tensor)
        key = (tensor.device, tensor.untyped_storage().data_ptr()) if whole else id(original)
        if key not in self._offsets:
            self._offsets[key] = self.tensor_bytes
            self._copies.append(_Copy(tensor, self.tensor_bytes, num_bytes, whole))
            self._held.append(original)
            self.tensor_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        stride, first = (tensor.stride(), int(tensor.storage_offset())) if whole else (_row_major(shape), 0)
        return TensorLocation(self._offsets[key], num_bytes, tensor.dtype, shape, stride, first)

    def copy_into(self, memory: SharedMemory) -> list[PickledState]:
        """Copy everything; returns where the states are. Raises OSError if there is too little memory."""
        memory.reserve(self.tensor_bytes + sum(len(content) for _, content in self._pickles))
        for copy in self._copies:
            target, source = memory.bytes(copy.offset, copy.num_bytes), copy.tensor
            if copy.whole:
                raw = torch.empty(0, dtype=torch.uint8, device=source.device)
                target.copy_(raw.set_(source.untyped_storage()))
            else:
                target.view(source.dtype).view(source.shape).copy_(source)
        position, states = self.tensor_bytes, []
        for name, content in self._pickles:
            memory.bytes(position, len(content)).numpy()[:] = memoryview(content)
            states.append(PickledState(name, position, len(content)))
            position += len(content)
        return states


def _plain(original: torch.Tensor, name: str) -> torch.Tensor:
    tensor = original.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor) is not torch.Tensor:
        raise CheckpointSaveError(
            f"{name}: a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout} cannot be copied by "
            "fastpersist-decoupled; save it with another engine, such as torch"
        )
    if tensor.device.type == "meta":
        raise CheckpointSaveError(f"{name}: a tensor on device meta has no data to save")
    return tensor.resolve_conj().resolve_neg()


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class _Pickler(pickle.Pickler):
    """Pickles what is no tensor."""

    def __init__(self, buffer: io.BytesIO, capture: Capture, name: str) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._capture = capture
        self._name = name

    def persistent_id(self, obj: Any) -> Any:
        return tuple(self._capture.place(obj, self._name)) if isinstance(obj, torch.Tensor) else None


class Restorer:
    """Makes states out of a snapshot. Their tensors are in the memory itself, nothing is copied."""

    def __init__(self, memory: SharedMemory) -> None:
        memory.map()
        self._memory = memory
        self._storages: dict[int, torch.UntypedStorage] = {}

    def state(self, pickled: PickledState) -> Any:
        content = self._memory.bytes(pickled.offset, pickled.num_bytes).numpy().tobytes()
        # Unpickling interns attribute names. One that this process has not met is the same object as an equal string
        # elsewhere in the state, which torch.save then writes once; one that it has met is not. Here it has met all,
        # so that the size of the file does not depend on what this process has imported.
        met = _Unpickler(io.BytesIO(content), self).load()
        state = _Unpickler(io.BytesIO(content), self).load()
        del met
        return state

    def tensor(self, place: TensorLocation) -> torch.Tensor:
        if not place.num_bytes:
            return torch.empty(place.shape, dtype=place.dtype)
        if place.offset not in self._storages:
            self._storages[place.offset] = self._memory.storage(place.offset, place.num_bytes)
        made = torch.empty(0, dtype=place.dtype)
        return made.set_(self._storages[place.offset], place.storage_offset, place.shape, place.stride)


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, restorer: Restorer) -> None:
        super().__init__(buffer)
        self._restorer = restorer

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self._restorer.tensor(TensorLocation(*pid))
