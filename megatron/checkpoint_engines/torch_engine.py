"""torch.save per file, with the files and the meaning of DeepSpeed's default engine, each phase timed apart.

Differences: every file is fsynced (--checkpoint-durability none leaves that out), its checksum goes into the
manifest and is verified while loading, and only known classes are unpickled.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint_engines import safe_unpickling
from megatron.checkpoint_engines.base import CheckpointEngine, FileState, SavedFile
from megatron.checkpoint_engines.errors import CheckpointDamagedError
from megatron.checkpoint_engines.timed_files import TimedReader, TimedWriter, VerifyingReader
from megatron.checkpoint_engines.zip_records import ALGORITHM, directory_checksum, open_directory_checksum
from megatron.restart_trace.clock import now_ns
from megatron.restart_trace.recorder import Operation


class TorchEngine(CheckpointEngine):
    """The baseline of every comparison. Host memory: a copy of one file's device tensors at a time."""

    name = "torch"

    def _save_file(self, file: FileState, directory: Path, op: Operation) -> SavedFile:
        path = directory / file.name
        with op.span("device_to_host", file=file.name) as span:
            counter = _Counter()
            state = stage_on_host(file.state, counter)
            span.bytes = counter.copied_bytes
        opened = now_ns()
        writer: Any = TimedWriter(path)  # as much of a file as torch.save asks for
        try:
            try:
                torch.save(state, writer)
                writer.flush()
            except RuntimeError as exc:
                # torch's zip writer hides the OSError of our write behind an error of its own
                raise (exc.__context__ if isinstance(exc.__context__, OSError) else exc) from None
            del state  # giving a host copy back to the system takes time, too
            checksum = open_directory_checksum(writer.fd)  # a few kB, still in the page cache
            closed = now_ns()
            serialize_ns = closed - opened - writer.write_ns
            op.add("serialize", None, opened, closed, duration_ns=serialize_ns, file=file.name)
            op.add(
                "flush",
                "write",
                opened,
                closed,
                duration_ns=writer.write_ns,
                file=file.name,
                num_bytes=writer.num_bytes,
            )
            if self.options.fsync:
                with op.span("flush", "fsync", file=file.name) as span:
                    os.fsync(writer.fd)
                    span.bytes = writer.num_bytes
        finally:
            writer.close()
        return SavedFile(file.name, writer.num_bytes, checksum)

    def _load_file(self, path: Path, expected: SavedFile | None, op: Operation) -> Any:
        opened = now_ns()
        reader = self._open(path, expected)
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

    def _open(self, path: Path, expected: SavedFile | None) -> TimedReader:
        if not self.options.verify_checksums:
            return TimedReader(path)
        try:
            if expected is not None:
                _check_directory(path, expected)
            return VerifyingReader(path)
        except zipfile.BadZipFile as exc:
            raise CheckpointDamagedError(f"{path}: not a complete torch.save file ({exc})") from exc


class _Counter:
    copied_bytes = 0


def stage_on_host(state: Any, counter: _Counter) -> Any:
    """A copy of the nest `state` whose tensors are on the CPU and own exactly their storage.

    Device tensors are copied to the host. CPU tensors are copied only where they are views of something
    larger, which torch.save would write whole; the others are used as they are.
    """
    if isinstance(state, torch.Tensor):
        tensor = state.detach()
        view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        if tensor.device.type == "cpu" and not view:
            return tensor
        counter.copied_bytes += tensor.numel() * tensor.element_size()
        return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu")
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(stage_on_host(item, counter) for item in state))
    if type(state) in (list, tuple):
        return type(state)(stage_on_host(item, counter) for item in state)
    if isinstance(state, Mapping):
        items = [(key, stage_on_host(value, counter)) for key, value in state.items()]
        return type(state)(items) if type(state) is not dict else dict(items)  # type: ignore[call-arg]
    return state


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
