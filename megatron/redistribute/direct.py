"""--redistribute direct: every rank reads just its share of a checkpoint of another layout, and nothing is converted.

Masters and moments are read out of the files of all ranks that saved them, wherever the bytes lie that belong to this
rank's ZeRO-1 partition. So no two DP replicas read the same bytes. The weights are the masters, rounded and gathered
over the replicas, as after a step of the optimizer. The random state of a rank has no successor on another layout: it
is seeded anew. Checksums of tensors are not verified: a rank reads parts of them; those of the headers are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron import checkpoint_layout as names
from megatron.checkpoint_commit import Candidate, Manifest
from megatron.checkpoint_engines.base import CheckpointEngine, PlacedTensor
from megatron.checkpoint_placements import (
    flat_partitions,
    fragments,
    layer_modules,
    layer_placements,
    shard_placement,
)
from megatron.checkpoint_state import (
    Progress,
    RankPlace,
    restore_optimizer,
    restore_progress,
    restore_tied_weights,
)
from megatron.config import Config
from megatron.redistribute.reading import read_transfers
from megatron.redistribute.sources import WEIGHT, SourceIndex
from megatron.redistribute.targets import Target, plan
from megatron.redistribute.torch_shards import TorchShards
from megatron.restart_trace.recorder import Operation
from megatron.tensor_parallel.parameter_slice import slice_of
from megatron.tensor_parallel.random import seed_everything
from megatron.topology import Layout

_MASTER = "master"


class DirectLoad:
    """One load onto another layout: `read` on each rank, then, once all ranks have, `apply`."""

    def __init__(
        self,
        engine: Any,
        place: RankPlace,
        config: Config,
        vocab_size: int,
        candidate: Candidate,
        op: Operation,
    ) -> None:
        """`vocab_size`: the tokenizer's. `candidate` has a manifest."""
        self._engine = engine
        self._place = place
        self._config = config
        self._vocab_size = vocab_size
        self._directory = candidate.directory
        self._manifest: Manifest = candidate.manifest  # pyright: ignore[reportAttributeAccessIssue]
        self._op = op
        options = config.checkpoint
        self._with_optimizer = not (options.no_load_optim or options.finetune)
        self._common: dict[str, Any] = {}
        self._shard: dict[str, Any] = {}

    def read(self, reader: CheckpointEngine) -> None:
        """Read this rank's share into live tensors, and into memory for the moments.

        Raises CheckpointDamagedError or OSError for files that cannot be used, CheckpointMismatchError naming what the
        checkpoint lacks.
        """
        files = self._manifest.files
        old = Layout(**self._manifest.layout)
        first = old.coordinates(0)
        with self._op.span("discover"):
            index = SourceIndex(self._placed_tensors(reader))
        self._common = reader.load_values(
            names.model_states_file(old, first), self._directory, files, self._op
        )
        if self._with_optimizer:
            name = names.optimizer_file(old, first, self._place.params_dtype)
            saved = reader.load_values(name, self._directory, files, self._op)["optimizer_state_dict"]
            targets = self._optimizer(saved, index)
        else:
            targets = self._weights()
        with self._op.span("redistribute", "reshard"):
            transfers = plan(targets, index)
        options = self._config.checkpoint
        sizes = {self._directory / name: file.num_bytes for name, file in files.items()}
        moved = read_transfers(transfers, sizes, options.direct_io, options.io_threads, self._op)
        self._op.bytes = (self._op.bytes or 0) + moved
        self._op.num_files = (self._op.num_files or 0) + len({t.source.path for t in transfers})

    def apply(self) -> Progress:
        """Make what was read the state of training; collective over all ranks."""
        engine = self._engine
        with self._op.span("load", "host_to_device"):
            if self._with_optimizer:
                restore_optimizer(engine, self._place, self._shard)
            else:
                engine.optimizer._restore_from_bit16_weights()
            progress = restore_progress(engine, self._common, self._config)
        with self._op.span("redistribute", "all_gather" if self._with_optimizer else "broadcast"):
            if self._with_optimizer:
                engine.optimizer.update_lp_params()
            else:
                restore_tied_weights(engine, False)
        self._seed(progress)
        return progress

    def _placed_tensors(self, reader: CheckpointEngine) -> list[PlacedTensor]:
        if reader.wants_placements:
            return reader.placed_tensors(self._directory, self._manifest.files, self._op)
        parts = {name: slice_of(param, name) for name, param in self._engine.module.named_parameters()}
        shards = TorchShards(reader, self._directory, self._manifest, parts, self._vocab_size, self._op)
        if self._with_optimizer:
            return shards.optimizer_tensors(self._place.params_dtype)
        layers = {
            number: {
                key: placement["name"]
                for key, placement in layer_placements(self._engine, layer, self._vocab_size).items()
            }
            for number, layer in layer_modules(self._engine)
        }
        return shards.weights(layers)

    def _weights(self) -> list[Target]:
        """The live weights of this stage's layers."""
        targets = []
        for _, layer in layer_modules(self._engine):
            state = layer.state_dict()
            placements = layer_placements(self._engine, layer, self._vocab_size)
            targets += [Target(state[key], WEIGHT, placement) for key, placement in placements.items()]
        return targets

    def _optimizer(self, saved: Mapping[str, Any], index: SourceIndex) -> list[Target]:
        """The live masters, and new tensors for the moments; makes the shard that DeepSpeed is to load."""
        inner = self._engine.basic_optimizer
        own = self._engine.optimizer.state_dict()
        masters = own["single_partition_of_fp32_groups"]
        params = [param for group in inner.param_groups for param in group["params"]]
        held = [
            fragments(partition, self._vocab_size)
            for partition in flat_partitions(self._engine, self._place.at.dp)
        ]
        kinds = sorted(index.kinds() - {WEIGHT, _MASTER})
        base = saved["base_optimizer_state"]
        counters = _counters(base)
        targets, state = [], {}
        for group, (master, param) in enumerate(zip(masters, params, strict=True)):
            placement = shard_placement(_MASTER, held[group], master.numel())
            targets.append(Target(master.detach(), _MASTER, placement))
            moments = {kind: torch.empty_like(param) for kind in kinds}
            for kind, moment in moments.items():
                targets.append(Target(moment, kind, shard_placement(kind, held[group], moment.numel())))
            state[group] = _copied(counters) | moments  # torch counts in place, for each parameter by itself
        groups = _groups(base["param_groups"], own["base_optimizer_state"]["param_groups"])
        of_training = {key: saved[key] for key in own if key in _OF_TRAINING and key in saved}
        self._shard = own | of_training | {"base_optimizer_state": {"state": state, "param_groups": groups}}
        return targets

    def _seed(self, progress: Progress) -> None:
        """Other random numbers than those that training began with, the same on every resume from here."""
        training, at = self._config.training, self._place.at
        seed_everything(
            training.seed + progress.iteration,
            pp_rank=at.pp,
            tp_rank=at.tp,
            dp_offset=10 * at.dp if training.data_parallel_random_init else 0,
        )


_OF_TRAINING = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")  # else a shard is of its rank


def _counters(base: Mapping[str, Any]) -> dict[str, Any]:
    """What the optimizer keeps of every parameter alike: its step counter."""
    for values in base["state"].values():
        return {key: value for key, value in values.items() if not torch.is_tensor(value) or value.dim() == 0}
    return {}


def _copied(counters: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in counters.items()}


def _groups(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options of the saved groups, of the same name, for this rank's parameters."""
    by_name = {group.get("name"): group for group in saved}
    return [by_name.get(group.get("name"), group) | {"params": group["params"]} for group in own]
