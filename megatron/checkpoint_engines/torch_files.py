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


def read_values(path: Path, expected: SavedFile | None, verify: bool, op: Operation) -> Any:
    """The state saved in `path` without its tensors: they are on "meta", but for those without dimensions.

    Of the others `position_in_file` tells where they lie. With `verify` the table of checksums is checked against
    `expected`. Raises CheckpointDamagedError as `read_state`.
    """
    with op.span("load", "deserialize", file=path.name):
        try:
            if verify and expected is not None:
                _check_directory(path, expected)
        except zipfile.BadZipFile as exc:
            raise CheckpointDamagedError(f"{path}: not a complete torch.save file ({exc})") from exc
        with path.open("rb") as file:
            return _with_values(_load_known_classes(path, file, "meta"), file)


def position_in_file(tensor: torch.Tensor) -> int:
    """First byte of a tensor of `read_values` in its file."""
    # Set by torch.load(map_location="meta"), torch 2.7 and later.
    start: Any = tensor.untyped_storage()._checkpoint_offset
    return start + int(tensor.storage_offset()) * tensor.element_size()


def _with_values(state: Any, file: Any) -> Any:
    """The nest `state` of dicts and lists with its 0-dimensional tensors read from `file`."""
    if isinstance(state, torch.Tensor):
        if state.dim():
            return state
        file.seek(position_in_file(state))
        return torch.frombuffer(bytearray(file.read(state.element_size())), dtype=state.dtype)[0]
    if isinstance(state, dict):
        for key, value in state.items():
            state[key] = _with_values(value, file)
    if isinstance(state, list):
        state[:] = [_with_values(value, file) for value in state]
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
