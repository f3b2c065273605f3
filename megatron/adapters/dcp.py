"""Engine `lazy` as storage of torch.distributed.checkpoint: each rank writes one file of safetensors and checksums.

    dcp.async_save(state, checkpoint_id=path, storage_writer=LazyWriter())
    dcp.load(state, checkpoint_id=path, storage_reader=LazyReader())

A checkpoint is complete once its `.metadata` is there, which is written last, by the coordinator. A directory that does
not exist yet is filled under another name, `.NAME.incomplete`, and renamed when it is complete. Into one that exists
each save writes files with new names, then replaces `.metadata`, then removes the files that the replaced one names: at
any instant the directory holds a complete checkpoint. What failed saves left there, the next one removes.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as metadata_module
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megatron.adapters import lazy_files
from megatron.adapters.snapshot import LiveSave, Snapshot, check_snapshot
from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.engines.dcp.storage import TensorProperties
from megatron.checkpointing.engines.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    reading,
)
from megatron.checkpointing.engines.lazy.writer import LazySave
from megatron.fileio.checksums import crc32
from megatron.fileio.files import sync_directory

logger = logging.getLogger(__name__)

METADATA = ".metadata"
_SUFFIX = ".safetensors"
_CRC = b"crc32:"  # at the end of the metadata, after the pickle: then 8 hexadecimal digits
_CRC_BYTES = len(_CRC) + 8
_FILE_NAME = re.compile(rb"rank_[0-9]{5,}_[0-9a-f]{12}\.safetensors")  # of a file of data


@dataclass(frozen=True)
class StoredTensor:
    """Where an item of a plan is: a file of the checkpoint, and the name of a tensor in it."""

    file: SavedFile
    name: str


class _Running(threading.local):
    """What a save knows from its beginning to its end, which DCP runs on one thread."""

    target: Path | None = None
    staged: LiveSave[LazySave] | None = None
    place = Path()  # the directory in which all ranks write, on the coordinator


class LazyWriter(StorageWriter, AsyncStager):
    """Storage for `dcp.save` and `dcp.async_save`; for the latter it is also what stages.

    `path`: a directory, unless `checkpoint_id` is given to DCP. `snapshot`: "lazy" reads parameters and states of
    optimizers while training computes, until an optimizer steps; "copy" copies all before `async_save` returns, for
    trainers that change parameters otherwise. Without `fsync` a checkpoint need not outlast a power failure.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        snapshot: str = "lazy",
        fsync: bool = True,
        io_threads: int | None = None,
    ) -> None:
        """Raises ValueError for an unknown `snapshot`."""
        check_snapshot(snapshot, "snapshot")
        self._target = None if path is None else Path(path)
        self._how = snapshot
        self._options = lazy_files.options(fsync=fsync, io_threads=io_threads)
        self._staged: LiveSave[LazySave] | None = None  # until the save that it is for begins, on another thread
        self._running = _Running()

    def __reduce__(self) -> NoReturn:
        raise TypeError("LazyWriter writes from the tensors of this process: give async_save the type THREAD")

    # Staging, on the training thread

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state to be saved: without copies of what only an optimizer's step changes.

        Raises CheckpointSaveError if the save before has not begun.
        """
        if self._staged is not None:
            raise CheckpointSaveError(
                "the save before by this LazyWriter has not begun: wait for the future of async_save before the next, "
                "or make a LazyWriter for each save"
            )
        snapshot = Snapshot(self._how)
        staged: dict[str, Any] = _taken(state_dict, snapshot, "")
        self._staged = LiveSave(snapshot)
        return staged

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def synchronize_staging(self) -> None:
        return None

    def close(self) -> None:
        return None

    # Writing

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._target = self._running.target = Path(checkpoint_id)

    @property
    def target(self) -> Path:
        """Raises ValueError if no directory was given."""
        target = self._running.target or self._target
        if target is None:
            raise ValueError("LazyWriter has no directory: give it a path, or give dcp.save a checkpoint_id")
        return target

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for `use_collectives=False`, by which no rank would know that all files are written."""
        self._running.staged, self._staged = self._staged, None
        if kwargs.get("use_collectives") is False:
            raise ValueError("use_collectives=False: LazyWriter commits a checkpoint of all ranks; leave it out")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide, on the coordinator, in which directory all ranks write.

        Raises FileNotFoundError for a link to nothing, which no directory could replace at the end.
        """
        target = self.target
        if os.path.lexists(target) and not target.exists():
            raise FileNotFoundError(
                f"checkpoint directory {target}: a symbolic link to {os.readlink(target)}, which does not exist; "
                "create that directory, or remove the link"
            )
        place = target if target.exists() else target.with_name(f".{target.name}.incomplete")
        place.mkdir(parents=True, exist_ok=True)
        for name in {path.name for path in place.iterdir() if _is_own(path.name)} - _files_named_in(place):
            (place / name).unlink(missing_ok=True)
        self._running.place = place
        return [replace(plan, storage_data=str(place)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file. Raises OSError, or CheckpointSaveError if the state was changed meanwhile."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        path = Path(plan.storage_data) / f"rank_{rank:05d}_{uuid.uuid4().hex[:12]}{_SUFFIX}"
        names = {item.index: _name_of(item.index) for item in plan.items}
        future: Future[list[WriteResult]] = Future()
        if not names:
            future.set_result([])
            return future

        def begin() -> LazySave:
            tensors = {names[item.index]: _resolved(item, planner) for item in plan.items}
            sizes.update({name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()})
            return lazy_files.begin(path, tensors, self._options)

        sizes: dict[str, int] = {}
        staged, self._running.staged = self._running.staged, None
        save = begin() if staged is None else staged.begin(begin)
        if staged is None:
            save.release_state()
        try:
            (file,) = save.wait()
            if staged is not None:
                staged.check()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        file = replace(file, states=())
        future.set_result([WriteResult(i, sizes[name], StoredTensor(file, name)) for i, name in names.items()])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator, once all ranks have written.

        Raises OSError, or CheckpointSaveError if a file is gone: then the checkpoint before stays.
        """
        target, place = self.target, self._running.place
        stored = {result.index: result.storage_data for mine in results for result in mine}
        files = {item.file for item in stored.values()}
        for file in files:
            _check_written(place / file.name, file.num_bytes)
        metadata.storage_data = stored
        metadata.storage_meta = self.storage_meta()
        content = pickle.dumps(metadata)
        content += _CRC + f"{crc32(content):08x}".encode()
        fsync = self._options.fsync
        if fsync:
            sync_directory(place)
        replaced = _files_named_in(place)
        lazy_files.replace_file(place / METADATA, content, fsync)
        if place != target:
            os.rename(place, target)
            if fsync:
                sync_directory(target.parent)
        for name in replaced - {file.name for file in files}:
            (target / name).unlink(missing_ok=True)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self.target))


