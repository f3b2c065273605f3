"""Makes a checkpoint of ours of a Hugging Face model directory, one layer at a time.

Engine torch writes it for the layout TP1 PP1 DP1, without optimizer and random state: a training begins from it with
--finetune, on any layout.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState, SavedFile
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.preflight.compatibility import model_identity
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.commit import publish, write_manifest
from megatron.checkpointing.store.manifest import Manifest
from megatron.config import ModelConfig, padded_vocab_size
from megatron.hf.checkpoints import SETTINGS, TORCH_DTYPES
from megatron.hf.configs import CONFIG, ConfigFile, flags_of
from megatron.hf.errors import ConversionError
from megatron.hf.output import new_directory
from megatron.hf.safetensors_files import TensorInfo, find_tensors, read_json, read_tensor
from megatron.hf.tensors import HEAD, Parameter, bare_names, parameters, with_base
from megatron.hf.tokenizers import tokenizer_flags
from megatron.parallel.topology import Layout
from restart_trace.recorder import untraced_operation

_LAYOUT = Layout(1, 1, 1)
_ENGINE = "torch"
# Buffers that older versions of transformers saved beside the weights.
_BUFFERS = re.compile(r"(.*\.attn\.(bias|masked_bias)|.*\.rotary_emb\.inv_freq)")


def import_model(load: Path, out: Path, params_dtype: str | None, divisible_by: int) -> str:
    """Write the model in `load` as a checkpoint in the new directory `out`; returns the flags to begin from it.

    `params_dtype`: None for that of the tensors. `divisible_by`: --make-vocab-size-divisible-by.
    Raises ConversionError naming file or flag, value and fix, or OSError; nothing is there then.
    """
    if not load.is_dir():
        raise ConversionError(f"--load {load}: no such directory; give that of a Hugging Face model, with {CONFIG}")
    config = ConfigFile(load / CONFIG, read_json(load / CONFIG))
    source = _Source(load, _named(find_tensors(load, _BUFFERS), config.architecture), config.vocab_size)
    model = config.model(most_layers=len(source.tensors))
    padded = padded_vocab_size(config.vocab_size, divisible_by, _LAYOUT.tp)
    everything = parameters(model, config.architecture, padded)
    source.check(everything, tied=not model.untie_embeddings_and_output_weights)
    model = dataclasses.replace(model, params_dtype=params_dtype or source.params_dtype())
    flags = f"{flags_of(model)} {tokenizer_flags(load, config.vocab_size)}"
    if divisible_by != _DIVISIBLE_BY:
        flags += f" --make-vocab-size-divisible-by {divisible_by}"
    with new_directory(out) as directory:
        _write_checkpoint(directory, model, everything, source, padded)
    return f"--load {shlex.quote(str(out.absolute()))} --finetune {flags}"


_DIVISIBLE_BY = ModelConfig.make_vocab_size_divisible_by


def _named(tensors: Mapping[str, TensorInfo], architecture: str) -> dict[str, TensorInfo]:
    """The tensors by the names that the model with its head has."""
    bare = bare_names(architecture, tensors)
    return {with_base(name) if bare else name: it for name, it in tensors.items()}


@dataclasses.dataclass
class _Source:
    """The tensors of a model directory, by name."""

    directory: Path
    tensors: dict[str, TensorInfo]
    vocab_size: int

    def check(self, wanted: Sequence[Parameter], tied: bool) -> None:
        """Raises ConversionError naming a tensor that is missing, left over, or of another shape."""
        if tied and HEAD in self.tensors:
            self._check_tied(wanted[0].names[0])
        shapes = {name: shape for each in wanted for name, shape in each.shapes(self.vocab_size).items()}
        for what, names_ in (("lacks", shapes.keys() - self.tensors), ("has also", self.tensors.keys() - shapes)):
            if names_:
                more = f" and {len(names_) - 1} more" if len(names_) > 1 else ""
                raise ConversionError(
                    f"{self.directory}: {what} {min(names_)}{more}, by its {CONFIG}: both must be of one model; save "
                    "it again with transformers' save_pretrained"
                )
        for name, shape in shapes.items():
            found = self.tensors[name]
            if found.shape != shape:
                raise ConversionError(
                    f"{found.path}: {name} has the shape {list(found.shape)}, and {list(shape)} by {CONFIG}: both must "
                    "be of one model"
                )

    def params_dtype(self) -> str:
        """The type of all tensors. Raises ConversionError if they have several."""
        types = {tensor.dtype for tensor in self.tensors.values()}
        found = sorted(name for name, dtype in TORCH_DTYPES.items() if dtype in types)
        if len(found) != 1:
            raise ConversionError(
                f"{self.directory}: its tensors have several types ({', '.join(found)}); choose one with "
                "--params-dtype, to which the others are rounded"
            )
        return found[0]

    def _check_tied(self, embedding: str) -> None:
        """Leave a copy of the embedding as the head out; it may have been rounded."""
        head, words = self.tensors.pop(HEAD), self.tensors.get(embedding)
        if words is None:
            return
        dtype = min((head.dtype, words.dtype), key=lambda each: each.itemsize)
        if not torch.equal(read_tensor(head).to(dtype), read_tensor(words).to(dtype)):
            raise ConversionError(
                f"{head.path}: {HEAD} differs from {embedding}, and {CONFIG} says tie_word_embeddings true: set that "
                "to false if the head is one of its own"
            )

    def full(self, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """Our parameter; rows that pad the vocabulary are copies of the last token's.

        They take part in the softmax, where zeros would outweigh every token whose logit is negative.
        """
        made = torch.empty(parameter.part.shape, dtype=dtype)
        for name, start, stop in parameter.rows(self.vocab_size):
            tensor = read_tensor(self.tensors[name])
            rows = made[start:stop]
            rows.copy_(parameter.read(tensor))
            if tensor.dtype != dtype and not bool(torch.isfinite(rows).all()):
                raise ConversionError(
                    f"{self.tensors[name].path}: {name} has values that {dtype} does not hold; give another "
                    "--params-dtype"
                )
        if parameter.part.vocabulary:
            made[self.vocab_size :] = made[self.vocab_size - 1]
        return made


def _write_checkpoint(
    directory: Path, model: ModelConfig, everything: Sequence[Parameter], source: _Source, padded: int
) -> None:
    engine, op = create_engine(_ENGINE, EngineOptions()), untraced_operation()
    tag, dtype = names.tag_of(0), TORCH_DTYPES[model.params_dtype]
    temporary = directory / names.temporary_directory(tag, names.attempt_of(1))
    temporary.mkdir()
    saved: list[SavedFile] = []
    for number, layer in itertools.groupby(everything, key=lambda each: each.layer):
        state = {each.key: source.full(each, dtype) for each in layer}
        saved += engine.save([FileState(names.layer_file(number, 0), state)], temporary, op)
        del state
    first = names.model_states_file(_LAYOUT, _LAYOUT.coordinates(0))
    saved += engine.save([FileState(first, _common(model, source.vocab_size, padded))], temporary, op)
    manifest = Manifest(
        tag,
        0,
        _ENGINE,
        _LAYOUT.as_dict(),
        model_identity(model, padded),
        {file.name: file for file in saved},
        training={"no_save_optim": True, "no_save_rng": True},
    )
    write_manifest(temporary, manifest, fsync=True)
    for problem in publish(directory, temporary, manifest, fsync=True):
        raise OSError(problem)


def _common(model: ModelConfig, vocab_size: int, padded: int) -> dict[str, Any]:
    """What replicas share: which model it is, and no progress."""
    arguments = {name: getattr(model, name) for name in SETTINGS}
    return {
        "args": argparse.Namespace(**arguments, padded_vocab_size=padded, bf16=model.bf16, fp16=model.fp16),
        "iteration": 0,
        "universal_checkpoint_info": {"original_vocab_size": vocab_size, "padded_vocab_size": padded},
    }
