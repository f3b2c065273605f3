"""Several datasets read in proportion to weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import ArraySpec, IndexCache

logger = logging.getLogger(__name__)

IntArray = npt.NDArray[Any]
# Up to here a plain loop over Python floats is faster than three numpy calls for each sample.
_MAX_DATASETS_IN_PYTHON = 24
# Samples that are built and cached at a time: 10 s to a minute, all that is lost if the process that builds is killed.
_PART = 1 << 25
# Samples added at a time if the blend is read beyond its size.
_CHUNK = 1 << 16
_BETWEEN_LINES_S = 10.0


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
        self._num_stored = -(-size // _PART)
        # By number: those of _PART samples within size, then those of _CHUNK samples beyond it.
        self._parts: dict[int, dict[str, IntArray]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the cached choice itself instead of receiving a copy.
        return {**self.__dict__, "_parts": {}}

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
        part, position = (
            divmod(i, _PART) if i < self.size else divmod(i - self.size + self._num_stored * _CHUNK, _CHUNK)
        )
        arrays = self._part(part)
        return int(arrays["dataset_index"][position]), int(arrays["dataset_sample_index"][position])

    def build_index(self, num_samples: int | None = None) -> None:
        """Build the index of each dataset, and store the choice in the cache, part by part. See GPTDataset.build_index.

        A part that is in the cache is not built again, so a blend that is asked for anew, larger or after its builder
        was killed, goes on from there.
        """
        wanted = num_samples or 0
        for dataset, weight in zip(self.datasets, self.weights.tolist(), strict=True):
            dataset.build_index(int(wanted * weight * 1.005) + 1)
        if self.cache is None:
            return
        told = time.monotonic()
        for part in range(self._num_stored):
            self.cache.ensure(self._description(part), self._specs(part), lambda part=part: self._build(part))
            if time.monotonic() - told >= _BETWEEN_LINES_S:
                told, (_, stop) = time.monotonic(), self._range(part)
                logger.info("blend of %d datasets: %d of %d samples are indexed", len(self.weights), stop, self.size)

    def load_index(self) -> None:
        """Map the index of each dataset and the choice. Raises IndexCacheError."""
        for dataset in self.datasets:
            dataset.load_index()
        for part in range(self._num_stored):
            self._part(part)

    def _part(self, part: int) -> dict[str, IntArray]:
        """Its arrays; see `_build`."""
        arrays = self._parts.get(part)
        if arrays is None:
            if self.cache is not None and part < self._num_stored:
                arrays = self.cache.load(self._description(part), self._specs(part))
            else:
                arrays = self._build(part)
            self._parts[part] = arrays
        return arrays

    def _range(self, part: int) -> tuple[int, int]:
        """Its samples, [start, stop)."""
        if part < self._num_stored:
            return part * _PART, min((part + 1) * _PART, self.size)
        start = self.size + (part - self._num_stored) * _CHUNK
        return start, start + _CHUNK

    def _build(self, part: int) -> dict[str, IntArray]:
        """The choice for each sample of the part, and the samples `taken` of each dataset up to its end."""
        for earlier in range(part):  # in their order, so that none has to build the one before it
            self._part(earlier)
        before = self._parts[part - 1]["taken"] if part else np.zeros(len(self.weights), dtype=np.int64)
        index = blending_indices(self.weights, *self._range(part), before)
        taken = before + np.bincount(index, minlength=len(before))
        ranks = rank_within(index, len(self.weights)) + before[index]
        return {"dataset_index": index, "dataset_sample_index": ranks, "taken": taken}

    def _specs(self, part: int) -> dict[str, ArraySpec]:
        start, stop = self._range(part)
        return {
            "dataset_index": ArraySpec(index_dtype(len(self.weights)), (stop - start,)),
            "dataset_sample_index": ArraySpec(np.int64, (stop - start,)),
            "taken": ArraySpec(np.int64, self.weights.shape),
        }

    def _description(self, part: int) -> str:
        weights = " ".join(weight.hex() for weight in self.weights.tolist())
        start, stop = self._range(part)
        return f"Blend, version 2\nSamples [{start}, {stop})\nWeights {weights}"


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
