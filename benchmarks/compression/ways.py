"""The ways of compressing a block of one kind of tensor that are compared. What they need is imported when used."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks.compression.planes import Bytes, add, join, split, subtract

NONE, EXPONENT, PLANES = "", "exponent", "planes"
PACKAGES = "zstandard lz4 isal zlib-ng"

Function = Callable[[Any], bytes]


@dataclass(frozen=True)
class Way:
    """`grouping`: the codec gets the bytes as they are, each byte plane by itself, or only that of the exponents."""

    codec: str
    grouping: str = NONE
    delta: str = NONE  # "xor" or "difference", with the bytes of an earlier checkpoint

    def pack(self, block: Bytes, earlier: Bytes | None, width: int) -> list[bytes | Bytes]:
        """The parts that would be stored; a plane that the codec does not make smaller is stored as it is."""
        compress, _ = codec(self.codec)
        if self.delta:
            assert earlier is not None
            block = block ^ earlier if self.delta == "xor" else subtract(block, earlier, width)
        if not self.grouping:
            return [compress(block)]
        planes = split(block, width).reshape(width, -1)
        tried = 1 if self.grouping == EXPONENT else width
        parts: list[bytes | Bytes] = []
        for number, plane in enumerate(planes):
            packed = compress(plane) if number < tried else plane
            parts.append(packed if len(packed) < len(plane) else plane)
        return parts

    def unpack(self, parts: list[bytes | Bytes], earlier: Bytes | None, width: int) -> Bytes:
        """What `pack` was given."""
        _, decompress = codec(self.codec)
        if not self.grouping:
            block = np.frombuffer(decompress(parts[0]), np.uint8)
        else:
            found = [one if isinstance(one, np.ndarray) else np.frombuffer(decompress(one), np.uint8) for one in parts]
            block = join(np.concatenate(found), width)
        if self.delta:
            assert earlier is not None
            block = block ^ earlier if self.delta == "xor" else add(block, earlier, width)
        return block


_of_thread = threading.local()  # a compressor of zstandard is for one thread


def codec(name: str) -> tuple[Function, Function]:
    """(compress, decompress), for this thread. Raises ImportError if its package is not installed."""
    known: dict[str, tuple[Function, Function]] = _of_thread.__dict__.setdefault("codecs", {})
    if name not in known:
        known[name] = _new_codec(name)
    return known[name]


def _new_codec(name: str) -> tuple[Function, Function]:
    kind, _, level = name.partition("-")
    if kind == "zstd":
        zstandard = import_module("zstandard")
        return zstandard.ZstdCompressor(level=int(level)).compress, zstandard.ZstdDecompressor().decompress
    if kind == "lz4":
        lz4 = import_module("lz4.frame")
        return lz4.compress, lz4.decompress
    if kind == "isal":
        isal = import_module("isal.isal_zlib")
        return functools.partial(isal.compress, level=int(level)), isal.decompress
    library = import_module("zlib_ng.zlib_ng" if kind == "huffman" else "zlib")

    def huffman(data: Any) -> bytes:
        packer = library.compressobj(level=1, strategy=library.Z_HUFFMAN_ONLY)
        return packer.compress(data) + packer.flush()

    return huffman, library.decompress


WAYS: dict[str, Way] = {
    "zstd-1": Way("zstd-1"),
    "zstd-3": Way("zstd-3"),
    "lz4": Way("lz4"),
    "isal-0": Way("isal-0"),
    "planes-zstd-1": Way("zstd-1", PLANES),
    "planes-zstd-3": Way("zstd-3", PLANES),
    "planes-lz4": Way("lz4", PLANES),
    "exponent-zstd-1": Way("zstd-1", EXPONENT),
    "exponent-zstd-3": Way("zstd-3", EXPONENT),
    "exponent-isal-0": Way("isal-0", EXPONENT),
    "exponent-huffman": Way("huffman", EXPONENT),
    "exponent-zlib": Way("zlib", EXPONENT),  # Python's own
    "xor-planes-zstd-1": Way("zstd-1", PLANES, "xor"),
    "xor-planes-zstd-3": Way("zstd-3", PLANES, "xor"),
    "difference-planes-zstd-1": Way("zstd-1", PLANES, "difference"),
    "difference-exponent-zstd-1": Way("zstd-1", EXPONENT, "difference"),
}
