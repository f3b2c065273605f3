"""Which samples a data-parallel rank reads, and the loaders that make batches of them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


class SampleDataset(Protocol):
    """A dataset of token samples of one length."""

    def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]: ...


class PretrainingSampler:
    """Sample numbers of each micro-batch of one data-parallel rank, in order.

    The samples from ``consumed_samples`` on are divided into groups of ``micro_batch_size *
    data_parallel_size``; of each group, rank ``r`` takes the ``r``-th ``micro_batch_size``. An incomplete
    last group is dropped. Starting at any ``consumed_samples`` takes no time. The order is that of upstream's
    ``MegatronPretrainingSampler``.

    total_samples: end of the samples, or None for no end.
    Raises ValueError for sizes below 1, a rank outside its group, or no samples left.
    """

    def __init__(
        self,
        total_samples: int | None,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        if micro_batch_size < 1 or data_parallel_size < 1:
            raise ValueError(
                f"--micro-batch-size {micro_batch_size} and the data-parallel size {data_parallel_size} "
                "must be at least 1"
            )
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(
                f"data-parallel rank {data_parallel_rank} is not in [0, {data_parallel_size}): give the rank "
                "within its data-parallel group"
            )
        if consumed_samples < 0 or (total_samples is not None and consumed_samples >= total_samples):
            raise ValueError(
                f"{consumed_samples} samples are consumed and the dataset has {total_samples}: none is left: "
                "raise --train-samples or --train-iters, or start from an earlier checkpoint"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.samples_per_step = micro_batch_size * data_parallel_size

    def __len__(self) -> int:
        """Micro-batches of this rank from ``consumed_samples`` on. TypeError when there is no end."""
        if self.total_samples is None:
            raise TypeError("a sampler without total_samples has no length")
        return (self.total_samples - self.consumed_samples) // self.samples_per_step

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed_samples
        while self.total_samples is None or first + self.samples_per_step <= self.total_samples:
            start = first + self.data_parallel_rank * self.micro_batch_size
            yield list(range(start, start + self.micro_batch_size))
            first += self.samples_per_step


class HelperProcesses(Protocol):
    """How the processes of a loader start, and live: ``megatron.training.helpers.Helpers``."""

    @property
    def context(self) -> BaseContext: ...

    def starting(self) -> AbstractContextManager[None]:
        """Around the start of the processes."""
        ...

    def in_worker(self, number: int) -> None:
        """First in each of them."""
        ...


class PretrainingDataLoader:
    """Iterator over the batches of one sampler.

    Each batch is ``{"text": int64 tensor [micro_batch_size, seq_length + 1]}``. ``consumed_samples`` counts
    the samples that all data-parallel ranks together have been given, those before the start included;
    batches that worker processes have only prepared do not count.
    """

    def __init__(self, batches: Generator[dict[str, torch.Tensor], None, None], sampler: PretrainingSampler) -> None:
        self._batches = batches
        self._samples_per_step = sampler.samples_per_step
        self.consumed_samples = sampler.consumed_samples

    def __iter__(self) -> PretrainingDataLoader:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        batch = next(self._batches)
        self.consumed_samples += self._samples_per_step
        return batch

    def close(self) -> None:
        """End the worker processes. The garbage collector may drop their queues first: then each is waited for 5 s."""
        self._batches.close()


def build_pretraining_data_loader(
    dataset: SampleDataset | None,
    sampler: PretrainingSampler,
    num_workers: int = 0,
    pin_memory: bool = False,
    helpers: HelperProcesses | None = None,
) -> PretrainingDataLoader | None:
    """Loader of the sampler's batches; None for a dataset that is None.

    With ``num_workers`` 0 the batches are made in this process and ``torch.utils.data`` is not imported;
    otherwise that many processes prepare them, from the first ``next()`` on. ``pin_memory`` needs a CUDA
    device. ``helpers``: how these processes live; None: as torch has it. Raises ValueError for num_workers < 0.
    """
    if num_workers < 0:
        raise ValueError(f"--num-workers {num_workers}: give 0 to load in the training process, or more")
    if dataset is None:
        return None
    if num_workers == 0:
        batches = _in_process_batches(dataset, sampler, pin_memory)
    else:
        batches = _worker_batches(dataset, sampler, num_workers, pin_memory, helpers)
    return PretrainingDataLoader(batches, sampler)


def collate(samples: list[dict[str, npt.NDArray[np.int64]]]) -> dict[str, torch.Tensor]:
    """Stack samples ``{"text": [seq_length + 1]}`` to ``{"text": [len(samples), seq_length + 1]}``."""
    import torch

    return {"text": torch.from_numpy(np.stack([sample["text"] for sample in samples]))}


def _in_process_batches(
    dataset: SampleDataset, sampler: PretrainingSampler, pin_memory: bool
) -> Generator[dict[str, torch.Tensor], None, None]:
    for indices in sampler:
        batch = collate([dataset[i] for i in indices])
        yield {key: value.pin_memory() for key, value in batch.items()} if pin_memory else batch


def _worker_batches(
    dataset: Any, sampler: PretrainingSampler, num_workers: int, pin_memory: bool, helpers: HelperProcesses | None
) -> Generator[dict[str, torch.Tensor], None, None]:
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        pin_memory=pin_memory,
        collate_fn=collate,
        # The loader draws a seed for its workers; from the default stream, a restart would shift all dropout.
        generator=torch.Generator(),
        multiprocessing_context=None if helpers is None else helpers.context,
        worker_init_fn=None if helpers is None else helpers.in_worker,
    )
    with contextlib.nullcontext() if helpers is None else helpers.starting():
        batches = iter(loader)
    yield from batches
