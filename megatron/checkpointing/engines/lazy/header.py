"""The header of a file of engine `lazy` (megatron.checkpointing.engines.lazy.format), read without torch."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.fileio.compressed_files import SUFFIX as COMPRESSED
from megatron.fileio.open_files import RangedFile, RangedFiles

if TYPE_CHECKING:
    from megatron.checkpointing.engines.base import FilePart

ALIGNMENT = 4096  # of the data in the file, and of every direct transfer
SUFFIX = ".safetensors"
METADATA = "__metadata__"  # the only name in the header that is not a tensor's
LENGTH = struct.Struct("<Q")
SHARED_VERSION = "2"  # of the format of files that several ranks share
# How their header begins: each rank then adds its metadata, and behind those its entries (shared_format).
SHARED_BEGINNING = f'{{"{METADATA}":{{"format":"pt","lazy_format_version":"{SHARED_VERSION}"'.encode()
PADDING = "padding/"  # begins the names of tensors that only align those of the next rank
MAX_HEADER = 100_000_000  # bytes; the safetensors library refuses more
_FIRST_REQUEST = 1 << 18  # bytes requested before the header's length is known; most headers are shorter


def is_compressed(name: str) -> bool:
    """Whether a file of engine lazy is in compressed blocks, by its name."""
    return name.endswith(SUFFIX + COMPRESSED)


def is_lazy_file(name: str) -> bool:
    """Whether a file of a checkpoint of engine lazy holds tensors, by its name."""
    return name.removesuffix(COMPRESSED).endswith(SUFFIX)


def read_header(path: Path, ranged: RangedFiles | None = None) -> bytes:
    """The bytes before the data. `ranged`: opens the file, if it is not on this node.

    Raises CheckpointDamagedError if the file is too short for them.
    """
    if ranged is None:
        with path.open("rb", buffering=0) as file:
            # The kernel would read megabytes ahead, of which a rank may need nothing, or which it reads directly.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            return read_header_by(path, ALIGNMENT, lambda start, size: os.pread(file.fileno(), size, start))
    with closing(ranged(path)) as opened:
        return read_header_by(path, _FIRST_REQUEST, lambda start, size: _bytes_of(opened, start, size))


def read_header_by(path: Path, first_bytes: int, read: Callable[[int, int], bytes]) -> bytes:
    """As `read_header`, by `read(position, size)`, which returns at most `size` bytes; the first time `first_bytes`."""
    found = read(0, first_bytes)
    if len(found) < LENGTH.size:
        raise CheckpointDamagedError(f"{path}: {len(found)} bytes, too few for a safetensors file")
    size = LENGTH.unpack_from(found)[0] + LENGTH.size
    if size > MAX_HEADER:
        raise CheckpointDamagedError(f"{path}: not a safetensors file: its header says that it is {size} bytes long")
    while len(found) < size and (more := read(len(found), size - len(found))):
        found += more
    if len(found) < size:
        raise CheckpointDamagedError(f"{path}: ends within its header of {size} bytes")
    return found[:size]


def read_part_header(path: Path, part: FilePart, ranged: RangedFiles | None = None) -> list[bytes]:
    """The extents of the header that tell of one part of a shared file. `ranged`, raises: as `read_header`."""
    if ranged is None:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            found = [os.pread(file.fileno(), extent.stop - extent.start, extent.start) for extent in part.header]
    else:
        with closing(ranged(path)) as opened:
            found = [_bytes_of(opened, extent.start, extent.stop - extent.start) for extent in part.header]
    for extent, text in zip(part.header, found, strict=True):
        if len(text) < extent.stop - extent.start:
            raise CheckpointDamagedError(f"{path}: ends within its header, at byte {extent.start + len(text)}")
    return found


def part_metadata(text: bytes) -> dict[str, Any]:
    """What the first extent of a part's header adds to `__metadata__`. Raises ValueError if it is none."""
    beginning = text[LENGTH.size :]
    added = beginning.removeprefix(SHARED_BEGINNING) if beginning.startswith(SHARED_BEGINNING) else text
    return json.loads(b"{" + added.strip().removeprefix(b",") + b"}")


def part_entries(text: bytes) -> dict[str, Any]:
    """The tensors in the second extent of a part's header, padding too. Raises ValueError if it is none.

    That of the first rank begins with the bracket that closes `__metadata__`, that of the last ends with the header's.
    """
    entries = text.strip(b" }").removeprefix(b",")
    return json.loads(b"{" + entries + b"}}") if entries else {}


def _bytes_of(file: RangedFile, start: int, size: int) -> bytes:
    content = bytearray(min(size, file.num_bytes - start))
    file.read(memoryview(content), start)
    return bytes(content)


def entries_of(header: bytes) -> dict[str, Any]:
    """Name -> dtype, shape and data_offsets of each tensor, and METADATA. Raises ValueError if it is not JSON."""
    entries: dict[str, Any] = json.loads(header[LENGTH.size :])
    return entries
