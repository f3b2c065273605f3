"""Writing and reading files of torch.save: errors by their own name, contents verified, known classes only."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint_engines import safe_unpickling
from megatron.checkpoint_engines.base import SavedFile
from megatron.checkpoint_engines.errors import CheckpointDamagedError
from megatron.checkpoint_engines.timed_files import TimedReader, VerifyingReader
from megatron.checkpoint_engines.zip_records import ALGORITHM, directory_checksum
from megatron.restart_trace.clock import now_ns
from megatron.restart_trace.recorder import Operation


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


def _load_known_classes(path: Path, reader: TimedReader) -> Any:
    with safe_unpickling.known_classes():
        try:
            return torch.load(reader, map_location="cpu", weights_only=True)  # pyright: ignore[reportArgumentType]
        except (OSError, MemoryError):
            raise
        except pickle.UnpicklingError as exc:
            reader.finish()
            raise CheckpointDamagedError(
                f"{path}: holds a class that is not on the allow-list, or a damaged pickle ({exc})"
            ) from exc
        except Exception as exc:  # a damaged pickle can make the unpickler raise anything
            reader.finish()
            raise CheckpointDamagedError(
                f"{path}: cannot be read as a torch.save file ({type(exc).__name__}: {exc})"
            ) from exc
