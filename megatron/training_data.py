"""Datasets and loaders of a rank, positioned where training stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint_state import Progress
from megatron.config import Config
from megatron.control_plane import ControlPlane
from megatron.data.data_samplers import PretrainingSampler, build_pretraining_data_loader
from megatron.topology import Coordinates, Layout

SplitDatasets = tuple[Any, Any, Any]


@dataclass(frozen=True)
class DataRequest:
    """What a datasets provider is asked for. Samples are (train, valid, test).

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
    """Iterators over micro-batches; None on pipeline stages that read no data, or where a split is empty."""

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

    Sets `progress.indexed_train_samples` if it is not set yet. Raises RuntimeError on every rank, with the
    reason, if any rank fails.
    """
    training = config.training
    train_samples = training.train_iters * training.global_batch_size
    evaluations = training.train_iters // training.eval_interval + 1 if training.eval_interval else 1
    eval_samples = training.eval_iters * training.global_batch_size
    needed = (train_samples, evaluations * eval_samples, eval_samples)
    progress.indexed_train_samples = progress.indexed_train_samples or train_samples

    def agree(error: Exception | None) -> None:
        failed = control.agree(None if error is None else f"{type(error).__name__}: {error}")
        if failed and error is None:
            raise RuntimeError("; ".join(f"rank {rank}: {reason}" for rank, reason in failed))

    train, valid, test = provider(
        DataRequest(
            config, (progress.indexed_train_samples, *needed[1:]), needed, control.rank == 0, agree
        )
    )

    def loader(dataset: Any, consumed: int) -> Iterator[Any] | None:
        if dataset is None or at.pp not in (0, layout.pp - 1):
            return None
        sampler = PretrainingSampler(None, consumed, training.micro_batch_size, at.dp, layout.dp)
        return build_pretraining_data_loader(dataset, sampler, config.data.num_workers)

    return DataIterators(
        train=loader(train, progress.consumed_train_samples),
        valid=loader(valid, progress.consumed_valid_samples),
        test=loader(test, 0),
        has_valid=valid is not None and training.eval_iters > 0,
        has_test=test is not None and training.eval_iters > 0,
    )
