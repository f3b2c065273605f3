"""The plan of a checkpoint: every file of every rank, and what rank 0 adds when it commits."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.engines.registry import check_engine_name
from megatron.checkpointing.preflight.compatibility import model_identity, training_identity
from megatron.checkpointing.preflight.first_start import first_start
from megatron.checkpointing.state.collect import Progress
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.commit import collect_files
from megatron.checkpointing.store.manifest import Manifest
from megatron.config import Config, ConfigError
from megatron.parallel.topology import Coordinates, Layout

from .device_memory import device_bytes
from .engines import PlannedState, engine_plan, share_files
from .kinds import KINDS, METADATA, file_tensor_bytes, tensor_bytes_by_kind
from .presets import Planned
from .rank_state import first_save, planned_files
from .stage import stage_on_meta
from .upstream import check_model, upstream_sizes

UPSTREAM = "upstream"


@dataclass(frozen=True)
class PlannedFile:
    """A file in the directory of the checkpoint, or above it ("../latest")."""

    name: str
    num_bytes: int
    rank: int  # the rank that writes it, or the first of those that do


@dataclass(frozen=True)
class RankPlan:
    """What one rank writes and needs; of a file that it shares its part. `by_kind`: bytes of these by kinds.KINDS."""

    rank: int
    at: Coordinates
    files: tuple[PlannedFile, ...]
    by_kind: dict[str, int]
    device: dict[str, int]
    host_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())


@dataclass(frozen=True)
class Plan:
    """The plan of all ranks. `commit_files` (not in `ranks`): manifest.json, and files beside the tag's directory."""

    engine: str
    layout: Layout
    config: Config
    vocab_sizes: tuple[int, int]
    progress: Progress
    ranks: tuple[RankPlan, ...]
    commit_files: tuple[PlannedFile, ...]

    @property
    def files(self) -> list[PlannedFile]:
        found: dict[str, PlannedFile] = {}
        for rank in self.ranks:
            for file in rank.files:
                before = found.get(file.name)
                found[file.name] = (
                    file if before is None else replace(before, num_bytes=before.num_bytes + file.num_bytes)
                )
        return list(found.values())

    @property
    def total_bytes(self) -> int:
        return sum(rank.num_bytes for rank in self.ranks)

    @property
    def by_kind(self) -> dict[str, int]:
        return {kind: sum(rank.by_kind[kind] for rank in self.ranks) for kind in KINDS}


def make_plan(
    planned: Planned,
    engine: str,
    progress: Progress | None = None,
    report: Callable[[int, int], None] = lambda done, ranks: None,
    ranks_per_node: int = 8,
) -> Plan:
    """The plan of a checkpoint of `planned` written by `engine`, or by upstream if that is its name.

    `progress`: at the save; None: at the first save. `report` is called after each rank with the number of ranks done
    and the number of all ranks. `ranks_per_node` counts with --checkpoint-files-per-node. Raises ConfigError for what
    cannot be planned.
    """
    config, layout, vocab_sizes = planned
    if engine != UPSTREAM:
        # An engine that cannot be planned is refused before any work.
        engine_plan(engine)
        check_engine_name(engine, in_object_storage=config.checkpoint.in_object_storage)
    else:
        check_model(config)
    if config.checkpoint.verify_restored_state:
        raise ConfigError(
            "--verify-restored-state: the files of hashes that it adds are not planned; leave it out, and add "
            "tensor_hashes_rank_*.json to what the plan says"
        )
    # The engine's name is one of the saved arguments.
    checkpoint = replace(config.checkpoint, checkpoint_engine="torch" if engine == UPSTREAM else engine)
    config = replace(config, checkpoint=checkpoint)
    planned = (config, layout, vocab_sizes)
    progress = progress or first_save(config)
    # Ranks of a stage follow each other, since their model is built once.
    made = {}
    places = map(layout.coordinates, range(layout.world_size))
    for at in sorted(places, key=lambda at: (at.pp, at.dp % layout.ep, at.tp, at.dp)):
        rank = layout.rank(*at)
        made[rank] = _plan_rank(planned, engine, progress, rank)
        report(len(made), layout.world_size)
    ranks = tuple(made[rank][0] for rank in range(layout.world_size))
    saved = [made[rank][1] for rank in range(layout.world_size)]
    files_per_node = config.checkpoint.checkpoint_files_per_node
    if files_per_node is not None:
        try:
            saved = share_files(saved, files_per_node, ranks_per_node)
        except CheckpointSaveError as exc:
            raise ConfigError(str(exc)) from None
        ranks = tuple(
            replace(rank, files=tuple(replace(file, name=mine.name) for file in rank.files))
            for rank, (mine,) in zip(ranks, saved, strict=True)
        )
    commit_files = () if engine in (UPSTREAM, "none") else _commit_files(planned, engine, progress, saved)
    return Plan(engine, layout, config, vocab_sizes, progress, ranks, commit_files)


def _plan_rank(planned: Planned, engine: str, progress: Progress, rank: int) -> tuple[RankPlan, list[SavedFile]]:
    config, layout, vocab_sizes = planned
    at = layout.coordinates(rank)
    of_engine = engine_plan("torch" if engine == UPSTREAM else engine)
    placements = of_engine.placements
    states = planned_files(config, layout, at, vocab_sizes, progress, with_placements=placements)
    saved = upstream_sizes(states, config, layout, at) if engine == UPSTREAM else of_engine.sizes(states, rank, config)
    kinds = tensor_bytes_by_kind(states)
    stage = stage_on_meta(config.model, vocab_sizes[1], layout, at if placements else at._replace(tp=0))
    parameters = sum(parameter.numel() for parameter in stage.parameters())
    device = device_bytes(config, parameters, stage.num_blocks, at.pp, vocab_sizes[1], kinds)
    total = sum(file.num_bytes for file in saved)
    by_kind = kinds | {METADATA: total - sum(kinds.values())} if saved else dict.fromkeys(KINDS, 0)
    files = tuple(PlannedFile(file.name, file.num_bytes, rank) for file in saved)
    host = of_engine.host_bytes(PlannedState(config, [file_tensor_bytes(file) for file in states], parameters))
    return RankPlan(rank, at, files, by_kind, device, host), saved


def _commit_files(
    planned: Planned, engine: str, progress: Progress, saved: Sequence[Sequence[SavedFile]]
) -> tuple[PlannedFile, ...]:
    """The files that rank 0 writes in the first commit of a run, with sizes from the code that commits."""
    config, layout, vocab_sizes = planned
    tag = names.tag_of(progress.iteration)
    begins = first_start(config.checkpoint)
    manifest = Manifest(
        tag=tag,
        step=progress.iteration,
        engine=engine,
        layout=layout.as_dict(),
        model=model_identity(config.model, vocab_sizes[1]),
        training=training_identity(config),
        files=collect_files(saved),
        loaded_from=begins.loaded_from,
        first_start=begins.flags,
        run_id=uuid.UUID(int=0).hex,  # of the length of any
    )
    return (
        PlannedFile(names.MANIFEST, len(manifest.to_json().encode()), 0),
        PlannedFile(f"../{names.LATEST}", len(tag), 0),
        PlannedFile(f"../{names.TRACKER}", len(str(progress.iteration)), 0),
    )
