"""Hooks of torch.save and torch.load within a save or load, which separate serialization from storage.

In a save, `write` is the time in torch's calls that add a record to the archive, and `serialize` the rest. In torch's
zip format the call that writes a record also computes its checksum (CRC32), so that counts as `write`. In a load,
`read` is the time in read(2), and `deserialize` the rest.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from restart_trace.clock import now_ns
from restart_trace.hooks.guard import Call, wrap
from restart_trace.hooks.session import Session

_ZIP = b"PK\x03\x04"  # first bytes of torch's current format


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


class Serialization:
    """Hooks of torch.save and torch.load, active within a save or load."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._writing: _Watch | None = None  # while torch.save runs

    @contextmanager
    def save(self, call: Call) -> Iterator[None]:
        """Around torch.save."""
        running = self._session.running()
        path = call.arguments()["f"] if running is not None else None
        if running is None or running.opaque or not isinstance(path, (str, os.PathLike)):
            yield
            return
        archive = call.arguments()["_use_new_zipfile_serialization"]
        if not archive:  # the format before torch 1.6, written by one call
            with running.engine_call(path):
                yield
            return
        watch = self._writing = _Watch()
        with running.apart() as start:
            try:
                yield
            finally:
                self._writing = None
            end = now_ns()
            file, size = running.name_of(path), os.path.getsize(path)
            add = running.operation.add
            add("serialize", None, start, end, duration_ns=end - start - watch.total_ns, file=file)
            add("flush", "write", start, end, duration_ns=watch.total_ns, file=file, num_bytes=size)
            running.count(size)

    @contextmanager
    def open_writer(self, call: Call) -> Iterator[None]:
        """Around torch's function that opens the archive that torch.save writes."""
        yield
        if self._writing is not None:
            call.result.file_like = _TimedArchive(call.result.file_like, self._writing)

    @contextmanager
    def load(self, call: Call) -> Iterator[None]:
        """Around torch.load."""
        running = self._session.running()
        arguments = call.arguments() if running is not None else {}
        path = arguments.get("f")
        if running is None or running.opaque or not isinstance(path, (str, os.PathLike)):
            yield
            return
        if _is_mapped(arguments["mmap"]) or not _is_archive(path):
            with running.engine_call(path):
                yield
            return
        watch = _Watch()
        with running.apart() as start, io.BufferedReader(_TimedFile(path, watch)) as file:
            given = dict(call.kwargs)
            if "f" in given:
                call.kwargs = given | {"f": file}
            else:
                call.args = (file, *call.args[1:])
            yield
            end = now_ns()
            name, add = running.name_of(path), running.operation.add
            add("load", "read", start, end, duration_ns=watch.total_ns, file=name, num_bytes=watch.bytes)
            add("load", "deserialize", start, end, duration_ns=end - start - watch.total_ns, file=name)
            running.count(watch.bytes)

    @contextmanager
    def fsync(self, call: Call) -> Iterator[None]:
        """Around os.fsync."""
        running = self._session.running()
        if running is None or running.opaque or running.kind != "save":
            yield
            return
        with running.phase("flush", "fsync"):
            yield


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
