"""Placements for checkpoints of engine torch, which keeps none: worked out of DeepSpeed's own metadata.

A ZeRO-1 shard says where in its flat partitions each parameter's fragment lies (`param_slice_mappings`), not which part
of the parameter that is; it follows from the fragments of the DP ranks before. How TP split a parameter follows from
the live parameter, which is split the same way, but for the number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron import checkpoint_layout as names
from megatron.checkpoint_commit import Manifest
from megatron.checkpoint_engines.base import CheckpointEngine, PlacedTensor
from megatron.checkpoint_engines.errors import CheckpointDamagedError
from megatron.checkpoint_engines.torch_files import position_in_file
from megatron.checkpoint_placements import shard_placement, weight_placement
from megatron.restart_trace.recorder import Operation
from megatron.tensor_parallel.parameter_slice import ParameterSlice
from megatron.topology import Coordinates, Layout


class TorchShards:
    """The tensors of a checkpoint that hold parts of some parameters."""

    def __init__(
        self,
        reader: CheckpointEngine,
        directory: Path,
        manifest: Manifest,
        parts: Mapping[str, ParameterSlice],
        vocab_size: int,
        op: Operation,
    ) -> None:
        """`parts`: parameters that are needed, as they are split here. `vocab_size`: the tokenizer's."""
        self._reader = reader
        self._directory = directory
        self._manifest = manifest
        self._layout = Layout(**manifest.layout)
        self._parts = parts
        self._vocab_size = vocab_size
        self._op = op

    def optimizer_tensors(self, params_dtype: str) -> list[PlacedTensor]:
        """Masters and moments, in the order of the ranks that saved them."""
        found: list[PlacedTensor] = []
        begun: dict[tuple[Any, ...], int] = defaultdict(int)  # elements of a parameter in the DP ranks before
        for rank in range(self._layout.world_size):
            at = self._layout.coordinates(rank)
            path = self._directory / names.optimizer_file(self._layout, at, params_dtype)
            found += self._of_shard(path, at, begun)
        return found

    def weights(self, layers: Mapping[int, Mapping[str, str]]) -> list[PlacedTensor]:
        """Weights of pipeline layers: number -> key in the layer's state -> name of the parameter."""
        found = []
        for number, keys in layers.items():
            for tp_rank in range(self._layout.tp):
                path = self._directory / names.layer_file(number, tp_rank)
                state = self._load(path)
                for key, name in keys.items():
                    placement = weight_placement(name, self._old_part(name, tp_rank), self._vocab_size)
                    found.append(_placed(path, key, state[key], placement))
        return found

    def _load(self, path: Path) -> Any:
        return self._reader.load_values(path.name, self._directory, self._manifest.files, self._op)

    def _of_shard(
        self, path: Path, at: Coordinates, begun: dict[tuple[Any, ...], int]
    ) -> Iterator[PlacedTensor]:
        shard = self._load(path)["optimizer_state_dict"]
        masters = shard["single_partition_of_fp32_groups"]
        for group, (master, mapping) in enumerate(zip(masters, shard["param_slice_mappings"], strict=True)):
            held = []
            for name, address in mapping.items():
                key = at.pp, at.tp, group, name
                start, begun[key] = begun[key], begun[key] + address.numel
                if name in self._parts and address.numel:
                    part = self._old_part(name, at.tp)
                    fragment = weight_placement(name, part, self._vocab_size)
                    fragment |= {
                        "local_shape": list(part.local_shape),
                        "start": start,
                        "numel": address.numel,
                    }
                    held.append(fragment | {"offset": address.start})
            if not held:
                continue
            held.sort(key=lambda fragment: fragment["offset"])
            for kind, tensor in [("master", master), *_moments(shard["base_optimizer_state"], group)]:
                yield _placed(path, kind, tensor, shard_placement(kind, held, tensor.numel()))

    def _old_part(self, name: str, tp_rank: int) -> ParameterSlice:
        """The part of a parameter that a TP rank of the old layout held."""
        part = self._parts[name]
        if part.vocabulary:  # padded so that TP divides it
            padded = self._manifest.model["padded_vocab_size"]
            part = replace(part, shape=(padded, *part.shape[1:]), blocks=(padded,), tp_rank=0, tp_size=1)
        return replace(part, tp_rank=tp_rank, tp_size=self._layout.tp)


def _moments(base: Mapping[str, Any], group: int) -> Iterator[tuple[str, torch.Tensor]]:
    (key,) = base["param_groups"][group]["params"]  # ZeRO gives the optimizer a single flat tensor per group
    for kind, value in base["state"].get(key, {}).items():
        if torch.is_tensor(value) and value.dim():
            yield kind, value


def _placed(path: Path, name: str, tensor: torch.Tensor, placement: dict[str, Any]) -> PlacedTensor:
    if not tensor.is_contiguous():
        raise CheckpointDamagedError(f"{path}: the elements of {name} do not lie in order")
    return PlacedTensor(path, name, tensor.dtype, position_in_file(tensor), placement)
