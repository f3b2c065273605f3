"""A rank's files as upstream has DeepSpeed write them of --no-pipeline-parallel, and of a mixture of experts.

There are none of pipeline layers: mp_rank_* has the weights of the stage, and each expert a file of its own, for which
the layers with experts are counted (megatron/checkpointing/reshard/upstream_modules.py). Parameters are called as in
upstream's GPTModel with --no-pipeline-parallel, as in all of its scripts with experts, and otherwise as here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.checkpointing.engines.base import FileState
from megatron.checkpointing.reshard.upstream_modules import expert_of
from megatron.checkpointing.store import naming as names
from megatron.config import Config, ConfigError
from megatron.parallel.topology import Coordinates, Layout

_OPTIMIZER = "optimizer_state_dict"
_OF_EXPERTS = ".deepspeed_experts."


def holds_modules(config: Config) -> bool:
    """Whether upstream writes the weights so."""
    return config.model.has_experts or config.parallel.no_pipeline_parallel


def check_experts(config: Config) -> None:
    """Raises ConfigError for experts that upstream cannot divide so, or whose files are not known."""
    ep, parallel = config.parallel.moe_expert_parallel_size, config.parallel
    if any(experts > 1 and experts % ep for experts in config.model.experts_per_layer):
        raise ConfigError(
            f"--moe-expert-parallel-size {ep}: upstream divides the experts of each layer over all of these ranks; "
            "give a number that divides all of --num-experts, or drop --upstream"
        )
    if parallel.pipeline_model_parallel_size > 1 and not config.model.untie_embeddings_and_output_weights:
        raise ConfigError(
            "--num-experts: the files of upstream's tied embeddings on several stages are not planned; add "
            "--untie-embeddings-and-output-weights, or drop --upstream"
        )


def upstreams_files(files: Sequence[FileState], config: Config, layout: Layout, at: Coordinates) -> list[FileState]:
    """The files of the rank at `at` as upstream arranges them, of those that this program would write."""
    module: dict[str, Any] = {}
    experts: dict[tuple[int, int], dict[str, Any]] = {}
    others = []
    for file in files:
        place = names.layer_of(file.name)
        if place is None:
            others.append(file)
            continue
        for key, tensor in file.state.items():
            name = f"{place[0]}.{key}"
            expert = expert_of(name)
            (module if expert is None else experts.setdefault(expert, {}))[_upstreams_name(name, config)] = tensor
    numbers = sorted({layer for layer, _ in experts})
    mp_rank = names.model_parallel_rank(layout, at)
    found = [
        FileState(names.deepspeed_expert_file(numbers.index(layer), expert, mp_rank), state)
        for (layer, expert), state in experts.items()
    ]
    return found + [_renamed(file, module, config, layout) for file in others]


def _renamed(file: FileState, module: Mapping[str, Any], config: Config, layout: Layout) -> FileState:
    """A file of the optimizer or an mp_rank file, with upstream's names and the weights of the stage."""
    state = dict(file.state)
    if _OPTIMIZER in state:
        shard = dict(state[_OPTIMIZER])
        shard["param_slice_mappings"] = [
            type(mapping)((_name_on_rank(name, config, layout), at) for name, at in mapping.items())
            for mapping in shard["param_slice_mappings"]
        ]
        return replace(file, state=state | {_OPTIMIZER: shard})
    shapes = [
        type(group)((_name_on_rank(name, config, layout), shape) for name, shape in group.items())
        for group in state["param_shapes"] or []
    ]
    whole = _nested(module) if config.parallel.no_pipeline_parallel else dict(module)
    beside: dict[str, Any] = {"param_shapes": shapes}
    if config.model.has_experts:
        beside |= {"num_experts": [n for n in config.model.experts_per_layer if n > 1], "ds_autoep_layers": None}
    return replace(file, state=state | {"module": whole} | beside)


def _name_on_rank(name: str, config: Config, layout: Layout) -> str:
    """Upstream's name of a parameter of a rank, where experts are numbered from 0."""
    expert = expert_of(name)
    if expert is not None:
        held = config.model.experts_per_layer[expert[0] - 2] // layout.ep
        name = name.replace(f"{_OF_EXPERTS}{expert[1]}.", f"{_OF_EXPERTS}{expert[1] % held}.")
    return _upstreams_name(name, config)


def _upstreams_name(name: str, config: Config) -> str:
    if not config.parallel.no_pipeline_parallel:
        return name
    number, _, rest = name.replace("tied_modules.embed.", "1.").partition(".")
    block, blocks = int(number) - 2, config.model.num_layers
    if block < 0:
        return f"language_model.embedding.{rest}"
    if block < blocks:
        return f"language_model.encoder.layers.{block}.{rest}"
    if block == blocks:
        return f"language_model.encoder.final_layernorm.{rest}"
    return f"language_model.output_layer.{rest.removeprefix('lm_head.')}"


def _nested(module: Mapping[str, Any]) -> dict[str, Any]:
    """As the state of upstream's GPTModel."""
    parts: dict[str, Any] = {"embedding": {}, "encoder": {}}
    for name, tensor in module.items():
        _, part, rest = name.split(".", 2)
        if part == "embedding":
            table, _, key = rest.partition(".")
            parts[part].setdefault(table, {})[key] = tensor
        else:
            parts.setdefault(part, {})[rest] = tensor
    return {"language_model": parts}
