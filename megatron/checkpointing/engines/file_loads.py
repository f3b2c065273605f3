"""Loads by a library: which bytes of a file are verified, and how its time is divided into phases."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.fileio.checksums import ALGORITHM, CheckedBytes
from megatron.fileio.timed_files import Timeline
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation


def checked_content(path: Path, expected: SavedFile | None) -> list[CheckedBytes]:
    """All bytes of a file with the CRC-32 that the manifest has of it; [] if there is none to compare with.

    Raises CheckpointDamagedError if what it has is no CRC-32.
    """
    if expected is None or expected.checksum == "none":
        return []
    algorithm, _, digits = expected.checksum.partition(":")
    try:
        if algorithm == ALGORITHM:
            return [CheckedBytes("the file", 0, expected.num_bytes, int(digits, 16))]
    except ValueError:
        pass
    raise CheckpointDamagedError(f"{path}: checksum {expected.checksum!r} is not one of this engine's")


def report_load(op: Operation, name: str, timeline: Timeline, start_ns: int, num_bytes: int) -> int:
    """Spans of a load from `start_ns` until now: what `timeline` has of reading and verifying; the rest deserializes.

    Times of threads that work side by side count once. `name`: of the file, or of the state in files of its own.
    Returns the end of these spans, where those of the next file begin if recording these is to be accounted for, too:
    of small files on a busy machine that is a good part of the time.
    """
    end_ns = now_ns()
    spent = timeline.shares(["read", "verify"], start_ns, end_ns)
    for detail, duration, moved in (
        ("read", spent["read"], num_bytes),
        ("verify", spent["verify"], None),
        ("deserialize", spent[""], None),
    ):
        op.add("load", detail, start_ns, end_ns, duration_ns=duration, file=name, num_bytes=moved)
    return end_ns
