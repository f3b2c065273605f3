"""Storage of torch.distributed.checkpoint, derived from the library's own reader and writer.

It times every call, verifies checksums, and unpickles only the classes of the library's metadata.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException

from megatron.checkpointing.engines.base import EngineOptions, SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError, reading
from megatron.checkpointing.engines.file_loads import checked_content
from megatron.checkpointing.engines.unpickling import PlainUnpickler
from megatron.fileio.checksums import CheckedBytes
from megatron.fileio.files import with_name
from megatron.fileio.timed_files import TimedReader, TimedWriter, Timeline, read_file
from restart_trace import under_way
from restart_trace.clock import now_ns

METADATA = ".metadata"
_REPORT = "report"  # attribute that the library's metadata gets on its way back to the caller
_KIND = "the metadata of a checkpoint"


class TensorProperties(metadata.TensorProperties):
    """As any torch has pickled it: 2.15 adds strides, which no load needs, and with which earlier versions fail."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[:5])


# All that the metadata of tensors, which are not split among ranks, consists of.
_CLASSES: dict[tuple[str, str], Any] = {
    (item.__module__, item.__qualname__): item
    for item in (
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        torch.serialization._get_layout,
    )
}
_CLASSES[metadata.TensorProperties.__module__, metadata.TensorProperties.__qualname__] = TensorProperties


