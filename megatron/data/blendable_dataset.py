"""Several datasets read in proportion to weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import ArraySpec, IndexCache

IntArray = npt.NDArray[Any]
# Up to here a plain loop over Python floats is faster than three numpy calls for each sample.
_MAX_DATASETS_IN_PYTHON = 24
# Samples added at a time if the blend is read beyond its size.
_CHUNK = 1 << 16


class SampleSource(Protocol):
    """The data of a blend."""

    def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]: ...

    def build_index(self, num_samples: int | None = None) -> None: ...

    def load_index(self) -> None: ...


class BlendableDataset:
    """A blend: sample ``i`` comes from the dataset whose share of the first ``i`` samples is furthest behind.

    Which one that is depends on the weights and on ``i`` alone, so ``size`` does not change the order: the
    blend goes on beyond it, as its datasets do.

    Args:
        datasets: the parts; each must serve samples without an end (GPTDataset does).
        weights: one positive weight for each; they are normalised.
        size: ``len()`` of the blend, the number of samples that is built ahead.
        cache: where the choice is stored; None keeps it in memory.

    Raises ValueError for weights that are not positive or not one for each dataset.
    """

    def __init__(
        self, datasets: Sequence[SampleSource], weights: Sequence[float], size: int, cache: IndexCache | None = None
    ) -> None:
        if not datasets or len(datasets) != len(weights) or not all(0 < weight < np.inf for weight in weights):
            raise ValueError(
                f"--data-path: {len(datasets)} datasets with weights {list(weights)}: give each a weight > 0"
            )
        if size < 1:
            raise ValueError(f"a blend of {size} samples: ask for at least 1")
        self.datasets = list(datasets)
        self.weights = np.array(weights, dtype=np.float64)
        self.weights /= np.sum(self.weights)
        self.size = size
        self.cache = cache
        # What lies within size, then chunks of _CHUNK samples beyond it.
        self._chunks: list[dict[str, IntArray]] = []
        self._counts = np.zeros(len(self.weights), dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the cached choice itself instead of receiving a copy.
        return {**self.__dict__, "_chunks": [], "_counts": np.zeros_like(self._counts)}

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[dict[str, npt.NDArray[np.int64]]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]:
        """Sample ``i`` >= 0 of the blend; ``i`` may lie beyond ``len()``."""
        dataset, sample = self.choice(i)
        return self.datasets[dataset][sample]

    def choice(self, i: int) -> tuple[int, int]:
        """Number of the dataset that sample ``i`` comes from, and its number there."""
        if i < 0:
            raise IndexError(f"sample {i} of a blend: samples count from 0")
        chunk, position = (0, i) if i < self.size else divmod(i - self.size + _CHUNK, _CHUNK)
        while len(self._chunks) <= chunk:
            self._add_chunk()
        arrays = self._chunks[chunk]
        return int(arrays["dataset_index"][position]), int(arrays["dataset_sample_index"][position])

    def build_index(self, num_samples: int | None = None) -> None:
        """Build the index of each part, and store the choice in the cache. See GPTDataset.build_index."""
        wanted = num_samples or 0
        for dataset, weight in zip(self.datasets, self.weights.tolist(), strict=True):
            dataset.build_index(int(wanted * weight * 1.005) + 1)
        if self.cache is not None:
            self.cache.ensure(self._description(), self._specs(), lambda: self._build(0, self.size))

    def load_index(self) -> None:
        """Map the index of each part and the choice. Raises IndexCacheError."""
        for dataset in self.datasets:
            dataset.load_index()
        if not self._chunks:
            self._add_chunk()

    def _add_chunk(self) -> None:
        if self._chunks:
            arrays = self._build(self.size + (len(self._chunks) - 1) * _CHUNK, _CHUNK)
        elif self.cache is None:
            arrays = self._build(0, self.size)
        else:
            arrays = self.cache.load(self._description(), self._specs())
        self._counts += np.bincount(arrays["dataset_index"], minlength=len(self._counts))
        self._chunks.append(arrays)

    def _build(self, start: int, length: int) -> dict[str, IntArray]:
        index = blending_indices(self.weights, start, start + length, self._counts)
        ranks = rank_within(index, len(self.weights)) + self._counts[index]
        return {"dataset_index": index, "dataset_sample_index": ranks}

    def _specs(self) -> dict[str, ArraySpec]:
        return {
            "dataset_index": ArraySpec(index_dtype(len(self.weights)), (self.size,)),
            "dataset_sample_index": ArraySpec(np.int64, (self.size,)),
        }

    def _description(self) -> str:
        weights = " ".join(weight.hex() for weight in self.weights.tolist())
        return f"Blend, version 1\nSamples {self.size}\nWeights {weights}"


def index_dtype(num_datasets: int) -> type[np.signedinteger[Any]]:
    """int16 up to 32767 datasets, else int32 (upstream's uint8 ends at 255)."""
    return np.int16 if num_datasets <= np.iinfo(np.int16).max else np.int32


def blending_indices(weights: npt.NDArray[np.float64], start: int, stop: int, counts: IntArray) -> IntArray:
    """Dataset of each of the samples ``[start, stop)``, shape [stop - start].

    Sample ``n`` is taken from the dataset with the largest ``weight * max(n, 1) - samples taken so far``, the
    first of equals: ``build_blending_indices`` of upstream's ``megatron/data/helpers.cpp``, in the same
    double arithmetic.

    counts: samples taken from each dataset before ``start``; it is not changed.
    """
    taken = counts.astype(np.float64)
    choose = choose_in_python if len(weights) <= _MAX_DATASETS_IN_PYTHON else choose_in_numpy
    return np.array(choose(weights, taken, start, stop), dtype=index_dtype(len(weights)))


def choose_in_python(weights: IntArray, taken: IntArray, start: int, stop: int) -> list[int]:
    counts: list[float] = taken.tolist()
    shares: list[tuple[int, float]] = list(enumerate(weights.tolist()))
    chosen = []
    for n in range(start, stop):
        step = float(n or 1)
        largest, best = -np.inf, 0
        for dataset, weight in shares:
            error = weight * step - counts[dataset]
            if error > largest:
                largest, best = error, dataset
        counts[best] += 1.0
        chosen.append(best)
    return chosen


def choose_in_numpy(weights: IntArray, taken: IntArray, start: int, stop: int) -> list[int]:
    errors = np.empty_like(taken)
    multiply, subtract, argmax = np.multiply, np.subtract, errors.argmax
    chosen = []
    for n in range(start, stop):
        multiply(weights, float(n or 1), out=errors)
        subtract(errors, taken, out=errors)
        best = argmax()
        taken[best] += 1.0
        chosen.append(best)
    return chosen


def rank_within(index: IntArray, num_datasets: int) -> npt.NDArray[np.int64]:
    """How many earlier entries of ``index`` have the same value, for each entry."""
    ranks = np.empty(len(index), dtype=np.int64)
    counts = np.bincount(index, minlength=num_datasets)
    order = np.argsort(index, kind="stable")
    first = np.cumsum(counts) - counts
    ranks[order] = np.arange(len(index)) - np.repeat(first, counts)
    return ranks