def _is_own(name: str) -> bool:
    """Whether a file of data has this name."""
    return _FILE_NAME.fullmatch(os.fsencode(name)) is not None


def _files_named_in(directory: Path) -> set[str]:
    """The files of data that the metadata of a directory names; none if there is no metadata.

    They stand in the pickle as they are: it is not run.
    """
    try:
        content = (directory / METADATA).read_bytes()
    except FileNotFoundError:
        return set()
    return {name.decode() for name in _FILE_NAME.findall(content)}


def _check_written(path: Path, num_bytes: int) -> None:
    """Raises CheckpointSaveError if a file that a rank has written is not there as it was written."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        found = None
    if found != num_bytes:
        what = "is gone" if found is None else f"has {found} bytes instead of {num_bytes}"
        raise CheckpointSaveError(
            f"{path} {what} before the save is complete: give each job, and each save that runs at the same time, a "
            "directory of its own, on storage that all ranks share"
        )


def _name_of(index: MetadataIndex) -> str:
    """The name of a tensor in a file: that of the parameter and, if it is a part of it, where the part begins."""
    return index.fqn if not index.offset else f"{index.fqn}@{','.join(map(str, index.offset))}"


def _resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    data = planner.resolve_data(item)
    if item.type is WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO)
        return torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)
    assert isinstance(data, torch.Tensor)
    return data.detach()


def _taken(value: Any, snapshot: Snapshot, name: str) -> Any:
    """The nest with each tensor as `snapshot` takes it, and copies of all else that may change."""
    if isinstance(value, torch.Tensor):
        return snapshot.take(value, name)
    if isinstance(value, Mapping):
        return {key: _taken(item, snapshot, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_taken(item, snapshot, f"{name}.{number}") for number, item in enumerate(value))
    return value if isinstance(value, (str, int, float, bytes, type(None))) else pickle.loads(pickle.dumps(value))


class _Unpickler(pickle.Unpickler):
    """pickle's, for the metadata of any version of torch."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = super().find_class(module_name, global_name)
        return TensorProperties if found is metadata_module.TensorProperties else found