class Failure:
    """The first error of a Writer, for all threads of the library: once there is one, nothing more is begun."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def set(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error

    def check(self) -> None:
        if self.error is not None:
            raise RuntimeError("not written, because another file of this state failed")


class _SyncedFile(TimedWriter):
    """`fileno` is taken for the beginning of an fsync, which ends with `close`: the library asks for nothing else.

    It hands over what is still in the buffer first, which the library's os.fsync(file.fileno()) leaves out.
    """

    def __init__(self, path: Path, timeline: Timeline, checksum: bool) -> None:
        super().__init__(path, timeline, checksum)
        self._timeline = timeline
        self._path = path
        self._sync_ns: int | None = None
        self._under_way = -1

    def fileno(self) -> int:
        self.flush()
        self._sync_ns = now_ns()
        under_way.end(self._under_way)
        self._under_way = under_way.begin(under_way.STORAGE, "fsync of", str(self._path))
        return super().fileno()

    def close(self) -> None:
        if not self.closed and self._sync_ns is not None:
            self._timeline.add("fsync", self._sync_ns)
            under_way.end(self._under_way)
        super().close()


class _WritingFiles(filesystem.FileSystem):
    """`written` by file name."""

    def __init__(self, timeline: Timeline, checksum: bool, failure: Failure) -> None:
        super().__init__()
        self.written: dict[str, TimedWriter] = {}
        self._timeline = timeline
        self._checksum = checksum
        self._failure = failure

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        self._failure.check()
        stream: _SyncedFile | None = None
        try:
            stream = _SyncedFile(Path(path), self._timeline, self._checksum)
            with stream:
                yield stream
        except BaseException as exc:
            error = (stream and stream.error) or exc
            # The library loses what its threads raise.
            self._failure.set(with_name(error, Path(path)) if isinstance(error, OSError) else error)
            raise
        self.written[Path(path).name] = stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


@dataclass
class Report:
    """What a Writer has written: `files` by name, with their size and CRC-32, and when it did what."""

    files: dict[str, tuple[int, int | None]]
    timeline: Timeline
    started_ns: int
    ended_ns: int


def report_of(metadata: metadata.Metadata) -> Report:
    """The report of the Writer of a save, from the metadata that the save returns, in whichever process it ran."""
    return vars(metadata)[_REPORT]


class Writer(filesystem.FileSystemWriter):
    """Writes one state."""

    def __init__(self, root: Path, options: EngineOptions) -> None:
        super().__init__(root, sync_files=options.fsync, thread_count=options.io_threads or 1)
        self.failure = Failure()
        self._timeline = Timeline()
        self._started_ns = 0  # of writing
        self.fs: _WritingFiles = _WritingFiles(self._timeline, options.checksum, self.failure)

    def storage_meta(self) -> metadata.StorageMeta:
        # The library's has the path as an object, whose class the reader would have to be allowed.
        return metadata.StorageMeta(checkpoint_id=Path(self.path).name, save_id=self.save_id)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._started_ns = now_ns()
        with self._first_error():
            future = super().write_data(plan, planner)
            self.failure.check()
        written = len(future.value())
        if written != len(plan.items):
            raise RuntimeError(f"{self.path}: {written} of {len(plan.items)} tensors were written")
        return future

    def finish(self, metadata: Any, results: Any) -> None:
        with self._first_error():
            super().finish(metadata, results)
        files = {name: (file.num_bytes, file.crc) for name, file in sorted(self.fs.written.items())}
        vars(metadata)[_REPORT] = Report(files, self._timeline, self._started_ns, now_ns())

    @contextlib.contextmanager
    def _first_error(self) -> Generator[None, None, None]:
        """Raise what went wrong first instead of what followed from it."""
        try:
            yield
        except BaseException as exc:
            if self.failure.error is None or self.failure.error is exc:
                raise
            raise self.failure.error from None


class _ReadingFiles(filesystem.FileSystem):
    def __init__(self, root: Path, files: Mapping[str, SavedFile], verify: bool, timeline: Timeline) -> None:
        super().__init__()
        self._root = root
        self._files = files
        self._verify = verify
        self._timeline = timeline

    def checked(self, name: str) -> list[CheckedBytes]:
        """What to verify. Raises CheckpointDamagedError for a file that is not of this checkpoint."""
        if name not in self._files:
            raise CheckpointDamagedError(f"{self._root / name}: is not one of the files that were saved")
        return checked_content(self._root / name, self._files[name]) if self._verify else []

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        inside = Path(path).relative_to(self._root)
        raw = TimedReader(Path(path), self._timeline, self.checked(str(inside)))
        with io.BufferedReader(raw) as stream:  # as the library's own: torch.load reads in small pieces
            try:
                yield stream
            except Exception:
                raw.finish()  # if the file is damaged, say that rather than what followed from it
                raise
            raw.finish()


class Reader(filesystem.FileSystemReader):
    """Reads one state; `files` by their path within `root`."""

    def __init__(self, root: Path, files: Mapping[str, SavedFile], verify: bool, timeline: Timeline) -> None:
        super().__init__(root)
        self._root = root
        self._files = files
        self.fs: _ReadingFiles = _ReadingFiles(root, files, verify, timeline)
        content = read_file(root / METADATA, timeline, self.fs.checked(METADATA))
        self._metadata = parse_metadata(root / METADATA, content)
        self._metadata.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        with reading(root / METADATA, _KIND):  # anything may be missing, or be of another type
            self._check()

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self._metadata

    def tensors(self) -> dict[str, metadata.TensorStorageMetadata]:
        """What is kept of each tensor."""
        return self._metadata.state_dict_metadata  # pyright: ignore[reportReturnType]  # _check saw to it

    def _check(self) -> None:
        """Refuse what this engine does not write: the library would unpickle it, or read other files."""
        places = {index.fqn: info for index, info in self._metadata.storage_data.items()}
        for name, item in self._metadata.state_dict_metadata.items():
            info = places.get(name)
            if (
                info is None
                or not isinstance(item, metadata.TensorStorageMetadata)
                or [chunk.sizes for chunk in item.chunks] != [item.size]
                or info.transform_descriptors
                or info.relative_path not in self._files
            ):
                raise CheckpointDamagedError(
                    f"{self._root / METADATA}: {name} is kept in a way that this engine neither writes nor loads"
                )
            size = self._files[info.relative_path].num_bytes
            if info.offset < 0 or info.length < 0 or info.offset + info.length > size:
                raise CheckpointDamagedError(
                    f"{self._root / info.relative_path}: {size} bytes; by {METADATA}, {name} lies beyond its end"
                )
            if item.size.numel() * item.properties.dtype.itemsize > info.length:
                where = self._root / METADATA
                raise CheckpointDamagedError(f"{where}: {name} is larger than what is kept of it")


class _Unpickler(PlainUnpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _CLASSES:
            return self.allowed(_CLASSES[module_name, global_name])
        dtype = vars(torch).get(global_name) if module_name == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it holds {module_name}.{global_name}, which is not on the allow-list")


def parse_metadata(path: Path, content: bytes) -> metadata.Metadata:
    """Unpickle metadata; runs nothing of the checkpoint's choice. Raises CheckpointDamagedError."""
    try:
        found = _Unpickler(content).load()
        if not isinstance(found, metadata.Metadata):
            raise TypeError(f"it holds a {type(found).__name__}")
        return found
    except Exception as exc:  # a damaged pickle can make the unpickler raise anything, MemoryError too
        raise CheckpointDamagedError(f"{path}: cannot be read as {_KIND}: {exc}") from exc


def cause_of(error: BaseException) -> BaseException:
    """What is behind a CheckpointException: the OSError if there is one, else the first error."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link
        link = link.__cause__ or link.__context__
    return error
