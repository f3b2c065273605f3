"""Datasets and loaders of a rank, positioned at the samples consumed."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing.state.collect import Progress
from megatron.config import Config, ConfigError
from megatron.data.data_samplers import PretrainingSampler, build_pretraining_data_loader
from megatron.parallel.control_plane import ControlPlane
from megatron.processes.in_process_restart import at_return
from megatron.startup.initialize import Runtime
from megatron.startup.preflight import Vocabulary
from megatron.training.helpers import Helpers
from restart_trace.device_threads import device_thread

logger = logging.getLogger(__name__)

SplitDatasets = tuple[Any, Any, Any]
_MOST_BETWEEN_SIGNS_S = 10.0


class DataError(RuntimeError):
    """The data cannot be read or indexed; the message names the file or flag."""


class DataFailureError(DataError):
    """A rank failed while it built the datasets, by an error that is not of the data: another start may go well."""

    exit_code = 1


@dataclass(frozen=True)
class DataRequest:
    """The datasets that a provider is to build. Samples are (train, valid, test).

    `indexed_samples` decide the order of the data and stay the same over all restarts of a run;
    `needed_samples` are those that this run will read. `run_on_builder` and `agree` are for
    build_train_valid_test_datasets.
    """

    config: Config
    indexed_samples: tuple[int, int, int]
    needed_samples: tuple[int, int, int]
    run_on_builder: Callable[[Callable[[], None]], Exception | None]
    agree: Callable[[Exception | None], None]


@dataclass(frozen=True)
class BatchRequest:
    """What the stage of this rank needs of each micro-batch."""

    device: Any  # torch.device
    first_stage: bool  # needs the inputs
    last_stage: bool  # needs labels and loss mask
    position_ids: bool  # whether position ids are among the inputs: only learned positions use them
    eod_token: int | None  # with --eod-mask-loss
    part: int = 0  # of each sequence, which `parts` ranks with the same micro-batches divide among themselves
    parts: int = 1


def agreed_vocabulary(config: Config, vocabulary: Vocabulary, control: ControlPlane) -> Vocabulary:
    """Rank 0's, which has seen the checkpoint; collective.

    Raises ConfigError on every rank, naming the host and the fix, if the tokenizer of any host is another one.
    """
    first = control.broadcast(vocabulary)
    mine, wanted = (f"it has {each.size} tokens and {each.eod} ends a document" for each in (vocabulary, first))
    differ = control.agree(f"{os.uname().nodename}, {mine}" if mine != wanted else None)
    if differ:
        rank, told = differ[0]
        raise ConfigError(
            f"--tokenizer-type {config.data.tokenizer_type}: on rank {rank}, {told}, on rank 0 {wanted}; give every "
            "host the same files and flags"
        )
    return first


def batch_request(config: Config, runtime: Runtime, eod_token: int | None) -> BatchRequest:
    """That of this rank. `eod_token`: the tokenizer's."""
    stage = runtime.coordinates.pp
    return BatchRequest(
        device=runtime.device,
        first_stage=stage == 0,
        last_stage=stage == runtime.layout.pp - 1,
        position_ids=config.model.add_position_embedding,
        eod_token=eod_token if config.data.eod_mask_loss else None,
        part=runtime.coordinates.dp % config.parallel.ds_sequence_parallel_size,
        parts=config.parallel.ds_sequence_parallel_size,
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
    reason, if any rank fails: DataFailureError if none did by a ValueError or an OSError.
    """
    training, control = config.training, runtime.control
    at, layout, parts = runtime.coordinates, runtime.layout, config.parallel.ds_sequence_parallel_size
    needed = training.needed_samples
    train, valid, test = progress.indexed_samples or (0, 0, 0)
    # A split that no launch has read yet, for example without --eval-iters, has no order that must be kept.
    progress.indexed_samples = train or needed[0], valid or needed[1], test or needed[2]

    def agree(error: Exception | None) -> None:
        of_data = isinstance(error, (ValueError, OSError))
        if error is not None and not of_data:
            logger.error("rank %d: the data could not be built", control.rank, exc_info=error)
        reason = str(error) if of_data else f"rank {control.rank}: {type(error).__name__}: {error}"
        failed = control.agree(None if error is None else json.dumps([of_data, reason]))
        if failed:
            told = [json.loads(content) for _, content in failed]
            kind = DataError if any(of_data for of_data, _ in told) else DataFailureError
            raise kind("; ".join(dict.fromkeys(reason for _, reason in told)))

    pause_s = min(_MOST_BETWEEN_SIGNS_S, 60 * config.parallel.distributed_timeout_minutes / 4)
    run_on_builder = functools.partial(run_on_rank_0, control, pause_s)
    train_set, valid_set, test_set = provider(
        DataRequest(config, progress.indexed_samples, needed, run_on_builder, agree)
    )

    def loader(dataset: Any, consumed: int) -> Iterator[Any] | None:
        if dataset is None or at.pp not in (0, layout.pp - 1):
            return None
        sampler = PretrainingSampler(None, consumed, training.micro_batch_size, at.dp // parts, layout.dp // parts)
        made = build_pretraining_data_loader(
            dataset, sampler, config.data.num_workers, runtime.device.type != "cpu", Helpers()
        )
        if made is not None:
            at_return(made.close)
        return made

    return DataIterators(
        train=loader(train_set, progress.consumed_train_samples),
        valid=loader(valid_set, progress.consumed_valid_samples),
        test=loader(test_set, 0),
        has_valid=valid_set is not None and training.eval_iters > 0,
        has_test=test_set is not None and training.eval_iters > 0,
    )


def run_on_rank_0(control: ControlPlane, pause_s: float, work: Callable[[], None]) -> Exception | None:
    """Collective: run `work` on rank 0, while the others wait for it however long it takes. Returns what it raised.

    An index of hundreds of millions of samples takes longer than --distributed-timeout-minutes, so the others hear
    every `pause_s` seconds that rank 0 is at work. If a rank is lost meanwhile, the others raise AgreementLostError;
    what rank 0 has cached by then need not be built again.
    """
    if control.rank != 0:
        while control.broadcast(None):
            pass
        return None
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = device_thread(run, name="data-index")
    thread.start()
    while thread.is_alive():
        thread.join(pause_s)
        if thread.is_alive():
            control.broadcast(True)
    control.broadcast(False)
    return errors[0] if errors else None
