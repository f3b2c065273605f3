"""Tells errors that only say that another rank does not answer, or has ended, from those of this rank itself."""

from __future__ import annotations

import re

from megatron.parallel.tree import AgreementLostError, AgreementTimeoutError
from megatron.processes.in_process_restart import AskedToReturnError

_TIMED_OUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_CONNECTION_LOST = re.compile(
    r"connection (closed|reset|refused|was)|broken pipe|pair closure|socket.*(closed|error)|recv.*0 bytes"
    r"|ncclRemoteError|ncclSystemError|communicator was aborted|remote process exited",
    re.IGNORECASE,
)
_TRANSPORT = re.compile(r"gloo/|\bTCPStore\b|\bDist\w*Error\b")


def comes_from_another_rank(error: BaseException) -> bool:
    """Whether `error` only means that another rank does not answer, or has ended: not what is wrong itself."""
    text = text_of(error)
    of_transport = isinstance(error, RuntimeError) and _TRANSPORT.search(text) is not None
    lost = _TIMED_OUT.search(text) or _CONNECTION_LOST.search(text)
    return isinstance(error, (AgreementLostError, AskedToReturnError)) or (of_transport and lost is not None)


def has_timed_out(error: BaseException) -> bool:
    """Whether `error` means that a wait for other ranks has passed its deadline, as further waits would."""
    if isinstance(error, AgreementLostError):
        return isinstance(error, AgreementTimeoutError)
    text = text_of(error)
    return isinstance(error, RuntimeError) and bool(_TRANSPORT.search(text) and _TIMED_OUT.search(text))


def text_of(error: BaseException) -> str:
    """Its class and message, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
