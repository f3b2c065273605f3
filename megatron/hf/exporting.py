"""Writes the model of a checkpoint as a Hugging Face model directory, one layer at a time."""

from __future__ import annotations

import contextlib
import itertools
import logging
from pathlib import Path

from megatron.hf.checkpoints import TORCH_DTYPES, SavedModel, newest_checkpoint
from megatron.hf.configs import CONFIG, architecture_of, config_of
from megatron.hf.errors import ConversionError
from megatron.hf.output import new_directory
from megatron.hf.safetensors_files import ShardWriter, TensorInfo, write_json
from megatron.hf.tensors import parameters
from megatron.hf.tokenizers import end_of_text, write_tokenizer

logger = logging.getLogger(__name__)

GENERATION = "generation_config.json"


def export(load: Path, out: Path, tag: str | None, max_shard_bytes: int) -> str:
    """Write the checkpoint in `load` to the new directory `out`; returns what was written, for the user.

    Raises ConversionError or CheckpointError naming flag or file, value and fix, or OSError; nothing is there then.
    """
    candidate = newest_checkpoint(load, tag)
    with contextlib.closing(SavedModel(candidate)) as saved:
        try:
            architecture = architecture_of(saved.model)
        except ConversionError as exc:
            raise ConversionError(f"{candidate.place}: {exc}") from None
        with new_directory(out) as directory:
            size = _write_weights(saved, architecture, directory, max_shard_bytes)
            end = end_of_text(saved.arguments, saved.vocab_size)
            write_json(directory / CONFIG, config_of(saved.model, architecture, saved.vocab_size, end))
            if end is not None:
                write_json(directory / GENERATION, {"bos_token_id": end, "eos_token_id": end})
            tokenizer = write_tokenizer(saved.arguments, saved.model.max_position_embeddings, directory)
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
                    writer.write(name, rows.T if each.transposed else rows)
    return f"{len(announced)} tensors, {writer.num_bytes} bytes in {writer.num_files} file(s)"
