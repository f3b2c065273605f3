"""Which samples each data-parallel rank reads, and the batches made of them."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.data_samplers import PretrainingSampler, build_pretraining_data_loader


class Counting:
    """Sample i holds i, i + 1, ..."""

    def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]:
        return {"text": np.arange(i, i + 5, dtype=np.int64)}


@settings(max_examples=200, deadline=None)
@given(total=st.integers(1, 60), consumed=st.integers(0, 59), micro=st.integers(1, 5), size=st.integers(1, 4))
def test_ranks_share_each_group_of_samples(total: int, consumed: int, micro: int, size: int) -> None:
    if consumed >= total:
        consumed = total - 1
    samplers = [PretrainingSampler(total, consumed, micro, rank, size) for rank in range(size)]
    per_rank = [list(sampler) for sampler in samplers]
    groups = (total - consumed) // (micro * size)
    assert [len(batches) for batches in per_rank] == [groups] * size == [len(sampler) for sampler in samplers]
    in_order = [i for batches in zip(*per_rank, strict=True) for batch in batches for i in batch]
    assert in_order == list(range(consumed, consumed + groups * micro * size))


def test_a_sampler_can_be_read_twice() -> None:
    sampler = PretrainingSampler(20, 4, 2, 1, 2)
    assert list(sampler) == list(sampler) == [[6, 7], [10, 11], [14, 15], [18, 19]]


def test_starting_late_takes_no_time_and_needs_no_end() -> None:
    start = time.thread_time()
    batches = list(itertools.islice(PretrainingSampler(None, 10**15, 2, 1, 4), 2))
    assert time.thread_time() - start < 1
    assert batches == [[10**15 + 2, 10**15 + 3], [10**15 + 10, 10**15 + 11]]
    with pytest.raises(TypeError, match="no length"):
        len(PretrainingSampler(None, 0, 1, 0, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 0, 0, 0, 1), "--micro-batch-size 0"),
        ((10, 0, 1, 0, 0), "data-parallel size 0"),
        ((10, 0, 1, 2, 2), r"rank 2 is not in \[0, 2\)"),
        ((10, 0, 1, -1, 2), "rank -1"),
        ((10, 10, 1, 0, 1), "10 samples are consumed .* none is left"),
        ((None, -1, 1, 0, 1), "-1 samples"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PretrainingSampler(*arguments)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_and_consumed_samples(num_workers: int) -> None:
    loader = build_pretraining_data_loader(Counting(), PretrainingSampler(23, 4, 3, 1, 2), num_workers)
    assert loader is not None and loader.consumed_samples == 4
    seen = []
    for number, batch in enumerate(loader, 1):
        assert list(batch) == ["text"]
        assert batch["text"].dtype == torch.int64 and batch["text"].shape == (3, 5)
        assert loader.consumed_samples == 4 + 6 * number  # not what workers have prepared
        seen.append(batch["text"][:, 0].tolist())
    assert seen == [[7, 8, 9], [13, 14, 15], [19, 20, 21]]
    with pytest.raises(StopIteration):
        next(loader)


def test_a_loader_that_is_closed_has_no_processes_any_more() -> None:
    loader = build_pretraining_data_loader(Counting(), PretrainingSampler(None, 0, 2, 0, 1), 2)
    assert loader is not None
    before = set(multiprocessing.active_children())
    next(loader)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    loader.close()
    assert not workers & set(multiprocessing.active_children())


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_going_on_from_consumed_samples_gives_the_same_batches(num_workers: int) -> None:
    whole = build_pretraining_data_loader(Counting(), PretrainingSampler(None, 0, 2, 0, 2), num_workers)
    assert whole is not None
    batches = [next(whole)["text"] for _ in range(6)]
    resumed = build_pretraining_data_loader(Counting(), PretrainingSampler(None, 12, 2, 0, 2), num_workers)
    assert resumed is not None
    assert all(torch.equal(batch, next(resumed)["text"]) for batch in batches[3:])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_draws_no_random_numbers_of_the_training_process(num_workers: int) -> None:
    """A restart makes its loader anew: drawing from the default stream would shift all dropout after it."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = build_pretraining_data_loader(Counting(), PretrainingSampler(None, 0, 2, 0, 1), num_workers)
    assert loader is not None
    next(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_dataset_no_loader() -> None:
    assert build_pretraining_data_loader(None, PretrainingSampler(None, 0, 1, 0, 1)) is None


def test_negative_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="--num-workers -1"):
        build_pretraining_data_loader(Counting(), PretrainingSampler(None, 0, 1, 0, 1), num_workers=-1)


def test_a_batch_does_not_share_memory_with_the_dataset() -> None:
    class Constant:
        text = np.zeros(3, dtype=np.int64)

        def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]:
            return {"text": self.text}

    loader = build_pretraining_data_loader(Constant(), PretrainingSampler(None, 0, 1, 0, 1))
    assert loader is not None
    next(loader)["text"].fill_(7)
    assert Constant.text.tolist() == [0, 0, 0]
