"""GPT samples out of indexed token files: one dataset per split, and the entry that builds all three."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.config import DataConfig
from megatron.data.blendable_dataset import BlendableDataset
from megatron.data.index_cache import ArraySpec, IndexCache, IndexCacheError
from megatron.data.indexed_dataset import IndexedDatasetError, MMapIndexedDataset, data_file_path
from megatron.data.sample_index import EpochPlan, build_index, doc_idx_dtype, plan_epochs, shuffle_idx_dtype
from megatron.data.splits import SPLIT_NAMES, blended_num_samples, split_ranges

logger = logging.getLogger(__name__)

Sample = dict[str, npt.NDArray[np.int64]]
# Bump when the arrays of an index change their meaning, so that older caches are not read.
_INDEX_VERSION = 1
# Blocks are read in order; a batch can straddle two of them.
_BLOCKS_KEPT = 2


class GPTDataset:
    """Samples of ``seq_length + 1`` tokens from a range of documents, in upstream's order, without an end.

    ``num_samples`` is what upstream calls the number of samples of a run: it decides the number of epochs
    that are shuffled together, and with it the order. ``len()`` is the number of samples of those epochs, at
    least ``num_samples``. Samples ``[0, len)`` are block 0, in upstream's order for ``num_samples`` and
    ``seed``. Sample ``i`` beyond is in block ``k = i // len``: the same epochs again, all shuffled together,
    by a random state seeded with ``(seed, k)``. So sample ``i`` depends on ``num_samples`` and ``seed``
    alone: a run that is resumed with more or fewer iterations, but is given its first ``num_samples``, goes
    on with the data it would have seen.

    Args:
        name: for messages, e.g. ``train``.
        indexed_dataset: the tokens.
        documents: range ``[start, stop)`` of the sequences of ``indexed_dataset`` to use.
        num_samples: samples to index at least, >= 1.
        seed: 0 to 2**32 - 1.
        cache: where index arrays are stored; None keeps them in memory.

    Raises ValueError when the documents hold no token, IndexedDatasetError when they hold no integers.
    """

    def __init__(
        self,
        name: str,
        indexed_dataset: MMapIndexedDataset,
        documents: tuple[int, int],
        num_samples: int,
        seq_length: int,
        seed: int,
        cache: IndexCache | None = None,
    ) -> None:
        if num_samples < 1 or seq_length < 1 or not 0 <= seed < 2**32:
            raise ValueError(
                f"{name} dataset: num_samples {num_samples} and seq_length {seq_length} must be at least 1, "
                f"seed {seed} from 0 to 2**32 - 1"
            )
        if indexed_dataset.dtype.kind not in "iu":
            raise IndexedDatasetError(
                f"{data_file_path(indexed_dataset.path_prefix)}: holds {indexed_dataset.dtype}, no token ids:"
                " make it with tools/preprocess_data.py"
            )
        tokens_per_epoch = indexed_dataset.tokens_in(*documents)
        if tokens_per_epoch == 0:
            raise ValueError(
                f"{data_file_path(indexed_dataset.path_prefix)}: no tokens for {name} in its documents "
                f"[{documents[0]}, {documents[1]}): use a larger corpus or change --split"
            )
        self.name = name
        self.indexed_dataset = indexed_dataset
        self.documents = documents
        self.seq_length = seq_length
        self.seed = seed
        self.cache = cache
        self.plan = plan_epochs(tokens_per_epoch, seq_length, num_samples)
        self._fingerprint = indexed_dataset.fingerprint()
        self._blocks: dict[int, dict[str, npt.NDArray[Any]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the cached index itself instead of receiving a copy.
        return {**self.__dict__, "_blocks": {}}

    def __len__(self) -> int:
        return self.plan.num_samples

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Sample:
        """Sample ``i`` >= 0, ``{"text": int64 [seq_length + 1]}``; ``i`` may lie beyond ``len()``."""
        if i < 0:
            raise IndexError(f"sample {i} of the {self.name} dataset: samples count from 0")
        block, position = divmod(int(i), self.plan.num_samples)
        arrays = self.block(block)
        j = int(arrays["shuffle_idx"][position])
        (first, first_offset), (last, last_offset) = arrays["sample_idx"][j : j + 2].tolist()
        doc_ids = arrays["doc_idx"][first : last + 1].tolist()
        end = last_offset + 1
        try:
            if first == last:
                text = self.indexed_dataset.get(doc_ids[0], first_offset, end - first_offset).astype(np.int64)
            else:
                parts = [self.indexed_dataset.get(doc_ids[0], first_offset)]
                parts += [self.indexed_dataset.get(doc) for doc in doc_ids[1:-1]]
                parts.append(self.indexed_dataset.get(doc_ids[-1], 0, end))
                text = np.concatenate(parts, dtype=np.int64)
        except IndexError as error:
            raise IndexedDatasetError(self._damaged(i)) from error
        if len(text) != self.seq_length + 1:
            raise IndexedDatasetError(self._damaged(i))
        return {"text": text}

    def _damaged(self, i: int) -> str:
        directories = " or ".join(map(str, self.cache.directories)) if self.cache is not None else "memory"
        return (
            f"the index of the {self.name} dataset is damaged (sample {i}): delete the files in "
            f"{directories} and start again"
        )

    def build_index(self, num_samples: int | None = None) -> None:
        """Store the index in the cache: block 0, and the blocks beyond that ``num_samples`` samples need.

        To be called by one process before the others call ``load_index``. Does nothing without a cache.
        Raises IndexCacheError.
        """
        if self.cache is None:
            return
        wanted = max(len(self), num_samples or 0)
        for block in range(-(-wanted // len(self))):
            self.cache.ensure(self._description(block), self._specs(), lambda block=block: self._told_block(block))

    def _told_block(self, block: int) -> dict[str, npt.NDArray[Any]]:
        logger.info("%s dataset: indexing %d samples", self.name, len(self))
        return self.build_block(block)

    def load_index(self) -> None:
        """Map block 0, so that a missing index shows now. Raises IndexCacheError."""
        self.block(0)

    def block(self, block: int) -> dict[str, npt.NDArray[Any]]:
        arrays = self._blocks.get(block)
        if arrays is None:
            arrays = self._load_block(block)
            self._blocks[block] = arrays
            if len(self._blocks) > _BLOCKS_KEPT:
                del self._blocks[next(iter(self._blocks))]
        return arrays

    def _load_block(self, block: int) -> dict[str, npt.NDArray[Any]]:
        if self.cache is not None:
            if block == 0:
                return self.cache.load(self._description(0), self._specs())
            try:
                return self.cache.load(self._description(block), self._specs(), wait_s=0.0)
            except IndexCacheError:
                logger.info("%s dataset: building index block %d in memory", self.name, block)
        return self.build_block(block)

    def build_block(self, block: int) -> dict[str, npt.NDArray[Any]]:
        plan, seed = self.plan, np.array([self.seed, block], dtype=np.uint32)
        rng = np.random.RandomState(self.seed) if block == 0 else np.random.RandomState(seed)
        if block:
            plan = EpochPlan(plan.num_epochs, plan.num_samples, plan.num_samples)
        return build_index(self.indexed_dataset.sizes, *self.documents, self.seq_length, plan, rng)

    def _specs(self) -> dict[str, ArraySpec]:
        start, stop = self.documents
        samples = self.plan.num_samples
        return {
            "doc_idx": ArraySpec(doc_idx_dtype(stop), (self.plan.num_epochs * (stop - start),)),
            "sample_idx": ArraySpec(np.int64, (samples + 1, 2)),
            "shuffle_idx": ArraySpec(shuffle_idx_dtype(samples), (samples,)),
        }

    def _description(self, block: int) -> str:
        """Everything the index depends on; not the path, so that moved data keep their index."""
        plan = self.plan
        return "\n".join(
            (
                f"GPT sample index, version {_INDEX_VERSION}",
                f"Dataset {os.path.basename(self.indexed_dataset.path_prefix)}: {self._fingerprint}",
                f"Documents [{self.documents[0]}, {self.documents[1]})",
                f"Epochs {plan.num_epochs}, samples {plan.num_samples}, first {plan.num_first}",
                f"Sequence length {self.seq_length}",
                f"Random seed {self.seed}",
                f"Block {block}",
            )
        )


SplitDataset = GPTDataset | BlendableDataset
SplitDatasets = tuple[SplitDataset | None, SplitDataset | None, SplitDataset | None]


def build_train_valid_test_datasets(
    data: DataConfig,
    *,
    train_valid_test_num_samples: tuple[int, int, int],
    seq_length: int,
    seed: int,
    run_on_builder: Callable[[Callable[[], None]], Exception | None],
    agree: Callable[[Exception | None], None],
    required_num_samples: tuple[int, int, int] = (0, 0, 0),
    train_dataset: Callable[..., GPTDataset] = GPTDataset,
) -> SplitDatasets:
    """Build the datasets of the three splits; None for a split without samples (0 samples, or a share of 0).

    Collective: every process that calls it calls ``run_on_builder`` and then ``agree`` exactly once.
    ``run_on_builder`` calls its argument, which writes index files, in the process that builds, and returns what that
    raised; in the others it returns None once the builder is done, which may be after many minutes. ``agree`` gets the
    exception that stopped this process, or None; it must return only after all have called it and must raise on
    every process when any of them passed an exception; so a failure of the builder ends all of them, and none waits
    for files that will not come. All map the files after it. One builder is enough where all nodes share the cache
    directory, else one per node.

    Args:
        data: ``--data-path`` is divided by ``--split``; of the paths of one split all documents are used.
        train_valid_test_num_samples: samples of each split that decide its order. A resumed run passes those
            of the run's first start (see GPTDataset), whatever its iterations are now.
        required_num_samples: samples that will be read, where more than those: their index is then built
            ahead, too.
        train_dataset: makes the training set(s) of the arguments of GPTDataset.

    Raises ValueError (IndexedDatasetError, IndexCacheError) naming flag or file.
    """
    error: Exception | None = None
    datasets: list[SplitDataset | None] = [None, None, None]
    planner: _Planner | None = None

    def build() -> None:
        if planner is None:
            return
        planner.warn_of_trailing_tokens()
        for dataset, required in zip(datasets, required_num_samples, strict=True):
            if dataset is not None:
                dataset.build_index(required)

    try:
        planner = _Planner(data, seq_length, seed, train_dataset)
        datasets = [planner.plan(split, train_valid_test_num_samples[split]) for split in range(3)]
    except Exception as caught:  # every error must reach the other processes, which wait in agree()
        error = caught
    error = run_on_builder(build) or error
    agree(error)
    if error is not None:
        raise error
    for dataset in datasets:
        if dataset is not None:
            dataset.load_index()
    return datasets[0], datasets[1], datasets[2]


class _Planner:
    """Opens each token file once and makes the datasets, without building their indices."""

    def __init__(self, data: DataConfig, seq_length: int, seed: int, train_dataset: Callable[..., GPTDataset]) -> None:
        if not data.prefixes:
            raise ValueError(
                "--data-path is missing: give the common path of the .bin and .idx files, without the suffix"
            )
        self.data = data
        self.seq_length = seq_length
        self.seed = seed
        self.train_dataset = train_dataset
        self.opened: dict[str, MMapIndexedDataset] = {}

    def plan(self, split: int, num_samples: int) -> SplitDataset | None:
        if num_samples == 0 or (self.data.data_path and self.data.split_fractions[split] == 0):
            return None
        flag = "data_path" if self.data.data_path else f"{SPLIT_NAMES[split]}_data_path"
        blend = self.data.blend(flag)
        if not blend:
            return None
        if len(getattr(self.data, flag)) == 1:  # a prefix alone
            return self._plan_one(split, blend[0][1], num_samples)
        weights = [weight for weight, _ in blend]
        shares = blended_num_samples(weights, num_samples)
        parts = [self._plan_one(split, prefix, share) for (_, prefix), share in zip(blend, shares, strict=True)]
        cache = IndexCache.beside(blend[0][1], self.data.data_cache_path)
        return BlendableDataset(parts, weights, sum(shares), cache)

    def warn_of_trailing_tokens(self) -> None:
        for prefix, indexed in self.opened.items():
            if indexed.num_trailing_tokens:
                logger.warning(
                    "%s holds %d tokens more than its index counts: end-of-document tokens were left out of "
                    "the sizes, as upstream's preprocessing does, so documents are cut at the wrong places; "
                    "tools/preprocess_data.py --document-sizes exact counts them",
                    data_file_path(prefix),
                    indexed.num_trailing_tokens,
                )

    def _plan_one(self, split: int, prefix: str, num_samples: int) -> GPTDataset:
        if prefix not in self.opened:
            self.opened[prefix] = MMapIndexedDataset(prefix)
        indexed = self.opened[prefix]
        name, documents = SPLIT_NAMES[split], (0, len(indexed))
        if self.data.data_path:
            documents = split_ranges(self.data.split_fractions, len(indexed))[split]
        if documents[0] >= documents[1]:
            raise ValueError(
                f"--split {self.data.split}: leaves no document for {name} out of the {len(indexed)} of "
                f"{prefix}: give {name} a larger share or a share of 0, or use a larger corpus"
            )
        cache = IndexCache.beside(prefix, self.data.data_cache_path)
        make = self.train_dataset if split == 0 else GPTDataset
        return make(name, indexed, documents, num_samples, self.seq_length, self.seed, cache)
