"""The ways of writing and reading that are compared. Imports nothing heavy: the command line needs it."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
NO, TRUNCATED, ALLOCATED = "no", "truncated", "allocated"


@dataclass(frozen=True)
class Way:
    """How the bytes of one rank are moved."""

    workers: int = 4  # threads that fill and verify buffers
    depth: int = 1  # transfers that a worker has under way; above 1 they are queued in io_uring
    uring: bool = False
    block: int = 8 * MIB
    direct: bool = True
    files: int = 1  # the bytes are divided into so many
    sized: str = NO  # what is done for the file's size before it is written
    checksum: bool = True
    copied: bool = True  # through a buffer; else from and to the tensors' own memory


FILLED, PLACED = "filled", "placed"  # as ckpt-replay calls them; the others are compared with these

WRITES: dict[str, Way] = {
    FILLED: Way(sized=ALLOCATED, checksum=False),
    "filled-truncated": Way(sized=TRUNCATED, checksum=False),
    "threads": Way(),
    "threads-truncated": Way(sized=TRUNCATED),
    "threads-allocated": Way(sized=ALLOCATED),
    "threads-2": Way(workers=2),
    "threads-2-allocated": Way(workers=2, sized=ALLOCATED),
    "threads-8": Way(workers=8),
    "threads-8-allocated": Way(workers=8, sized=ALLOCATED),
    "block-1-allocated": Way(block=MIB, sized=ALLOCATED),
    "block-2-allocated": Way(block=2 * MIB, sized=ALLOCATED),
    "block-4-allocated": Way(block=4 * MIB, sized=ALLOCATED),
    "block-32-allocated": Way(block=32 * MIB, sized=ALLOCATED),
    "buffered": Way(direct=False),
    "files-64-allocated": Way(files=64, sized=ALLOCATED),
    "uring-1x4": Way(uring=True, workers=1, depth=4),
    "uring-1x8": Way(uring=True, workers=1, depth=8),
    "uring-1x8-allocated": Way(uring=True, workers=1, depth=8, sized=ALLOCATED),
    "uring-1x16-2": Way(uring=True, workers=1, depth=16, block=2 * MIB),
    "uring-1x16-2-allocated": Way(uring=True, workers=1, depth=16, block=2 * MIB, sized=ALLOCATED),
    "uring-2x4": Way(uring=True, workers=2, depth=4),
    "uring-2x4-allocated": Way(uring=True, workers=2, depth=4, sized=ALLOCATED),
    "in-place": Way(copied=False),
    "in-place-allocated": Way(copied=False, sized=ALLOCATED),
}

READS: dict[str, Way] = {
    PLACED: Way(workers=8, block=2 * MIB),
    "threads-4": Way(workers=4, block=2 * MIB),
    "threads-16": Way(workers=16, block=2 * MIB),
    "block-1": Way(workers=8, block=MIB),
    "block-4": Way(workers=8, block=4 * MIB),
    "block-8": Way(workers=8, block=8 * MIB),
    "nocrc": Way(workers=8, block=2 * MIB, checksum=False),
    "buffered": Way(workers=8, block=2 * MIB, direct=False),
    "files-64": Way(workers=8, block=2 * MIB, files=64),
    "uring-1x8": Way(uring=True, workers=1, depth=8, block=2 * MIB),
    "uring-1x16": Way(uring=True, workers=1, depth=16, block=2 * MIB),
    "uring-2x4": Way(uring=True, workers=2, depth=4, block=2 * MIB),
    "uring-2x8": Way(uring=True, workers=2, depth=8, block=2 * MIB),
    "in-place": Way(workers=8, block=2 * MIB, copied=False),
    "in-place-uring-2x8": Way(uring=True, workers=2, depth=8, block=2 * MIB, copied=False),
}
