"""Which part of which parameter each tensor of a checkpoint is, so that another layout can find what it needs.

A placement is a JSON object kept beside a tensor. With those of all ranks, and without any code of the model, each
element of each parameter can be found in the files of any TP x PP x DP layout.

Weight (tensors of the layer_* files):

    name      parameter name, the same on every stage and layout: "5.mlp.dense_4h_to_h.weight" (5 is the number of
              the pipeline layer) or "tied_modules.embed.word_embeddings.weight"; an expert's has its number there
    shape     of the full parameter
    dim       dimension split over TP; null: every TP rank holds the whole parameter
    ranges    [[start, stop], ...] along `dim` of the full parameter: the tensor here is their concatenation. One
              range, or one for each matrix that is fused there (query, key, value; gate, up). null if `dim` is
    unpadded  only where `dim` counts tokens: size of the true vocabulary; what follows is of no token

ZeRO-1 shard (flat tensors of the *_optim_states file: master weights and the optimizer's state of the same shape):

    kind       "master", or the optimizer's key: "exp_avg", "exp_avg_sq", "momentum_buffer"
    fragments  [{name, shape, dim, ranges, unpadded: of the parameter, as above
                 local_shape: of this rank's slice of it
                 start, numel: elements [start, start + numel) of that slice, flattened row by row
                 offset: where they begin in the tensor here}, ...] in order of `offset`; no two overlap
    padding    elements of the tensor that belong to no fragment: alignment, of no meaning

A parameter that is replicated over TP is in the files of every TP rank, the same bits. A tied embedding is in the
shards of the first and of the last stage, where its masters and moments may differ by rounding: the first stage's,
on the lower rank, are the ones to read, as its weight is the one in a layer_* file.

How DeepSpeed lays out a flat group (runtime/bf16_optimizer.py, runtime/zero/stage_1_and_2.py of 0.19): parameters one
after the other, zeros up to a multiple of 2 x DP elements, then cut into DP partitions of equal size. For experts that
are divided over EP of the DP ranks it is DP / EP instead of DP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from megatron.checkpointing.engines.base import FileState
from megatron.checkpointing.state.layer_files import layer_files
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.naming import RankPlace
from megatron.parallel.parameter_slice import ParameterSlice, slice_of

JsonObject = dict[str, Any]
NestPath = tuple[Any, ...]  # keys from the top of a state down to a tensor

_MASTERS = ("optimizer_state_dict", "single_partition_of_fp32_groups")
_BASE = ("optimizer_state_dict", "base_optimizer_state")


@dataclass(frozen=True)
class FlatParameter:
    """A parameter in a flat group of ZeRO-1. `offset`: of its first element in the whole group, elements."""

    name: str
    part: ParameterSlice
    offset: int


@dataclass(frozen=True)
class FlatPartition:
    """The partition [start, start + size) of a flat group that one DP rank holds, elements."""

    parameters: Sequence[FlatParameter]  # of the whole group
    start: int
    size: int


def weight_placement(name: str, part: ParameterSlice, vocab_size: int) -> JsonObject:
    """Placement of the tensor that holds `part` of the parameter called `name`.

    `vocab_size`: the true vocabulary, of the tokenizer.
    """
    ranges = part.ranges
    placed: JsonObject = {
        "name": name,
        "shape": list(part.shape),
        "dim": part.dim,
        "ranges": None if ranges is None else [list(pair) for pair in ranges],
    }
    if part.vocabulary:
        placed["unpadded"] = vocab_size
    return placed


def fragments(partition: FlatPartition, vocab_size: int) -> list[JsonObject]:
    """What lies in a partition, in order; padding is left out."""
    found = []
    end = partition.start + partition.size
    for parameter in partition.parameters:
        local_shape = parameter.part.local_shape
        first = max(parameter.offset, partition.start)
        numel = min(parameter.offset + math.prod(local_shape), end) - first
        if numel > 0:
            fragment = weight_placement(parameter.name, parameter.part, vocab_size)
            fragment |= {
                "local_shape": list(local_shape),
                "start": first - parameter.offset,
                "numel": numel,
                "offset": first - partition.start,
            }
            found.append(fragment)
    return sorted(found, key=lambda fragment: fragment["offset"])


def shard_placement(kind: str, held: list[JsonObject], numel: int) -> JsonObject:
    """Placement of a flat tensor of `numel` elements with the fragments `held`.

    The tensor may end with the last fragment or go on with padding. Raises ValueError if it is shorter.
    """
    end = held[-1]["offset"] + held[-1]["numel"] if held else 0
    if end > numel:
        raise ValueError(f"{kind}: a flat tensor of {numel} elements cannot hold fragments up to element {end}")
    covered = sum(fragment["numel"] for fragment in held)
    return {"kind": kind, "fragments": held, "padding": numel - covered}


def optimizer_placements(
    state: Mapping[str, Any], partitions: Sequence[FlatPartition], vocab_size: int
) -> dict[NestPath, JsonObject]:
    """Path in the nest -> placement, for an optimizer file's `state`; `partitions` are those of its groups.

    0-dimensional tensors (step counters) are everybody's and get none.
    """
    held = [fragments(partition, vocab_size) for partition in partitions]
    placed: dict[NestPath, JsonObject] = {}
    for group, master in enumerate(state[_MASTERS[0]][_MASTERS[1]]):
        placed[(*_MASTERS, group)] = shard_placement("master", held[group], master.numel())
    for path, group, values in _moments(state[_BASE[0]][_BASE[1]]):
        for kind, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() == 1:
                placed[(*_BASE, *path, kind)] = shard_placement(kind, held[group], value.numel())
    return placed


def _moments(base: Any) -> Iterator[tuple[NestPath, int, Mapping[str, Any]]]:
    """(path within the base optimizer's state, flat group, its tensors by name)."""
    if isinstance(base, list):  # zero_optimization.elastic_checkpoint
        for group, values in enumerate(base):
            yield (group,), group, values
        return
    for group, options in enumerate(base["param_groups"]):
        for key in options["params"]:  # one: ZeRO gives the optimizer a single flat tensor per group
            if key in base["state"]:  # empty until the optimizer has stepped
                yield ("state", key), group, base["state"][key]


def add_placements(engine: Any, place: RankPlace, vocab_size: int, files: list[FileState]) -> list[FileState]:
    """`files`, as collected from a DeepSpeed PipelineEngine, with their `placements`. No tensor is copied or read.

    `vocab_size`: the true vocabulary, of the tokenizer. Raises ValueError naming a tensor whose parameter does not
    say how it is split.
    """
    name_of = names_of_parameters(engine)
    layers = {file.name: file.layer for file in layer_files(engine.module, place)}
    optimizer_file = names.optimizer_file(place.layout, place.at, place.params_dtype)
    placed = []
    for file in files:
        if file.name in layers:
            found = layer_placements(file, layers[file.name], name_of, vocab_size)
            file = replace(file, placements={(key,): placement for key, placement in found.items()})
        elif file.name == optimizer_file:
            partitions = flat_partitions(engine, place.at.dp)
            file = replace(file, placements=optimizer_placements(file.state, partitions, vocab_size))
        placed.append(file)
    return placed


def layer_placements(
    file: FileState, layer: torch.nn.Module, name_of: Mapping[int, str], vocab_size: int
) -> dict[str, JsonObject]:
    """Key -> placement, for `file` with the state of a pipeline layer. Raises ValueError as `add_placements`."""
    params = dict(layer.named_parameters(remove_duplicate=False))
    unknown = [key for key in file.state if key not in params]
    if unknown:
        raise ValueError(f"{file.name}: {', '.join(unknown)}: no parameter, so where it belongs is unknown")
    named = [(key, name_of[id(params[key])]) for key in file.state]
    return {key: weight_placement(name, slice_of(params[key], name), vocab_size) for key, name in named}


def names_of_parameters(engine: Any) -> dict[int, str]:
    """id of a live parameter -> its name."""
    return {id(param): name for name, param in engine.module.named_parameters()}


def flat_partitions(engine: Any, dp_rank: int) -> list[FlatPartition]:
    """The partitions of the flat groups of DeepSpeed's optimizer that `dp_rank` holds.

    Groups of divided experts are partitioned over the ranks with the same experts.
    """
    optimizer, name_of = engine.optimizer, names_of_parameters(engine)
    # DeepSpeed has two classes of it: bf16, and all else.
    if hasattr(optimizer, "bf16_groups"):
        groups = optimizer.bf16_groups
        offsets = [[0, *accumulate(param.numel() for param in group)][:-1] for group in groups]
        sizes = [partitions[0].numel() for partitions in optimizer.bf16_partitioned_groups]  # all are equal
    else:  # its order and offsets differ from the default with round_robin_gradients and parameter_alignment
        groups = optimizer.round_robin_bit16_groups
        offsets = optimizer.round_robin_bit16_offsets
        sizes = optimizer.partition_size
    found = []
    for params, starts, size in zip(groups, offsets, sizes, strict=True):
        named = [(name_of[id(param)], param, start) for param, start in zip(params, starts, strict=True)]
        table = [FlatParameter(name, slice_of(param, name), start) for name, param, start in named]
        mark = getattr(params[0], "divided_expert", None)
        found.append(FlatPartition(table, (dp_rank if mark is None else dp_rank // mark.ranks) * size, size))
    return found
