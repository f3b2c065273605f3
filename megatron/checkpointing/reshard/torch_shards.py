"""Computes the placements of tensors in files of torch.save, which store none, from DeepSpeed's metadata.

A ZeRO-1 shard says where in its flat partitions the fragment of each parameter lies (`param_slice_mappings`), but not
which elements of the parameter these are; that follows from the fragments of the preceding DP ranks. How TP split a
parameter follows from the live parameter, which is split along the same dimension over another number of ranks.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.base import CheckpointEngine, PlacedTensor, SavedCheckpoint
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointMismatchError
from megatron.checkpointing.engines.torch_files import position_in_file, record_in_file, tensor_records
from megatron.checkpointing.reshard.upstream_modules import expert_files, expert_of, name_in_shard, weights_of
from megatron.checkpointing.state.shard_metadata import shard_placement, weight_placement
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.upstream import ForeignCheckpoint
from megatron.fileio.checksums import CheckedBytes
from megatron.fileio.zip_records import Record
from megatron.parallel.parameter_slice import ParameterSlice
from megatron.parallel.topology import Coordinates, Layout
from restart_trace.recorder import Operation

_EXPERT = re.compile(r"\.deepspeed_experts\.(\d+)\.")


@dataclass(frozen=True)
class FlatGroup:
    """A flat group of the ZeRO-1 shard of one rank: what is in it, and where in the file its tensors lie."""

    path: Path
    at: Coordinates
    group: int
    fragments: Sequence[tuple[str, int, int]]  # name of a parameter, first element in the partition, elements
    tensors: Sequence[PlacedTensor]  # "master" and the moments, by name; of their placements only "numel"


@dataclass
class TorchShards:
    """The tensors of a checkpoint that hold parts of some parameters.

    `parts`: parameters that are needed, as they are split here. `vocab_size`: the tokenizer's. `foreign`: what upstream
    says of the checkpoint, if it saved it.
    """

    reader: CheckpointEngine
    directory: Path
    manifest: Manifest
    parts: Mapping[str, ParameterSlice]
    vocab_size: int
    foreign: ForeignCheckpoint | None
    op: Operation

    def __post_init__(self) -> None:
        self._checkpoint = SavedCheckpoint(self.directory, self.manifest.files)
        self._layout = Layout(**self.manifest.layout)

    def flat_groups(self, ranks: Iterable[int], params_dtype: str) -> list[FlatGroup]:
        """What the files of some of the ranks that saved them say of their shards."""
        found: list[FlatGroup] = []
        for rank in ranks:
            at = self._layout.coordinates(rank)
            path = self._checkpoint.path(names.optimizer_file(self._layout, at, params_dtype))
            found += self._of_shard(path, at)
        return found

    def optimizer_tensors(self, groups: Iterable[FlatGroup]) -> list[PlacedTensor]:
        """Masters and moments. `groups`: of all ranks that saved them, in their order."""
        found: list[PlacedTensor] = []
        begun: dict[tuple[int, int, str], int] = defaultdict(int)  # elements in the DP ranks before
        for group in groups:
            held = []
            for name, offset, numel in group.fragments:
                key = group.at.pp, group.at.tp, name
                start, begun[key] = begun[key], begun[key] + numel
                if name in self.parts and numel:
                    held.append(self._fragment(name, group.at.tp, start, numel) | {"offset": offset})
            if held:
                held.sort(key=lambda fragment: fragment["offset"])
                found += [
                    replace(tensor, placement=shard_placement(tensor.name, held, tensor.placement["numel"]))
                    for tensor in group.tensors
                ]
        for (pp, tp, name), numel in begun.items():
            if name in self.parts:
                self._check_numel(name, pp, tp, numel)
        return found

    def _check_numel(self, name: str, pp: int, tp: int, numel: int) -> None:
        wanted = math.prod(self._old_part(name, tp).local_shape)
        if numel != wanted:
            first = names.optimizer_file(self._layout, Coordinates(tp, pp, 0), self.manifest.model["params_dtype"])
            raise CheckpointDamagedError(
                f"{self._checkpoint.path(first)}: it and its data-parallel replicas have {numel} elements of {name}, "
                f"which has {wanted} there"
            )

    def _fragment(self, name: str, tp_rank: int, start: int, numel: int) -> dict[str, Any]:
        local_shape = list(self._old_part(name, tp_rank).local_shape)
        return self._placement(name, tp_rank) | {"local_shape": local_shape, "start": start, "numel": numel}

    def _placement(self, name: str, tp_rank: int) -> dict[str, Any]:
        """Placement of the part of a parameter that a TP rank of the old layout held."""
        part = self._old_part(name, tp_rank)
        placement = weight_placement(name, part, self.vocab_size)
        if self.foreign is not None and self.foreign.heads_interleaved and ".query_key_value." in name:
            placement["ranges"] = interleaved_ranges(part, self.manifest.model["num_key_value_heads"])
        return placement

    def weights(self, layers: Mapping[int, Mapping[str, str]]) -> list[PlacedTensor]:
        """Weights of pipeline layers: number -> key in the layer's state -> name of the parameter."""
        if self.foreign is not None and self.foreign.in_modules:
            return self._weights_of_modules({name for keys in layers.values() for name in keys.values()}, self.foreign)
        found = []
        for number, keys in layers.items():
            for tp_rank in range(self._layout.tp):
                by_file: dict[str, dict[str, str]] = defaultdict(dict)
                for key, name in keys.items():
                    by_file[self._file_with(number, key, tp_rank)][key] = name
                for file, held in by_file.items():
                    path = self._checkpoint.path(file)
                    found += self._weights_in(path, self._load(path), held, tp_rank)
        return found

    def _weights_of_modules(self, wanted: Collection[str], foreign: ForeignCheckpoint) -> list[PlacedTensor]:
        """As `weights`, of the parameters called `wanted`: of upstream's files of stages, and of experts."""
        found: list[PlacedTensor] = []
        experts = {expert_of(name) for name in wanted}

        def add(file: str, tp_rank: int) -> Iterable[str]:
            path = self._checkpoint.path(file)
            weights = weights_of(self._load(path), foreign)
            found.extend(self._weights_in(path, weights, {name: name for name in weights if name in wanted}, tp_rank))
            return weights

        for pp, tp_rank in itertools.product(range(self._layout.pp), range(self._layout.tp)):
            at = Coordinates(tp_rank, pp, 0)
            weights = add(names.model_states_file(self._layout, at), tp_rank)
            for expert, file in expert_files(weights, names.model_parallel_rank(self._layout, at), foreign).items():
                if expert in experts:
                    add(file, tp_rank)
        return found

    def _file_with(self, number: int, key: str, tp_rank: int) -> str:
        """The file with the weight `key` of a pipeline layer. Experts that were divided have files of their own."""
        expert = _EXPERT.search(key)
        own = names.expert_file(number, int(expert[1]), tp_rank) if expert else None
        return own if own in self.manifest.files else names.layer_file(number, tp_rank)

    def _weights_in(
        self, path: Path, state: Mapping[str, Any], keys: Mapping[str, str], tp_rank: int
    ) -> Iterator[PlacedTensor]:
        records = self._records(path)
        for key, name in keys.items():
            _check_weight(path, key, state, self._old_part(name, tp_rank))
            yield placed_tensor(path, key, state[key], self._placement(name, tp_rank), records)

    def _records(self, path: Path) -> Mapping[int, Record]:
        """By first byte; none if checksums are not to be verified."""
        return tensor_records(path) if self.reader.options.verify_checksums else {}

    def _load(self, path: Path) -> Any:
        return self.reader.load_values(path.name, self._checkpoint, self.op)

    def _of_shard(self, path: Path, at: Coordinates) -> Iterator[FlatGroup]:
        shard = _shard_of(path, self._load(path))
        records = self._records(path)
        masters = shard["single_partition_of_fp32_groups"]
        for group, (master, mapping) in enumerate(zip(masters, shard["param_slice_mappings"], strict=True)):
            fragments = [
                (self._name_in_shard(name, at), address.start, address.numel) for name, address in mapping.items()
            ]
            _check_fragments(path, fragments, master.numel())
            tensors = [
                placed_tensor(path, kind, tensor, {"numel": tensor.numel()}, records)
                for kind, tensor in [("master", master), *_moments(shard["base_optimizer_state"], group)]
            ]
            # DeepSpeed takes the padding of the last partition off the masters, and leaves that of the moments.
            if any(tensor.placement["numel"] < master.numel() for tensor in tensors):
                raise CheckpointDamagedError(f"{path}: the moments of group {group} are shorter than its masters")
            yield FlatGroup(path, at, group, fragments, tensors)

    def _name_in_shard(self, name: str, at: Coordinates) -> str:
        if self.foreign is None or not self.foreign.in_modules:
            return name
        return name_in_shard(name, at.dp, self.foreign)

    def _old_part(self, name: str, tp_rank: int) -> ParameterSlice:
        """The part of a parameter that a TP rank of the old layout held."""
        part = self.parts[name]
        if part.vocabulary:  # padded so that TP divides it
            padded = self.manifest.model["padded_vocab_size"]
            part = replace(part, shape=(padded, *part.shape[1:]), blocks=(padded,), tp_rank=0, tp_size=1)
        return replace(part, tp_rank=tp_rank, tp_size=self._layout.tp)


