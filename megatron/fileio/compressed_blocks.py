"""Lossless compression of blocks of tensors: Zstandard on those planes of bytes that it makes smaller.

A trained float has few different exponents, and a mantissa that looks random (ZipNN, arXiv:2411.05239). So the first
bytes of all values of a block are compressed by themselves, and others are stored unless a part of them shows that they
would be smaller, too. A block, whose integers are little endian:

    4 bytes    "CBLK"
    1 byte     version of this format
    1 byte     bytes of a value: 1, 2, 4 or 8
    2 bytes    0
    4 bytes    bytes of the original, at most MOST_BYTES
    4 bytes    CRC-32 of the original
    4 bytes    bytes of each plane as it is here; as many as in the original: it is stored as it was
    ...        the planes: from the first byte of a value, that of the sign, on; the last one is half of a value
    ...        what is left of the original after its last whole value

A block never takes more than HEAD_BYTES more than its original, so whoever reads one can bound its memory in advance.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from importlib import import_module, util
from typing import Any, NamedTuple

import numpy as np

from megatron.fileio.checksums import crc32

PACKAGE = "zstandard"
WIDTHS = (1, 2, 4, 8)
MOST_BYTES = 1 << 20  # of an original
_MAGIC, _VERSION = b"CBLK", 1
_HEAD = struct.Struct("<4sBBHII")
_SIZE = struct.Struct("<I")
_MOST_PLANES = 4
HEAD_BYTES = _HEAD.size + _MOST_PLANES * _SIZE.size  # at most
_SAMPLE = 4096  # bytes of a plane that are tried
_WORTH = 0.95  # a plane is compressed if its sample becomes smaller than that

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class DamagedBlockError(ValueError):
    """Bytes that are no block, or not all of one. The message says what is wrong with them."""


class Unpacked(NamedTuple):
    """Bytes of the original, and their CRC-32."""

    num_bytes: int
    crc32: int


def is_available() -> bool:
    """Whether the package that compresses is installed."""
    return util.find_spec(PACKAGE) is not None


class BlockCodec:
    """Packs and unpacks blocks, for one thread. Raises ImportError if the package is not installed.

    The package, NumPy and the checksum let other threads of Python run meanwhile.
    """

    def __init__(self) -> None:
        zstandard = import_module(PACKAGE)
        self._error: type[Exception] = zstandard.ZstdError
        self._params = zstandard.get_frame_parameters
        # Few values in no order have no matches worth looking for: what is gained comes from the Huffman code.
        level = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6, write_content_size=1)
        self._compress = zstandard.ZstdCompressor(compression_params=level).compress
        self._decompress = zstandard.ZstdDecompressor().decompress
        self._planes = np.empty(MOST_BYTES, np.uint8)
        self.room = memoryview(bytearray(MOST_BYTES + HEAD_BYTES))  # for whoever receives a block to unpack

    def pack(self, content: Any, width: int) -> bytes:
        """The block of `content`, contiguous bytes of values of `width` bytes each.

        Any bytes are restored, also if they are no such values. Raises ValueError for more than MOST_BYTES, another
        width than one of WIDTHS, and bytes that are not contiguous.
        """
        if width not in WIDTHS:
            raise ValueError(f"values of {width} bytes: only values of {', '.join(map(str, WIDTHS))} are compressed")
        view = memoryview(content)
        if not view.c_contiguous:
            raise ValueError("a block must be contiguous in memory: copy it first")
        original = np.frombuffer(view.cast("B") if view.nbytes else b"", np.uint8)
        size = len(original)
        if size > MOST_BYTES:
            raise ValueError(f"a block of {size} bytes: at most {MOST_BYTES} are compressed at once")
        whole = size // width * width
        planes = [self._smaller(plane) for plane in self._split(original[:whole], width)]
        head = _HEAD.pack(_MAGIC, _VERSION, width, 0, size, crc32(original))
        head += b"".join(_SIZE.pack(len(plane)) for plane in planes)
        return b"".join([head, *planes, original[whole:].data])

    def unpack(self, packed: Any, into: memoryview) -> Unpacked:
        """Restore a block to the beginning of `into`. What else it takes is no longer, whatever the block announces.

        Raises DamagedBlockError, also if the original is longer than `into`.
        """
        block = np.frombuffer(packed, np.uint8)
        width, size, crc, stored = _head_of(block)
        if size > len(into):
            raise DamagedBlockError(f"a block has {size} bytes, and {len(into)} are expected")
        whole = size // width * width
        position, out = _HEAD.size + len(stored) * _SIZE.size, np.frombuffer(into[:size], np.uint8)
        for plane, num_bytes in zip(_planes_of(out[:whole], width), stored, strict=True):
            plane[:] = self._restored(block[position : position + num_bytes], plane.nbytes).view(plane.dtype)
            position += num_bytes
        out[whole:] = block[position:]
        found = crc32(out)
        if found != crc:
            raise DamagedBlockError(f"a block has checksum {found:08x}, and was packed with {crc:08x}")
        return Unpacked(size, crc)

    def _split(self, values: Bytes, width: int) -> list[Bytes]:
        """The planes of whole values; in memory that the next block overwrites, but for values of one byte."""
        if width == 1:
            return [values]
        found, position = [], 0
        for plane in _planes_of(values, width):
            copy = self._planes[position : position + plane.nbytes]
            copy.view(plane.dtype)[:] = plane
            found.append(copy)
            position += len(copy)
        return found

    def _smaller(self, plane: Bytes) -> Any:
        """The plane compressed, or as it is."""
        sample = plane[len(plane) // 2 :][:_SAMPLE]
        if len(plane) > 2 * _SAMPLE and len(self._compress(sample)) >= _WORTH * len(sample):
            return plane
        packed = self._compress(plane)
        return packed if len(packed) < len(plane) else plane

    def _restored(self, plane: Bytes, num_bytes: int) -> Bytes:
        """The plane of so many bytes. What its frame says of its size is read before memory is taken for it."""
        if len(plane) == num_bytes:
            return plane
        try:
            announced = self._params(plane).content_size
            if announced != num_bytes:
                raise DamagedBlockError(f"a plane of a block has {announced} bytes, and {num_bytes} are expected")
            restored = np.frombuffer(self._decompress(plane, allow_extra_data=False), np.uint8)
        except self._error as error:
            raise DamagedBlockError(f"a plane of a block cannot be decompressed: {error}") from error
        if len(restored) != num_bytes:
            raise DamagedBlockError(f"a plane of a block has {len(restored)} bytes, and {num_bytes} are expected")
        return restored


def _plane_widths(width: int) -> Sequence[int]:
    """Bytes of a value in each plane, from the value's first byte on: single ones, and at last half of the value."""
    return {1: (1,), 2: (1, 1), 4: (1, 1, 2), 8: (1, 1, 2, 4)}[width]


