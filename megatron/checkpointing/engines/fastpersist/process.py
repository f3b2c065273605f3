"""The process that writes for engine `fastpersist-decoupled`. The engine starts it.

It receives the description of a snapshot in shared memory, writes the states one after another, and answers with the
files or the error. It ends at once when the engine closes its end of the connection or has ended itself.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.processes.parent_process import end_with_parent, ignore_stop_signals
from restart_trace.clock import now_ns

# What takes time to import comes after the process has seen to its own end.
if TYPE_CHECKING:
    from megatron.checkpointing.engines.base import SavedFile
    from megatron.checkpointing.engines.fastpersist.snapshot import PickledState, SharedMemory
    from megatron.checkpointing.engines.fastpersist.writer import StateWriter


READY = b"ready"  # sent once, when all is imported


@dataclass(frozen=True)
class Request:
    """Write these states, in this order, into `directory`."""

    directory: str
    states: list[PickledState]


@dataclass
class Reply:
    """What came of a request. `spans` are arguments of Operation.add, of the monotonic clock that processes share."""

    saved: list[SavedFile] = field(default_factory=list)
    spans: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    writer: str = ""  # of DeepSpeed's, and why
    failure: Exception | None = None  # of a class that both processes know

    def add(self, *arguments: Any, **labels: Any) -> None:
        """As Operation.add."""
        self.spans.append((arguments, labels))


def main(connection_fd: int, memory_fd: int, parent: int, dies_with_thread: bool) -> None:
    """Serve requests until the connection ends.

    `dies_with_thread`: be killed when the thread that started this process ends, which is only wanted of a main thread.
    """
    ignore_stop_signals()
    if dies_with_thread:
        end_with_parent(parent)
    elif os.getppid() != parent:
        os._exit(0)
    connection = Connection(connection_fd)
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, received), name="receive", daemon=True).start()
    options = pickle.loads(received.get())
    from megatron.checkpointing.engines.fastpersist.snapshot import SharedMemory
    from megatron.checkpointing.engines.fastpersist.writer import StateWriter

    memory, writer = SharedMemory(memory_fd), StateWriter(options)
    # If nobody is left to hear of it, the thread ends the process.
    with contextlib.suppress(BrokenPipeError):
        connection.send_bytes(READY)
    while True:
        reply = _carry_out(pickle.loads(received.get()), writer, memory)
        with contextlib.suppress(BrokenPipeError):
            connection.send_bytes(pickle.dumps(reply))


def _receive(connection: Connection, received: queue.SimpleQueue[bytes]) -> None:
    """Pass messages on; end the process, in the midst of a write if need be, when no more can come."""
    try:
        while True:
            received.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _carry_out(request: Request, writer: StateWriter, memory: SharedMemory) -> Reply:
    from megatron.checkpointing.engines.errors import CheckpointSaveError, EngineUnavailableError
    from megatron.checkpointing.engines.fastpersist.snapshot import Restorer
    from megatron.checkpointing.engines.host_staging import Staging, stage_on_host

    reply = Reply()
    try:
        restorer = Restorer(memory)
        for pickled in request.states:
            begun, staging = now_ns(), Staging()
            state = stage_on_host(restorer.state(pickled), staging)
            path = Path(request.directory) / pickled.name
            reply.saved.append(writer.write(state, staging, path, pickled.name, reply.add, begun))
        reply.writer = str(writer.choose())
    except (OSError, CheckpointSaveError, EngineUnavailableError) as exc:
        reply.failure = exc
    except Exception as exc:  # whatever it is, the training is told
        reply.failure = CheckpointSaveError(f"the checkpoint writer failed: {type(exc).__name__}: {exc}")
    return reply
