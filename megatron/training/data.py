"""Datasets and loaders of a rank, positioned at the samples consumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing.state import Progress, samples_of_run
from megatron.config import Config
from megatron.data.data_samplers import PretrainingSampler, build_pretraining_data_loader
from megatron.startup.initialize import Runtime

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


@dataclass(frozen=True)
class BatchRequest:
    """What the stage of this rank needs of each micro-batch."""

    device: Any  # torch.device
    first_stage: bool  # needs the inputs
    last_stage: bool  # needs labels and loss mask
    position_ids: bool  # whether position ids are among the inputs: only learned positions use them
    eod_token: int | None  # with --eod-mask-loss


def batch_request(config: Config, runtime: Runtime, eod_token: int | None) -> BatchRequest:
    """That of this rank. `eod_token`: the tokenizer's."""
    stage = runtime.coordinates.pp
    return BatchRequest(
        device=runtime.device,
        first_stage=stage == 0,
        last_stage=stage == runtime.layout.pp - 1,
        position_ids=config.model.add_position_embedding,
        eod_token=eod_token if config.data.eod_mask_loss else None,
    )


@dataclass
class DataIterators:
    """Iterators over micro-batches; None on pipeline stages that read no data, or if a split is empty."""

    train: Iterator[Any] | None
    valid: Iterator[Any] | None
    test: Iterator[Any] | None
    has_valid: bool
    has_test: bool


def build_data_iterators(
    provider: Callable[[DataRequest], SplitDatasets], config: Config, runtime: Runtime, progress: Progress
) -> DataIterators:
    """Build the datasets and position them at `progress`, in constant time; collective.

    Micro-batches are in host memory, which is pinned if the rank computes on a device: only from there does a copy not
    wait for the device's earlier work.
    Sets `progress.indexed_samples` for the splits for which it is not set yet. Raises DataError on every rank, with the
    reason, if any rank fails.
    """
    training, control = config.training, runtime.control
    at, layout = runtime.coordinates, runtime.layout
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
        return build_pretraining_data_loader(dataset, sampler, config.data.num_workers, runtime.device.type != "cpu")

    return DataIterators(
        train=loader(train_set, progress.consumed_train_samples),
        valid=loader(valid_set, progress.consumed_valid_samples),
        test=loader(test_set, 0),
        has_valid=valid_set is not None and training.eval_iters > 0,
        has_test=test_set is not None and training.eval_iters > 0,
    )
