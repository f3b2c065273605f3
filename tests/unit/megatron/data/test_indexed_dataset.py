"""Megatron's mmap format: bytes, reading, and every kind of damage."""

from __future__ import annotations

import hashlib
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import indexed_dataset
from megatron.data.indexed_dataset import (
    IndexedDatasetError,
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    best_fitting_dtype,
)

UPSTREAM = Path(__file__).resolve().parents[3] / "golden" / "upstream_run" / "data" / "corpus_text_document"
ROOT = Path(__file__).resolve().parents[4]


def write(prefix: Path, documents: list[list[list[int]]], dtype: type = np.uint16) -> Path:
    """A dataset of documents, each a list of sequences."""
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for document in documents:
        builder.add_doc([token for sequence in document for token in sequence], [len(s) for s in document])
    builder.finalize(f"{prefix}.idx")
    return prefix


def index_bytes(code: int, itemsize: int, sizes: list[int], doc_idx: list[int]) -> bytes:
    """The index as the format's description has it, field by field."""
    pointers, end = [], 0
    for size in sizes:
        pointers.append(end)
        end += size * itemsize
    return b"".join(
        (
            b"MMIDIDX\x00\x00",
            struct.pack("<QBQQ", 1, code, len(sizes), len(doc_idx)),
            struct.pack(f"<{len(sizes)}i", *sizes),
            struct.pack(f"<{len(sizes)}q", *pointers),
            struct.pack(f"<{len(doc_idx)}q", *doc_idx),
        )
    )


@pytest.mark.parametrize(("dtype", "code", "letter"), [(np.uint16, 8, "H"), (np.int32, 4, "i"), (np.uint8, 1, "B")])
def test_builder_writes_the_documented_bytes(tmp_path: Path, dtype: type, code: int, letter: str) -> None:
    prefix = write(tmp_path / "d", [[[1, 2, 3]], [], [[4], [5, 6]]], dtype)
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack(f"<6{letter}", 1, 2, 3, 4, 5, 6)
    expected = index_bytes(code, np.dtype(dtype).itemsize, [3, 1, 2], [0, 1, 1, 3])
    assert Path(f"{prefix}.idx").read_bytes() == expected


def test_sizes_may_leave_tokens_out(tmp_path: Path) -> None:
    builder = MMapIndexedDatasetBuilder(tmp_path / "d.bin", np.uint16)
    builder.add_doc([7, 8, 9], [2])
    builder.add_doc([1, 2], [1])
    builder.finalize(tmp_path / "d.idx")
    data = MMapIndexedDataset(tmp_path / "d")
    assert (data.num_tokens, data.num_trailing_tokens) == (3, 2)
    assert [data[i].tolist() for i in range(2)] == [[7, 8], [9]]  # upstream's drift


def test_reads_what_upstream_wrote() -> None:
    data = MMapIndexedDataset(UPSTREAM)
    assert (len(data), data.dtype, data.num_trailing_tokens) == (400, np.uint16, 400)
    assert data.doc_idx.tolist() == list(range(401))
    assert data.num_tokens == int(data.sizes.sum()) == 88480
    tokens = np.fromfile(f"{UPSTREAM}.bin", dtype=np.uint16)
    start = int(data.sizes[:7].sum())
    assert data[7].tolist() == tokens[start : start + data.sizes[7]].tolist()


sequences = st.lists(st.integers(0, 65535), max_size=6)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(documents=st.lists(st.lists(sequences, max_size=3), max_size=8))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]) -> None:
    prefix = write(tmp_path_factory.mktemp("d") / "d", documents)
    data = MMapIndexedDataset(prefix)
    flat = [sequence for document in documents for sequence in document]
    assert [data[i].tolist() for i in range(len(data))] == flat
    assert [data[-1 - i].tolist() for i in range(len(data))] == flat[::-1]
    bounds = data.doc_idx.tolist()
    assert [flat[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)] == documents
    lengths = [len(sequence) for sequence in flat]
    for start in range(len(flat)):
        assert data.tokens_in(start, len(flat)) == sum(lengths[start:])
        assert data.tokens_in(0, start) == sum(lengths[:start])
    assert (data.num_tokens, data.num_trailing_tokens) == (sum(lengths), 0)


