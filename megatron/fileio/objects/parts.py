"""Sizes of the parts and ranges of an object in requests, and how many requests these are. Standard library only."""

from __future__ import annotations

MIB = 1 << 20
LISTED = 1000  # keys in one answer, as stores have it
PART_BYTES = 8 * MIB  # of an upload or a ranged read; a store takes parts from 5 MiB on, but for the last
_MAX_PARTS = 10_000  # of one upload
_LONGEST_RANGE = 32 * MIB
_RANGES = 32  # that an object has at least, where they are longer than a part: enough for all threads of a rank


def parts(size: int) -> list[tuple[int, int, int]]:
    """(number from 1, first byte, byte after the last) of the parts of an object; none of an empty one."""
    length = max(PART_BYTES, -(-size // _MAX_PARTS))
    return [(i + 1, start, min(start + length, size)) for i, start in enumerate(range(0, size, length))]


def upload_requests(num_bytes: int) -> int:
    """Requests for the upload of a file of so many bytes, if none has to be tried again."""
    return 1 if num_bytes <= PART_BYTES else len(parts(num_bytes)) + 2


def download_requests(num_bytes: int) -> int:
    """Requests for the download of an object of so many bytes, if none has to be tried again."""
    return len(parts(num_bytes))


def range_bytes(num_bytes: int) -> int:
    """Bytes of one ranged read of an object of so many bytes that is read straight to memory.

    Long ranges cost client and server less processor time for each byte; those of small objects stay short, so that
    several threads, and on another layout several ranks, have some each.
    """
    length = PART_BYTES
    while length < _LONGEST_RANGE and num_bytes >= 2 * length * _RANGES:
        length *= 2
    return length


def range_requests(num_bytes: int) -> int:
    """Requests for all of an object of so many bytes in such ranges, if none has to be tried again."""
    return -(-num_bytes // range_bytes(num_bytes))


def streamed_part_bytes(num_bytes: int, block_bytes: int) -> int:
    """Bytes of a part of an object of `num_bytes` that comes in blocks: so many blocks that parts are not too small."""
    wanted = max(PART_BYTES, -(-num_bytes // (_MAX_PARTS - 1)))
    return -(-wanted // block_bytes) * block_bytes
