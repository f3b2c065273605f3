"""Checkpoints in upstream's files: written from full parameters, and put together from the files of all ranks.

Written from what upstream's files look like (golden/upstream_run), by concatenation and chunks of tensors, and
independent of the code under test.
"""

from __future__ import annotations

import argparse
import itertools
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.tensor_fragment import fragment_address

from megatron.checkpointing.engines.unpickling import known_classes
from megatron.parallel.topology import Layout

KINDS = ("master", "exp_avg", "exp_avg_sq")
Tensors = dict[str, torch.Tensor]
State = dict[str, Tensors]  # kind -> name of a parameter -> the full tensor
SINCE_BLOCKS = "ds_sequence_parallel_fpdt"  # an argument of every upstream whose fused QKV is [Q; K; V]


@dataclass(frozen=True)
class UpstreamModel:
    """A GPT of upstream's, in LLaMA's style if `llama`: untied, SwiGLU, RMSNorm, no biases; else in GPT-2's."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int  # key/value heads
    channels: int
    vocab: int
    padded: int
    llama: bool

    @property
    def qkv(self) -> tuple[int, int, int]:
        """Rows of query, key and value."""
        return self.heads * self.channels, self.groups * self.channels, self.groups * self.channels

    def block(self, number: int) -> dict[str, tuple[int, ...]]:
        """Name -> full shape, of the parameters of a transformer block."""
        h, up = self.hidden, self.ffn * (2 if self.llama else 1)
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (h,)}
        shapes |= {"self_attention.query_key_value.weight": (sum(self.qkv), h)}
        shapes |= {"self_attention.dense.weight": (h, self.qkv[0]), "post_attention_layernorm.weight": (h,)}
        shapes |= {"mlp.dense_h_to_4h.weight": (up, h), "mlp.dense_4h_to_h.weight": (h, self.ffn)}
        if not self.llama:
            shapes |= {n.replace("weight", "bias"): shape[:1] for n, shape in shapes.items()}
        return {f"{number}.{name}": shape for name, shape in shapes.items()}

    def stages(self, count: int, spare: bool = False) -> list[dict[str, tuple[int, ...]]]:
        """Name -> full shape, by stage; `spare`: with upstream's second position embedding on the last."""
        blocks = [self.block(number) for number in range(2, self.layers + 2)]
        per_stage = self.layers // count
        found = [
            {n: s for block in blocks[i * per_stage : (i + 1) * per_stage] for n, s in block.items()}
            for i in range(count)
        ]
        norm = {f"{self.layers + 2}.weight": (self.hidden,)}
        words, positions = (self.padded, self.hidden), (5, self.hidden)
        if self.llama:
            found[0] = {"1.word_embeddings.weight": words} | found[0]
            found[-1] |= norm | {f"{self.layers + 3}.lm_head.weight": words}
            return found
        tied = "tied_modules.embed.word_embeddings.weight"
        place = {"tied_modules.embed.position_embeddings.weight": positions}
        found[0] = {tied: words} | place | found[0]
        found[-1] |= norm | {f"{self.layers + 2}.bias": (self.hidden,)}
        if count > 1:
            found[-1] |= {tied: words} | (place if spare else {})
        return found

    def parts(self, name: str) -> list[int]:
        """Rows of the matrices that are fused in a parameter which is split over TP by rows."""
        if "query_key_value" in name:
            return list(self.qkv)
        return [self.ffn] * 2 if "h_to_4h" in name and self.llama else []


GOLDEN = UpstreamModel(4, 64, 176, 4, 4, 16, 500, 512, True)
GROUPED = UpstreamModel(2, 6, 12, 4, 2, 3, 9, 12, False)


def is_split_by_columns(name: str) -> bool:
    return name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight"))


def is_split_by_rows(name: str) -> bool:
    return (
        "_embeddings.weight" in name
        and "position" not in name
        or any(part in name for part in ("lm_head", "query_key_value", "dense_h_to_4h"))
    )


