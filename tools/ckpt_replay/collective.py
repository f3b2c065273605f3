"""Saves and loads by torch's DCP as trainers call it: all ranks together, as one checkpoint.

`dcp-collective` does what async_save with a thread does: FileSystemWriter, copies whose memory is kept between saves,
and cached plans, so that saves after the first exchange none. `dcp-safetensors` is the same with
HuggingFaceStorageWriter: a file of each rank, from which rank 0 then makes one, which alone is read. There are no
checksums. DCP writes its metadata, or that one file, last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpointing.engines.base import EngineOptions, FileState
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation, Recorder

from .library import BackgroundSave, make_durable, state_of, targets_of, tensors_of


class Names:
    """The states of a process that holds what `rank` holds, with names of that rank.

    Of several such processes, which name the same tensors, DCP has each write a part of them.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def content(self, files: Sequence[FileState]) -> dict[str, Any]:
        """What DCP saves of `files`."""
        return {
            self._prefix(file) + name: self.stored(tensor)
            for file in files
            for name, tensor in tensors_of(file).items()
        }

    def load(
        self, live: Sequence[FileState], planned: Sequence[FileState], place: object, reader: object
    ) -> dict[str, Any]:
        """Library.load_into's states of the checkpoint that `reader` reads; collective."""
        from torch.distributed.checkpoint.state_dict_loader import load

        targets: dict[str, dict[str, Any]] = {
            file.name: targets_of(before, file, lambda meta: torch.empty_like(meta, device="cpu"))
            for before, file in zip(live, planned, strict=True)
        }
        content = {
            self._prefix(file) + name: self.stored(tensor)
            for file in planned
            for name, tensor in targets[file.name].items()
        }
        load(content, storage_reader=reader)  # pyright: ignore[reportArgumentType]
        for file in planned:
            for name, tensor in targets[file.name].items():
                self.restore(tensor, content[self._prefix(file) + name])
        return {file.name: state_of(targets[file.name], place) for file in planned}

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is saved of `tensor`, or loaded for it."""
        return tensor

    def restore(self, tensor: torch.Tensor, loaded: torch.Tensor) -> None:
        """Put into `tensor` what `stored` has made of it, once that is loaded."""

    def _prefix(self, file: FileState) -> str:
        return f"rank_{self._rank:05d}/{file.name}/"


def written_by(plan: Any) -> tuple[int, int]:
    """How many tensors, or parts of some, a process writes by its SavePlan, and their bytes."""
    parts = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return len(parts), sum(part.chunk.sizes.numel() * part.properties.dtype.itemsize for part in parts)


class _FloatsAlone(Names):
    """For safetensors as DCP writes and joins them.

    It can join only floating-point tensors (it asks torch.finfo), loses the value of scalars, and takes none that share
    memory, as random states do here.
    """

    def content(self, files: Sequence[FileState]) -> dict[str, Any]:
        seen: set[int] = set()
        content = super().content(files)
        for name, tensor in content.items():
            if tensor.data_ptr() in seen:
                content[name] = tensor.clone()
            seen.add(tensor.data_ptr())
        return content

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        if _is_joined(tensor):
            return tensor
        octets = tensor.contiguous().reshape(-1).view(torch.uint8)
        return torch.nn.functional.pad(octets, (0, octets.numel() % 2)).view(torch.float16)

    def restore(self, tensor: torch.Tensor, loaded: torch.Tensor) -> None:
        if not _is_joined(tensor):
            octets = loaded.view(torch.uint8)[: tensor.nbytes]
            tensor.copy_(octets.view(tensor.dtype).reshape(tensor.shape))


def _is_joined(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 0


class CollectiveDcp:
    """DCP for one process of the default process group, which holds what `rank` holds.

    `wait_for_all`: returns when all processes have called it; called on a thread of its own.
    """

    asynchronous = True
    loads_in_place = True
    names = Names

    def __init__(self, options: EngineOptions, rank: int, recorder: Recorder, wait_for_all: Callable[[], None]) -> None:
        from megatron.checkpointing.engines.dcp.staging import Copies

        self._names = self.names(rank)
        self._recorder = recorder
        self._wait_for_all = wait_for_all
        self._fsync = options.fsync
        self._threads = options.io_threads or 1
        self._copies = Copies(shared=False)
        self._group: Any = dist.new_group(backend="gloo")  # of the thread that saves

    def save(self, place: Path, step: int, files: Sequence[FileState]) -> BackgroundSave:
        op = self._recorder.begin("save", tag=place.name, step=step, engine=type(self).__name__)
        begun = now_ns()
        self._copies.start()
        staged = self._copies.stage(self._names.content(files))
        op.add("device_to_host", None, begun, now_ns())
        return BackgroundSave(
            op, begun, lambda: self._write(op, staged, place), staged.result, lambda: self._complete(op, place)
        )

    def _write(self, op: Operation, staged: Future[Any], place: Path) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.state_dict_saver import save

        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(staged.result(), storage_writer=self._writer(place), planner=planner, process_group=self._group)
        tensors, op.bytes = written_by(planner.plan)
        op.num_files = min(self._threads, tensors)

    def _complete(self, op: Operation, place: Path) -> None:
        op.durable = False
        if self._fsync:
            make_durable(op, self._unflushed(place), place, self._wait_for_all)

    def load_into(
        self, live: Sequence[FileState], planned: Sequence[FileState], place: Path
    ) -> tuple[dict[str, Any], int]:
        begun = now_ns()
        states = self._names.load(live, planned, place, self._reader(place))
        return states, now_ns() - begun

    def close(self) -> None:
        self._copies.drop()
        dist.destroy_process_group(self._group)

    def _writer(self, place: Path) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(place, sync_files=self._fsync, thread_count=self._threads)

    def _reader(self, place: Path) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        return FileSystemReader(place)

    def _unflushed(self, place: Path) -> list[Path]:
        """Files of `place` that the library leaves to the kernel to write."""
        return []


class SafetensorsDcp(CollectiveDcp):
    names = _FloatsAlone

    def _writer(self, place: Path) -> Any:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        writer = HuggingFaceStorageWriter(
            str(place), thread_count=self._threads, save_distributed=True, enable_consolidation=True
        )
        writer.sync_files = self._fsync
        return writer

    def _reader(self, place: Path) -> Any:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        return HuggingFaceStorageReader(str(place))

    def _unflushed(self, place: Path) -> list[Path]:
        return [path for path in place.iterdir() if path.is_file()] if dist.get_rank() == 0 else []
