"""Hooks of torch.save and torch.load, which separate serialization from storage, and of what else storage is asked.

A call with a file, as a path or open, outside of any other save or load is one itself (Session.file_call). Of one with
memory nothing says what the program does with the bytes: a notice tells that there are such.

In a save, `write` is the time in torch's calls that add a record to the archive, and `serialize` the rest. In torch's
zip format the call that writes a record also computes its checksum (CRC32), so that counts as `write`. In a load,
`read` is the time in read(2), and `deserialize` the rest.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from restart_trace.clock import now_ns
from restart_trace.hooks import waits
from restart_trace.hooks.guard import Call, wrap
from restart_trace.hooks.running import Running
from restart_trace.hooks.session import Session
from restart_trace.raised import Raised

_ZIP = b"PK\x03\x04"  # first bytes of torch's current format
_OF_MEMORY = (
    "outside of any save or load, as into an io.BytesIO or a file without a name: what the program does with these "
    "bytes is not observed; --save-function and --load-function name its functions that do it"
)
_TO_MEMORY = f"torch.save writes to memory {_OF_MEMORY}"
_FROM_MEMORY = f"torch.load reads from memory {_OF_MEMORY}"


class _Watch:
    """Total nanoseconds and bytes of one kind of call."""

    def __init__(self) -> None:
        self.total_ns = 0
        self.bytes = 0


class _TimedArchive:
    """torch's archive writer with timed methods, which compute checksums and write."""

    def __init__(self, archive: Any, watch: _Watch) -> None:
        self._archive = archive
        self._watch = watch

    def write_record(self, *args: Any) -> Any:
        return self._timed(self._archive.write_record, args)

    def write_end_of_file(self) -> Any:
        return self._timed(self._archive.write_end_of_file, ())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._archive, name)

    def _timed(self, method: Any, args: tuple[Any, ...]) -> Any:
        start = now_ns()
        try:
            return method(*args)
        finally:
            self._watch.total_ns += now_ns() - start


class _TimedFile(io.FileIO):
    """An unbuffered file with timed reads. Wrapped in io.BufferedReader it is like the result of open()."""

    def __init__(self, path: str | os.PathLike[str], watch: _Watch) -> None:
        super().__init__(os.fspath(path), "rb")
        self._watch = watch

    def readinto(self, buffer: Any) -> Any:
        start = now_ns()
        count = super().readinto(buffer)
        self._count(start, count or 0)
        return count

    def readall(self) -> bytes:
        start = now_ns()
        content = super().readall()
        self._count(start, len(content))
        return content

    def _count(self, start_ns: int, num_bytes: int) -> None:
        self._watch.total_ns += now_ns() - start_ns
        self._watch.bytes += num_bytes


class _TimedReads:
    """An open file with timed reads."""

    def __init__(self, file: Any, watch: _Watch) -> None:
        self._file = file
        self._watch = watch
        if hasattr(file, "readinto"):  # torch prefers it where there is one
            self.readinto = self._readinto

    def read(self, *args: Any) -> Any:
        start = now_ns()
        content = self._file.read(*args)
        self._count(start, len(content))
        return content

    def _readinto(self, buffer: Any) -> Any:
        start = now_ns()
        count = self._file.readinto(buffer)
        self._count(start, count or 0)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _count(self, start_ns: int, num_bytes: int) -> None:
        self._watch.total_ns += now_ns() - start_ns
        self._watch.bytes += num_bytes


