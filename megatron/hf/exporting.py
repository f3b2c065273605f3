"""Writes the model of a checkpoint as a Hugging Face model directory, one layer at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
from pathlib import Path

from megatron.checkpointing.store.search import Candidate
from megatron.fileio.new_directory import new_directory as directory_beside
from megatron.hf.checkpoints import TORCH_DTYPES, SavedModel, newest_checkpoint
from megatron.hf.configs import CONFIG, architecture_of, config_of
from megatron.hf.errors import ConversionError
from megatron.hf.output import new_directory
from megatron.hf.safetensors_files import ShardWriter, TensorInfo, write_json
from megatron.hf.source import SOURCE, Source, owner_of
from megatron.hf.tensors import parameters
from megatron.hf.tokenizers import end_of_text, write_tokenizer

logger = logging.getLogger(__name__)

GENERATION = "generation_config.json"


def export(load: Path, out: Path, tag: str | None, max_shard_bytes: int) -> str:
    """Write the checkpoint in `load` to the new directory `out`; returns what was written, for the user.

    Raises ConversionError or CheckpointError naming flag or file, value and fix, or OSError; nothing is there then.
    """
    candidate = newest_checkpoint(load, tag)
    source = Source.of_checkpoint(candidate.directory)
    return _export(candidate, source, out, new_directory(out), max_shard_bytes)


def export_for_run(load: Path, out: Path, tag: str, max_shard_bytes: int, run_id: str, generation: int) -> str:
    """As `export`, for the training that saves to `load` and has this id, and for its launch of this generation.

    An export of this checkpoint that is there already stays, and one of another checkpoint of this run is replaced.
    """
    candidate = newest_checkpoint(load, tag)
    found, source = Source.of_export(out), Source.of_checkpoint(candidate.directory, run_id)
    if found is not None and found.manifest == source.manifest:
        return f"{out}: is there already"
    mine = found is not None and found.is_of_run(run_id, load, out)
    if os.path.lexists(out) and not mine:
        whose = "is no export" if found is None else "is an export of another run"
        raise ConversionError(f"{out}: {whose}, and nothing is overwritten; give another --export-hf-dir, or remove it")
    owner = owner_of(run_id, load, out.parent)
    target = directory_beside(out, owner=owner, generation=generation, replace=mine)
    return _export(candidate, source, out, target, max_shard_bytes)


def _export(
    candidate: Candidate,
    source: Source,
    out: Path,
    target: contextlib.AbstractContextManager[Path],
    max_shard_bytes: int,
) -> str:
    with contextlib.closing(SavedModel(candidate)) as saved:
        try:
            architecture = architecture_of(saved.model)
        except ConversionError as exc:
            raise ConversionError(f"{candidate.place}: {exc}") from None
        with target as directory:
            size = _write_weights(saved, architecture, directory, max_shard_bytes)
            end = end_of_text(saved.arguments, saved.vocab_size)
            write_json(directory / CONFIG, config_of(saved.model, architecture, saved.vocab_size, end))
            if end is not None:
                write_json(directory / GENERATION, {"bos_token_id": end, "eos_token_id": end})
            tokenizer = write_tokenizer(saved.arguments, saved.model.max_position_embeddings, directory)
            write_json(directory / SOURCE, dataclasses.asdict(source))
    return f"{out}: {architecture} of {candidate.place}, {size}; {tokenizer}"


def _write_weights(saved: SavedModel, architecture: str, directory: Path, max_shard_bytes: int) -> str:
    """Write the tensors; returns their size in words."""
    everything = parameters(saved.model, architecture, saved.padded_vocab_size)
    dtype = TORCH_DTYPES[saved.model.params_dtype]
    shapes = {name: shape for each in everything for name, shape in each.shapes(saved.vocab_size).items()}
    announced = [TensorInfo(name, dtype, shape) for name, shape in shapes.items()]
    with ShardWriter(directory, announced, max_shard_bytes) as writer:
        for _, layer in itertools.groupby(everything, key=lambda each: each.layer):
            of_layer = list(layer)
            full = saved.layer(of_layer)
            for each in of_layer:
                tensor = full.pop(0)
                for name, start, stop in each.rows(saved.vocab_size):
                    rows = tensor[start:stop]
                    writer.write(name, each.written(rows))
    return f"{len(announced)} tensors, {writer.num_bytes} bytes in {writer.num_files} file(s)"
