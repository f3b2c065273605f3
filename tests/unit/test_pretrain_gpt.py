"""A micro-batch on its way from the loader to the model: what it holds, and what is copied for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.parallel.topology import TensorParallelGroup
from megatron.training.data import BatchRequest
from pretrain_gpt import get_batch_pipe, loss_func

TEXT = torch.tensor([[5, 0, 7, 9], [1, 2, 3, 0]])
CPU, DEVICE = torch.device("cpu"), torch.device("meta")  # which stands in for CUDA: it has tensors that are not here


def request(*, first: bool = True, last: bool = True, positions: bool = False, eod: int | None = None) -> BatchRequest:
    return BatchRequest(CPU, first, last, positions, eod)


def test_tokens_labels_and_mask_of_a_text() -> None:
    tokens, (labels, mask, counted) = get_batch_pipe({"text": TEXT}, request())
    assert tokens.tolist() == [[5, 0, 7], [1, 2, 3]]
    assert labels.tolist() == [[0, 7, 9], [2, 3, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 1, 1]] and mask.dtype == torch.float32
    assert counted.item() == 6


def test_no_loss_where_a_document_has_ended() -> None:
    _, (_, mask, counted) = get_batch_pipe({"text": TEXT}, request(eod=0))
    assert mask.tolist() == [[1, 0, 1], [1, 1, 1]] and mask.dtype == torch.float32
    assert counted.item() == 5


def test_ranks_of_a_sequence_get_a_part_each_and_their_mean_loss_is_that_of_the_whole() -> None:
    """Of three parts the mask keeps 2, 1 and 2 tokens."""
    (tokens, positions), (targets, mask, counted) = get_batch_pipe({"text": TEXT}, request(positions=True, eod=0))
    logits = torch.randn((*tokens.shape, 11), generator=torch.Generator().manual_seed(1))
    expected = loss_func(logits, (targets, mask, counted), TensorParallelGroup())
    losses = []
    for part in range(3):
        asked = BatchRequest(CPU, True, True, True, 0, part, 3)
        (own_tokens, own_positions), labels = get_batch_pipe({"text": TEXT}, asked)
        assert torch.equal(own_tokens, tokens[:, part : part + 1])
        assert torch.equal(own_positions, positions[:, part : part + 1])
        losses.append(loss_func(logits[:, part : part + 1], labels, TensorParallelGroup()))
    assert torch.stack(losses).mean().item() == pytest.approx(expected.item(), abs=1e-6)


def test_a_stage_gets_what_it_uses() -> None:
    (tokens, position_ids), labels = get_batch_pipe({"text": TEXT}, request(last=False, positions=True))
    assert labels is None
    assert tokens.shape == position_ids.shape and position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    inputs, labels = get_batch_pipe({"text": TEXT}, request(first=False, positions=True))
    assert inputs is None and len(labels) == 3


class Transfers(TorchDispatchMode):
    """Counts what copies from the host to the device, and which operations make tensors on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device = 0
        self.on_host: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = {leaf.device for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        if CPU in made:
            self.on_host.append(str(func))
        elif CPU in given:
            self.to_device += 1
        return result


@dataclass
class Stage:
    """What PipelineEngine's loading of a micro-batch uses of its engine, on the device that is not there."""

    request: BatchRequest
    device: torch.device = DEVICE
    pipe_buffers: dict[str, list[Any]] = field(default_factory=lambda: {"inputs": [None], "labels": [None]})

    def _next_batch(self) -> Any:
        return get_batch_pipe({"text": TEXT}, self.request)

    def wall_clock_breakdown(self) -> bool:
        return False

    def _reentrant_activation_checkpointing(self) -> bool:
        return True

    def is_first_stage(self) -> bool:
        return self.request.first_stage

    def is_last_stage(self) -> bool:
        return self.request.last_stage


@pytest.mark.parametrize(("first", "last"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("eod", [None, 0])
def test_deepspeed_loads_a_micro_batch_with_one_copy_to_the_device(
    first: bool, last: bool, positions: bool, eod: int | None
) -> None:
    stage: Any = Stage(BatchRequest(DEVICE, first, last, positions, eod))
    with Transfers() as transfers:
        PipelineEngine._exec_load_micro_batch(stage, 0)
    assert (transfers.to_device, transfers.on_host) == (1, [])
    inputs, labels = (stage.pipe_buffers[name][0] for name in ("inputs", "labels"))
    assert (inputs is not None, labels is not None) == (first, last)
    assert all(tensor.device == DEVICE for tensor in tree_leaves((inputs, labels)) if tensor is not None)