class Serialization:
    """Hooks of torch.save and torch.load."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._of_thread = threading.local()  # `writing`: the watch of torch.save, while that runs

    @contextmanager
    def save(self, call: Call) -> Iterator[None]:
        """Around torch.save."""
        arguments = call.arguments()
        target = arguments["f"]
        path = path_of(target)
        with self._session.file_call("save", "torch.save", path) as running:
            if running is None or running.opaque:
                if running is None and path is None:
                    self._session.notice("save", "saved_to_memory", _TO_MEMORY)
                yield
            elif not arguments["_use_new_zipfile_serialization"]:  # the format before torch 1.6, written by one call
                with running.library_call(path):
                    yield
            else:
                with self._save(running, target, path):
                    yield

    @contextmanager
    def _save(self, running: Running, target: Any, path: str | None) -> Iterator[None]:
        """Around torch.save, which writes its archive to `target`; `path`: None if that is in memory."""
        begin = _position(target)
        watch = self._of_thread.writing = _Watch()
        raised = Raised()
        with running.apart() as start:
            try:
                with raised:
                    yield
            finally:
                self._of_thread.writing = None
                end = now_ns()
                file = None if path is None else running.name_of(path)
                of_storage = {} if path is None else {"duration_ns": end - start - watch.total_ns, "file": file}
                running.add("serialize", None, start, end, error=raised.error, **of_storage)
                if path is not None:
                    size = None if raised.error else _written(target, begin)
                    running.add("flush", "write", start, end, duration_ns=watch.total_ns, file=file, num_bytes=size)
                    if size is not None:
                        running.count(size, path)

    @contextmanager
    def open_writer(self, call: Call) -> Iterator[None]:
        """Around torch's function that opens the archive that torch.save writes."""
        yield
        writing = getattr(self._of_thread, "writing", None)
        if writing is not None:
            call.result.file_like = _TimedArchive(call.result.file_like, writing)

    @contextmanager
    def load(self, call: Call) -> Iterator[None]:
        """Around torch.load."""
        arguments = call.arguments()
        source = arguments["f"]
        path = path_of(source)
        # Asked before the load begins: in a process's first load it imports a module, as torch would.
        whole = path is not None and _is_path(source) and (_is_mapped(arguments["mmap"]) or not _is_archive(path))
        with self._session.file_call("load", "torch.load", path) as running:
            if running is None or running.opaque or path is None:
                if running is None and path is None:
                    self._session.notice("load", "loaded_from_memory", _FROM_MEMORY)
                yield
            elif whole:
                with running.library_call(path):
                    yield
            else:
                with self._load(running, call, source, path):
                    yield

    @contextmanager
    def _load(self, running: Running, call: Call, source: Any, path: str) -> Iterator[None]:
        """Around torch.load of the archive `source`, which is given to it as a file with timed reads."""
        watch = _Watch()
        with running.apart() as start, ExitStack() as stack:
            if _is_path(source):
                file: Any = stack.enter_context(io.BufferedReader(_TimedFile(path, watch)))
            else:
                file = _TimedReads(source, watch)
            given = dict(call.kwargs)
            if "f" in given:
                call.kwargs = given | {"f": file}
            else:
                call.args = (file, *call.args[1:])
            raised = Raised()
            try:
                with raised:
                    yield
            finally:
                end, name, read_ns = now_ns(), running.name_of(path), watch.total_ns
                running.add("load", "read", start, end, duration_ns=read_ns, file=name, num_bytes=watch.bytes)
                rest_ns = end - start - read_ns
                running.add("load", "deserialize", start, end, duration_ns=rest_ns, file=name, error=raised.error)
                running.count(watch.bytes, path)

    @contextmanager
    def fsync(self, call: Call) -> Iterator[None]:
        """Around os.fsync."""
        running = self._session.running()
        if running is None or running.opaque or running.kind != "save":
            yield
            return
        with running.phase("flush", "fsync"):
            yield

    @contextmanager
    def make_directory(self, call: Call) -> Iterator[None]:
        """Around os.makedirs and Path.mkdir."""
        running = self._session.running()
        if running is None or running.opaque or running.kind != "save":
            yield
            return
        with running.phase("make_directory"):
            yield


def path_of(file: Any) -> str | None:
    """The path of what torch.save or torch.load was given: a path or an open file; None for memory and pipes."""
    if _is_path(file):
        return os.fspath(file)
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else None


def _is_path(file: Any) -> bool:
    return isinstance(file, (str, os.PathLike))


def _position(file: Any) -> int | None:
    """Where an open file is written next; None for a path, and for a file that does not tell."""
    if _is_path(file):
        return None
    try:
        return int(file.tell())
    except (AttributeError, OSError, ValueError):
        return None


def _written(file: Any, begin: int | None) -> int | None:
    """Bytes that were written to a file; `begin`: its position before. None if that cannot be told."""
    if _is_path(file):
        return os.path.getsize(file)
    end = _position(file)
    return None if begin is None or end is None else end - begin


def _is_mapped(mmap: bool | None) -> bool:
    """Whether torch.load maps the file, which it then opens itself: by its argument `mmap`, or by torch's setting."""
    if mmap is not None:
        return mmap
    from torch.utils.serialization import config

    return config.load.mmap


def _is_archive(path: str | os.PathLike[str]) -> bool:
    """Whether torch.load reads this file record by record; also False if it cannot be read, which torch will report."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_ZIP)) == _ZIP
    except OSError:
        return False


def hook(session: Session, torch: Any) -> None:
    """Hook torch."""
    serialization = Serialization(session)
    module = torch.serialization
    wrap(module, "_open_zipfile_writer", serialization.open_writer)
    wrap(module, "save", serialization.save)
    wrap(module, "load", serialization.load)
    torch.save, torch.load = module.save, module.load
    wrap(os, "fsync", serialization.fsync)
    wrap(os, "makedirs", serialization.make_directory)
    wrap(Path, "mkdir", serialization.make_directory)
    waits.hook(session)
