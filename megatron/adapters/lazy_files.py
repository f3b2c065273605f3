"""Files of engine `lazy` (docs/lazy_format.md) under any name: what both adapters write and read."""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState, SavedFile
from megatron.checkpointing.engines.lazy import format as lazy_format
from megatron.checkpointing.engines.lazy.arena import Arena
from megatron.checkpointing.engines.lazy.host_cache import DEFAULT_IO_THREADS, HostCache
from megatron.checkpointing.engines.lazy.reader import Wanted, open_checked, read_tensors
from megatron.checkpointing.engines.lazy.writer import LazySave
from megatron.fileio.files import open_file, sync_directory, sync_file
from restart_trace.recorder import untraced_operation

_STATE = "state"  # the one state in each file; its tensors are called state/NAME
# The variables of torchrun and DeepSpeed's launcher, Slurm, Open MPI, and MPICH; the first that is set counts.
_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_WORLD_SIZE = (
    "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"
)  # fmt: skip


def options(*, fsync: bool = True, verify: bool = True, io_threads: int | None = None) -> EngineOptions:
    """The engine's options in a job of which only the launcher's variables are known."""
    return EngineOptions(
        fsync=fsync,
        verify_checksums=verify,
        io_threads=io_threads,
        rank=_number(_RANK, 0),
        local_rank=_number(_LOCAL_RANK, 0),
        local_world_size=_number(_LOCAL_WORLD_SIZE, 1),
    )


def _number(variables: Iterable[str], otherwise: int) -> int:
    """The number in the first of the variables of the environment that has one."""
    return next((int(value) for name in variables if (value := os.environ.get(name, "")).isdecimal()), otherwise)


@functools.cache
def _host_cache(io_threads: int, local_world_size: int) -> HostCache:
    """The buffers of all saves of this process."""
    return HostCache(EngineOptions().io_block_bytes, io_threads, None, local_world_size)


def begin(path: Path, tensors: Mapping[str, torch.Tensor], of: EngineOptions) -> LazySave:
    """Begin to write a file. The tensors may change once `release_state` has returned; `wait` returns its SavedFile.

    Raises SkeletonError for a tensor that is not dense.
    """
    cache = _host_cache(of.io_threads or DEFAULT_IO_THREADS, of.local_world_size)
    captured = lazy_format.capture([FileState(_STATE, dict(tensors))], of.checksum)
    # At least a block, so that the size of the buffers never changes: another save may be using some.
    cache.prepare(max(captured.contents.data_bytes, of.io_block_bytes))
    return LazySave(captured, path, of, cache, untraced_operation())


def read(
    path: Path, saved: SavedFile, names: Iterable[str] | None, into: Mapping[str, torch.Tensor], of: EngineOptions
) -> dict[str, torch.Tensor]:
    """Tensors of a file by name; None: all. Those of `into` that have the type and shape saved are filled in place.

    Raises CheckpointDamagedError naming the file, or OSError.
    """
    op = untraced_operation()
    contents = open_checked(path, saved, of, None, op)
    entries = contents.tensors_of(_STATE)
    if names is not None:
        wanted = {f"{_STATE}/{name}" for name in names}
        entries = [entry for entry in entries if entry.name in wanted]
    live = {f"{_STATE}/{name}": tensor for name, tensor in into.items()}
    found, _ = read_tensors([Wanted(path, contents, entries)], live, Arena(), of, None, op)
    return {name.removeprefix(f"{_STATE}/"): tensor for (_, name), tensor in found.items()}


@contextlib.contextmanager
def replacing(path: Path, fsync: bool) -> Iterator[BinaryIO]:
    """A file to be written, which gets its name then: a reader, also after a crash, sees all of it or the one before.

    Until then it has a name that nothing else has, neither a file of somebody else nor a link.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    with open(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC), "wb") as file:
        try:
            yield file
            file.flush()
            if fsync:
                sync_file(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if fsync:
        sync_directory(path.parent)


def replace_file(path: Path, content: bytes, fsync: bool) -> None:
    """Write a file so that a reader, also after a crash, sees all of it or what was there before."""
    with replacing(path, fsync) as file:
        file.write(content)
