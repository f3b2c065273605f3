"""Memory-mapped token files in Megatron's ``mmap`` format.

A dataset is two files that share a path prefix. ``PREFIX.bin`` holds the tokens of all sequences, one after
the other, as little-endian integers. ``PREFIX.idx`` holds, little-endian and without padding:

====================  =======================================================================
9 bytes               magic ``MMIDIDX\\0\\0``
uint64                version, 1
uint8                 data type code, see ``DTYPES``
uint64                number of sequences, ``n``
uint64                number of entries of the document index, ``d``
int32[n]              tokens in each sequence
int64[n]              offset of each sequence in ``PREFIX.bin``, in bytes
int64[d]              document index: document ``k`` is the sequences ``[doc_idx[k], doc_idx[k + 1])``
====================  =======================================================================

Format: ``MMapIndexedDataset`` of Megatron-LM and Megatron-DeepSpeed. With ``--append-eod`` their
preprocessing leaves the end-of-document token out of the sizes, so a ``.bin`` longer than the index says is
legal.
"""

from __future__ import annotations

import os
import zlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.index_header import HEADER, MAGIC, REMAKE, VERSION, IndexedDatasetError, parse_header

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.float64),
    7: np.dtype(np.float32),
    8: np.dtype(np.uint16),
}
# Up to this many sequences are checked and fingerprinted in full on opening (3 ms); of more, evenly spaced
# blocks.
_FULL_CHECK = 1 << 20
_CHECK_BLOCKS = 1024


def index_file_path(path_prefix: str | os.PathLike[str]) -> str:
    """Path of the index that belongs to a dataset's prefix."""
    return os.fspath(path_prefix) + ".idx"


def data_file_path(path_prefix: str | os.PathLike[str]) -> str:
    """Path of the token file that belongs to a dataset's prefix."""
    return os.fspath(path_prefix) + ".bin"


def best_fitting_dtype(vocab_size: int | None = None) -> np.dtype[Any]:
    """uint16 for vocabularies below 65500 entries, else int32: the choice of Megatron's preprocessing."""
    if vocab_size is not None and vocab_size < 65500:
        return np.dtype(np.uint16)
    return np.dtype(np.int32)


