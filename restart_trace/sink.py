"""Where records go: one JSONL file per process, or nowhere.

Each record is one write(2), so what a killed process wrote stays readable.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class NullSink:
    """Drops every record: `--restart-trace off`."""

    def write(self, record: dict[str, Any]) -> bool:
        return True

    def close(self) -> None:
        return None


class JsonlSink:
    """Append-only record file of this process: a process that it forks writes nothing to it.

    A record is handed to the kernel as soon as it is made: SIGKILL loses none that was written (a power cut
    may, since nothing is fsynced: the trace must not add an fsync to what it measures).

    Raises OSError if the file exists already or the directory cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler of the program may write while this thread does
        self._told = False

    def write(self, record: dict[str, Any]) -> bool:
        """Append one record; False if it could not be written.

        A full disk is not allowed to end the training that is traced: the failed save is reported by the
        checkpointing code, and the instrument loses records, says so once, and goes on.
        """
        if os.getpid() != self._pid:  # asked before the lock, which may have been held at the fork
            self._tell(f"process {os.getpid()} was forked by the one that the file belongs to, {self._pid}")
            return False
        line = (json.dumps(record, separators=(",", ":"), default=str) + "\n").encode()
        with self._lock:
            try:
                written = os.write(self._fd, line)
                if written == len(line):
                    return True
                # A part of a line would swallow the next record, or stand before the one that is written again.
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            except OSError as exc:
                self._tell(str(exc))
                return False
            self._tell(f"only {written} of {len(line)} bytes could be written")
            return False

    def _tell(self, reason: str) -> None:
        if not self._told:
            self._told = True
            logger.error("%s: trace records are being lost: %s", self.path, reason)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
