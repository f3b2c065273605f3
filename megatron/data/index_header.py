"""The header of an .idx file in Megatron's mmap format, which megatron.data.indexed_dataset describes.

Standard library only: it is also checked before NumPy is imported.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

HEADER = struct.Struct("<9sQBQQ")  # magic, version, data type code, number of sequences, entries of the document index
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Data type code -> bytes of a token."""
FLOATING_POINT = (6, 7)  # codes of data types that hold no token ids
REMAKE = "make the dataset again with tools/preprocess_data.py, or copy both files again"
_LEGACY_MAGIC = b"TNTIDX\x00\x00"


class IndexedDatasetError(ValueError):
    """A .bin/.idx pair is missing, truncated, corrupt, or of another format."""


class IndexHeader(NamedTuple):
    """`documents`: entries of the document index, one more than there are documents."""

    code: int
    sequences: int
    documents: int


def parse_header(path: str, header: bytes, num_bytes: int) -> IndexHeader:
    """The header of the file at `path`, from its first HEADER.size bytes; `num_bytes`: size of the file.

    Raises IndexedDatasetError naming the file and what is wrong, such as another size than its header says.
    """
    if header.startswith(_LEGACY_MAGIC):
        raise IndexedDatasetError(f"{path} has the old lazy/cached format, and only mmap is supported: {REMAKE}")
    if header[: len(MAGIC)] != MAGIC:
        raise IndexedDatasetError(f"{path} is no index of the mmap format (it starts with {header[:9]!r}): {REMAKE}")
    if len(header) < HEADER.size:
        raise IndexedDatasetError(f"{path} is truncated: {num_bytes} bytes end inside the header: {REMAKE}")
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != VERSION:
        raise IndexedDatasetError(f"{path} has format version {version}, supported is {VERSION}: {REMAKE}")
    if code not in TOKEN_BYTES:
        raise IndexedDatasetError(f"{path} has data type code {code}, supported are 1 to {len(TOKEN_BYTES)}: {REMAKE}")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if num_bytes != expected:
        state = "truncated" if num_bytes < expected else "too long"
        raise IndexedDatasetError(f"{path} is {state}: {num_bytes} bytes, and its header says {expected}: {REMAKE}")
    return IndexHeader(code, sequences, documents)
