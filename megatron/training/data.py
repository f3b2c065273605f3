"""Datasets and loaders of a rank, positioned at the samples consumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing.state import Progress, samples_of_run
from megatron.config import Config
from megatron.data.data_samplers import PretrainingSampler, build_pretraining_data_loader
from megatron.parallel.control_plane import ControlPlane
from megatron.parallel.topology import Coordinates, Layout

SplitDatasets = tuple[Any, Any, Any]


class DataError(RuntimeError):
    """The data cannot be read or indexed; the message names the file or flag."""


@dataclass(frozen=True)
class DataRequest:
    """The datasets that a provider is to build. Samples are (train, valid, test).

    `indexed_samples` decide the order of the data and stay the same over all restarts of a run;
    `needed_samples` are those that this run will read.
    """

    config: Config
    indexed_samples: tuple[int, int, int]
    needed_samples: tuple[int, int, int]
    is_builder: bool
    agree: Callable[[Exception | None], None]


@dataclass
class DataIterators:
    """Iterators over micro-batches; None on pipeline stages that read no data, or if a split is empty."""

    train: Iterator[Any] | None
    valid: Iterator[Any] | None
    test: Iterator[Any] | None
    has_valid: bool
    has_test: bool


def build_data_iterators(
    provider: Callable[[DataRequest], SplitDatasets],
    config: Config,
    control: ControlPlane,
    layout: Layout,
    at: Coordinates,
    progress: Progress,
) -> DataIterators:
    """Build the datasets and position them at `progress`, in constant time; collective.

    Sets `progress.indexed_samples` for the splits for which it is not set yet. Raises DataError on every rank, with the
    reason, if any rank fails.
    """
    training = config.training
    needed = samples_of_run(
        training.train_iters,
        training.eval_interval,
        training.eval_iters,
        training.global_batch_size,
        training.train_samples,
    )
    train, valid, test = progress.indexed_samples or (0, 0, 0)
    # A split that no launch has read yet, for example without --eval-iters, has no order that must be kept.
    progress.indexed_samples = train or needed[0], valid or needed[1], test or needed[2]

    def agree(error: Exception | None) -> None:
        failed = control.agree(None if error is None else str(error))
        if failed:
            raise DataError("; ".join(dict.fromkeys(reason for _, reason in failed)))

    train_set, valid_set, test_set = provider(
        DataRequest(config, progress.indexed_samples, needed, control.rank == 0, agree)
    )

    def loader(dataset: Any, consumed: int) -> Iterator[Any] | None:
        if dataset is None or at.pp not in (0, layout.pp - 1):
            return None
        sampler = PretrainingSampler(None, consumed, training.micro_batch_size, at.dp, layout.dp)
        return build_pretraining_data_loader(dataset, sampler, config.data.num_workers)

    return DataIterators(
        train=loader(train_set, progress.consumed_train_samples),
        valid=loader(valid_set, progress.consumed_valid_samples),
        test=loader(test_set, 0),
        has_valid=valid_set is not None and training.eval_iters > 0,
        has_test=test_set is not None and training.eval_iters > 0,
    )