class LazyReader(StorageReader):
    """Storage for `dcp.load`, of checkpoints that LazyWriter saved. `verify`: compare all that is read with checksums.

    Ranks may be as many as they like. Raises CheckpointDamagedError naming the file that is missing or altered.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, verify: bool = True) -> None:
        self._path = None if path is None else Path(path)
        self._options = lazy_files.options(verify=verify)
        self._stored: dict[MetadataIndex, StoredTensor] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)

    @property
    def path(self) -> Path:
        """Raises ValueError if no directory was given."""
        if self._path is None:
            raise ValueError("LazyReader has no directory: give it a path, or give dcp.load a checkpoint_id")
        return self._path

    # DCP would ask again for a rank's own metadata if there were an argument called kwargs.
    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        """Raises CheckpointNotFoundError if there is no complete checkpoint, CheckpointDamagedError if it is altered.

        The error is logged, too: torch before 2.13 raises "metadata is None" in its place. The metadata is a pickle, as
        DCP's own: load only checkpoints that you would let run code.
        """
        try:
            return self._metadata()
        except Exception as exc:
            logger.error("%s", exc)
            raise

    def _metadata(self) -> Metadata:
        path = self.path / METADATA
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointNotFoundError(
                f"{path} is missing: {self.path} holds no complete checkpoint; load an older one"
            ) from None
        pickled, end = content[:-_CRC_BYTES], content[-_CRC_BYTES:]
        if end[: len(_CRC)] != _CRC:
            raise CheckpointDamagedError(
                f"{path}: does not end with a checksum: LazyWriter did not write it, or it is cut off"
            )
        if end != _CRC + f"{crc32(pickled):08x}".encode():
            raise CheckpointDamagedError(f"{path}: does not have the checksum it was saved with")
        with reading(path):
            return _Unpickler(io.BytesIO(pickled)).load()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read, file by file, what the plan wants: complete tensors in place, others by way of host memory."""
        by_file: dict[SavedFile, dict[str, list[ReadItem]]] = {}
        for item in plan.items:
            stored = self._stored[item.storage_index]
            by_file.setdefault(stored.file, {}).setdefault(stored.name, []).append(item)
        for file, wanted in by_file.items():
            self._read_file(file, wanted, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(self, file: SavedFile, wanted: Mapping[str, list[ReadItem]], planner: LoadPlanner) -> None:
        targets = {
            item.dest_index: planner.resolve_tensor(item).detach()
            for items in wanted.values()
            for item in items
            if item.type is LoadItemType.TENSOR
        }
        # Those of another shape than the saved tensor, of which they want a part, are not filled.
        into = {
            name: targets[items[0].dest_index]
            for name, items in wanted.items()
            if len(items) == 1 and items[0].type is LoadItemType.TENSOR and not any(items[0].storage_offsets)
        }
        found = lazy_files.read(self.path / file.name, file, wanted, into, self._options)
        for name, items in wanted.items():
            if name not in found:
                raise CheckpointDamagedError(f"{self.path / file.name}: does not hold {name}")
            for item in items:
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(found[name].numpy().tobytes()))
                    continue
                target = targets[item.dest_index]
                if found[name] is not target:
                    part = found[name]
                    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        part = part.narrow(dim, start, length)
                    target.copy_(part)
                planner.commit_tensor(item, target)
