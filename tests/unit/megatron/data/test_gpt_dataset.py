"""The order of GPT samples: upstream's, stable under resume, and what is refused."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron.config.data import DEFAULT_SPLIT
from megatron.data.indexed_dataset import IndexedDatasetError, MMapIndexedDatasetBuilder
from megatron.data.sample_index import build_sample_idx, plan_epochs
from megatron.data.splits import split_ranges
from tests.unit.megatron.data.dataset_helpers import CORPUS, GOLDEN, build, dataset_of, in_memory, sha256

RECORDED: dict[str, Any] = json.loads((GOLDEN / "upstream_data" / "sample_order.json").read_text())


@pytest.fixture(autouse=True)
def _recorded_data_stay_as_they_are() -> Iterator[None]:
    yield
    assert not (Path(CORPUS).parent / "index-cache").exists()


# --- upstream's order ---


@pytest.mark.parametrize("case", RECORDED["index"], ids=lambda case: f"{case['name']}-{case['num_samples']}")
def test_index_and_samples_equal_upstreams(tmp_path: Path, case: dict[str, Any]) -> None:
    datasets = build(
        split=case["split"],
        train_valid_test_num_samples=tuple(case["num_samples"]),
        seq_length=case["seq_length"],
        seed=case["seed"],
        data_cache_path=str(tmp_path),
    )
    dataset = datasets[["train", "valid", "test"].index(case["name"])]
    arrays = dataset.block(0)
    assert len(dataset) == case["length"]
    for name in ("doc_idx", "sample_idx", "shuffle_idx"):
        assert sha256(arrays[name]) == case[name], name
    samples = [dataset[i]["text"] for i in range(min(20, len(dataset)))]
    assert all(sample.dtype == np.int64 and sample.shape == (case["seq_length"] + 1,) for sample in samples)
    assert sha256(np.stack(samples)) == case["samples_20"]
    assert sha256(dataset[len(dataset) - 1]["text"]) == case["last"]


def reference_sample_idx(sizes: list[int], doc_idx: list[int], seq_length: int, num_samples: int) -> list[list[int]]:
    """Walk over the tokens: sample j ends with the token that sample j + 1 starts with."""
    rows, position, offset = [[0, 0]], 0, 0
    for _ in range(num_samples):
        missing = seq_length + 1
        while sizes[doc_idx[position]] - offset < missing:
            missing -= sizes[doc_idx[position]] - offset
            position, offset = position + 1, 0
        offset += missing - 1
        rows.append([position, offset])
    return rows


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 90)), min_size=1, max_size=20),
    epochs=st.integers(1, 3),
    seq_length=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_sample_idx_equals_the_walk(sizes: list[int], epochs: int, seq_length: int, seed: int) -> None:
    num_samples = (epochs * sum(sizes) - 1) // seq_length
    assume(num_samples >= 1)
    doc_idx = np.tile(np.arange(len(sizes), dtype=np.int32), epochs)
    np.random.RandomState(seed).shuffle(doc_idx)
    built = build_sample_idx(np.array(sizes, dtype=np.int32), doc_idx, seq_length, num_samples)
    assert built.dtype == np.int64
    assert built.tolist() == reference_sample_idx(sizes, doc_idx.tolist(), seq_length, num_samples)


def test_sample_idx_beyond_2_to_31_tokens() -> None:
    sizes = [2**31 - 1, 0, 2**31 - 2, 5, 2**31 - 3]
    doc_idx = np.array([4, 0, 1, 3, 2, 0, 4, 2], dtype=np.int32)
    seq_length = 700_000_001
    num_samples = (sum(sizes[doc] for doc in doc_idx) - 1) // seq_length
    built = build_sample_idx(np.array(sizes, dtype=np.int32), doc_idx, seq_length, num_samples)
    assert num_samples == 18
    assert built.tolist() == reference_sample_idx(sizes, doc_idx.tolist(), seq_length, num_samples)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(tokens=st.integers(1, 400), seq_length=st.integers(1, 60), num_samples=st.integers(1, 300))
@example(tokens=1001, seq_length=10, num_samples=179)  # 79 of 100 samples of the last epoch
@example(tokens=1001, seq_length=10, num_samples=180)
def test_plan_follows_upstreams_rule(tokens: int, seq_length: int, num_samples: int) -> None:
    epochs = 1
    while (epochs * tokens - 1) // seq_length < num_samples:
        epochs += 1
    plan = plan_epochs(tokens, seq_length, num_samples)
    assert (plan.num_epochs, plan.num_samples) == (epochs, (epochs * tokens - 1) // seq_length)
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    per_epoch = (tokens - 1) // seq_length
    separate = epochs > 1 and num_samples - before_last < int(0.80 * per_epoch)
    assert plan.separate_last_epoch == separate
    assert plan.num_first == (before_last if separate else plan.num_samples)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    num_samples=st.integers(1, 40),
    seq_length=st.integers(1, 15),
)
def test_samples_are_slices_of_the_shuffled_documents(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], num_samples: int, seq_length: int
) -> None:
    assume(sum(lengths) > 0)
    dataset = in_memory(tmp_path_factory.mktemp("d"), lengths, num_samples, seq_length)
    assert len(dataset) >= num_samples
    for block in (0, 1):
        arrays = dataset.block(block)
        stream = np.concatenate([dataset.indexed_dataset[int(doc)] for doc in arrays["doc_idx"]])
        assert sorted(arrays["doc_idx"].tolist()) == sorted(list(range(len(lengths))) * dataset.plan.num_epochs)
        assert sorted(arrays["shuffle_idx"].tolist()) == list(range(len(dataset)))
        for i, j in enumerate(arrays["shuffle_idx"].tolist()):
            expected = stream[j * seq_length : (j + 1) * seq_length + 1]
            assert dataset[block * len(dataset) + i]["text"].tolist() == expected.tolist()


# --- without an end, and stable ---


def test_samples_beyond_the_end_do_not_depend_on_how_they_are_reached(tmp_path: Path) -> None:
    dataset = in_memory(tmp_path, [7, 30, 12, 25], num_samples=20, seq_length=8)
    length = len(dataset)
    forward = [dataset[i]["text"].tolist() for i in range(4 * length)]
    again = in_memory(tmp_path, [7, 30, 12, 25], num_samples=20, seq_length=8)
    backward = [again[i]["text"].tolist() for i in reversed(range(4 * length))]
    assert forward == backward[::-1]
    blocks = [forward[block * length : (block + 1) * length] for block in range(4)]
    assert all(first != second for first, second in zip(blocks[:-1], blocks[1:], strict=True))
    assert [sample["text"].tolist() for sample in dataset] == blocks[0]  # iteration ends at len()


def test_only_the_first_num_samples_decides_the_order(tmp_path: Path) -> None:
    """Asking for more samples on resume keeps the order; changing num_samples itself would not."""
    short, *_ = build(train_valid_test_num_samples=(2000, 0, 0), data_cache_path=str(tmp_path / "a"))
    longer, *_ = build(
        train_valid_test_num_samples=(2000, 0, 0),
        required_num_samples=(9000, 0, 0),
        data_cache_path=str(tmp_path / "b"),
    )
    other, *_ = build(train_valid_test_num_samples=(9000, 0, 0), data_cache_path=str(tmp_path / "c"))
    probes = [0, 1, 1999, 2763, 2764, 5000, 8999]
    assert len(short) == len(longer) == 2764
    assert all(np.array_equal(short[i]["text"], longer[i]["text"]) for i in probes)
    assert any(not np.array_equal(short[i]["text"], other[i]["text"]) for i in probes)
    # what was required is built ahead and in the cache; the rest is made when it is read
    assert len(list((tmp_path / "a").glob("*.dsc"))) == 1
    assert len(list((tmp_path / "b").glob("*.dsc"))) == 4


def test_negative_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IndexError, match="count from 0"):
        in_memory(tmp_path, [50], 1, 8)[-1]


# --- splits and bad input ---


@pytest.mark.parametrize(
    ("split", "documents", "ranges"),
    [
        ("969,30,1", 400, [(0, 388), (388, 400), (400, 400)]),
        ("969, 30, 1", 1000, [(0, 969), (969, 999), (999, 1000)]),
        ("100,0,0", 7, [(0, 7), (7, 7), (7, 7)]),
        ("1", 7, [(0, 7), (7, 7), (7, 7)]),
        ("4/1", 10, [(0, 8), (8, 10), (10, 10)]),
        ("1,1", 1, [(0, 1), (1, 1), (1, 1)]),
        ("0,1,1", 3, [(0, 0), (0, 1), (1, 3)]),  # upstream's border lies at -1 here
    ],
)
def test_split_ranges(split: str, documents: int, ranges: list[tuple[int, int]]) -> None:
    shares = [float(part) for part in re.split("[,/]", split)]
    assert split_ranges([share / sum(shares) for share in shares] + [0.0] * (3 - len(shares)), documents) == ranges


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    shares=st.lists(st.floats(0, 1000), min_size=1, max_size=3).filter(lambda shares: sum(shares) > 1e-9),
    documents=st.integers(1, 5000),
)
def test_split_ranges_hold_every_document_once(shares: list[float], documents: int) -> None:
    ranges = split_ranges([share / sum(shares) for share in shares], documents)
    covered = [document for start, stop in ranges for document in range(start, stop)]
    assert covered == list(range(documents))


@pytest.mark.parametrize("split", ["", "a,b", "1,,1", "-1,2,0", "0,0,0", "1,2,3,4", "nan,1,1", "inf,1,1", "9;1"])
def test_a_malformed_split_is_refused(split: str) -> None:
    with pytest.raises(ValueError, match=r"--split "):
        build(split=split)


def test_too_few_documents_for_a_split(tmp_path: Path) -> None:
    prefix = dataset_of(tmp_path, [50] * 3)
    with pytest.raises(ValueError, match=r"--split 969,30,1: leaves no document for valid out of the 3 of .*/d:"):
        build(data_path=[prefix], split="969,30,1", train_valid_test_num_samples=(4, 4, 4))
    train, valid, test = build(data_path=[prefix], split="969,30,1", train_valid_test_num_samples=(4, 0, 0))
    assert len(train) >= 4 and valid is None and test is None


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_an_empty_dataset_is_refused(tmp_path: Path, lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"(no tokens for train|leaves no document).*corpus"):
        build(data_path=[dataset_of(tmp_path, lengths)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_path": []}, "--data-path is missing"),
        ({"train_data_path": [CORPUS]}, "--data-path and --train-data-path exclude each other"),
        ({"data_path": ["0.5", CORPUS, "0.5"]}, "--data-path .*pairs of a weight and a path prefix"),
        ({"data_path": [CORPUS, "0.5"]}, "--data-path .*expected a weight before 0.5"),
        ({"data_path": ["0", CORPUS, "1", CORPUS]}, "--data-path .*the weight 0 .*must be positive"),
        ({"data_path": ["nan", CORPUS]}, "--data-path .*the weight nan .*must be positive"),
        ({"seq_length": 0}, "seq_length 0"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_data_that_are_no_tokens_are_refused(tmp_path: Path) -> None:
    builder = MMapIndexedDatasetBuilder(tmp_path / "d.bin", np.float32)
    builder.add_doc(np.ones(50), [50])
    builder.finalize(tmp_path / "d.idx")
    with pytest.raises(IndexedDatasetError, match=r"d\.bin: holds float32, no token ids"):
        build(data_path=[str(tmp_path / "d")])


def test_data_of_their_own_for_each_split(tmp_path: Path) -> None:
    train, valid, test = build(
        data_path=[],
        train_data_path=[dataset_of(tmp_path, [40] * 5, "a")],
        valid_data_path=["1", dataset_of(tmp_path, [30] * 2, "b"), "3", dataset_of(tmp_path, [20] * 4, "c")],
        split=DEFAULT_SPLIT,
        train_valid_test_num_samples=(6, 4, 4),
        seq_length=10,
        data_cache_path=str(tmp_path / "cache"),
    )
    assert test is None
    assert train.documents == (0, 5)
    assert [part.documents for part in valid.datasets] == [(0, 2), (0, 4)]
    assert valid[0]["text"].shape == (11,)


def test_tokens_outside_of_the_index_are_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(split="90,10,0", train_valid_test_num_samples=(8, 8, 0), data_cache_path=str(tmp_path))
    (message,) = (record.getMessage() for record in caplog.records)
    assert "corpus_text_document.bin holds 400 tokens more" in message and "--document-sizes exact" in message