class MMapIndexedDataset:
    """Read-only view of one dataset; tokens are read from disk when they are asked for.

    Opening reads the header and checks the lengths of both files and the agreement of sizes and offsets (in
    full up to 2**20 sequences, in evenly spaced blocks beyond: opening takes milliseconds whatever the size).

    Raises IndexedDatasetError naming the file, what is wrong with it and what to do.
    """

    def __init__(self, path_prefix: str | os.PathLike[str]) -> None:
        self.path_prefix = os.fspath(path_prefix)
        self._open()

    def __getstate__(self) -> str:
        # A worker process maps the files itself instead of receiving their contents.
        return self.path_prefix

    def __setstate__(self, state: str) -> None:
        self.path_prefix = state
        self._open()

    def _open(self) -> None:
        for path in (index_file_path(self.path_prefix), data_file_path(self.path_prefix)):
            if not os.path.isfile(path):
                raise IndexedDatasetError(_missing_message(self.path_prefix, path))
        self.dtype, self.sizes, self._pointers, self.doc_idx = _map_index(index_file_path(self.path_prefix))
        self.num_tokens = int(self._pointers[-1]) // self.dtype.itemsize + int(self.sizes[-1]) if len(self) else 0
        self._check_index()
        self._tokens = self._map_tokens()

    def _check_index(self) -> None:
        path = index_file_path(self.path_prefix)
        num_sequences = len(self)
        ends_fit = len(self.doc_idx) and self.doc_idx[0] == 0 and self.doc_idx[-1] == num_sequences
        if not ends_fit:
            raise IndexedDatasetError(
                f"{path}: corrupt document index (it must run from 0 to {num_sequences}): {REMAKE}"
            )
        for start, stop in _check_ranges(num_sequences):
            # One past the range, so that every size is compared with the distance of two offsets.
            pointers = self._pointers[start : stop + 1]
            sizes = self.sizes[start:stop].astype(np.int64)
            distances = np.diff(pointers)
            bad = np.flatnonzero((sizes[: len(distances)] * self.dtype.itemsize != distances) | (distances < 0))
            first_wrong = start == 0 and pointers[0] != 0
            if first_wrong or len(bad) or sizes[-1] < 0:
                where = start + (int(bad[0]) if len(bad) else 0)
                raise IndexedDatasetError(
                    f"{path}: corrupt: sizes and offsets disagree near sequence {where}: {REMAKE}"
                )

    def _map_tokens(self) -> npt.NDArray[Any]:
        path = data_file_path(self.path_prefix)
        num_bytes = os.path.getsize(path)
        itemsize = self.dtype.itemsize
        needed = self.num_tokens * itemsize
        if num_bytes < needed:
            raise IndexedDatasetError(
                f"{path}: truncated: {num_bytes} bytes, but its index needs {needed} "
                f"({self.num_tokens} tokens of {itemsize} bytes): {REMAKE}"
            )
        if num_bytes % itemsize:
            raise IndexedDatasetError(
                f"{path}: {num_bytes} bytes is no multiple of the token size {itemsize}: {REMAKE}"
            )
        self.num_trailing_tokens = num_bytes // itemsize - self.num_tokens
        if num_bytes == 0:
            return np.empty(0, self.dtype)
        # A plain ndarray over the mapping: slicing np.memmap costs several times more.
        return np.memmap(path, dtype=self.dtype, mode="r").view(np.ndarray)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sizes)

    def __getitem__(self, i: int) -> npt.NDArray[Any]:
        """The tokens of sequence ``i`` (negative: from the end), shape [sizes[i]], a view of the file."""
        index = i + len(self) if i < 0 else i
        return self.get(index)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """``length`` tokens (default: all the rest) of sequence ``i`` from token ``offset`` on, a view of the
        file.

        Raises IndexError when the range is not inside the sequence.
        """
        if not 0 <= i < len(self.sizes):
            raise IndexError(f"sequence {i} of {self.path_prefix}, which has {len(self)}")
        size = int(self.sizes[i])
        count = size - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > size:
            raise IndexError(
                f"tokens [{offset}, {offset + count}) of sequence {i} of {self.path_prefix}: it has {size}"
            )
        start = int(self._pointers[i]) // self.dtype.itemsize + offset
        return self._tokens[start : start + count]

    def tokens_in(self, start: int, stop: int) -> int:
        """Tokens in the sequences ``[start, stop)``, from their offsets: no pass over the sizes."""
        if start >= stop:
            return 0
        end = self.num_tokens if stop == len(self) else int(self._pointers[stop]) // self.dtype.itemsize
        return end - int(self._pointers[start]) // self.dtype.itemsize

    def fingerprint(self) -> str:
        """Short text that changes when the sequences' number, sizes or order change (not their tokens)."""
        checksum = 0
        for start, stop in _check_ranges(len(self)):
            checksum = zlib.crc32(self.sizes[start:stop].tobytes(), checksum)
        return f"{len(self)} sequences, {self.num_tokens} tokens, sizes crc32 {checksum:08x}"


def _missing_message(path_prefix: str, path: str) -> str:
    message = f"{path}: no such file: --data-path takes the path of the .bin and .idx files without suffix"
    if path_prefix.endswith((".bin", ".idx")):
        return f"{message} ({path_prefix[:-4]})"
    parent = Path(path_prefix).parent
    near = sorted(str(found)[:-4] for found in parent.glob("*.idx")) if parent.is_dir() else []
    return f"{message} (in that directory: {', '.join(near[:5])})" if near else message