def test_get_returns_the_part_asked_for_and_no_more(tmp_path: Path) -> None:
    data = MMapIndexedDataset(write(tmp_path / "d", [[[1, 2, 3, 4]], [[5]]]))
    assert data.get(0, 1, 2).tolist() == [2, 3]
    assert data.get(0, 3).tolist() == [4]
    assert data.get(0, 4).tolist() == []
    for arguments in ((0, 3, 2), (0, 5), (0, -1, 1), (0, 0, -1), (2,), (-1,)):
        with pytest.raises(IndexError, match=str(tmp_path)):
            data.get(*arguments)


def test_more_than_2_to_31_tokens(tmp_path: Path) -> None:
    """A sparse token file of 9 GB: offsets beyond 32 bits, in bytes and in tokens."""
    sizes = [1_500_000_000] * 3
    (tmp_path / "d.idx").write_bytes(index_bytes(8, 2, sizes, [0, 1, 2, 3]))
    with open(tmp_path / "d.bin", "wb") as file:
        file.truncate(2 * sum(sizes))
        file.seek(2 * 4_000_000_000)
        file.write(struct.pack("<2H", 111, 222))
    data = MMapIndexedDataset(tmp_path / "d")
    assert data.num_tokens == 4_500_000_000
    assert data.get(2, 999_999_999, 4).tolist() == [0, 111, 222, 0]
    assert data.tokens_in(1, 3) == 3_000_000_000


def test_a_pickled_dataset_maps_the_files_again(tmp_path: Path) -> None:
    data = MMapIndexedDataset(write(tmp_path / "d", [[[1] * 1000]]))
    pickled = pickle.dumps(data)
    assert len(pickled) < 300
    assert pickle.loads(pickled)[0].tolist() == [1] * 1000


@pytest.mark.parametrize("token", [65536, -1])
def test_a_token_that_does_not_fit_is_refused(tmp_path: Path, token: int) -> None:
    builder = MMapIndexedDatasetBuilder(tmp_path / "d.bin", np.uint16)
    with pytest.raises(IndexedDatasetError, match=f"{token}.* do not fit uint16"):
        builder.add_doc([1, token] if token > 0 else [token, 1], [2])
    builder.close()


def test_a_sequence_too_long_for_the_format_is_refused(tmp_path: Path) -> None:
    builder = MMapIndexedDatasetBuilder(tmp_path / "d.bin", np.uint16)
    with pytest.raises(IndexedDatasetError, match="2147483648 tokens"):
        builder.add_doc([], [2**31])
    builder.close()


def test_a_data_type_without_a_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IndexedDatasetError, match="uint32"):
        MMapIndexedDatasetBuilder(tmp_path / "d.bin", np.uint32)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(500, "uint16"), (65499, "uint16"), (65500, "int32"), (None, "int32")]
)
def test_best_fitting_dtype(vocab_size: int | None, dtype: str) -> None:
    assert best_fitting_dtype(vocab_size) == np.dtype(dtype)


def flip(path: Path, offset: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


# The index of sequences of 3, 1 and 2 tokens has its sizes at 34, pointers at 46, doc_idx at 70.
@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (0, b"TNTIDX\x00\x00\x00", "old lazy/cached format"),
        (9, struct.pack("<Q", 2), "format version 2, supported is 1"),
        (17, b"\x09", "data type code 9"),
        (18, struct.pack("<Q", 4), "truncated: 102 bytes, and its header says 114"),
        (26, struct.pack("<Q", 2), "too long: 102 bytes"),
        (34, struct.pack("<i", 2), "sizes and offsets disagree near sequence 0"),
        (38, struct.pack("<i", -1), "sizes and offsets disagree near sequence 1"),
        (42, struct.pack("<i", -1), "sizes and offsets disagree"),
        (46, struct.pack("<q", 2), "sizes and offsets disagree"),
        (54, struct.pack("<q", 7), "sizes and offsets disagree near sequence 0"),
        (70, struct.pack("<q", 1), "corrupt document index"),
        (94, struct.pack("<q", 2), "corrupt document index"),
    ],
)
def test_a_corrupt_index_is_named(tmp_path: Path, offset: int, content: bytes, message: str) -> None:
    prefix = write(tmp_path / "d", [[[1, 2, 3]], [[4]], [[5, 6]]])
    assert Path(f"{prefix}.idx").stat().st_size == 102
    flip(Path(f"{prefix}.idx"), offset, content)
    with pytest.raises(IndexedDatasetError, match=rf"d\.idx.*{message}.*preprocess_data"):
        MMapIndexedDataset(prefix)


