"""What a load onto another layout takes to plan: what ranks tell each other, of a checkpoint that is only described.

The model has the shapes of 70b, with half its TP and PP and four times its DP. The ranks take turns: what rank 0
computes of all of them, and what each of them of its own, is the code of a load.
"""

from __future__ import annotations

import math
import pickle
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.base import PlacedTensor
from megatron.checkpointing.reshard.direct import Survey, surveys_of_each
from megatron.checkpointing.reshard.reading import Reading
from megatron.checkpointing.reshard.runs import parts_of
from megatron.checkpointing.reshard.sources import SourceIndex, kind_of
from megatron.checkpointing.reshard.targets import Target, plan
from megatron.checkpointing.reshard.verifying import Share, shares_of_each, to_verify
from megatron.checkpointing.state.shard_metadata import FlatParameter, FlatPartition, fragments, shard_placement
from megatron.fileio.checksums import CheckedBytes
from megatron.parallel.parameter_slice import ParameterSlice
from megatron.parallel.topology import Layout
from restart_trace.clock import now_ns

_HIDDEN, _FFN, _LAYERS, _KV, _VOCABULARY = 8192, 28672, 80, 1024, 51200
_KINDS = ("master", "exp_avg", "exp_avg_sq")
_FLOAT = 4  # bytes
_SAVED = Path("/save/global_step1")


@dataclass(frozen=True)
class Planning:
    """Of one number of ranks: bytes and seconds of one of them (medians and the most), and seconds of rank 0's."""

    tensors: int
    all_bytes: int  # what each would hear if each heard of all
    told_bytes: tuple[float, int]
    shares_bytes: tuple[float, int]
    plan_s: tuple[float, float]
    dealing_s: float  # rank 0, for all


def layouts(ranks: int) -> tuple[Layout, Layout]:
    """The one that the checkpoint was saved on, and the one it is loaded onto."""
    across = 8 if ranks >= 64 else 2
    old = Layout(tp=across, pp=across, dp=ranks // across**2)
    return old, Layout(tp=across // 2, pp=across // 2, dp=old.dp * 4)


def measure_planning(ranks: int) -> Planning:
    """`ranks` are a multiple of 4, and from 64 on of 64."""
    old, new = layouts(ranks)
    surveys = []
    for rank in range(ranks):
        needed = {part["name"] for part in _held(new, rank)}
        surveys.append(Survey(list(_saved_by(old, rank)), needed))
    everything = [tensor for survey in surveys for tensor in survey.tensors]
    begin = now_ns()
    received = [pickle.dumps(survey) for survey in surveys_of_each(surveys)]
    dealing = now_ns() - begin
    sizes = {tensor.path: 1 << 40 for tensor in everything}
    shares, plan_ns = [], []
    for rank in range(ranks):
        begin = now_ns()
        shares.append(_share(new, rank, pickle.loads(received[rank]), sizes))
        plan_ns.append(now_ns() - begin)
    begin = now_ns()
    dealt = [pickle.dumps(mine) for mine in shares_of_each(shares)]
    dealing += now_ns() - begin
    for rank in range(ranks):
        begin = now_ns()
        to_verify(pickle.loads(dealt[rank]), rank)
        plan_ns[rank] += now_ns() - begin
    told_bytes, shares_bytes = ([len(one) for one in items] for items in (received, dealt))
    seconds = [taken / 1e9 for taken in plan_ns]
    return Planning(
        tensors=len(everything),
        all_bytes=len(pickle.dumps(everything)) + len(pickle.dumps(shares)),
        told_bytes=(statistics.median(told_bytes), max(told_bytes)),
        shares_bytes=(statistics.median(shares_bytes), max(shares_bytes)),
        plan_s=(statistics.median(seconds), max(seconds)),
        dealing_s=dealing / 1e9,
    )


def _share(layout: Layout, rank: int, received: Survey, sizes: dict[Path, int]) -> Share:
    index = SourceIndex(received.tensors)
    held = _held(layout, rank)
    numel = sum(part["numel"] for part in held)
    targets = [Target(torch.empty(numel, device="meta"), kind, shard_placement(kind, held, numel)) for kind in _KINDS]
    assert received.kinds == {kind_of(tensor) for tensor in received.tensors}
    return Reading(plan(targets, index), sizes, "auto", None).share()


def _saved_by(layout: Layout, rank: int) -> Iterator[PlacedTensor]:
    held = _held(layout, rank)
    numel = sum(part["numel"] for part in held)
    path = _SAVED / f"rank_{rank:05d}.safetensors"
    for number, kind in enumerate(_KINDS):
        start = number * numel * _FLOAT
        checked = CheckedBytes(kind, start, start + numel * _FLOAT, 0)
        placement = shard_placement(kind, held, numel)
        assert parts_of(placement) == held
        yield PlacedTensor(path, kind, torch.float32, start, placement, checked)


def _held(layout: Layout, rank: int) -> list[dict[str, Any]]:
    """The fragments of a rank's partition of its stage's flat group."""
    at = layout.coordinates(rank)
    table, offset = [], 0
    for name, shape, dim, blocks in _stage(at.pp, layout.pp):
        vocabulary = blocks == (_VOCABULARY,)
        part = ParameterSlice(shape, dim, blocks, at.tp, layout.tp, vocabulary)
        table.append(FlatParameter(name, part, offset))
        offset += math.prod(part.local_shape)
    size = -(-offset // (2 * layout.dp)) * 2
    return fragments(FlatPartition(table, at.dp * size, size), _VOCABULARY)


def _stage(stage: int, stages: int) -> Iterator[tuple[str, tuple[int, ...], int | None, tuple[int, ...]]]:
    """Name, shape, dimension split over TP and fused blocks of each parameter of a pipeline stage."""
    if stage == 0:
        yield "embedding.weight", (_VOCABULARY, _HIDDEN), 0, (_VOCABULARY,)
    for layer in range(_LAYERS * stage // stages, _LAYERS * (stage + 1) // stages):
        qkv, gated = (_HIDDEN, _KV, _KV), (_FFN, _FFN)
        yield f"{layer}.input_layernorm.weight", (_HIDDEN,), None, ()
        yield f"{layer}.self_attention.query_key_value.weight", (sum(qkv), _HIDDEN), 0, qkv
        yield f"{layer}.self_attention.dense.weight", (_HIDDEN, _HIDDEN), 1, (_HIDDEN,)
        yield f"{layer}.post_attention_layernorm.weight", (_HIDDEN,), None, ()
        yield f"{layer}.mlp.dense_h_to_4h.weight", (sum(gated), _HIDDEN), 0, gated
        yield f"{layer}.mlp.dense_4h_to_h.weight", (_HIDDEN, _FFN), 1, (_FFN,)
    if stage == stages - 1:
        yield "final_layernorm.weight", (_HIDDEN,), None, ()
        yield "lm_head.weight", (_VOCABULARY, _HIDDEN), 0, (_VOCABULARY,)