def _planes_of(values: Bytes, width: int) -> list[np.ndarray[Any, Any]]:
    """Views of the planes of whole values. Elements are as wide as a plane: NumPy is slow with pairs of bytes."""
    found, stop = [], width
    for plane_width in _plane_widths(width):
        stop -= plane_width
        found.append(values.view(f"<u{plane_width}").reshape(-1, width // plane_width)[:, stop // plane_width])
    return found


def _head_of(block: Bytes) -> tuple[int, int, int, list[int]]:
    """(bytes of a value, bytes and CRC-32 of the original, bytes of each plane), which agree with each other."""
    if len(block) < _HEAD.size:
        raise DamagedBlockError(f"a block of {len(block)} bytes has no complete header")
    magic, version, width, zero, size, crc = _HEAD.unpack_from(block.data)
    if magic != _MAGIC or zero or width not in WIDTHS:
        raise DamagedBlockError("a block has no header of compressed tensors")
    if version != _VERSION:
        raise DamagedBlockError(f"a block has version {version}, and this program reads version {_VERSION}")
    if size > MOST_BYTES:
        raise DamagedBlockError(f"a block of {size} bytes: at most {MOST_BYTES} are allowed")
    widths = _plane_widths(width)
    start = _HEAD.size + len(widths) * _SIZE.size
    if len(block) < start:
        raise DamagedBlockError(f"a block of {len(block)} bytes has no complete header")
    stored = [_SIZE.unpack_from(block.data, _HEAD.size + i * _SIZE.size)[0] for i in range(len(widths))]
    if any(has > size // width * of for has, of in zip(stored, widths, strict=True)):
        raise DamagedBlockError("a plane of a block is longer than in the original")
    if len(block) != start + sum(stored) + size % width:
        raise DamagedBlockError(f"a block has {len(block)} bytes, and its header tells of another number")
    return width, size, crc, stored
