"""Checks that a checkpoint fits the model and the layout, before torch is imported and before any tensor is read."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.base import EngineOptions, SavedCheckpoint
from megatron.checkpointing.engines.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    EngineUnavailableError,
    UnknownEngineError,
    reading,
)
from megatron.checkpointing.engines.registry import (
    check_engine_name,
    create_engine,
    is_redistributable,
    redistributable_engines,
)
from megatron.checkpointing.preflight.universal_directory import inspect
from megatron.checkpointing.state.changed_flags import REFUSED_OF_MODEL, REFUSED_OF_TRAINING, check_refused
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.search import Candidate, read_latest
from megatron.checkpointing.store.upstream import FIRST_FILE, ForeignCheckpoint, describe, read_header
from megatron.config import Config, ConfigError, ModelConfig, padded_vocab_size
from megatron.config.arguments import namespace_from_config
from megatron.config.flags import flag_name
from megatron.config.model import position_embedding_type
from megatron.config.schedule import check_same_schedule, schedule_settings
from megatron.config.uris import is_uri
from megatron.fileio.files import is_directory, is_there
from megatron.parallel.topology import Layout
from restart_trace.recorder import untraced_operation

# Of a run that does not save a state -> what says that it is not loaded either, and what is missing.
_NOT_SAVED = {
    "no_save_optim": ("no_load_optim", "no optimizer state"),
    "no_save_rng": ("no_load_rng", "no random state, and dropout would repeat its masks"),
}
_LARGEST_TP = 128


def model_identity(model: ModelConfig, padded_vocab_size: int) -> dict[str, Any]:
    """What must be equal for the tensors of a checkpoint to fit."""
    identity = {name: getattr(model, name) for name in REFUSED_OF_MODEL}
    identity["num_experts"] = " ".join(map(str, model.num_experts))  # a manifest has no lists here
    if model.add_position_embedding:
        identity["max_position_embeddings"] = model.max_position_embeddings
    return identity | {"padded_vocab_size": padded_vocab_size, "params_dtype": model.params_dtype}


def _identity_in(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """model_identity as a checkpoint has it, with what earlier versions and upstream could not have otherwise."""
    lacking: dict[str, Any] = {
        "embed_layernorm": False, "num_experts": "1", "expert_interval": 2, "mlp_type": "standard",
    }  # fmt: skip
    rotary, table = (checkpoint.get(name) for name in ("use_rotary_position_embeddings", "add_position_embedding"))
    if rotary is not None and table is not None:
        lacking["position_embedding_type"] = position_embedding_type(rotary, table)
    return lacking | dict(checkpoint)


def training_identity(config: Config) -> dict[str, Any]:
    """What must be equal for optimizer and schedule to fit unless a flag decides, and what the run does not save."""
    without = {name: True for name in _NOT_SAVED if getattr(config.checkpoint, name)}
    mine = namespace_from_config(config)
    refused = {name: getattr(mine, name) for name in REFUSED_OF_TRAINING}
    return refused | schedule_settings(config.optimizer, config.training) | without


def check_candidate(
    candidate: Candidate,
    config: Config,
    layout: Layout,
    padded_vocab_size: int,
    redistributable: bool | None = None,
    foreign: ForeignCheckpoint | None = None,
) -> bool:
    """Whether the checkpoint was saved on another layout than `layout`, and is to be loaded onto it.

    So are a universal one, and one of upstream's whose shards are cut otherwise on the same layout. Raises
    CheckpointMismatchError naming every difference of shape, another optimizer or schedule, a --train-iters before its
    iteration, and a difference of layout, unless both layouts have ZeRO-1 and the engine that saved the checkpoint is
    `redistributable` (None: not known yet). A checkpoint without manifest is judged by the arguments in its mp_rank_00
    file, as upstream wrote them (`foreign`, where they are known); if they are ours, its manifest is gone:
    CheckpointDamagedError.
    """
    mine = model_identity(config.model, padded_vocab_size)
    if candidate.manifest is not None:
        theirs = _identity_in(candidate.manifest.model)
        their_layout = Layout(**candidate.manifest.layout)
    else:
        foreign = foreign or _described(candidate, config)
        theirs, their_layout = _identity_in(foreign.model), foreign.layout
    if 3 in (their_layout.zero, layout.zero) and their_layout != layout:
        fix = f"3 on {their_layout.world_size} ranks" if their_layout.zero == 3 else "1"
        raise CheckpointMismatchError(
            f"{candidate.place}: saved on {their_layout}, but this run is {layout}, and what --zero-stage 3 saves is "
            f"loaded at that stage alone, on as many ranks: start with --zero-stage {fix}, or give another --load"
        )
    universal = config.checkpoint.universal_checkpoint
    other_layout = universal or their_layout != layout or (foreign is not None and foreign.needs_rearranging)
    if other_layout:
        del mine["padded_vocab_size"]  # TP pads it; the true size is checked parameter by parameter
    different = [
        f"{name} is {theirs[name]} in the checkpoint and {mine[name]} here"
        for name in mine
        if name in theirs and theirs[name] != mine[name]
    ]
    if different:
        raise CheckpointMismatchError(
            f"{candidate.place}: another model: {'; '.join(different)}; give the flags of the run that saved it, "
            "or another --load"
        )
    _check_length(candidate, config)
    if candidate.manifest is not None:
        _check_saved(candidate.manifest.training, candidate.place, config, other_layout)
        _check_training(candidate.manifest.training, candidate.place, config)
    if other_layout and redistributable is False:
        *others, last = redistributable_engines()
        raise CheckpointMismatchError(
            f"{candidate.place}: saved on {their_layout}, but this run is {layout}, and only a checkpoint of "
            f"--checkpoint-engine {', '.join(others)} or {last} can be loaded onto another layout: start with "
            f"--tensor-model-parallel-size {their_layout.tp} --pipeline-model-parallel-size {their_layout.pp} on "
            f"{their_layout.world_size} ranks"
        )
    return other_layout


def _check_training(theirs: Mapping[str, Any], place: str, config: Config) -> None:
    """Raises CheckpointMismatchError if optimizer or schedule are not `theirs`, and no flag says which counts.

    `theirs`: of the manifest of the checkpoint at `place`. What an earlier version did not write there is compared once
    the state has been read.
    """
    options, optimizer = config.checkpoint, config.optimizer
    if not theirs or options.finetune:
        return
    saved = argparse.Namespace(**{name: theirs[name] for name in REFUSED_OF_TRAINING if name in theirs})
    check_refused(saved, namespace_from_config(config), place)
    decided = optimizer.override_opt_param_scheduler or optimizer.use_checkpoint_opt_param_scheduler
    if not (options.no_load_lr_state or decided):
        try:
            check_same_schedule(schedule_settings(optimizer, config.training), theirs)
        except ConfigError as exc:
            raise CheckpointMismatchError(f"{place}: {exc}") from exc


def _check_saved(theirs: Mapping[str, Any], place: str, config: Config, other_layout: bool) -> None:
    """Raises CheckpointMismatchError if a state was not saved that this run would load.

    Random state fits the layout that saved it; on another one it is seeded anew. `theirs`: as in _check_training.
    """
    for saving, (loading, what) in _NOT_SAVED.items():
        needed = not (getattr(config.checkpoint, loading) or config.checkpoint.finetune)
        if theirs.get(saving) and needed and not (other_layout and saving == "no_save_rng"):
            raise CheckpointMismatchError(
                f"{place}: holds {what} (it was saved with {flag_name(saving)}): give {flag_name(loading)} to go on "
                "without, or load another checkpoint"
            )


def _check_length(candidate: Candidate, config: Config) -> None:
    """Raises CheckpointMismatchError if the run would end before the iteration that it resumes from.

    In samples nothing is compared: their iterations depend on --global-batch-size, which may change on resume.
    """
    options, training = config.checkpoint, config.training
    if options.finetune or options.reset_iteration or training.train_samples is not None:
        return
    if candidate.step > training.train_iters:
        raise CheckpointMismatchError(
            f"--train-iters {training.train_iters}: {candidate.place} is of iteration {candidate.step}, so nothing "
            "would be trained; give a later end, an earlier checkpoint with --load-tag, or --reset-iteration"
        )


def cannot_be_read(place: str, engine: str, why: str) -> CheckpointMismatchError:
    """The error for a checkpoint of an engine that is not here."""
    return CheckpointMismatchError(
        f"{place}/{names.MANIFEST}: the checkpoint was saved with --checkpoint-engine {engine}, and only that can "
        f"read it, which is not possible here: {why}. Install what is missing, or load a checkpoint of another engine "
        "with --load-tag"
    )


def foreign_engine(config: Config) -> str:
    """Name of the engine that reads a checkpoint without a manifest, as upstream writes it.

    Its files have DeepSpeed's names in any case; only who asks for DataStates-LLM can mean files of that format.
    """
    return "datastates" if config.checkpoint.checkpoint_engine == "datastates" else "torch"


def check_newest(config: Config, layout: Layout, vocab_size: int) -> int:
    """The padded vocabulary to train with: that of the checkpoint which a load would try first, if TP divides it.

    Rows of tokens that are none take part in the softmax, so a model with another number of them is another model;
    without such a checkpoint it is --make-vocab-size-divisible-by times TP. `vocab_size`: the tokenizer's.
    Makes check_candidate of that checkpoint, if it has a readable manifest, or is upstream's: one small file, so that a
    wrong shape costs no start-up. Where nothing differs, the beginning of the manifest will do, whose length does not
    grow with the ranks. All else is left to the load. Raises OSError if --load cannot be listed.
    """
    padded = padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by, layout.tp)
    if config.checkpoint.universal_checkpoint:
        return _padded_as(inspect(config.checkpoint, vocab_size).candidate, None, config, layout, vocab_size, padded)
    found, foreign = _named_without_manifest(config)
    if found is None:
        with contextlib.suppress(CheckpointError):
            begun = newest_with_manifest(config, Manifest.beginning_of)
            if begun is None or _padded_as(begun, None, config, layout, vocab_size, padded) == padded:
                return padded
    # A difference may be what a flipped bit says: only the checksum of the whole tells.
    found = found or newest_with_manifest(config)
    return padded if found is None else _padded_as(found, foreign, config, layout, vocab_size, padded)


def _padded_as(
    found: Candidate, foreign: ForeignCheckpoint | None, config: Config, layout: Layout, vocab_size: int, padded: int
) -> int:
    """As check_newest, of the checkpoint that was `found`. `padded`: the vocabulary without one."""
    manifest = found.manifest
    engine = manifest.engine if manifest is not None else foreign_engine(config)
    try:
        check_engine_name(engine)
    except (UnknownEngineError, EngineUnavailableError) as exc:
        raise cannot_be_read(found.place, engine, str(exc)) from exc
    model = manifest.model if manifest is not None else foreign.model if foreign is not None else {}
    kept = model.get("padded_vocab_size")
    # Padded by any TP: a checkpoint with another number is one of another vocabulary.
    multiple = config.model.make_vocab_size_divisible_by
    by_any = {padded_vocab_size(vocab_size, multiple, tp) for tp in range(1, _LARGEST_TP + 1)}
    if type(kept) is int and kept in by_any and kept % layout.tp == 0:
        padded = kept
    check_candidate(found, config, layout, padded, is_redistributable(engine), foreign)
    return padded


def _named_without_manifest(config: Config) -> tuple[Candidate | None, ForeignCheckpoint | None]:
    """The checkpoint that `latest` or --load-tag names, if it has no manifest and says what it is; without torch.

    What is wrong with one that does not is the load's to tell.
    """
    options = config.checkpoint
    if options.load is None or is_uri(options.load):
        return None, None
    try:
        tag = options.load_tag or read_latest(Path(options.load))
    except ValueError:
        return None, None
    directory = Path(options.load) / (tag or "")
    if tag is None or is_there(directory / names.MANIFEST):
        return None, None
    try:
        with reading(directory / FIRST_FILE):
            state = read_header(directory)
            foreign = describe(directory, state) if state is not None else None
    except CheckpointDamagedError:
        return None, None
    return (Candidate(directory, tag, foreign.step, None), foreign) if foreign else (None, None)


def newest_with_manifest(config: Config, read: Callable[[Path], Manifest] = Manifest.of) -> Candidate | None:
    """The checkpoint that a load most likely tries first; None without --load or a readable manifest there.

    In a file system `read` has what is needed of the manifest in a directory; it raises OSError or ValueError.
    """
    options = config.checkpoint
    if options.load is not None and is_uri(options.load):
        from megatron.checkpointing.store.bucket.checkpoints import open_checkpoints

        return open_checkpoints("--load", options.load, options).newest_manifest(options.load_tag)
    if options.load is None or options.universal_checkpoint or not is_directory(options.load):
        return None
    tags = [options.load_tag] if options.load_tag else _tags_newest_first(Path(options.load))
    for tag in tags:
        directory = Path(options.load) / tag
        try:
            manifest = read(directory)
        except (OSError, ValueError):
            continue
        return Candidate(directory, manifest.tag, manifest.step, manifest)
    return None


def _tags_newest_first(load_dir: Path) -> list[str]:
    steps = {path.name: names.step_of(path.name) for path in load_dir.iterdir()}
    return sorted((tag for tag in steps if steps[tag] is not None), key=lambda tag: -(steps[tag] or 0))


def _described(candidate: Candidate, config: Config) -> ForeignCheckpoint:
    engine, place, op = foreign_engine(config), SavedCheckpoint(candidate.directory), untraced_operation()
    reader = create_engine(engine, EngineOptions())
    with reading(candidate.directory / FIRST_FILE):  # it may hold anything, all weights of a rank too
        if is_redistributable(engine):
            return describe(candidate.directory, reader.load_values(FIRST_FILE, place, op))
        return describe(candidate.directory, reader.load([FIRST_FILE], place, op)[FIRST_FILE])
