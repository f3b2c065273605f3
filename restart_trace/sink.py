"""Destinations of records: one JSONL file per process, or none.

Each record is one write(2), so the file of a killed process stays readable.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode  # json.dumps would make another for each record
_ITERATION = b'{"type":"iteration","step":%d,"start_ns":%d,"end_ns":%d}\n'
_OF_ITERATION = {"type", "step", "start_ns", "end_ns"}


def line_of(record: dict[str, Any]) -> bytes:
    """The record as a line of JSON.

    The iteration that hooks record at each training step has no other fields, and is formatted without the encoder: the
    step has evicted that from the processor's caches, so it would cost more than the write.
    """
    if record.get("type") == "iteration" and record.keys() == _OF_ITERATION:
        return _ITERATION % (record["step"], record["start_ns"], record["end_ns"])
    return (_encode(record) + "\n").encode()


class NullSink:
    """Drops every record: `--restart-trace off`."""

    def write(self, record: dict[str, Any]) -> bool:
        return True

    def close(self) -> None:
        return None


class JsonlSink:
    """Append-only record file of this process. A forked child writes nothing to it.

    A record is passed to the kernel as soon as it is made, so SIGKILL loses no record. A power failure may, since the
    trace must not add an fsync to what it measures.

    Raises OSError if the file already exists or the directory cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler of the program may write while this thread does
        self._reported = False

    def write(self, record: dict[str, Any]) -> bool:
        """Append one record; False if it could not be written.

        A full disk must not end the traced training: the checkpointing code reports the failed save, and the instrument
        logs once that records are lost, and continues.
        """
        if os.getpid() != self._pid:  # checked before the lock is taken, which may have been held at the fork
            self._report(f"process {os.getpid()} was forked from process {self._pid}, to which the file belongs")
            return False
        line = line_of(record)
        with self._lock:
            try:
                written = os.write(self._fd, line)
                if written == len(line):
                    return True
                # A partial line would merge with the next record, or with this one when it is written again.
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            except OSError as exc:
                self._report(str(exc))
                return False
            self._report(f"only {written} of {len(line)} bytes could be written")
            return False

    def _report(self, reason: str) -> None:
        if not self._reported:
            self._reported = True
            logger.error("%s: trace records are being lost: %s", self.path, reason)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
