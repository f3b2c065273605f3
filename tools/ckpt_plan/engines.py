"""What each engine writes for planned states, and what it needs on the host meanwhile.

The bytes of its files are found by running its own code without the data: torch.save itself writes the files of the
torch format, under its own `skip_data`, which leaves a hole for each tensor: holes take no space on disk. An engine
whose sizes cannot be computed exactly is refused; none is estimated.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import torch
from torch.serialization import skip_data

from megatron.checkpointing.engines.base import FileState, SavedFile
from megatron.checkpointing.engines.host_staging import Staging, stage_on_host
from megatron.checkpointing.store.disk_space import slot_bytes
from megatron.config import Config, ConfigError
from megatron.fileio import zip_records
from megatron.peers.memory_slots import SLOTS_PER_RANK

from ..common.tensor_trees import map_tensors

_LAYER_SIZES: dict[tuple[Any, ...], int] = {}  # (key, dtype, shape) of each tensor -> bytes of the file
_MIB = 1 << 20
_FAST_WRITER_BYTES = 64 * _MIB  # page-locked buffers of DeepSpeed's FastFileWriter


@dataclass(frozen=True)
class PlannedState:
    """The state of a rank: `file_bytes`: bytes of the tensors of each file; `parameters`: their number."""

    config: Config
    file_bytes: list[int]
    parameters: int


@dataclass(frozen=True)
class EnginePlan:
    """`sizes`: the files that the engine writes for the states of a rank; checksums are placeholders.

    `host_bytes`: an estimate of what it holds on the host in addition to the state while it saves, which `host_note`
    describes. `placements`: whether the states must have them, as the class of the engine says.
    """

    sizes: Callable[[Sequence[FileState], int, Config], list[SavedFile]]
    host_bytes: Callable[[PlannedState], int]
    host_note: str
    placements: bool = False


def engine_plan(engine: str) -> EnginePlan:
    """Raises ConfigError if the engine is unknown or cannot be planned."""
    from megatron.checkpointing.engines.registry import engine_names

    if engine in ENGINES:
        return ENGINES[engine]
    known = ", ".join(ENGINES)
    if engine not in engine_names():
        raise ConfigError(f"--engine {engine}: no such engine; those that can be planned are: {known}")
    raise ConfigError(
        f"--engine {engine}: its files cannot be planned, since its library lays them out while it writes; "
        f"those that can be are: {known}. Measure it with tools.ckpt_replay"
    )


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
    from megatron.checkpointing.engines.lazy import shared_format

    checksums = config.checkpoint.checksum == "crc32"
    if config.checkpoint.checkpoint_compression != "none":
        raise ConfigError(
            f"--checkpoint-compression {config.checkpoint.checkpoint_compression}: what its files take depends on the "
            "values in them; drop the flag for their sizes before that, and give --compress-rate and "
            "--compressed-share to learn whether it pays"
        )
    if config.checkpoint.checkpoint_files_per_node is not None:
        return [shared_format.planned_part(lazy_format.capture(files, checksums).contents, rank)]
    name, size = lazy_format.planned_size(files, rank, checksums)
    return [SavedFile(name, size, f"{lazy_format.ALGORITHM}:{0:08x}", tuple(file.name for file in files))]


def share_files(
    saved: Sequence[Sequence[SavedFile]], files_per_node: int, ranks_per_node: int
) -> list[list[SavedFile]]:
    """`saved` by rank, each alone in its file, with the places that they have in the files that they share.

    Raises CheckpointSaveError as `place_parts` does.
    """
    from megatron.checkpointing.engines.lazy import shared_format

    found = []
    for rank, (alone,) in enumerate(saved):
        local = rank % ranks_per_node
        on_node = min(ranks_per_node, len(saved) - rank + local)
        name = shared_format.file_name(rank, local, on_node, files_per_node)
        found.append(replace(alone, name=name))
    return [[file] for file in shared_format.placed(found)]


def _no_files(files: Sequence[FileState], rank: int, config: Config) -> list[SavedFile]:
    return []


def _largest_file(planned: PlannedState) -> int:
    return max(planned.file_bytes, default=0)


def _all_files(planned: PlannedState) -> int:
    return sum(planned.file_bytes)


def _fast_writer(planned: PlannedState) -> int:
    return _largest_file(planned) + _FAST_WRITER_BYTES


def _host_cache(planned: PlannedState) -> int:
    cache = planned.config.checkpoint.host_cache_size
    return _all_files(planned) if cache is None else min(_all_files(planned), int(cache * 1024 * _MIB))


def _slots(planned: PlannedState) -> int:
    ranks = planned.config.parallel.weight_copies
    return SLOTS_PER_RANK * slot_bytes(planned.config, planned.parameters, ranks)


def _nothing(planned: PlannedState) -> int:
    return 0


ENGINES = {
    "torch": EnginePlan(
        _torch_sizes, _largest_file, "tensors of the largest file, copied from the device before they are written"
    ),
    "fastpersist": EnginePlan(
        _torch_sizes,  # the same bytes through another writer
        _fast_writer,
        "tensors of the largest file, and 64 MiB of buffers where FastFileWriter is used",
    ),
    "fastpersist-decoupled": EnginePlan(
        _decoupled_sizes, _all_files, "all tensors of the rank, copied for the writing process"
    ),
    "lazy": EnginePlan(
        _lazy_sizes,
        _host_cache,
        "--host-cache-size; by default all tensors of the rank, if half its share of free memory takes them",
        placements=True,
    ),
    "memory": EnginePlan(
        _lazy_sizes,  # what it writes to storage
        _slots,
        "two slots, each of which takes a whole save of the rank, for as long as it trains",
        placements=True,
    ),
    "none": EnginePlan(_no_files, _nothing, "nothing is written"),
}
