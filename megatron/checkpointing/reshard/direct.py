"""Loads a checkpoint onto another layout: every rank reads only its share of the files, and nothing is converted.

Masters and moments are read from the files of all ranks that saved them, at the bytes that belong to this rank's ZeRO-1
partition, so no two DP replicas read the same bytes. The weights are the masters, rounded and gathered over the
replicas, as after a step of the optimizer (gathering.py). With --no-load-optim only weights are read, which all DP
replicas need: each replica reads some of them and broadcasts them to the others. verifying.py says which rank verifies
which bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.checkpointing.agreement import CheckpointRejectedError, exchanging, run_and_scatter, run_on_all_ranks
from megatron.checkpointing.context import RunContext
from megatron.checkpointing.engines.base import (
    CheckpointEngine,
    FileCopies,
    FileState,
    MemoryFiles,
    PlacedTensor,
    SavedCheckpoint,
    note_loaded,
)
from megatron.checkpointing.engines.errors import CheckpointMismatchError, reading
from megatron.checkpointing.reshard.gathering import update_weights
from megatron.checkpointing.reshard.reading import Reading
from megatron.checkpointing.reshard.runs import parts_of
from megatron.checkpointing.reshard.sources import WEIGHT, SourceIndex, kind_of
from megatron.checkpointing.reshard.targets import Target, plan
from megatron.checkpointing.reshard.torch_shards import TorchShards
from megatron.checkpointing.reshard.verifying import Share, Shares, damage, shares_of_each
from megatron.checkpointing.state.changed_flags import check_training, warn_of_changes
from megatron.checkpointing.state.collect import Progress
from megatron.checkpointing.state.layer_files import layer_files, layers_of
from megatron.checkpointing.state.replicas import broadcast_within_replicas
from megatron.checkpointing.state.restore import restore_optimizer, restore_progress, restore_tied_weights
from megatron.checkpointing.state.shard_metadata import (
    flat_partitions,
    fragments,
    layer_placements,
    names_of_parameters,
    shard_placement,
)
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.commit import collect_files, parts_of_ranks
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.parts import share_of, spread_over_replicas
from megatron.checkpointing.store.search import Candidate
from megatron.checkpointing.store.upstream import ForeignCheckpoint
from megatron.fileio.checksums import RangeChecksum
from megatron.parallel.parameter_slice import slice_of
from megatron.parallel.topology import Layout
from restart_trace.recorder import Operation
from restart_trace.under_way import READING, UnderWay

_MASTER = "master"


@dataclass
class Survey:
    """What a rank, or all of them, found in the old files.

    `tensors`: PlacedTensor, or where there are no placements FlatGroup. `needed`: the parameters that the rank holds a
    part of. `kinds`: of the tensors of all ranks.
    """

    tensors: list[Any] = field(default_factory=list)
    needed: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)


class _Read(NamedTuple):
    """What a rank has read: CRC-32s of what it is to verify, and by file the copy that it used of a save in memory."""

    checksums: list[RangeChecksum]
    used: dict[str, int]


def _joined(found: list[Survey]) -> Survey:
    """The surveys of all ranks as one, with the tensors in the order of the ranks that saved them."""
    return Survey([tensor for mine in found for tensor in mine.tensors])


def surveys_of_each(found: list[Survey]) -> list[Survey]:
    """As `_joined`, but by rank: to each only the tensors that have a part of what it needs."""
    everything = _joined(found)
    holding: dict[str, list[int]] = {}
    for position, tensor in enumerate(everything.tensors):
        for name in {part["name"] for part in parts_of(tensor.placement)}:
            holding.setdefault(name, []).append(position)
    kinds = {kind_of(tensor) for tensor in everything.tensors}
    surveys = []
    for mine in found:
        positions = sorted({position for name in mine.needed for position in holding.get(name, [])})
        tensors = [everything.tensors[position] for position in positions]
        surveys.append(Survey(tensors, kinds=kinds))
    return surveys


class DirectLoad:
    """One load onto another layout, with the checkpoint engine `reader`: each rank reads its share of the old files."""

    def __init__(
        self,
        ctx: RunContext,
        reader: CheckpointEngine,
        engine: Any,
        candidate: Candidate,
        foreign: ForeignCheckpoint | None,
        files: SavedCheckpoint,
        op: Operation,
    ) -> None:
        """`candidate` has a manifest, made for it if it is `foreign`; its files are read from `files`."""
        self._ctx = ctx
        self._place = ctx.place
        self._reader = reader
        self._engine = engine
        self._directory = candidate.directory
        self._told_as = candidate.place
        self._manifest: Manifest = candidate.manifest  # pyright: ignore[reportAttributeAccessIssue]
        self._checkpoint = files
        self._foreign = foreign
        self._op = op
        self._common: dict[str, Any] = {}  # what is the same for all ranks of the checkpoint
        options = ctx.config.checkpoint
        self._with_optimizer = not (options.no_load_optim or options.finetune)
        self._from_masters = self._with_optimizer  # else the weights are read, and masters are made of them
        self._shard: dict[str, Any] = {}
        self._weights: list[tuple[Target, range]] = []  # and the DP ranks that hold the same

    def run(self) -> Progress:
        """Plan, read and verify, apply; collective over all ranks, and raises on all of them as `run_on_all_ranks`.

        CheckpointMismatchError, before any tensor is read, names what the checkpoint lacks.
        """
        reading: list[Reading] = []
        of_all: dict[int, Share] = {}  # on rank 0

        def make_plan() -> Share:
            reading.append(self._plan(values, surveyed))
            return reading[0].share()

        def conclude(shares: list[Share]) -> list[Shares]:
            of_all.update(enumerate(shares))
            return shares_of_each(shares)

        def verify(found: list[_Read]) -> dict[str, int]:
            with self._op.span("load", "verify"):
                wrong = damage(of_all, [part for mine in found for part in mine.checksums], self._directory)
            return self._other_copies(wrong, found)

        control = self._ctx.control
        values = run_on_all_ranks(control, self._op, self._values, lambda by_rank: by_rank[0])
        if self._surveys_parameters:
            surveyed = run_and_scatter(control, self._op, self._survey, surveys_of_each)
        else:
            surveyed = run_on_all_ranks(control, self._op, self._survey, _joined)
        shares = run_and_scatter(control, self._op, make_plan, conclude)
        while others := run_on_all_ranks(control, self._op, lambda: self._read(reading[0], shares), verify):
            for name, number in others.items():
                self._copies.use(name, number)
        return self._apply()

    @property
    def _surveys_parameters(self) -> bool:
        """Whether each entry of a survey names its parameter, so that a rank needs only some of the entries."""
        return self._reader.wants_placements

    @property
    def _copies(self) -> FileCopies:
        """The access to the files of a save in memory."""
        assert isinstance(self._checkpoint, MemoryFiles)
        return self._checkpoint.copies

    def _other_copies(self, wrong: Mapping[str, list[str]], found: Sequence[_Read]) -> dict[str, int]:
        """On rank 0: by damaged file, the copy of it that all ranks are to use; everything is read once more then.

        Raises CheckpointRejectedError if there is none of some file. `wrong`: file name -> messages.
        """
        others, lost = {}, []
        for name, messages in wrong.items():
            number = None
            if isinstance(self._checkpoint, MemoryFiles):
                used = {mine.used[name] for mine in found if name in mine.used}
                number = self._copies.another(name, used, "; ".join(messages))
            if number is None:
                lost += messages
            else:
                others[name] = number
        if lost:
            raise CheckpointRejectedError(*lost)
        return others

    def _values(self) -> list[Any]:
        """On rank 0: the mp_rank state of the first rank that saved the checkpoint and, if wanted, its optimizer state.

        Tensors with dimensions may be without data.
        """
        old = Layout(**self._manifest.layout)
        first = old.coordinates(0)
        optimizer_file = names.optimizer_file(old, first, self._place.params_dtype)
        if self._with_optimizer and not self._checkpoint.holding(optimizer_file):
            raise CheckpointMismatchError(
                f"{self._directory}: was saved without {optimizer_file}; give --no-load-optim if it was saved with "
                "--no-save-optim, or load another checkpoint"
            )
        if self._ctx.control.rank != 0:
            return []
        wanted = [names.model_states_file(old, first), *([optimizer_file] if self._with_optimizer else [])]
        with reading(self._directory):
            common, *shard = [self._reader.load_values(name, self._checkpoint, self._op) for name in wanted]
            return [common | {"module": None}, *shard]  # upstream's may have weights there

    def _survey(self) -> Survey:
        """What the old files hold. Each file, or part of a shared one, is surveyed by one rank."""
        rank, world_size = self._ctx.control.rank, self._ctx.control.world_size
        old = Layout(**self._manifest.layout)
        found = Survey()
        with self._op.span("discover"), reading(self._directory):
            if self._reader.wants_placements:
                mine = share_of(parts_of_ranks(self._manifest.files), rank, world_size)
                checkpoint = replace(self._checkpoint, files=collect_files([mine]))
                tensors = self._reader.placed_tensors(checkpoint, self._op)
                found.tensors = [it for it in tensors if (kind_of(it) == WEIGHT) != self._with_optimizer]
                found.needed = self._names_held()
            elif self._with_optimizer:
                ranks = share_of(range(old.world_size), rank, world_size)
                shards = self._torch_shards()
                found.tensors = shards.flat_groups(ranks, self._place.params_dtype)
        return found

    def _names_held(self) -> set[str]:
        """The parameters of which this rank holds a part that is to be filled."""
        if not self._from_masters:
            return {it.placement["name"] for it, _ in self._live_weights()}
        partitions = flat_partitions(self._engine, self._place.at.dp)
        return {part["name"] for each in partitions for part in fragments(each, self._ctx.vocab_size)}

    def _plan(self, values: list[Any], surveyed: Survey) -> Reading:
        """What this rank reads: into live tensors, and into memory for the moments. `surveyed`: by all ranks."""
        with self._op.span("discover"), reading(self._directory):
            placed = self._placed_tensors(surveyed.tensors)
            sizes = self._file_sizes(placed)
            index = SourceIndex(placed)
        kinds = surveyed.kinds or index.kinds()
        self._common = values[0]
        check_training(self._common, self._ctx.config, self._directory)
        if self._from_masters:
            with reading(self._directory):
                saved = values[1]["optimizer_state_dict"]
            targets = self._optimizer(saved, kinds)
        else:
            self._weights = self._live_weights()
            here = self._place.at.dp
            targets = [it for (it, _), dp in zip(self._weights, self._readers(), strict=True) if dp == here]
        with self._op.span("redistribute", "reshard"):
            options, files = self._ctx.config.checkpoint, self._checkpoint
            direct_io, bring = options.direct_io, None
            if isinstance(files, MemoryFiles):
                direct_io, bring = "off", files.copies.bring  # they are memory already
            ranged = self._checkpoint.ranged
            return Reading(
                plan(targets, index), {path: size for path, (_, size) in sizes.items()}, direct_io, options.io_threads,
                bring=bring, ranged=ranged, names={path: name for path, (name, _) in sizes.items()},
            )  # fmt: skip

    def _file_sizes(self, placed: Sequence[PlacedTensor]) -> dict[Path, tuple[str, int]]:
        """The files that may be read: path -> (name in the directory of the checkpoint, size in bytes)."""
        return {self._directory / name: (name, file.num_bytes) for name, file in self._manifest.files.items()}

    def _read(self, reading: Reading, shares: Shares) -> _Read:
        with UnderWay(READING, f"the reading of {self._told_as}"):
            checksums = reading.run(shares, self._ctx.control.rank, self._op)
        note_loaded(reading.bytes_read, reading.num_files, self._op)
        return _Read(checksums, self._copies.used() if isinstance(self._checkpoint, MemoryFiles) else {})

    def _readers(self) -> list[int]:
        """The DP rank that reads each of `_weights`: the same list on all replicas."""
        sizes = [target.tensor.nbytes for target, _ in self._weights]
        return spread_over_replicas(sizes, [replicas for _, replicas in self._weights])

    def _share_weights(self) -> None:
        """Have the weights that each DP replica has read on all of them; collective over these."""
        place = self._place
        if place.layout.dp == 1:
            return
        pairs = zip(self._weights, self._readers(), strict=True)
        weights = [(target.tensor, reader, replicas) for (target, replicas), reader in pairs]
        with self._op.span("redistribute", "broadcast"), exchanging(self._ctx.control, "exchange of weights"):
            broadcast_within_replicas(self._engine, place, weights)

    def _apply(self) -> Progress:
        """Make what was read the state of training; collective over all ranks."""
        control = self._ctx.control
        if not self._from_masters:
            self._share_weights()
        progress: Progress = run_on_all_ranks(control, self._op, self._restore)[control.rank]
        if self._from_masters:
            with exchanging(control, "exchange of weights"):
                update_weights(self._engine.optimizer, self._op)
        else:
            with self._op.span("redistribute", "broadcast"), exchanging(control, "sharing of tied weights"):
                restore_tied_weights(self._engine, False)
        return progress

    def _restore(self) -> Progress:
        """The part of `_apply` that each rank does by itself."""
        engine = self._engine
        with self._op.span("load", "host_to_device"):
            if self._with_optimizer:
                restore_optimizer(engine, self._place, self._shard)
            elif not self._from_masters:
                engine.optimizer._restore_from_bit16_weights()
            progress = restore_progress(engine, self._common, self._ctx.config)
            warn_of_changes(self._common["args"], self._ctx.config)
        return progress

    def _torch_shards(self) -> TorchShards:
        parts = {name: slice_of(param, name) for name, param in self._engine.module.named_parameters()}
        return TorchShards(
            self._reader, self._directory, self._manifest, parts, self._ctx.vocab_size, self._foreign, self._op
        )

    def _placed_tensors(self, surveyed: list[Any]) -> list[PlacedTensor]:
        if self._reader.wants_placements:
            return surveyed
        shards = self._torch_shards()
        if self._with_optimizer:
            return shards.optimizer_tensors(surveyed)
        return shards.weights(
            {
                number: {key: placement["name"] for key, placement in self._placements_of(layer).items()}
                for number, layer in layers_of(self._engine.module)
            }
        )

    def _placements_of(self, layer: torch.nn.Module) -> dict[str, dict[str, Any]]:
        file = FileState(type(layer).__name__, layer.state_dict())
        return layer_placements(file, layer, names_of_parameters(self._engine), self._ctx.vocab_size)

    def _live_weights(self) -> list[tuple[Target, range]]:
        """The live weights of this stage's layers, and the DP ranks that hold the same."""
        targets = []
        for file in layer_files(self._engine.module, self._place):
            placements = self._placements_of(file.layer)
            targets += [(Target(it, WEIGHT, placements[key]), file.replicas) for key, it in file.state.items()]
        return targets

    def _optimizer(self, saved: Mapping[str, Any], kinds: set[str]) -> list[Target]:
        """The live masters, and new tensors for the moments; makes the shard that DeepSpeed is to load."""
        inner = self._engine.basic_optimizer
        own = self._engine.optimizer.state_dict()
        masters = own["single_partition_of_fp32_groups"]
        params = [param for group in inner.param_groups for param in group["params"]]
        partitions = flat_partitions(self._engine, self._place.at.dp)
        held = [fragments(partition, self._ctx.vocab_size) for partition in partitions]
        of_moments = sorted(kinds - {WEIGHT, _MASTER})
        with reading(self._directory):
            base = saved["base_optimizer_state"]
            counters = _counters(base)
            groups = _groups(base["param_groups"], own["base_optimizer_state"]["param_groups"])
            of_training = {key: saved[key] for key in own if key in _OF_TRAINING and key in saved}
        targets, state = [], {}
        for group, (master, param) in enumerate(zip(masters, params, strict=True)):
            placement = shard_placement(_MASTER, held[group], master.numel())
            targets.append(Target(master.detach(), _MASTER, placement))
            moments = {kind: torch.empty_like(param) for kind in of_moments}
            for kind, moment in moments.items():
                targets.append(Target(moment, kind, shard_placement(kind, held[group], moment.numel())))
            state[group] = _copied(counters) | moments  # torch counts in place, for each parameter by itself
        self._shard = own | of_training | {"base_optimizer_state": {"state": state, "param_groups": groups}}
        return targets


_OF_TRAINING = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")  # else a shard is of its rank


def _counters(base: Mapping[str, Any]) -> dict[str, Any]:
    """What the optimizer keeps of every parameter alike: its step counter."""
    for values in base["state"].values():
        return {key: value for key, value in values.items() if not torch.is_tensor(value) or value.dim() == 0}
    return {}


def _copied(counters: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in counters.items()}


_OF_A_GROUP = ("params", "name", "moe")  # the others are options of the optimizer


def _groups(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options of the saved groups for this rank's parameters.

    They are those of the group of the same name. Experts that are divided have groups of their own, or none in a
    checkpoint of another layout: their options are those of other parameters with the same weight decay.
    """
    by_name = {group.get("name"): group for group in saved if not group.get("moe")}
    name_of = {group.get("wd_mult"): group.get("name") for group in own if not group.get("moe")}
    found = []
    for group in own:
        name = name_of.get(group.get("wd_mult")) if group.get("moe") else group.get("name")
        found.append(by_name.get(name, group) | {key: group[key] for key in _OF_A_GROUP if key in group})
    return found
