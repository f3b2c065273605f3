"""The order of GPT samples: upstream's doc-idx, sample-idx and shuffle-idx.

The documents of one or more epochs are shuffled (``doc_idx``) and laid end to end. Sample ``j`` of that
stream is its tokens ``[j * seq_length, (j + 1) * seq_length]``: consecutive samples share one token.
``sample_idx[j]`` is where the first token of sample ``j`` lies: (position in ``doc_idx``, token in that
document). ``shuffle_idx`` is the order in which samples are read. Random numbers come from one
``numpy.random.RandomState`` in the order of upstream's ``megatron/data/gpt_dataset.py`` (Megatron-DeepSpeed),
so that a run reads the same samples as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[Any]
# A last epoch of which less than this share is needed is shuffled apart from the others: upstream's rule,
# which keeps a run that uses little of it from skipping random documents of the earlier epochs.
_LAST_EPOCH_SHARE = 0.80


@dataclass(frozen=True)
class EpochPlan:
    """How many epochs an index covers and which of its samples are shuffled together.

    num_samples: samples of the whole index. num_first: the samples ``[0, num_first)`` are shuffled apart from
    the rest; equal to num_samples when all are
        shuffled together.
    """

    num_epochs: int
    num_samples: int
    num_first: int

    @property
    def separate_last_epoch(self) -> bool:
        return self.num_first < self.num_samples


def plan_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> EpochPlan:
    """The fewest epochs that hold ``num_samples`` samples, and upstream's treatment of the last of them.

    ``num_samples`` must be at least 1 and ``tokens_per_epoch`` at least 1.
    """
    # Each sample takes seq_length tokens; the last one needs one more.
    num_epochs = -(-(num_samples * seq_length + 1) // tokens_per_epoch)
    in_all = (num_epochs * tokens_per_epoch - 1) // seq_length
    if num_epochs == 1:
        return EpochPlan(1, in_all, in_all)
    before_last = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
    in_one = (tokens_per_epoch - 1) // seq_length
    separate = num_samples - before_last < int(_LAST_EPOCH_SHARE * in_one)
    return EpochPlan(num_epochs, in_all, before_last if separate else in_all)


def build_index(
    sizes: IntArray,
    first_document: int,
    last_document: int,
    seq_length: int,
    plan: EpochPlan,
    rng: np.random.RandomState,
) -> dict[str, IntArray]:
    """Build the three arrays for the documents ``[first_document, last_document)``.

    Returns ``doc_idx`` [epochs * documents] (int32, int64 from 2**31 documents on), ``sample_idx``
    [plan.num_samples + 1, 2] int64 and ``shuffle_idx`` [plan.num_samples] (uint32, int64 near 2**32 samples).
    """
    # The order of these three calls on the random state is part of the sample order.
    doc_idx = _build_doc_idx(first_document, last_document, plan, rng)
    sample_idx = build_sample_idx(sizes, doc_idx, seq_length, plan.num_samples)
    shuffle_idx = _build_shuffle_idx(plan, rng)
    return {"doc_idx": doc_idx, "sample_idx": sample_idx, "shuffle_idx": shuffle_idx}


def doc_idx_dtype(last_document: int) -> type[np.signedinteger[Any]]:
    return np.int32 if last_document <= np.iinfo(np.int32).max else np.int64


def shuffle_idx_dtype(num_samples: int) -> type[np.integer[Any]]:
    return np.uint32 if num_samples < np.iinfo(np.uint32).max - 1 else np.int64


def _build_doc_idx(first_document: int, last_document: int, plan: EpochPlan, rng: np.random.RandomState) -> IntArray:
    documents = np.arange(first_document, last_document, dtype=doc_idx_dtype(last_document))
    if not plan.separate_last_epoch:
        doc_idx = np.tile(documents, plan.num_epochs)
        rng.shuffle(doc_idx)
        return doc_idx
    first = np.tile(documents, plan.num_epochs - 1)
    rng.shuffle(first)
    rng.shuffle(documents)
    return np.concatenate((first, documents))


def build_sample_idx(sizes: IntArray, doc_idx: IntArray, seq_length: int, num_samples: int) -> IntArray:
    """Where each sample starts: int64 [num_samples + 1, 2] of (position in doc_idx, token in that document).

    The last row is the last token of the last sample. A border that falls on the first token of a document is
    (that document, 0); documents without tokens never hold one, but the very first row is always (0, 0).
    """
    ends = np.cumsum(sizes[doc_idx], dtype=np.int64)
    tokens = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    # The first document whose end lies behind the token is the one that holds it.
    positions = np.searchsorted(ends, tokens, side="right")
    sample_idx = np.empty((num_samples + 1, 2), dtype=np.int64)
    sample_idx[:, 0] = positions
    sample_idx[:, 1] = tokens - np.where(positions > 0, ends[positions - 1], 0)
    sample_idx[0] = 0
    return sample_idx


def _build_shuffle_idx(plan: EpochPlan, rng: np.random.RandomState) -> IntArray:
    shuffle_idx = np.arange(plan.num_samples, dtype=shuffle_idx_dtype(plan.num_samples))
    # Two views: each is shuffled in place.
    rng.shuffle(shuffle_idx[: plan.num_first])
    if plan.separate_last_epoch:
        rng.shuffle(shuffle_idx[plan.num_first :])
    return shuffle_idx
