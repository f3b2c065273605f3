"""The model in one of our checkpoints, of any engine and layout: its sizes, and its parameters layer by layer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.base import EngineOptions, SavedCheckpoint
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointError, reading
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.search import Candidate, discover
from megatron.config import ModelConfig
from megatron.hf.errors import ConversionError
from megatron.hf.tensors import Parameter
from megatron.parallel.parameter_slice import ParameterSlice
from megatron.parallel.topology import Layout
from restart_trace.recorder import untraced_operation

logger = logging.getLogger(__name__)

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Arguments that decide what the model computes, or that config.json has. All others belong to the run.
SETTINGS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads", "kv_channels",
    "seq_length", "max_position_embeddings", "position_embedding_type", "use_rotary_position_embeddings",
    "rotary_percent", "rope_theta", "add_position_embedding", "embed_layernorm", "normalization", "layernorm_epsilon",
    "swiglu", "bias_gelu_fusion", "untie_embeddings_and_output_weights", "add_bias_linear", "attention_dropout",
    "hidden_dropout", "init_method_std", "params_dtype", "num_experts", "expert_interval",
)  # fmt: skip
# Of checkpoints of earlier versions, which did not have these settings: the others say it.
_OF_EARLIER_VERSIONS = {
    "position_embedding_type": None, "embed_layernorm": False, "num_experts": "1", "expert_interval": 2,
}  # fmt: skip


def newest_checkpoint(load: Path, tag: str | None) -> Candidate:
    """The checkpoint called `tag`, or the newest in `load`. Problems of others are logged.

    Raises ConversionError naming --load if there is none that this program has saved.
    """
    if not load.is_dir():
        raise ConversionError(f"--load {load}: no such directory; give what a training had as --save")
    found, problems = discover(load, tag)
    for problem in problems:
        logger.warning("checkpoint passed over: %s", problem)
    which = "complete checkpoint" if tag is None else f"complete checkpoint called {tag}"
    if not found:
        raise ConversionError(f"--load {load}: holds no {which}; give what a training had as --save, or a --load-tag")
    if found[0].manifest is None:
        raise ConversionError(
            f"--load {load}: {found[0].tag} has no {names.MANIFEST}, so another program saved it; resume it with this "
            "trainer, save it, and export that"
        )
    return found[0]


class SavedModel:
    """The model in a checkpoint. `model`: as the run had it; `vocab_size`: the tokenizer's; `arguments`: of the run."""

    def __init__(self, candidate: Candidate) -> None:
        """Reads what is no tensor. Raises CheckpointDamagedError, or ConversionError naming what it does not say."""
        assert candidate.manifest is not None
        self.directory = candidate.directory
        self.manifest: Manifest = candidate.manifest
        self._layout = Layout(**self.manifest.layout)
        if self._layout.zero == 3:
            raise ConversionError(
                f"--load {candidate.directory}: was saved with --zero-stage 3, of which no rank has whole weights; "
                "deepspeed.utils.zero_to_fp32 writes them as a state dict, of which this program exports nothing"
            )
        self._engine = create_engine(self.manifest.engine, EngineOptions())
        self._files = SavedCheckpoint(self.directory, self.manifest.files)
        first = names.model_states_file(self._layout, self._layout.coordinates(0))
        common = self._load([first])[first]
        path = self.directory / first
        with reading(path):
            self.arguments = common["args"]
            self.vocab_size: int = common["universal_checkpoint_info"]["original_vocab_size"]
            self.model = self._model_of(path)
        self.padded_vocab_size: int = self.manifest.model["padded_vocab_size"]
        if not 0 < self.vocab_size <= self.padded_vocab_size:
            raise CheckpointDamagedError(f"{path}: {self.vocab_size} tokens of {self.padded_vocab_size} rows")

    def _model_of(self, path: Path) -> ModelConfig:
        known = vars(self.arguments) | _OF_EARLIER_VERSIONS | self.manifest.model
        try:
            known["num_experts"] = tuple(map(int, str(known["num_experts"]).split()))
            return ModelConfig(**{name: known[name] for name in SETTINGS})
        except KeyError as exc:
            raise ConversionError(f"{path}: does not say {exc.args[0]}; resume the run, save, and export that") from exc
        except ValueError as exc:  # ConfigError is one
            raise ConversionError(f"{path}: {exc}") from exc

    def layer(self, parameters: Sequence[Parameter]) -> list[torch.Tensor]:
        """The full `parameters`, all of one pipeline layer, as they were saved.

        Raises CheckpointDamagedError naming the file that is altered, or that does not hold just these.
        """
        tp = self._layout.tp
        files = [names.layer_file(parameters[0].layer, rank) for rank in range(tp)]
        states = self._load(files)
        keys = {parameter.key for parameter in parameters}
        dtype = TORCH_DTYPES[self.model.params_dtype]
        for rank, file in enumerate(files):
            state = states[file]
            if set(state) != keys:
                differ = ", ".join(sorted(set(state) ^ keys))
                raise CheckpointDamagedError(f"{self.directory / file}: it and the model's flags differ in {differ}")
            for parameter in parameters:
                tensor, shape = state[parameter.key], _of_rank(parameter.part, rank, tp).local_shape
                if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
                    raise CheckpointDamagedError(
                        f"{self.directory / file}: {parameter.key} is {tensor.dtype} {tuple(tensor.shape)}, and the "
                        f"model's flags say {dtype} {shape}"
                    )
        return [joined(each.part, [states[file].pop(each.key) for file in files]) for each in parameters]

    def close(self) -> None:
        """Release the engine's memory."""
        self._engine.end_loads()
        self._engine.close()

    def _load(self, files: Sequence[str]) -> dict[str, Any]:
        try:
            return self._engine.load(files, self._files, untraced_operation())
        except CheckpointError as exc:
            exc.args = (f"{exc}; give another checkpoint with --load-tag",)
            raise


def joined(part: ParameterSlice, local: Sequence[torch.Tensor]) -> torch.Tensor:
    """The full parameter of the parts that the tensor-parallel ranks hold; if there is one alone, that itself."""
    if len(local) == 1 or part.dim is None:
        return local[0]
    full = torch.empty(part.shape, dtype=local[0].dtype)
    for rank, tensor in enumerate(local):
        begin = 0
        for start, stop in _of_rank(part, rank, len(local)).ranges or []:
            full.narrow(part.dim, start, stop - start).copy_(tensor.narrow(part.dim, begin, stop - start))
            begin += stop - start
    return full


def _of_rank(part: ParameterSlice, rank: int, tp: int) -> ParameterSlice:
    return dataclasses.replace(part, tp_rank=rank, tp_size=tp)