@pytest.mark.parametrize("length", [0, 5, 20, 33, 60, 101])
def test_a_truncated_index_is_named(tmp_path: Path, length: int) -> None:
    prefix = write(tmp_path / "d", [[[1, 2, 3]], [[4]], [[5, 6]]])
    Path(f"{prefix}.idx").write_bytes(Path(f"{prefix}.idx").read_bytes()[:length])
    with pytest.raises(IndexedDatasetError, match=r"d\.idx is (truncated|no index)"):
        MMapIndexedDataset(prefix)


@pytest.mark.parametrize(("length", "message"), [(0, "truncated: 0 bytes"), (11, "needs 12"), (13, "no multiple")])
def test_a_token_file_of_the_wrong_length_is_named(tmp_path: Path, length: int, message: str) -> None:
    prefix = write(tmp_path / "d", [[[1, 2, 3]], [[4]], [[5, 6]]])
    Path(f"{prefix}.bin").write_bytes((Path(f"{prefix}.bin").read_bytes() + b"\x00\x00")[:length])
    with pytest.raises(IndexedDatasetError, match=rf"d\.bin: .*{message}"):
        MMapIndexedDataset(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(tmp_path: Path, suffix: str) -> None:
    prefix = write(tmp_path / "d", [[[1]]])
    Path(f"{prefix}{suffix}").unlink()
    with pytest.raises(IndexedDatasetError, match=rf"d\{suffix}: no such file: --data-path"):
        MMapIndexedDataset(prefix)


def test_a_wrong_prefix_shows_the_right_one(tmp_path: Path) -> None:
    write(tmp_path / "corpus_text_document", [[[1]]])
    with pytest.raises(IndexedDatasetError, match=r"in that directory: .*corpus_text_document\)"):
        MMapIndexedDataset(tmp_path / "corpus")
    with pytest.raises(IndexedDatasetError, match=r"without suffix \(.*corpus_text_document\)"):
        MMapIndexedDataset(tmp_path / "corpus_text_document.bin")


def test_many_sequences_are_checked_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block-wise check of very large files, with its thresholds lowered."""
    monkeypatch.setattr(indexed_dataset, "_FULL_CHECK", 64)
    monkeypatch.setattr(indexed_dataset, "_CHECK_BLOCKS", 8)
    prefix = write(tmp_path / "d", [[[1] * (1 + i % 7)] for i in range(1000)])
    data = MMapIndexedDataset(prefix)
    assert data[999].tolist() == [1] * (1 + 999 % 7)
    before = data.fingerprint()
    swapped = write(tmp_path / "e", [[[1] * (1 + i % 7)] for i in reversed(range(1000))])
    assert MMapIndexedDataset(swapped).fingerprint() != before
    for sequence in (0, 3, 996, 999):  # in the first and the last block
        content = Path(f"{prefix}.idx").read_bytes()
        flip(Path(f"{prefix}.idx"), 34 + 4 * sequence, struct.pack("<i", -5))
        with pytest.raises(IndexedDatasetError, match="sizes and offsets disagree"):
            MMapIndexedDataset(prefix)
        Path(f"{prefix}.idx").write_bytes(content)


def test_fingerprint_tells_order_and_sizes_apart(tmp_path: Path) -> None:
    prints = {
        MMapIndexedDataset(write(tmp_path / str(i), documents)).fingerprint()
        for i, documents in enumerate(([[[1]], [[2, 3]]], [[[1, 2]], [[3]]], [[[1, 2, 3]]], [[[9]], [[8, 7]]]))
    }
    assert len(prints) == 3  # the first and the last have the same sizes


def test_golden_files_are_the_recorded_ones() -> None:
    recorded = {
        ".bin": "aad07cccc1fd4360d83a09ddeb32a3d541140b7fc6ec21c1fac44954fd5f6bc5",
        ".idx": "fd797c96a36a1731f0968d94bf17098648841e66d1bc43a0730af20d59c8d95f",
    }
    for suffix, digest in recorded.items():
        assert hashlib.sha256(Path(f"{UPSTREAM}{suffix}").read_bytes()).hexdigest() == digest


def test_data_modules_import_no_torch() -> None:
    program = (
        "import sys, megatron.data.gpt_dataset, megatron.data.data_samplers, megatron.tokenizer;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'tokenizers', 'sentencepiece')))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
