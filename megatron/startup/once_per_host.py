"""Runs a check once on each host: its first rank computes the result and sends it to the other ranks of the host.

With thousands of ranks the files of a start are read by as many processes as there are hosts, and not by all ranks.
The first rank of a host listens on a socket in the kernel's abstract namespace (unix(7)), which leaves no file behind,
and answers each other rank of its host once. A rank that finds nobody to ask finds out by itself, as does one whose
first rank has ended: all of them see the same files. Standard library only, as this runs before anything is imported.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from megatron.processes.in_process_restart import at_return
from restart_trace.cycles import job_key

Found = TypeVar("Found")

_LOOK_FOR_S = 1.0  # how long the first rank may begin later than another
_POLL_S = 0.005
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of the other side (socket(7), SO_PEERCRED)


def once_per_host(work: Callable[[], Found], env: Mapping[str, str], timeout_s: float) -> Found:
    """What `work` returns on the first rank of this host, or raises there.

    Raises TimeoutError if that takes longer than `timeout_s`, saying so.
    """
    size, local_rank = int(env.get("LOCAL_WORLD_SIZE", "1")), env.get("LOCAL_RANK", "0")
    if size == 1:
        return work()
    name = _name(env)
    if local_rank == "0":
        return _tell(work, name, size - 1)
    answer = _ask(name, timeout_s)
    if answer is None:
        return work()
    succeeded, found = answer
    if not succeeded:
        raise found
    return found


def _tell(work: Callable[[], Found], name: str, others: int) -> Found:
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(name)
    except OSError:  # of another group of ranks on this host, whose first one has come before
        listening.close()
        return work()
    listening.listen(others)
    try:
        found = work()
    except Exception as error:
        _answer(listening, others, (False, error))
        raise
    _answer(listening, others, (True, found))
    return found


def _answer(listening: socket.socket, others: int, answer: tuple[bool, Any]) -> None:
    """Tell each of the others as it asks, on a thread: some may begin much later."""
    try:
        content = pickle.dumps(answer)
        pickle.loads(content)  # not every exception can be
    except Exception:
        listening.close()
        return

    def serve() -> None:
        with listening, suppress(OSError):  # at_return
            for _ in range(others):
                with listening.accept()[0] as asking, suppress(OSError):
                    if _is_ours(asking):
                        asking.sendall(content)

    def end() -> None:
        with suppress(OSError):  # all have asked, and it is closed
            listening.shutdown(socket.SHUT_RDWR)

    at_return(end)  # another rank may have ended before it has asked
    threading.Thread(target=serve, name="tell-this-host", daemon=True).start()


def _ask(name: str, timeout_s: float) -> tuple[bool, Any] | None:
    """What the first rank says; None if there is none, or it has ended."""
    deadline = time.monotonic() + _LOOK_FOR_S
    with socket.socket(socket.AF_UNIX) as asking:
        while True:
            try:
                asking.connect(name)
                break
            except OSError:
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_S)
        if not _is_ours(asking):
            return None
        asking.settimeout(timeout_s)
        content = b""
        try:
            while part := asking.recv(1 << 16):
                content += part
        except TimeoutError:
            raise TimeoutError(
                f"the first rank of {socket.gethostname()} checks the files of the run for all ranks of this host, and "
                f"has not answered for {timeout_s:g} s (--distributed-timeout-minutes): it is stopped, or the storage "
                "does not answer"
            ) from None
        except OSError:
            return None
    return pickle.loads(content) if content else None


def _is_ours(other: socket.socket) -> bool:
    """Whether the other side runs as the same user."""
    found = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1] == os.getuid()


def _name(env: Mapping[str, str]) -> str:
    """The same for the ranks of one start on this host, and no others."""
    parts = [
        job_key(env), *(env.get(key, "") for key in ("TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE", "GROUP_RANK")),
        str(os.getuid()), os.getcwd(), *sys.argv,
    ]  # fmt: skip
    return "\0megatron-start-" + hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:32]