def interleaved(local: torch.Tensor, model: UpstreamModel) -> torch.Tensor:
    """The rows [Q; K; V] of a TP rank as upstream laid them before December 2024: head by head."""
    groups = local.shape[0] // ((model.heads // model.groups + 2) * model.channels)
    rows = [groups * model.heads // model.groups * model.channels, *[groups * model.channels] * 2]
    by_group = [part.reshape(groups, -1, *local.shape[1:]) for part in local.split(rows)]
    return torch.cat(by_group, dim=1).reshape(local.shape)


def local_of(model: UpstreamModel, name: str, full: torch.Tensor, tp: int, size: int) -> torch.Tensor:
    """What TP rank `tp` of `size` holds of a parameter."""
    if is_split_by_columns(name):
        return full.chunk(size, 1)[tp].contiguous()
    if not is_split_by_rows(name):
        return full
    fused = full.split(model.parts(name) or [full.shape[0]])
    return torch.cat([part.chunk(size)[tp] for part in fused])


def full_of(model: UpstreamModel, name: str, local: list[torch.Tensor]) -> torch.Tensor:
    """A parameter, of what the TP ranks hold."""
    if is_split_by_columns(name):
        return torch.cat(local, 1)
    if not is_split_by_rows(name):
        assert all(torch.equal(local[0], other) for other in local)
        return local[0]
    sizes = [part // len(local) for part in model.parts(name)]
    pieces = [tensor.split(sizes) if sizes else (tensor,) for tensor in local]
    return torch.cat([torch.cat(of_all) for of_all in zip(*pieces, strict=True)])


def load_known(path: Path) -> Any:
    """The content of a checkpoint file, known classes only."""
    with known_classes():
        return torch.load(path, map_location="cpu", weights_only=True)


def assembled(model: UpstreamModel, directory: Path, layout: Layout) -> State:
    """Masters and moments, of the shards of all ranks, and the weights of the layer files."""
    local: dict[tuple[str, str, int], torch.Tensor] = {}
    for pp, tp in itertools.product(reversed(range(layout.pp)), range(layout.tp)):  # the first stage's stay
        common = load_known(directory / f"mp_rank_{pp * layout.tp + tp:02d}_model_states.pt")
        shapes = {name: shape for group in common["param_shapes"] for name, shape in group.items()}
        pieces: dict[tuple[str, str], list[torch.Tensor]] = {}
        for dp in range(layout.dp):
            name = f"zero_pp_rank_{dp}_mp_rank_{pp * layout.tp + tp:02d}_optim_states.pt"
            (path,) = directory.glob(f"*{name}")
            shard = load_known(path)["optimizer_state_dict"]
            base = shard["base_optimizer_state"]["state"]
            for group, fragments in enumerate(shard["param_slice_mappings"]):
                flat = {"master": shard["single_partition_of_fp32_groups"][group], **base[group]}
                for (param, at), kind in itertools.product(fragments.items(), KINDS):
                    piece = flat[kind][at.start : at.start + at.numel]
                    pieces.setdefault((kind, param), []).append(piece)
        for (kind, param), found in pieces.items():
            local[kind, param, tp] = torch.cat(found).reshape(shapes[param])
    state: State = {kind: {} for kind in KINDS}
    for kind, param in {(kind, param): None for kind, param, _ in local}:
        by_rank = [local[kind, param, tp] for tp in range(layout.tp)]
        state[kind][param] = full_of(model, param, by_rank)
    return state


def some_state(model: UpstreamModel) -> State:
    """Distinct values; those of tokens that are none are not zero."""
    names = {name: shape for stage in model.stages(1) for name, shape in stage.items()}
    generator = torch.Generator().manual_seed(3)
    return {kind: {name: torch.randn(shape, generator=generator) for name, shape in names.items()} for kind in KINDS}


def arguments(model: UpstreamModel, layout: Layout, dtype: str, by_heads: bool) -> argparse.Namespace:
    """Those of upstream's that tell what the checkpoint is of."""
    args = argparse.Namespace(
        num_layers=model.layers, hidden_size=model.hidden, ffn_hidden_size=model.ffn, kv_channels=model.channels,
        num_attention_heads=model.heads, num_key_value_heads=model.groups, padded_vocab_size=model.padded,
        bf16=dtype == "bf16", fp16=dtype == "fp16", tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp, consumed_train_samples=20, consumed_valid_samples=0, train_iters=9,
        eval_interval=0, eval_iters=0, global_batch_size=4, swiglu=model.llama, num_experts=[1],
        normalization="rmsnorm" if model.llama else "layernorm", untie_embeddings_and_output_weights=model.llama,
        add_bias_linear=not model.llama, add_position_embedding=not model.llama, max_position_embeddings=5,
        use_rotary_position_embeddings=model.llama,
    )  # fmt: skip
    if not by_heads:
        setattr(args, SINCE_BLOCKS, False)
    return args


def write_upstream(
    directory: Path, model: UpstreamModel, state: State, layout: Layout, dtype: str = "bf16", by_heads: bool = False
) -> Path:
    """A checkpoint as upstream saves it after iteration 5; `by_heads`: one before December 2024."""
    directory.mkdir(parents=True)
    for pp, tp in itertools.product(range(layout.pp), range(layout.tp)):
        names = model.stages(layout.pp, spare=True)[pp]
        local = {kind: {n: local_of(model, n, state[kind][n], tp, layout.tp) for n in names} for kind in KINDS}
        for kind, name in itertools.product(KINDS, names if by_heads else ()):
            if "query_key_value" in name:
                local[kind][name] = interleaved(local[kind][name], model)
        if not model.llama and layout.pp > 1 and pp == layout.pp - 1:
            for kind in KINDS:  # no gradient has reached it since the start
                local[kind]["tied_modules.embed.position_embeddings.weight"] = torch.full((5, model.hidden), 7.0)
        _write_shards(directory, local, layout, pp, tp, dtype)
        _write_layers(directory, model, local["master"], pp, tp, dtype)
        common = {"args": arguments(model, layout, dtype, by_heads), "dp_world_size": layout.dp, "module": None}
        common |= {"iteration": 5, "global_steps": 5, "global_samples": 20, "skipped_steps": 0}
        common |= {"param_shapes": [{n: t.shape for n, t in local["master"].items()}]}
        common |= {"universal_checkpoint_info": {"original_vocab_size": model.vocab}}
        torch.save(common, directory / f"mp_rank_{pp * layout.tp + tp:02d}_model_states.pt")
    return directory


def _write_shards(directory: Path, local: State, layout: Layout, pp: int, tp: int, dtype: str) -> None:
    """Two groups, as DeepSpeed flattens them: padded to 2 x DP elements, and cut into DP partitions."""
    names = [[n for n, t in local["master"].items() if (t.dim() > 1) == decays] for decays in (True, False)]
    numels = [sum(local["master"][n].numel() for n in group) for group in names]
    sizes = [-(-numel // (2 * layout.dp)) * 2 for numel in numels]
    prefix = "bf16_" if dtype == "bf16" else ""
    for dp in range(layout.dp):
        shard: dict[str, Any] = {"single_partition_of_fp32_groups": [], "param_slice_mappings": []}
        base: dict[str, Any] = {"state": {}, "param_groups": []}
        for group, (mine, size) in enumerate(zip(names, sizes, strict=True)):
            flat = {}
            for kind in KINDS:
                joined = torch.cat([local[kind][n].reshape(-1) for n in mine])
                padded = torch.nn.functional.pad(joined, (0, size * layout.dp - len(joined)))
                flat[kind] = padded[dp * size : (dp + 1) * size].clone()
            shard["single_partition_of_fp32_groups"].append(flat.pop("master"))
            base["state"][group] = flat | {"step": torch.tensor(5.0)}
            base["param_groups"].append({"params": [group]})
            mapping, at = OrderedDict(), 0
            for name in mine:
                numel = local["master"][name].numel()
                first, last = max(at, dp * size), min(at + numel, (dp + 1) * size)
                if last > first:
                    mapping[name] = fragment_address(numel=last - first, start=first - dp * size)
                at += numel
            shard["param_slice_mappings"].append(mapping)
        name = f"{prefix}zero_pp_rank_{dp}_mp_rank_{pp * layout.tp + tp:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": shard | {"base_optimizer_state": base}}, directory / name)


def _write_layers(directory: Path, model: UpstreamModel, local: Tensors, pp: int, tp: int, dtype: str) -> None:
    weights = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    layers: dict[int, Tensors] = {}
    for name, tensor in local.items():
        number, _, key = name.partition(".")
        if name.startswith("tied_modules"):
            if pp > 0:  # the copies of later stages are in no file
                continue
            number, key = "1", name.removeprefix("tied_modules.embed.")
        layers.setdefault(int(number), {})[key] = tensor.to(weights)
    for number, layer in layers.items():
        torch.save(layer, directory / f"layer_{number:02d}-model_{tp:02d}-model_states.pt")
