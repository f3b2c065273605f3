"""Where the weights lie in upstream's checkpoints without files of pipeline layers, and what they are called here.

So are those of --no-pipeline-parallel, and all with a mixture of experts. DeepSpeed (0.19.8, runtime/engine.py,
_save_moe_checkpoint) puts the weights of a rank into "module" of its mp_rank_* file, but each expert into a file of its
own, layer_0_expert_5_mp_rank_00_model_states.pt, which counts the layers with experts of that stage. There an expert is
called by its number among all of the layer; in shards, among those of its rank, of which neighbouring data-parallel
ranks have the next ones.

With stages, parameters are called as here: "3.mlp.deepspeed_moe.gate.wg.weight". Without, as in upstream's GPTModel:
"language_model.encoder.layers.1.mlp.deepspeed_moe.gate.wg.weight".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.upstream import ForeignCheckpoint

Expert = tuple[int, int]  # pipeline layer, number among its experts
_BLOCK = re.compile(r"language_model\.encoder\.layers\.([0-9]{1,9})\.(.+)")
_GATE = re.compile(r"([0-9]{1,9})\.mlp\.deepspeed_moe\.gate\.wg\.weight")
_EXPERT = re.compile(r"([0-9]{1,9})(\.mlp\.deepspeed_moe\.experts\.deepspeed_experts\.)([0-9]{1,9})(\..+)")


def name_here(name: str, found: ForeignCheckpoint) -> str:
    """What the parameter that upstream calls `name` is called here; another name remains."""
    block = _BLOCK.fullmatch(name)
    if block is not None:
        return f"{int(block[1]) + 2}.{block[2]}"
    layers, untied = found.model["num_layers"], found.model["untie_embeddings_and_output_weights"]
    for theirs, ours in (
        ("language_model.embedding.", "1." if untied else "tied_modules.embed."),
        ("language_model.encoder.final_layernorm.", f"{layers + 2}."),
        ("language_model.output_layer.", f"{layers + 3}.lm_head."),
    ):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def name_in_shard(name: str, dp_rank: int, found: ForeignCheckpoint) -> str:
    """As `name_here`, of a parameter in the shard of a data-parallel rank, with the number of an expert among all."""
    here = name_here(name, found)
    expert = _EXPERT.fullmatch(here)
    if expert is None:
        return here
    experts = experts_of(int(expert[1]), found)
    ranks = found.layout.expert_ranks(experts)
    number = dp_rank % ranks * (experts // ranks) + int(expert[3])
    return f"{expert[1]}{expert[2]}{number}{expert[4]}"


def experts_of(layer: int, found: ForeignCheckpoint) -> int:
    """The number of experts of a pipeline layer."""
    block = layer - 2  # the embedding is layer 1
    return found.experts[block] if 0 <= block < len(found.experts) else 1


def weights_of(state: Mapping[str, Any], found: ForeignCheckpoint) -> dict[str, torch.Tensor]:
    """The weights in the `state` of an mp_rank_* or expert file, by their names here."""
    return {name_here(name, found): tensor for name, tensor in _flat(state.get("module", state))}


def _flat(nest: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dicts; upstream's GPTModel has one of "language_model", "encoder" and so on."""
    if isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(nest, torch.Tensor):
        yield prefix, nest


def expert_files(weights: Iterable[str], mp_rank: int, found: ForeignCheckpoint) -> dict[Expert, str]:
    """The files of the experts of a stage with `weights`, names of `weights_of` its mp_rank file."""
    layers = sorted(int(gate[1]) for name in weights if (gate := _GATE.fullmatch(name)))
    return {
        (layer, expert): names.deepspeed_expert_file(counted, expert, mp_rank)
        for counted, layer in enumerate(layers)
        for expert in range(experts_of(layer, found))
    }


def expert_of(name: str) -> Expert | None:
    """The expert that the parameter called `name` here belongs to."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[3]))
