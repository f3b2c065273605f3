"""The passes of each kind of layer of a pipeline stage, counted by running the layers on the meta device."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from torch.autograd.graph import _engine_run_backward

from megatron.config import ModelConfig
from megatron.model import gpt_model
from megatron.model.experts import AuxiliaryLoss
from megatron.model.gpt_model import TORCH_DTYPES
from megatron.parallel.expert_parallel import ExpertParallel
from megatron.parallel.placement import Placement
from megatron.parallel.random import MODEL_PARALLEL_RNG
from megatron.parallel.topology import Layout, TensorParallelGroup

from .passes import CudaKernels, Pass, PassRecorder

EMBEDDING, BLOCK, NORM, HEAD = "embedding", "block", "norm", "head"


@dataclass(frozen=True)
class LayerPasses:
    """The passes of one micro batch through a layer; `kept`: storages that others read after it."""

    forward: tuple[Pass, ...]
    backward: tuple[Pass, ...]
    kept: frozenset[int]


def block_of(experts: int) -> str:
    """What a block with so many experts is called; BLOCK if it has one MLP."""
    return BLOCK if experts == 1 else f"{BLOCK} of {experts} experts"


@functools.lru_cache(maxsize=8)
def count_layers(
    model: ModelConfig, padded_vocab_size: int, tp: int, sequence_parallel: bool, micro_batch_size: int, ep: int = 1
) -> dict[str, LayerPasses]:
    """The layers of rank 0 of `tp` tensor-parallel ranks, and of `ep` that experts are divided over.

    By EMBEDDING, `block_of` the numbers of experts, NORM, HEAD (which includes the loss).
    """
    device = torch.device("meta")
    with _groups_of(tp, ep) as group:
        parallel = TensorParallelGroup(0, tp, group, sequence_parallel)
        experts = ExpertParallel(Layout(tp, 1, ep, ep))
        experts.connect(model.experts_per_layer)
        place = Placement(parallel, TORCH_DTYPES[model.params_dtype], device, experts=experts)
        auxiliary = AuxiliaryLoss(model.moe_loss_coeff) if model.has_experts else None
        _, first, *blocks, norm, last = gpt_model._layer_specs(model, padded_vocab_size, place, auxiliary)
        by_kind = dict(zip(map(block_of, model.experts_per_layer), blocks, strict=True))
        tokens = torch.empty((micro_batch_size, model.seq_length), dtype=torch.int64, device=device)
        length = model.seq_length // (tp if parallel.splits_sequence else 1)

        def hidden() -> torch.Tensor:
            shape = (micro_batch_size, length, model.hidden_size)
            return torch.empty(shape, dtype=place.dtype, device=device, requires_grad=True)

        head, tied = last.build(), getattr(last, "forward_fn", None)
        loss_func = importlib.import_module("pretrain_gpt").loss_func  # the program's: no package imports it
        mask = torch.empty(tokens.shape, device=device)
        counted = mask.sum()

        def head_and_loss(x: torch.Tensor) -> torch.Tensor:
            return loss_func(tied(head, x) if tied else head(x), (tokens, mask, counted), parallel)

        return {
            EMBEDDING: _count(first.build(), (tokens, tokens) if model.add_position_embedding else tokens),
            **{kind: _count(block.build(), hidden()) for kind, block in by_kind.items()},
            NORM: _count(norm.build(), hidden()),
            HEAD: _count(head_and_loss, hidden()),
        }


def _count(layer: Callable[[Any], torch.Tensor], inputs: Any) -> LayerPasses:
    recorder = PassRecorder()
    with warnings.catch_warnings(), CudaKernels(recorder), recorder:
        warnings.simplefilter("ignore", FutureWarning)
        layer(inputs)  # what is computed once and kept, such as the table of rotations, is no part of a step
        recorder.passes.clear()
        out = layer(inputs)
        forward = len(recorder.passes)
        recorder.backward = True
        # As torch.autograd.backward, which itself passes CudaKernels, and would run the engine without it.
        _engine_run_backward(
            (out,), (torch.empty_like(out),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    kept = {recorder.number_of(out)}
    for tensor in [inputs, *(layer.parameters() if isinstance(layer, torch.nn.Module) else ())]:
        if isinstance(tensor, torch.Tensor) and tensor.grad is not None:
            kept.add(recorder.number_of(tensor.grad))
    return LayerPasses(tuple(recorder.passes[:forward]), tuple(recorder.passes[forward:]), frozenset(kept))


@contextlib.contextmanager
def _groups_of(tp: int, ep: int) -> Iterator[Any]:
    """A process group of `tp` of tp x ep ranks, whose collectives do nothing: torch's back end for such purposes.

    Also the random stream from which dropout draws.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if MODEL_PARALLEL_RNG not in get_cuda_rng_tracker().get_states():
        get_cuda_rng_tracker().add(MODEL_PARALLEL_RNG, 0)
    dist.init_process_group("fake", rank=0, world_size=tp * ep, store=FakeStore())
    try:
        yield dist.group.WORLD if ep == 1 else dist.new_group(list(range(tp)))
    finally:
        dist.destroy_process_group()
