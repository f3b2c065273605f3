"""Hooks of megatron-core's dist_checkpointing: its saves and loads, also those that a process of its own writes.

It plans by DCP's planners, and writes files by processes that it forks: their bytes are those of its write results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from restart_trace.clock import now_ns
from restart_trace.hooks.clients import operation_around
from restart_trace.hooks.guard import Call, Hook, guarded, wrap
from restart_trace.hooks.running import Running
from restart_trace.hooks.session import Session

_LIBRARY = "megatron.core.dist_checkpointing"


@dataclass(frozen=True)
class _Unpublished:
    """An asynchronous save whose files other processes write, since its call returned. `num_bytes`: until then."""

    running: Running
    returned_ns: int
    num_bytes: int


def _publish(save: _Unpublished, functions: Sequence[Callable[[], Any]]) -> None:
    """Call what megatron-core calls to publish the checkpoint."""
    for function in functions:
        function()


def hook(session: Session, module: ModuleType) -> None:
    """Hook megatron.core.dist_checkpointing.serialization."""
    around_save = operation_around(session, "save", _LIBRARY, _directory)

    @contextmanager
    def finalizing(call: Call) -> Iterator[None]:
        save, written_ns = call.args[0], now_ns()
        operation = save.running.operation
        with session.resumed(save.running), save.running.phase("commit", "publish"):
            try:
                yield
            finally:  # now the bytes are known that were written in the background
                num_bytes = (operation.bytes or 0) - save.num_bytes
                operation.add("library_call", None, save.returned_ns, written_ns, blocking=False, num_bytes=num_bytes)

    publish = guarded(_publish, Hook(f"the finalize_fns of {_LIBRARY}.save", finalizing))

    @contextmanager
    def save(call: Call) -> Iterator[None]:
        with around_save(call):
            yield
            running, request = session.running(), call.result
            if running is not None and request is not None and running.kind == "save":
                unpublished = _Unpublished(running, now_ns(), running.operation.bytes or 0)
                request.finalize_fns[:] = [partial(publish, unpublished, list(request.finalize_fns))]
                running.unfinished = True

    wrap(module, "save", save)
    wrap(module, "load", operation_around(session, "load", _LIBRARY, _directory))


def hook_writer(session: Session, module: ModuleType) -> None:
    """Hook megatron.core.dist_checkpointing.strategies.filesystem_async."""

    @contextmanager
    def results(call: Call) -> Iterator[None]:
        yield
        running = session.running()
        if running is not None and isinstance(call.result, list):
            running.moved({(one.storage_data.relative_path, one.size_in_bytes, one.index) for one in call.result})

    wrap(module.FileSystemWriterAsync, "retrieve_write_results", results)


def _directory(call: Call) -> Any:
    return call.arguments()["checkpoint_dir"]
