"""Blends: upstream's choice of datasets, for any number of them and any length."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.data import parse_blend
from megatron.data import blendable_dataset
from megatron.data.blendable_dataset import BlendableDataset, blending_indices, rank_within
from megatron.data.index_cache import IndexCache
from megatron.data.splits import blended_num_samples
from tests.unit.megatron.data.dataset_helpers import CORPUS, GOLDEN, build, sha256

RECORDED: dict[str, Any] = json.loads((GOLDEN / "upstream_data" / "sample_order.json").read_text())


class Endless:
    """A dataset whose samples say where they are from."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.built: list[int | None] = []

    def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]:
        return {"text": np.array([self.number, i])}

    def build_index(self, num_samples: int | None = None) -> None:
        self.built.append(num_samples)

    def load_index(self) -> None:
        pass


def reference(weights: list[float], size: int) -> list[list[int]]:
    """(dataset, sample in it) of each sample: always the one that is furthest behind its share."""
    counts = [0] * len(weights)
    chosen = []
    for i in range(size):
        behind = [weight * max(i, 1) - count for weight, count in zip(weights, counts, strict=True)]
        dataset = behind.index(max(behind))
        chosen.append([dataset, counts[dataset]])
        counts[dataset] += 1
    return chosen


def normalised(weights: list[float]) -> npt.NDArray[np.float64]:
    array = np.array(weights)
    return array / array.sum()


@pytest.mark.parametrize("case", RECORDED["blend_indices"], ids=lambda case: f"{len(case['weights'])} datasets")
def test_choice_equals_upstreams(case: dict[str, Any]) -> None:
    weights = normalised(case["weights"])
    index = blending_indices(weights, 0, case["size"], np.zeros(len(weights), dtype=np.int64))
    assert sha256(index) == case["dataset_index"]
    assert sha256(rank_within(index, len(weights))) == case["dataset_sample_index"]


@pytest.mark.parametrize("case", RECORDED["blend"], ids=lambda case: "-".join(case["weights"]))
def test_blended_samples_equal_upstreams(tmp_path: Path, case: dict[str, Any]) -> None:
    first, second = case["weights"]
    train, valid, test = build(
        data_path=[first, CORPUS, second, CORPUS],
        split=case["split"],
        train_valid_test_num_samples=tuple(case["num_samples"]),
        seq_length=case["seq_length"],
        seed=case["seed"],
        data_cache_path=str(tmp_path),
    )
    assert train is not None and valid is not None and test is None
    assert [len(train), len(valid)] == case["lengths"]
    assert sha256(np.stack([sample["text"] for sample in train])) == case["train"]
    assert sha256(np.stack([sample["text"] for sample in valid])) == case["valid"]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.one_of(st.floats(1e-3, 1.0), st.sampled_from([0.5, 1.0])), min_size=1, max_size=30),
    size=st.integers(1, 300),
    start=st.integers(0, 200),
)
def test_both_ways_of_choosing_equal_the_reference(weights: list[float], size: int, start: int) -> None:
    shares = normalised(weights)
    expected = [dataset for dataset, _ in reference(shares.tolist(), start + size)]
    counts = np.bincount(expected[:start], minlength=len(weights))
    for choose in (blendable_dataset.choose_in_python, blendable_dataset.choose_in_numpy):
        assert choose(shares, counts.astype(np.float64), start, start + size) == expected[start:]


def test_more_than_255_datasets() -> None:
    weights = np.random.RandomState(0).rand(300) + 0.1
    blend = BlendableDataset([Endless(i) for i in range(300)], weights.tolist(), 3000)
    assert [sample["text"].tolist() for sample in blend] == reference(blend.weights.tolist(), 3000)
    assert {dataset for dataset, _ in map(blend.choice, range(3000))} == set(range(300))


@pytest.mark.parametrize("cached", [False, True])
def test_a_blend_goes_on_beyond_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    monkeypatch.setattr(blendable_dataset, "_CHUNK", 64)
    cache = IndexCache((tmp_path,)) if cached else None
    blend = BlendableDataset([Endless(i) for i in range(3)], [0.2, 0.5, 0.3], 100, cache)
    blend.build_index()
    expected = reference(blend.weights.tolist(), 500)
    assert [list(blend.choice(i)) for i in (499, 0, 99, 100, 163, 164, 300)] == [
        expected[i] for i in (499, 0, 99, 100, 163, 164, 300)
    ]
    assert [list(blend.choice(i)) for i in range(500)] == expected
    assert len(list(blend)) == len(blend) == 100
    copy = pickle.loads(pickle.dumps(blend))
    assert [list(copy.choice(i)) for i in range(500)] == expected
    assert len(list(tmp_path.glob("*.dsc"))) == cached


def test_the_choice_is_cached_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder that was killed, and a blend of another size, go on from the parts that are there."""
    monkeypatch.setattr(blendable_dataset, "_PART", 64)
    cache, weights, built = IndexCache((tmp_path,)), [0.2, 0.5, 0.3], []
    choose = blendable_dataset.choose_in_python

    def counted(shares: Any, taken: Any, start: int, stop: int) -> list[int]:
        if start == 128 and not built[2:]:
            built.append((start, "killed"))
            raise KeyboardInterrupt
        built.append((start, stop))
        return choose(shares, taken, start, stop)

    monkeypatch.setattr(blendable_dataset, "choose_in_python", counted)

    def blend_of(size: int) -> BlendableDataset:
        return BlendableDataset([Endless(i) for i in range(3)], weights, size, cache)

    with pytest.raises(KeyboardInterrupt):
        blend_of(200).build_index()
    blend_of(200).build_index()
    blend_of(300).build_index()
    assert built == [(0, 64), (64, 128), (128, "killed"), (128, 192), (192, 200), (192, 256), (256, 300)]
    blend, expected = blend_of(300), reference(normalised(weights).tolist(), 400)
    blend.load_index()
    assert len(built) == 7 and [list(blend.choice(i)) for i in range(300)] == expected[:300]
    assert [list(blend.choice(i)) for i in range(399, 299, -1)] == expected[399:299:-1]


def test_parts_are_built_for_what_will_be_read() -> None:
    parts = [Endless(0), Endless(1)]
    blend = BlendableDataset(parts, [1, 3], 100)
    blend.build_index(10_000)
    needed = np.bincount([dataset for dataset, _ in reference([0.25, 0.75], 10_000)]).tolist()
    assert all(part.built[0] is not None and part.built[0] >= n for part, n in zip(parts, needed, strict=True))


def test_shares_and_the_half_percent_more() -> None:
    assert parse_blend("--data-path", ("1", "a", "3", " b ")) == [(0.25, "a"), (0.75, "b")]
    assert blended_num_samples([0.25, 0.75], 1000) == [252, 754]


@pytest.mark.parametrize("weights", [[], [1.0], [0.0, 1.0], [-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="--data-path: 2 datasets"):
        BlendableDataset([Endless(0), Endless(1)], weights, 10)


def test_negative_samples_are_refused() -> None:
    with pytest.raises(IndexError, match="count from 0"):
        BlendableDataset([Endless(0)], [1.0], 10)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 300])
def test_a_million_samples_take_seconds(count: int) -> None:
    start = time.thread_time()
    index = blending_indices(np.full(count, 1 / count), 0, 1_000_000, np.zeros(count, dtype=np.int64))
    assert time.thread_time() - start < 15  # 0.3 s and 1.5 s
    assert np.ptp(np.bincount(index)) <= 1
