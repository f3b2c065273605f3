"""How many bytes each engine writes for planned states, found by running its own code without the data.

torch.save itself writes the files of the torch format, under its own `skip_data`, which leaves a hole for each tensor:
holes take no space on disk. An engine whose sizes cannot be computed exactly is refused; none is estimated.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import torch
from torch.serialization import skip_data

from megatron.checkpointing.engines.base import FileState, SavedFile
from megatron.checkpointing.engines.host_staging import Staging, stage_on_host
from megatron.config import Config, ConfigError
from megatron.fileio import zip_records

from ..common.tensor_trees import map_tensors

_LAYER_SIZES: dict[tuple[Any, ...], int] = {}  # (key, dtype, shape) of each tensor -> bytes of the file
Sizer = Callable[[Sequence[FileState], int, Config], list[SavedFile]]


def sizer(engine: str) -> Sizer:
    """The function that returns the files that `engine` writes for the states of a rank; checksums are placeholders.

    Raises ConfigError if the engine is unknown or cannot be planned.
    """
    from megatron.checkpointing.engines.registry import engine_names

    if engine in _SIZERS:
        return _SIZERS[engine]
    known = ", ".join(_SIZERS)
    if engine not in engine_names():
        raise ConfigError(f"--engine {engine}: no such engine; those that can be planned are: {known}")
    raise ConfigError(
        f"--engine {engine}: its files cannot be planned, since its library lays them out while it writes; "
        f"those that can be are: {known}. Measure it with tools.ckpt_replay"
    )


def with_placements(engine: str) -> bool:
    """Whether the states for this engine must have placements."""
    from megatron.checkpointing.engines.registry import engine_class

    return engine in ("lazy", "memory") and engine_class(engine).wants_placements


def torch_file_size(state: Any) -> int:
    """Bytes that torch.save writes to a file object for `state`, whose tensors may be on the meta device.

    Tensors are saved as CPU tensors that own their storage, as `stage_on_host` returns them.
    """
    with TemporaryFile(prefix="ckpt_plan_") as file, skip_data():
        torch.save(_staged(state), file)
        return file.seek(0, os.SEEK_END)


def torch_named_file_size(state: Any, name: str) -> int:
    """As torch_file_size, for torch.save to a file called `name`, as upstream does: each record contains the name."""
    with TemporaryDirectory(prefix="ckpt_plan_") as directory, skip_data():
        path = Path(directory) / name
        torch.save(_staged(state), path)
        return path.stat().st_size


def _staged(state: Any) -> Any:
    return stage_on_host(map_tensors(state, without_data), Staging())


def without_data(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor like `tensor`, which is on the meta device: it has address space, but no memory."""
    if not tensor.is_meta:
        return tensor
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    # Read-only, so that the kernel reserves nothing: a shard may be larger than this machine's memory.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nothing will write to it
        return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)


def _torch_sizes(files: Sequence[FileState], rank: int, config: Config) -> list[SavedFile]:
    checksum = f"{zip_records.ALGORITHM}:{0:08x}"
    return [SavedFile(file.name, _torch_size(file), checksum) for file in files]


def _torch_size(file: FileState) -> int:
    """torch_file_size, cached: the blocks of a transformer have equal sizes."""
    if not file.name.startswith("layer_"):
        return torch_file_size(file.state)
    alike = tuple((key, tensor.dtype, tensor.shape) for key, tensor in file.state.items())
    if alike not in _LAYER_SIZES:
        _LAYER_SIZES[alike] = torch_file_size(file.state)
    return _LAYER_SIZES[alike]


def _decoupled_sizes(files: Sequence[FileState], rank: int, config: Config) -> list[SavedFile]:
    """The writing process unpickles the state, after which equal strings may be different objects than before.

    torch.save writes each object once, so the size of its file changes by some bytes.
    """
    return _torch_sizes([replace(file, state=_pickled_and_back(file.state)) for file in files], rank, config)


def _pickled_and_back(state: Any) -> Any:
    tensors: list[torch.Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if not isinstance(obj, torch.Tensor):
                return None
            tensors.append(obj)
            return len(tensors) - 1

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: int) -> torch.Tensor:
            return tensors[pid]

    buffer = io.BytesIO()
    Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(state)
    buffer.seek(0)
    return Unpickler(buffer).load()


def _lazy_sizes(files: Sequence[FileState], rank: int, config: Config) -> list[SavedFile]:
    from megatron.checkpointing.engines.lazy import format as lazy_format

    name, size = lazy_format.planned_size(files, rank, config.checkpoint.checksum == "crc32")
    return [SavedFile(name, size, f"{lazy_format.ALGORITHM}:{0:08x}", tuple(file.name for file in files))]


def _no_files(files: Sequence[FileState], rank: int, config: Config) -> list[SavedFile]:
    return []


_SIZERS: dict[str, Sizer] = {
    "torch": _torch_sizes,
    "fastpersist": _torch_sizes,  # the same bytes through another writer
    "fastpersist-decoupled": _decoupled_sizes,
    "lazy": _lazy_sizes,
    "memory": _lazy_sizes,  # what it writes to storage
    "none": _no_files,
}