def interleaved_ranges(part: ParameterSlice, groups: int) -> list[list[int]]:
    """`ranges` of fused QKV where the rows of each key/value head lie together: its query heads, the key, the value.

    `groups`: key/value heads of the model.
    """
    ends = [sum(part.blocks[: i + 1]) for i in range(len(part.blocks))]
    widths = [block // groups for block in part.blocks]
    mine = range(part.tp_rank * groups // part.tp_size, (part.tp_rank + 1) * groups // part.tp_size)
    return [
        [end - block + head * width, end - block + (head + 1) * width]
        for head in mine
        for end, block, width in zip(ends, part.blocks, widths, strict=True)
    ]


def _shard_of(path: Path, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """DeepSpeed's part of an optimizer file. Raises CheckpointMismatchError if it cannot be cut anew."""
    shard = state.get("optimizer_state_dict") or {}
    needed = ("single_partition_of_fp32_groups", "param_slice_mappings", "base_optimizer_state")
    lacking = [name for name in needed if name not in shard]
    if lacking or isinstance(shard["base_optimizer_state"], list):
        why = f"has no {', '.join(lacking)}" if lacking else "was saved with zero_optimization.elastic_checkpoint"
        raise CheckpointMismatchError(
            f"{path}: {why}, and only a shard of ZeRO stage 1 that says where each parameter lies in it can be loaded "
            "onto another layout; save the checkpoint so, or give --no-load-optim"
        )
    return shard


def _check_fragments(path: Path, fragments: Sequence[tuple[str, int, int]], numel: int) -> None:
    for name, start, count in fragments:
        if start < 0 or not 0 <= count <= numel - start:
            raise CheckpointDamagedError(
                f"{path}: {name} has the elements {start} to {start + count} of a partition of {numel}"
            )


def _check_weight(path: Path, key: str, state: Mapping[str, Any], part: ParameterSlice) -> None:
    """Raises CheckpointMismatchError if the state of a layer has not what the model needs."""
    shape = tuple(state[key].shape) if key in state else None
    if shape != part.local_shape:
        there = "is missing" if shape is None else f"has the shape {shape}"
        raise CheckpointMismatchError(
            f"{path}: {key} {there}, and {part.local_shape} belongs there: it is of another model; give the flags of "
            "the run that saved it, or another --load"
        )


def _moments(base: Mapping[str, Any], group: int) -> Iterator[tuple[str, torch.Tensor]]:
    (key,) = base["param_groups"][group]["params"]  # ZeRO gives the optimizer a single flat tensor per group
    for kind, value in base["state"].get(key, {}).items():
        if torch.is_tensor(value) and value.dim():
            yield kind, value


def placed_tensor(
    path: Path, name: str, tensor: torch.Tensor, placement: dict[str, Any], records: Mapping[int, Record]
) -> PlacedTensor:
    """`tensor`, as `read_values` has read it from `path`, to be verified by the one of `records` that it is in.

    Raises CheckpointDamagedError if its elements do not lie in order, or it is in none of the `records` though there
    are some.
    """
    if not tensor.is_contiguous():
        raise CheckpointDamagedError(f"{path}: the elements of {name} do not lie in order")
    checked = None
    record = records.get(record_in_file(tensor))
    if record is not None:
        end = record.offset + record.size
        checked = CheckedBytes(f"{name}, record {record.name},", record.offset, end, record.crc32)
    elif records:
        raise CheckpointDamagedError(f"{path}: {name} is in no record of the file")
    return PlacedTensor(path, name, tensor.dtype, position_in_file(tensor), placement, checked)