def _check_ranges(num_sequences: int) -> list[tuple[int, int]]:
    """Ranges of sequences to check: all of them, or blocks that hold about ``_FULL_CHECK`` in all."""
    if num_sequences == 0:
        return []
    if num_sequences <= _FULL_CHECK:
        return [(0, num_sequences)]
    block = _FULL_CHECK // _CHECK_BLOCKS
    starts = np.linspace(0, num_sequences - block, _CHECK_BLOCKS, dtype=np.int64).tolist()
    return [(start, start + block) for start in starts]


def _map_index(path: str) -> tuple[np.dtype[Any], npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Data type, sizes, pointers and document index of a checked .idx file, the arrays mapped from it."""
    with open(path, "rb") as file:
        code, num_sequences, _ = parse_header(path, file.read(HEADER.size), os.path.getsize(path))
    content = np.memmap(path, mode="r").view(np.ndarray)
    pointers_at = HEADER.size + 4 * num_sequences
    doc_idx_at = pointers_at + 8 * num_sequences
    return (
        DTYPES[code],
        content[HEADER.size : pointers_at].view("<i4"),
        content[pointers_at:doc_idx_at].view("<i8"),
        content[doc_idx_at:].view("<i8"),
    )


class MMapIndexedDatasetBuilder:
    """Writes a dataset, byte for byte as Megatron's builder of the same name.

    ``bin_path`` is opened at once and grows with each document; the index is written by ``finalize``.
    """

    def __init__(self, bin_path: str | os.PathLike[str], dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        if self.dtype not in DTYPES.values():
            raise IndexedDatasetError(
                f"token data type {self.dtype}: the mmap format has {sorted(map(str, DTYPES.values()))}"
            )
        self._file = open(bin_path, "wb")  # noqa: SIM115 - closed by finalize() or close()
        self._sizes = array("i")
        self._doc_idx = array("q", [0])

    def add_doc(self, tokens: npt.ArrayLike, sizes: list[int]) -> None:
        """Add one document of ``len(sizes)`` sequences.

        ``sizes`` is written as given: its sum may be less than ``len(tokens)``, as in Megatron's own files.
        Raises IndexedDatasetError for a token that does not fit the data type or a sequence of 2**31 tokens
        or more.
        """
        self.add_docs(tokens, sizes, [len(sizes)])

    def add_docs(self, tokens: npt.ArrayLike, sizes: list[int], sequences_per_doc: list[int]) -> None:
        """Add several documents: tokens and sequence sizes of all of them, number of sequences of each."""
        self._file.write(self._as_dtype(tokens).tobytes())
        try:
            self._sizes.extend(sizes)
        except OverflowError as error:
            raise IndexedDatasetError(
                f"a sequence of {max(sizes)} tokens: the mmap format allows at most 2147483647"
            ) from error
        end = self._doc_idx[-1]
        for count in sequences_per_doc:
            end += count
            self._doc_idx.append(end)

    def _as_dtype(self, tokens: npt.ArrayLike) -> npt.NDArray[Any]:
        given = np.asarray(tokens)
        if given.dtype == self.dtype or given.size == 0:
            return given.astype(self.dtype)
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype.name)
            if given.min() < limits.min or given.max() > limits.max:
                raise IndexedDatasetError(
                    f"token ids from {given.min()} to {given.max()} do not fit {self.dtype}: "
                    "choose the data type with best_fitting_dtype(vocab_size)"
                )
        return given.astype(self.dtype)

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._doc_idx) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens written so far, those outside of the sizes included."""
        return self._file.tell() // self.dtype.itemsize

    def finalize(self, idx_path: str | os.PathLike[str]) -> None:
        """Close the token file, durably, and write the index."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sizes = np.array(self._sizes, dtype=np.int32)
        pointers = np.zeros(len(sizes), dtype=np.int64)
        np.cumsum(sizes[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        with open(idx_path, "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, len(sizes), len(self._doc_idx)))
            for part in (sizes, pointers, np.array(self._doc_idx, dtype=np.int64)):
                file.write(part.tobytes())
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close the token file without an index, to abandon a build."""
        self._file.close()
