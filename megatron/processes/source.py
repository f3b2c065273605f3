"""Which sources this process runs, for comparison with other hosts."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path

import megatron
import restart_trace


@functools.cache
def source_checksum() -> str:
    """CRC-32 of the sources of both packages, by path, as hex: they are a megabyte, and each host reads them once."""
    crc = 0
    for package in (megatron, restart_trace):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            crc = zlib.crc32(path.read_bytes(), zlib.crc32(str(path.relative_to(root)).encode(), crc))
    return f"{crc:08x}"
