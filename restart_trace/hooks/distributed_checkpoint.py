"""Hooks of torch.distributed.checkpoint (DCP): save, async_save and load, their planners and their storage.

A storage writer's or reader's own work is one `library_call`; its bytes are those that it says it has written, or that
the plan has it read. `barrier` is the exchange of plans and results between the ranks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from restart_trace.clock import now_ns
from restart_trace.hooks.guard import Around, Call, wrap
from restart_trace.hooks.running import Running
from restart_trace.hooks.session import Session
from restart_trace.recorder import Operation

_EXCHANGES = (
    "gather_object", "scatter_object", "broadcast_object", "all_gather_object", "all_gather_object_enforce_type",
    "barrier",
)  # fmt: skip


class CheckpointHooks:
    """Around DCP's functions and its file system storage, which others extend."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._handed_over: list[Operation] = []  # asynchronous saves whose thread has not begun
        self._lock = threading.Lock()

    @contextmanager
    def save(self, call: Call) -> Iterator[None]:
        """Around save, which async_save calls on a thread of its own."""
        arguments = call.arguments()
        self._hook_storage(arguments["storage_writer"])
        running = None if self._session.is_training_thread() else self._take_over()
        if running is not None:
            with self._session.until_end(running), running.phase("collect"):
                yield
            return
        with self._operation("save", arguments, "collect"):
            yield

    @contextmanager
    def async_save(self, call: Call) -> Iterator[None]:
        """Around async_save: the save lasts until its future is done. Training waits for the copy alone."""
        arguments = call.arguments()
        self._hook_storage(arguments["storage_writer"])
        running = self._session.begin("save", ranks=_ranks(arguments))
        if running is None:
            yield
            return
        self._label(running, "save", arguments)
        running.unfinished = True
        with self._lock:
            self._handed_over.append(running.operation)
        try:
            with self._session.until_end(running), running.phase("device_to_host"):
                yield
        except BaseException:  # it handed over nothing: the next save's thread must not take it
            with self._lock, suppress(ValueError):
                self._handed_over.remove(running.operation)
            raise
        copied_ns = now_ns()
        future = getattr(call.result, "upload_completion", call.result)
        with self._lock:
            if running.operation in self._handed_over:
                self._session.background.given_to(running.operation, future)
        future.add_done_callback(lambda done: self._done(running.operation, copied_ns, done))

    @contextmanager
    def load(self, call: Call) -> Iterator[None]:
        """Around load."""
        arguments = call.arguments()
        self._hook_storage(arguments["storage_reader"])
        with self._operation("load", arguments, "library_call"):
            yield

    def phase(self, kind: str, phase: str, detail: str | None = None) -> Around:
        """Around a function that is one phase of a save or load, whichever `kind` says."""

        @contextmanager
        def around(call: Call) -> Iterator[None]:
            running = self._session.running()
            if running is None or running.opaque or kind not in ("", running.kind):
                yield
                return
            with running.phase(phase, detail):
                yield

        return around

    @contextmanager
    def write_data(self, call: Call) -> Iterator[None]:
        """Around a storage writer's write_data."""
        running = self._session.running()
        if running is None or running.opaque:
            yield
            return
        with running.library_call():
            yield
            written = call.result.value() if call.result.done() else []
            running.moved({(one.storage_data.relative_path, one.size_in_bytes, one.index) for one in written})

    @contextmanager
    def read_data(self, call: Call) -> Iterator[None]:
        """Around a storage reader's read_data."""
        running = self._session.running()
        if running is None or running.opaque:
            yield
            return
        arguments = call.arguments()
        with running.library_call():
            yield
            indices = {item.storage_index for item in arguments["plan"].items}
            stored = [(index, arguments["self"].storage_data[index]) for index in indices]
            running.moved({(place.relative_path, place.length, index) for index, place in stored})

    @contextmanager
    def file_thread(self, call: Call) -> Iterator[None]:
        """Around the work of one thread of the storage writer, whose calls of torch.save belong to write_data."""
        with self._session.not_traced():
            yield

    @contextmanager
    def _operation(self, kind: str, arguments: dict[str, Any], phase: str) -> Iterator[None]:
        begun = self._session.begin(kind, ranks=_ranks(arguments))
        if begun is None:  # a part of another save or load, or nothing is traced
            running = self._session.running()
            if running is None:
                yield
                return
            with running.phase(phase):
                yield
            return
        self._label(begun, kind, arguments)
        with self._session.until_end(begun), begun.phase(phase):
            yield

    def _label(self, running: Running, kind: str, arguments: dict[str, Any]) -> None:
        place = arguments["checkpoint_id"]
        if place is None:
            storage = arguments["storage_writer" if kind == "save" else "storage_reader"]
            place = getattr(storage, "path", None)
        running.operation.label(engine="torch.distributed.checkpoint")
        if place is not None:
            directory = os.path.abspath(place)
            running.operation.label(tag=os.path.basename(directory))
            self._session.record_directory(kind, directory, "torch.distributed.checkpoint")

    def _take_over(self) -> Running | None:
        """The asynchronous save that this thread writes, in a timeline of its own."""
        with self._lock:
            operation = self._handed_over.pop(0) if self._handed_over else None
        if operation is None:
            return None
        running = Running(operation, "save")
        return running if self._session.resume(running) else None

    def _done(self, operation: Operation, copied_ns: int, done: Future[Any]) -> None:
        """The save has ended. If another process wrote it, its time there is one span without bytes."""
        with self._lock:
            if operation not in self._handed_over:  # a thread of this process wrote it, and has ended it
                return
            self._handed_over.remove(operation)
        error = done.exception()
        operation.add("library_call", None, copied_ns, now_ns(), blocking=False)
        self._session.background.ends(operation)
        operation.end(None if error is None else f"{type(error).__name__}: {error}")

    def _hook_storage(self, storage: Any) -> None:
        """Hook the methods of the class of a storage writer or reader that is not torch's own."""
        for one in type(storage).__mro__[:-1] if storage is not None else ():
            wrap(one, "write_data", self.write_data)
            wrap(one, "read_data", self.read_data)
            wrap(one, "finish", self.phase("save", "commit", "publish"))


def _ranks(arguments: dict[str, Any]) -> int | None:
    """How many ranks make the save or load together, as DCP decides it; None of a group that this rank is not in."""
    import torch.distributed

    alone = arguments["no_dist"] or not (torch.distributed.is_available() and torch.distributed.is_initialized())
    size = 1 if alone else torch.distributed.get_world_size(arguments["process_group"])
    return size if size > 0 else None


def hook(session: Session, module: ModuleType) -> None:
    """Hook torch.distributed.checkpoint."""
    hooks = CheckpointHooks(session)
    saver, loader, files = module.state_dict_saver, module.state_dict_loader, module.filesystem
    wrap(saver, "save", hooks.save)
    wrap(saver, "async_save", hooks.async_save)
    wrap(loader, "load", hooks.load)
    module.save, module.async_save, module.load = saver.save, saver.async_save, loader.load  # type: ignore[attr-defined]
    wrap(files._FileSystemWriter, "write_data", hooks.write_data)
    wrap(files._FileSystemWriter, "finish", hooks.phase("save", "commit", "publish"))
    wrap(files.FileSystemReader, "read_data", hooks.read_data)
    wrap(files.FileSystemReader, "read_metadata", hooks.phase("load", "discover"))
    wrap(files, "_write_files_from_queue", hooks.file_thread)
    for name in _EXCHANGES:
        wrap(module.utils._DistWrapper, name, hooks.phase("", "barrier"))
