"""Ways to harm a checkpoint on disk, and what comes of it."""

from __future__ import annotations

import io
import pickletools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from tests.conformance.compare import differences
from tests.conformance.subjects import Saved, Subject

SAME, REFUSED, OTHER = "same state", "refused", "another state"
# Makes a directory "harmed" in the current one when it is unpickled; protocol 0, so that it is short.
BOMB = b"cos\nmkdir\n(S'harmed'\ntR."


def outcome(
    subject: Subject,
    states: Mapping[str, Any],
    saved: Saved,
    *,
    damaged: str = "",
    manifest: Mapping[str, SavedFile] | None = None,
    **options: Any,
) -> str:
    """Load all `states` and say what became of them.

    Any exception but the named ones escapes: the trainer would take an older checkpoint, and name no file.
    The error must name the file `damaged`.
    """
    try:
        found = subject.load(list(states), saved, manifest=manifest, **options)
    except (CheckpointDamagedError, OSError) as exc:
        assert damaged in str(exc), f"the error does not name {damaged}: {exc}"
        return REFUSED
    return OTHER if differences(found, dict(states)) else SAME


@contextmanager
def damaged(path: Path, content: bytes) -> Iterator[None]:
    """Let a file have other content for a while."""
    before = path.read_bytes()
    _fill(path, content)
    try:
        yield
    finally:
        _fill(path, before)


def _fill(path: Path, content: bytes) -> None:
    """In place: ext4 writes a file that was emptied to the disk at once, and the next time waits for that."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def flipped(content: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


def positions(size: int, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """(byte, bit) to flip: the head and the tail of a file, where formats keep their lengths, and all between."""
    rng = random.Random(seed)
    edges = [*range(min(size, 12)), *range(max(size - 8, 0), size)]
    chosen = rng.sample(edges, min(len(edges), count // 3))
    chosen += [rng.randrange(size) for _ in range(count - len(chosen))]
    return [(position, rng.randrange(8)) for position in sorted(set(chosen))]


def resized(manifest: Mapping[str, SavedFile], name: str, num_bytes: int) -> dict[str, SavedFile]:
    """A manifest that says that `name` always had that size."""
    return dict(manifest) | {name: replace(manifest[name], num_bytes=num_bytes)}


def pickles(content: bytes) -> list[tuple[int, int]]:
    """(first byte, length) of every pickle of more than a few steps that lies within `content` as it is."""
    found = []
    start = content.find(b"\x80")
    while start >= 0:
        protocol = content[start + 1 : start + 2]
        length = _pickle_length(content[start:]) if protocol in (b"\2", b"\3", b"\4", b"\5") else 0
        if length:
            found.append((start, length))
        start = content.find(b"\x80", start + max(length, 1))
    return found


def _pickle_length(content: bytes) -> int:
    """Bytes of the pickle that `content` begins with; 0 if it begins with none."""
    steps, stream = 0, io.BytesIO(content)
    try:
        for opcode, _, _ in pickletools.genops(stream):
            steps += 1
            if opcode.name == "STOP":
                return stream.tell() if steps > 4 else 0
    except Exception:  # arbitrary bytes make pickletools raise anything: then they are no pickle
        return 0
    return 0
