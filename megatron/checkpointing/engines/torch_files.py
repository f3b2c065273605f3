"""Writing and reading files of torch.save: errors by their own name, contents verified, known classes only."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from isal import isal_zlib

from megatron.checkpointing.engines.base import EngineOptions, SavedFile, check_size
from megatron.checkpointing.engines.codec import safe_unpickling
from megatron.checkpointing.engines.errors import CheckpointDamagedError, reading
from megatron.checkpointing.engines.verifying_reader import VerifyingReader
from megatron.fileio.timed_files import TimedReader
from megatron.fileio.zip_records import ALGORITHM, Record, directory_checksum, read_records
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation

_BLOCK = 1 << 20


def write_state(state: Any, file: Any) -> None:
    """torch.save `state` into `file`, an object with `write` and `flush`. Raises OSError if `file` does."""
    try:
        torch.save(state, file)
        file.flush()
    except RuntimeError as exc:
        # torch's zip writer hides the OSError of the file behind an error of its own
        raise (exc.__context__ if isinstance(exc.__context__, OSError) else exc) from None


def read_state(path: Path, expected: SavedFile | None, verify: bool, op: Operation) -> Any:
    """The state saved in `path`, tensors on the CPU; records `read`, `verify` and `deserialize` of a load.

    With `verify` every record is checked against its CRC-32, and all of them against `expected`. Raises
    CheckpointDamagedError naming the file if it is not whole, is altered, or holds an unknown class.
    """
    opened = now_ns()
    reader = _open(path, expected, verify)
    try:
        state = _load_known_classes(path, reader)
        reader.finish()
    finally:
        reader.close()
    closed = now_ns()
    rest = closed - opened - reader.read_ns - reader.verify_ns
    size = path.stat().st_size
    for detail, duration, moved in (
        ("read", reader.read_ns, size),
        ("verify", reader.verify_ns, None),
        ("deserialize", rest, None),
    ):
        op.add("load", detail, opened, closed, duration_ns=duration, file=path.name, num_bytes=moved)
    return state


def read_values(path: Path, expected: SavedFile | None, verify: bool, op: Operation) -> Any:
    """The state saved in `path` without its tensors: they are on "meta", but for those without dimensions.

    Of the others `position_in_file` tells where they lie. With `verify` the table of checksums is checked against
    `expected`, and all that is returned against the table. Raises CheckpointDamagedError as `read_state`.
    """
    with op.span("load", "deserialize", file=path.name), path.open("rb") as file:
        records: list[Record] = []
        try:
            if verify:
                if expected is not None:
                    _check_directory(path, expected)
                records = read_records(file)
        except zipfile.BadZipFile as exc:
            raise CheckpointDamagedError(f"{path}: not a complete torch.save file ({exc})") from exc
        storages = [record for record in records if "/data/" in record.name]
        _check_records(path, file, [record for record in records if record not in storages])
        file.seek(0)
        left_out: set[int] = set()
        state = _with_values(_load_known_classes(path, file, "meta"), file, left_out)
        _check_records(path, file, [record for record in storages if record.offset not in left_out])
        return state


def verify_file(path: Path, expected: SavedFile, op: Operation) -> None:
    """Read a file and check every record of it, and their table against `expected`; nothing is unpickled.

    Raises CheckpointDamagedError as `read_state`.
    """
    check_size(path, expected)
    with op.span("load", "verify", file=path.name), path.open("rb") as file:
        try:
            _check_directory(path, expected)
            records = read_records(file)
        except zipfile.BadZipFile as exc:
            raise CheckpointDamagedError(f"{path}: not a complete torch.save file ({exc})") from exc
        _check_records(path, file, records)


def tensor_records(path: Path) -> dict[int, Record]:
    """The records of a torch.save file by the byte that their data begins at: with `position_in_file`, a tensor's.

    Raises CheckpointDamagedError if the headers of the file are damaged.
    """
    try:
        with path.open("rb") as file:
            return {record.offset: record for record in read_records(file)}
    except zipfile.BadZipFile as exc:
        raise CheckpointDamagedError(f"{path}: not a complete torch.save file ({exc})") from exc


def record_in_file(tensor: torch.Tensor) -> int:
    """First byte of the record of a tensor of `read_values` in its file."""
    start: Any = (
        tensor.untyped_storage()._checkpoint_offset
    )  # torch.load(map_location="meta"), torch 2.7 and later
    return start


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


def _check_records(path: Path, file: Any, records: list[Record]) -> None:
    for record in records:
        file.seek(record.offset)
        crc = 0
        for start in range(0, record.size, _BLOCK):
            crc = isal_zlib.crc32(file.read(min(_BLOCK, record.size - start)), crc)
        if crc != record.crc32:
            raise CheckpointDamagedError(
                f"{path}: record {record.name} does not have the checksum it was saved with"
            )


def _open(path: Path, expected: SavedFile | None, verify: bool) -> TimedReader:
    if not verify:
        return TimedReader(path)
    try:
        if expected is not None:
            _check_directory(path, expected)
        return VerifyingReader(path)
    except zipfile.BadZipFile as exc:
        raise CheckpointDamagedError(f"{path}: not a complete torch.save file ({exc})") from exc


def _check_directory(path: Path, expected: SavedFile) -> None:
    algorithm, _, _ = expected.checksum.partition(":")
    if algorithm != ALGORITHM:
        raise CheckpointDamagedError(f"{path}: checksum {expected.checksum!r} is not one of this engine's")
    found = directory_checksum(path)
    if found != expected.checksum:
        raise CheckpointDamagedError(f"{path}: checksum {found}, but {expected.checksum} was saved")


def _load_known_classes(path: Path, file: Any, device: str = "cpu") -> Any:
    """torch.load of `file`, which was opened at `path`."""
    finish = getattr(file, "finish", lambda: None)  # of a reader of ours: what it found may say more
    with safe_unpickling.known_classes():
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
            finish()
            raise CheckpointDamagedError(
                f"{path}: cannot be read as a torch.save file ({type(exc).__name__}: {exc})"
            ) from exc


class ReadsTorchFiles:
    """The reading side of an engine whose files are those of torch.save, whatever writes them."""

    options: EngineOptions

    def _load_file(self, path: Path, expected: SavedFile | None, op: Operation) -> Any:
        return read_state(path, expected, self.options.verify_checksums, op)

    def load_values(
        self, name: str, directory: Path, expected: Mapping[str, SavedFile], op: Operation
    ) -> Any:
        path, file = directory / name, expected.get(name)
        check_size(path, file)
        with reading(path):
            return read_values(path, file, self.options.verify_checksums, op)
