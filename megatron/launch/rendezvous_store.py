"""The rendezvous of a launch, served by a process of its own that listens before the first rank exists.

Where rank 0 serves the store (torch's `env://`), every other rank tries to connect until rank 0 has come so far. A
TCPStore client that is refused waits most of a second before it tries again (torch 2.13), which is most of the
rendezvous of ranks that import nothing. Here the socket listens before the ranks are forked, so nobody is refused.
torchrun's agent serves the store, too; its variable, TORCHELASTIC_USE_AGENT_STORE, tells torch that rank 0 is to
connect as the others.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from typing import NoReturn

from megatron.net.listening import LOOPBACK, address_for_store, listen_on, name_here
from megatron.net.name_lookups import use_names_from_files
from megatron.processes.parent_process import become_helper
from megatron.processes.process_name import name_process
from megatron.processes.telling import tell

STORE_VARIABLES = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
PROCESS_NAME = "rendezvous"  # as ps shows it


class RendezvousStore:
    """A store on a port of this host, from `serve` until `close`: ranks that connect before wait to be served.

    The caller must have one thread, since `serve` forks. A process that is forked between the two calls `leave`.

    `name`: by which ranks reach this host; the store listens at its `address_for_store`, or at `bind`. `port`:
    0 for a free one. `master_addr`: by what the ranks of this host reach it. Raises OSError if the port is taken.
    """

    def __init__(self, name: str, port: int, bind: str | None = None, towards: str | None = None) -> None:
        address = bind if bind is not None else address_for_store(name, towards)
        listening = listen_on(address, port)
        self.master_addr = name_here(name, address)
        self.port = int(listening.getsockname()[1])
        self._listening, self._address = listening, address
        self._pid: int | None = None

    def serve(self) -> RendezvousStore:
        """Fork the process that serves it."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _serve(self._listening, self._address, parent)
        self._listening.close()
        return self

    def leave(self) -> None:
        """In another process: the port is none of its own."""
        self._listening.close()

    def close(self) -> None:
        """End the process; the port is free then."""
        self._listening.close()
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)  # it is not reaped before, so the number is no other's
            os.waitpid(self._pid, 0)


def _serve(listening: socket.socket, address: str, parent: int) -> NoReturn:
    """In the forked process: serve the store until killed, with the parent at the latest."""
    try:
        become_helper(parent)
        os.setsid()  # the terminal's signals are for the launcher to pass on
        name_process(PROCESS_NAME)
        select.select([listening], [], [])  # a script that never connects needs no torch
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  it is documented

        use_names_from_files()  # the thread that serves all ranks would ask for the name of each
        port = listening.getsockname()[1]
        own = name_here(LOOPBACK, address)
        _store = TCPStore(own, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        while True:
            signal.pause()
    except BaseException as error:
        tell(f"[launch] error: the rendezvous cannot be served: {error!r}")
    finally:
        os._exit(1)  # nothing of the forked launcher may run here
