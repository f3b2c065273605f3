"""Our model in one process, and checkpoints of it as the ranks of a layout would save them with an engine."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.preflight.compatibility import model_identity
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.commit import publish, write_manifest
from megatron.checkpointing.store.manifest import Manifest
from megatron.config import ModelConfig
from megatron.hf.checkpoints import TORCH_DTYPES
from megatron.model.embedding import EmbeddingPipe, LMHeadPipe, tied_logits
from megatron.model.norms import build_norm
from megatron.model.transformer import ParallelTransformerLayerPipe
from megatron.parallel.parameter_slice import slice_of
from megatron.parallel.placement import Placement
from megatron.parallel.topology import Layout, TensorParallelGroup
from restart_trace.recorder import untraced_operation

LLAMA: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 48, "ffn_hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
    "seq_length": 64, "use_rotary_position_embeddings": True, "normalization": "rmsnorm", "swiglu": True,
    "untie_embeddings_and_output_weights": True, "add_bias_linear": False, "rope_theta": 5000,
}  # fmt: skip
GPT2: dict[str, Any] = {"num_layers": 4, "hidden_size": 48, "num_attention_heads": 4, "seq_length": 64}
BLOOM: dict[str, Any] = GPT2 | {
    "num_attention_heads": 6, "position_embedding_type": "alibi", "embed_layernorm": True,
}  # fmt: skip
VOCAB, PADDED = 101, 128


def layers(model: ModelConfig, padded: int = PADDED, tp_rank: int = 0, tp: int = 1) -> dict[int, torch.nn.Module]:
    """Number of a pipeline layer -> its module on a rank."""
    place = Placement(TensorParallelGroup(tp_rank, tp), TORCH_DTYPES[model.params_dtype], torch.device("cpu"))
    found: list[torch.nn.Module] = [EmbeddingPipe(model, padded, place)]
    found += [ParallelTransformerLayerPipe(model, place) for _ in range(model.num_layers)]
    found.append(build_norm(model.normalization, model.hidden_size, model.layernorm_epsilon, place))
    if model.untie_embeddings_and_output_weights:
        found.append(LMHeadPipe(model, padded, place))
    return dict(enumerate(found, 1))


def drawn(model: ModelConfig, std: float = 0.3, padded: int = PADDED) -> dict[int, torch.nn.Module]:
    """Layers with random weights; the rows that pad the vocabulary are random, too."""
    modules = layers(model, padded)
    with torch.no_grad():
        for module in modules.values():
            for parameter in module.parameters():
                parameter.normal_(std=std)
    return modules


def logits(model: ModelConfig, modules: dict[int, torch.nn.Module], ids: torch.Tensor) -> torch.Tensor:
    """[b, s] to [b, s, padded vocabulary]."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    x: Any = (ids, positions) if model.add_position_embedding else ids
    with torch.no_grad():
        for number in range(1, model.num_layers + 3):
            x = modules[number].eval()(x)
        head = modules.get(model.num_layers + 3)
        return head(x) if head is not None else tied_logits(modules[1], x)  # type: ignore[arg-type]


def _stages(model: ModelConfig, pp: int) -> Iterator[list[int]]:
    last = model.num_layers + 2 + model.untie_embeddings_and_output_weights
    for stage in range(pp):
        first, end = (2 + model.num_layers * part // pp for part in (stage, stage + 1))
        yield list(range(1 if stage == 0 else first, last + 1 if stage == pp - 1 else end))


def save(
    save_dir: Path,
    model: ModelConfig,
    modules: dict[int, torch.nn.Module],
    layout: Layout,
    engine: str,
    arguments: dict[str, Any] | None = None,
    step: int = 5,
    padded: int = PADDED,
    run_id: str = "",
) -> Path:
    """Save weights and arguments as the first replica of `layout` does; the checkpoint's directory."""
    temporary = save_dir / "temporary"
    temporary.mkdir(parents=True)
    args = argparse.Namespace(**dataclasses.asdict(model), **{"tokenizer_type": "NullTokenizer", **(arguments or {})})
    common = {"args": args, "universal_checkpoint_info": {"original_vocab_size": VOCAB}, "rng": torch.zeros(4)}
    files = {}
    for pp, numbers in enumerate(_stages(model, layout.pp)):
        for tp in range(layout.tp):
            at = layout.coordinates(layout.rank(tp, pp, 0))
            mine = layers(model, padded, tp, layout.tp)
            states = [FileState(names.model_states_file(layout, at), common)]
            for number in numbers:
                full = modules[number].state_dict()
                local = {
                    key: _cut(full[key], slice_of(parameter, key)) for key, parameter in mine[number].named_parameters()
                }
                states.append(FileState(names.layer_file(number, tp), local))
            writer = create_engine(engine, EngineOptions(fsync=False, rank=layout.rank(tp, pp, 0)))
            files |= {file.name: file for file in writer.save(states, temporary, untraced_operation())}
            writer.close()
    tag = names.tag_of(step)
    manifest = Manifest(tag, step, engine, layout.as_dict(), model_identity(model, padded), files, run_id=run_id)
    write_manifest(temporary, manifest, fsync=False)
    assert publish(save_dir, temporary, manifest, fsync=False) == []
    return save_dir / tag


def _cut(full: torch.Tensor, part: Any) -> torch.Tensor:
    if part.dim is None:
        return full
    return torch.cat([full.narrow(part.dim, start, stop - start) for start, stop in part.ranges], part.dim)
