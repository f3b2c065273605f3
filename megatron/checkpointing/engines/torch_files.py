"""Writes and reads files of torch.save: errors name the file, contents are verified, only known classes are loaded."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron.checkpointing.engines import unpickling
from megatron.checkpointing.engines.base import CheckpointEngine, SavedCheckpoint, SavedFile, check_size
from megatron.checkpointing.engines.errors import CheckpointDamagedError, is_of_the_process, reading
from megatron.checkpointing.engines.file_loads import report_load
from megatron.fileio.timed_files import TimedReader, Timeline
from megatron.fileio.zip_records import ALGORITHM, Record, directory_checksum, read_records
from restart_trace.recorder import Operation

_ARCHIVE = b"PK\x03\x04"  # what a zip archive begins with


def write_state(state: Any, file: Any) -> None:
    """torch.save `state` into `file`, an object with `write` and `flush`. Raises OSError if `file` does."""
    try:
        torch.save(state, file)
        file.flush()
    except RuntimeError as exc:
        # torch's zip writer hides what ended it, of the file or of the process, behind an error of its own
        hidden = exc.__context__
        if hidden is not None and (isinstance(hidden, OSError) or is_of_the_process(hidden)):
            raise hidden from None
        raise


def report_writing(
    add: Callable[..., None],
    name: str,
    opened_ns: int,
    closed_ns: int,
    write_ns: int,
    num_bytes: int,
    apart_ns: int = 0,
) -> None:
    """Spans of a torch.save of `num_bytes` into the file `name`; `add`: Operation's, or one that keeps them for it.

    `apart_ns`: of the window, what other spans have.
    """
    serialize_ns = closed_ns - opened_ns - write_ns - apart_ns
    add("serialize", None, opened_ns, closed_ns, duration_ns=serialize_ns, file=name)
    add("flush", "write", opened_ns, closed_ns, duration_ns=write_ns, file=name, num_bytes=num_bytes)


def read_state(path: Path, expected: SavedFile | None, verify: bool, op: Operation) -> Any:
    """The state saved in `path`, tensors on the CPU; records `read`, `verify` and `deserialize` of a load.

    With `verify` every record is checked against its CRC-32, and all of them against `expected`. Raises
    CheckpointDamagedError naming the file if it is not whole, is altered, or holds an unknown class.
    """
    opened, timeline = op.until_ns(), Timeline()  # as of a save: with the recording of spans before
    with reading(path):
        checked = [record.checked for record in _records(path, expected)] if verify else []
        with TimedReader(path, timeline, checked) as reader:
            if reader.read(len(_ARCHIVE)) != _ARCHIVE:  # torch would try its older formats
                raise CheckpointDamagedError(f"{path}: cannot be read as a torch.save file: no zip archive")
            reader.seek(0)
            state = _load_known_classes(path, reader)
            reader.finish()
    report_load(op, path.name, timeline, opened, path.stat().st_size)
    return state


def read_values(path: Path, expected: SavedFile | None, verify: bool, op: Operation) -> Any:
    """The state saved in `path` without its tensors: they are on "meta", but for those without dimensions.

    Of the others `position_in_file` tells where they lie. With `verify` the table of checksums is checked against
    `expected`, and all that is returned against the table. Raises CheckpointDamagedError as `read_state`.
    """
    with op.span("load", "deserialize", file=path.name), reading(path), path.open("rb") as file:
        records = _records(path, expected) if verify else []
        storages = [record for record in records if "/data/" in record.name]
        _verify(path, [record for record in records if record not in storages])
        left_out: set[int] = set()
        state = _with_values(_load_known_classes(path, file, "meta"), file, left_out)
        _verify(path, [record for record in storages if record.offset not in left_out])
        return state


def tensor_records(path: Path) -> dict[int, Record]:
    """The records of a torch.save file by the byte that their data begins at: with `position_in_file`, a tensor's.

    Raises CheckpointDamagedError if the headers of the file are damaged.
    """
    return {record.offset: record for record in _records(path, None)}


def record_in_file(tensor: torch.Tensor) -> int:
    """First byte of the record of a tensor of `read_values` in its file."""
    storage: Any = tensor.untyped_storage()  # of torch.load(map_location="meta"), torch 2.7 and later
    return storage._checkpoint_offset


def position_in_file(tensor: torch.Tensor) -> int:
    """First byte of a tensor of `read_values` in its file."""
    return record_in_file(tensor) + int(tensor.storage_offset()) * tensor.element_size()


def _with_values(state: Any, file: Any, left_out: set[int]) -> Any:
    """The nest `state` of dicts and lists with its 0-dimensional tensors read from `file`.

    The records of the others join `left_out`.
    """
    if isinstance(state, torch.Tensor):
        if state.dim():
            left_out.add(record_in_file(state))
            return state
        file.seek(position_in_file(state))
        return torch.frombuffer(bytearray(file.read(state.element_size())), dtype=state.dtype)[0]
    if isinstance(state, dict):
        for key, value in state.items():
            state[key] = _with_values(value, file, left_out)
    if isinstance(state, list):
        state[:] = [_with_values(value, file, left_out) for value in state]
    return state


def _records(path: Path, expected: SavedFile | None) -> list[Record]:
    """The records of a torch.save file, whose table is compared with `expected`.

    Raises CheckpointDamagedError if that differs, or the headers are damaged.
    """
    try:
        if expected is not None:
            _check_directory(path, expected)
        with path.open("rb") as file:
            return read_records(file)
    except zipfile.BadZipFile as exc:
        raise CheckpointDamagedError(f"{path}: not a complete torch.save file ({exc})") from exc


def _check_directory(path: Path, expected: SavedFile) -> None:
    algorithm, _, _ = expected.checksum.partition(":")
    if algorithm != ALGORITHM:
        raise CheckpointDamagedError(f"{path}: checksum {expected.checksum!r} is not one of this engine's")
    found = directory_checksum(path)
    if found != expected.checksum:
        raise CheckpointDamagedError(f"{path}: checksum {found}, but {expected.checksum} was saved")


def _verify(path: Path, records: list[Record]) -> None:
    """Raises DamagedFileError naming the record that differs."""
    with TimedReader(path, Timeline(), [record.checked for record in records]) as file:
        file.finish()


def _load_known_classes(path: Path, file: Any, device: str = "cpu") -> Any:
    """torch.load of `file`, which was opened at `path`."""
    finish = getattr(file, "finish", lambda: None)  # of a reader of ours: what it found may say more
    with unpickling.known_classes():
        try:
            return torch.load(file, map_location=device, weights_only=True)
        except (OSError, MemoryError):
            raise
        except pickle.UnpicklingError as exc:
            finish()
            raise CheckpointDamagedError(
                f"{path}: holds a class that is not on the allow-list, or a damaged pickle ({exc})"
            ) from exc
        except Exception as exc:  # a damaged pickle can make the unpickler raise anything
            if is_of_the_process(exc):
                raise
            finish()
            raise CheckpointDamagedError(
                f"{path}: cannot be read as a torch.save file ({type(exc).__name__}: {exc})"
            ) from exc


class TorchFilesEngine(CheckpointEngine):
    """The reading side of an engine whose files are those of torch.save, whatever writes them."""

    redistributable: ClassVar[bool] = True

    def _load_file(self, path: Path, expected: SavedFile | None, op: Operation) -> Any:
        return read_state(path, expected, self.options.verify_checksums, op)

    def load_values(self, name: str, checkpoint: SavedCheckpoint, op: Operation) -> Any:
        path, file = checkpoint.path(name), checkpoint.files.get(name)
        check_size(path, file)
        return read_values(path, file, self.options.verify_checksums, op)
