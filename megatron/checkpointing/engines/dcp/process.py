"""The process that writes for engine `dcp-process`: the library's own loop of requests. The engine starts it.

The loop needs a process group, and gets one without other members, which meets on this host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from types import SimpleNamespace
from typing import Any

from megatron.processes.parent_process import end_after_process, ignore_stop_signals

# What takes time to import comes after the process has seen to its own end.

TAKEN = b"taken"  # the answer to an open file

_GROUP_OF_ONE = SimpleNamespace(
    local_rank=0,
    global_rank=0,
    world_size=1,
    tcp_store_master_addr="127.0.0.1",
    tcp_store_master_port=0,  # any free port
    use_prefix_store=False,
    disable_automatic_gc=False,
    disable_manual_gc=False,
)


def main(connection_fd: int, parent: int) -> None:
    """Serve requests until the connection or the process `parent` ends."""
    ignore_stop_signals()
    end_after_process(parent)
    logging.disable(logging.INFO)  # the library logs each request
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    from torch.distributed.checkpoint._async_process_executor import _AsyncCheckpointProcess

    _requests.append(Requests(connection_fd))
    group: Any = _GROUP_OF_ONE
    _AsyncCheckpointProcess._checkpointing_subprocess(group, _requests[0])


class Requests(Connection):
    """As the library reads and answers them; its loop would end with a traceback where nobody is left."""

    def recv(self) -> Any:
        with _silent_end():
            return super().recv()

    def send(self, obj: Any) -> None:
        with _silent_end():
            super().send(obj)


@contextlib.contextmanager
def _silent_end() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        os._exit(0)


_requests: list[Requests] = []  # of this process, once it serves


class SentFile:
    """An open file, in a request. They come after it, one by one and in its order, while it is unpickled.

    So this process has as many open as the state has storages, and few are on their way, which the system limits for
    all processes of a user.
    """

    def detach(self) -> int:
        """The file, which the caller closes; multiprocessing's DupFd calls it so."""
        file = recv_handle(_requests[0])
        _requests[0].send_bytes(TAKEN)
        return file
