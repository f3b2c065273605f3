"""Placements tell truly which part of which parameter a tensor is.

The local tensors are cut here by hand, as the layers say that they compute with them; the full ones must come back
from placements alone.
"""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpointing.state.shard_metadata import (
    FlatParameter,
    FlatPartition,
    fragments,
    optimizer_placements,
    shard_placement,
    weight_placement,
)
from megatron.config import ModelConfig, padded_vocab_size
from megatron.model.embedding import EmbeddingPipe, LMHeadPipe, TiedHead
from megatron.model.norms import RMSNorm
from megatron.model.transformer import ParallelTransformerLayerPipe
from megatron.parallel.parameter_slice import ParameterSlice, slice_of
from megatron.parallel.placement import Placement
from megatron.parallel.topology import TensorParallelGroup
from tests.flat_partitions import flat_partition
from tests.placement_reader import Reader

VOCAB = 500
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, POSITIONS = 8, 4, 6, 20, 12, 16
TP_SIZES = (1, 2, 4)

Cut = Callable[[torch.Tensor, int, int], torch.Tensor]  # (full, TP rank, TP size) -> local


def model(style: str) -> ModelConfig:
    llama = style == "llama"
    return ModelConfig(
        num_layers=2, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, kv_channels=HEAD_DIM, seq_length=POSITIONS, swiglu=llama,
        use_rotary_position_embeddings=llama, add_bias_linear=not llama,
        normalization="rmsnorm" if llama else "layernorm",
    )  # fmt: skip


def modules(style: str, padded: int, rank: int, size: int, device: str = "cpu") -> dict[str, torch.nn.Module]:
    """Layers of the model as a stage has them, under their global names."""
    config = model(style)
    place = Placement(TensorParallelGroup(rank, size), torch.float32, torch.device(device))
    embedding, block = EmbeddingPipe(config, padded, place), ParallelTransformerLayerPipe(config, place)
    if style == "llama":
        norm, head = RMSNorm(HIDDEN, 1e-5, place), LMHeadPipe(config, padded, place)
        return {"1": embedding, "5": block, "7": norm, "8": head}
    return {"tied_modules.embed": embedding, "5": block}


def named(layers: dict[str, torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    return {f"{prefix}.{key}": p for prefix, layer in layers.items() for key, p in layer.named_parameters()}


def rows(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return full.chunk(size, dim=0)[rank]


def columns(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return full.chunk(size, dim=1)[rank]


def whole(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return full


def heads(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The query heads of the rank, then its key heads, then its value heads."""
    per_head = full.reshape(HEADS + 2 * KV_HEADS, HEAD_DIM, *full.shape[1:])
    q, kv = HEADS // size, KV_HEADS // size
    keys, values = HEADS, HEADS + KV_HEADS
    mine = [*range(rank * q, (rank + 1) * q)]
    mine += [first + head for first in (keys, values) for head in range(rank * kv, (rank + 1) * kv)]
    return per_head[mine].reshape(-1, *full.shape[1:])


def gate_and_up(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    gate, up = full[:FFN], full[FFN:]
    return torch.cat((rows(gate, rank, size), rows(up, rank, size)))


def how_cut(style: str) -> dict[str, tuple[tuple[int, ...], Cut]]:
    """Parameter -> (full shape with the vocabulary as -1, how a rank's tensor is cut from it)."""
    qkv, fused = (HEADS + 2 * KV_HEADS) * HEAD_DIM, 2 * FFN if style == "llama" else FFN
    up: Cut = gate_and_up if style == "llama" else rows
    cuts: dict[str, tuple[tuple[int, ...], Cut]] = {
        "5.input_layernorm.weight": ((HIDDEN,), whole),
        "5.self_attention.query_key_value.weight": ((qkv, HIDDEN), heads),
        "5.self_attention.dense.weight": ((HIDDEN, HEADS * HEAD_DIM), columns),
        "5.post_attention_layernorm.weight": ((HIDDEN,), whole),
        "5.mlp.dense_h_to_4h.weight": ((fused, HIDDEN), up),
        "5.mlp.dense_4h_to_h.weight": ((HIDDEN, FFN), columns),
    }
    if style == "llama":
        ends = {name: ((-1, HIDDEN), rows) for name in ("1.word_embeddings.weight", "8.lm_head.weight")}
        return cuts | ends | {"7.weight": ((HIDDEN,), whole)}
    biases: dict[str, tuple[tuple[int, ...], Cut]] = {
        "5.input_layernorm.bias": ((HIDDEN,), whole),
        "5.self_attention.query_key_value.bias": ((qkv,), heads),
        "5.self_attention.dense.bias": ((HIDDEN,), whole),
        "5.post_attention_layernorm.bias": ((HIDDEN,), whole),
        "5.mlp.dense_h_to_4h.bias": ((FFN,), rows),
        "5.mlp.dense_4h_to_h.bias": ((HIDDEN,), whole),
    }
    ends = {"word_embeddings": ((-1, HIDDEN), rows), "position_embeddings": ((POSITIONS, HIDDEN), whole)}
    return cuts | biases | {f"tied_modules.embed.{name}.weight": cut for name, cut in ends.items()}


@pytest.mark.parametrize("size", TP_SIZES)
@pytest.mark.parametrize("style", ["llama", "classic"])
def test_full_weights_come_back(style: str, size: int) -> None:
    padded = padded_vocab_size(VOCAB, 11, size)  # 506, 506 and 528 rows
    cuts = how_cut(style)
    shapes = {name: tuple(padded if n < 0 else n for n in shape) for name, (shape, _) in cuts.items()}
    full = {name: torch.randn(shape) for name, shape in shapes.items()}
    reader = Reader()
    for rank in range(size):
        params = named(modules(style, padded, rank, size))
        assert params.keys() == cuts.keys()
        for name, param in params.items():
            local = cuts[name][1](full[name], rank, size)
            assert local.shape == param.shape, name
            placed = weight_placement(name, slice_of(param, name), VOCAB)
            assert json.loads(json.dumps(placed)) == placed
            assert placed.get("unpadded") == (VOCAB if -1 in cuts[name][0] else None)
            reader.add(local, placed)
    found = reader.whole("weight")
    assert found.keys() == full.keys()
    assert all(torch.equal(found[name], full[name]) for name in full)
    replicated = {name for name, (_, cut) in cuts.items() if cut is whole}
    assert reader.replicas("weight") == {name: size if name in replicated else 1 for name in full}


def test_ranges_of_fused_heads() -> None:
    params = named(modules("llama", 512, 1, 2))
    name = "5.self_attention.query_key_value.weight"
    assert weight_placement(name, slice_of(params[name], name), VOCAB) == {
        "name": name, "shape": [96, HIDDEN], "dim": 0, "ranges": [[24, 48], [60, 72], [84, 96]],
    }  # fmt: skip


def test_tied_head_is_the_embedding() -> None:
    place = Placement(TensorParallelGroup(1, 2), torch.float32, torch.device("cpu"))
    embedding = EmbeddingPipe(model("classic"), 512, place).word_embeddings.weight
    head = TiedHead(model("classic"), 512, place).word_embeddings.weight
    assert slice_of(embedding, "") == slice_of(head, "")


@pytest.mark.parametrize("size", TP_SIZES)
@pytest.mark.parametrize("style", ["llama", "classic"])
def test_initial_values_are_the_slice_that_the_placement_tells(style: str, size: int) -> None:
    def drawn(rank: int, size: int) -> dict[str, torch.nn.Parameter]:
        layers = modules(style, 512, rank, size)
        for prefix, layer in layers.items():
            for name, module in layer.named_modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters(3, f"{prefix}.{name}")  # pyright: ignore[reportCallIssue]
        return named(layers)

    reader = Reader()
    for rank in range(size):
        for name, param in drawn(rank, size).items():
            reader.add(param.detach(), weight_placement(name, slice_of(param, name), VOCAB))
    found = reader.whole("weight")
    assert all(torch.equal(found[name], param) for name, param in drawn(0, 1).items())


SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)


@settings(deadline=None, max_examples=60)
@given(st.lists(SHAPES, min_size=1, max_size=6), st.integers(1, 5))
def test_partitions_hold_every_element_once(shapes: list[tuple[int, ...]], dp: int) -> None:
    parts = [(f"p{i}", ParameterSlice(shape)) for i, shape in enumerate(shapes)]
    full = {name: torch.randn(part.shape) for name, part in parts}
    flat = torch.cat([full[name].reshape(-1) for name, _ in parts])
    total = math.ceil(len(flat) / (2 * dp)) * 2 * dp
    flat = torch.cat((flat, torch.zeros(total - len(flat))))
    reader = Reader()
    for rank in range(dp):
        partition = flat_partition(parts, rank, dp)
        assert (partition.start, partition.size) == (rank * total // dp, total // dp)
        held = fragments(partition, VOCAB)
        mine = flat[partition.start : partition.start + partition.size]
        reader.add(mine, shard_placement("master", held, len(mine)))
    assert reader.padding == total - sum(map(torch.Tensor.numel, full.values()))
    found = reader.whole("master")
    filled = {name for name in full if full[name].numel()}
    assert found.keys() == filled
    assert all(torch.equal(found[name], full[name]) for name in filled)


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("style", ["llama", "classic"])
def test_full_masters_come_back(style: str, tp: int, dp: int) -> None:
    full = {name: torch.randn(p.shape) for name, p in named(modules(style, 512, 0, 1)).items()}
    cuts = how_cut(style)
    reader = Reader()
    for tp_rank in range(tp):
        parts = [(name, slice_of(p, name)) for name, p in named(modules(style, 512, tp_rank, tp)).items()]
        flat = torch.cat([cuts[name][1](full[name], tp_rank, tp).reshape(-1) for name, _ in parts])
        for rank in range(dp):
            partition = flat_partition(parts, rank, dp)
            mine = flat[partition.start : partition.start + partition.size]
            reader.add(mine, shard_placement("exp_avg", fragments(partition, VOCAB), len(mine)))
    found = reader.whole("exp_avg")
    assert all(torch.equal(found[name], full[name]) for name in full)
    assert dp == 1 or sum(reader.cut.values()) > 0, "no partition ends within a parameter"
    vocabulary = {name for (_, name), parameter in reader.parameters.items() if parameter.unpadded == VOCAB}
    assert vocabulary == {name for name, (shape, _) in cuts.items() if -1 in shape}


GROUPS = [[("a", ParameterSlice((3, 2))), ("b", ParameterSlice((5,)))], [("c", ParameterSlice((2,)))]]


def groups_of(rank: int) -> list[FlatPartition]:
    return [flat_partition(group, rank, 2) for group in GROUPS]


def moments(numel: int) -> dict[str, Any]:
    return {"step": torch.tensor(4.0), "exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel)}


def optimizer_file(base: Any, masters: Iterable[int]) -> dict[str, Any]:
    flat = [torch.zeros(numel) for numel in masters]
    state = {"single_partition_of_fp32_groups": flat, "base_optimizer_state": base, "group_paddings": [0, 0]}
    return {"optimizer_state_dict": state, "rng_state": {"torch_rng_state": torch.zeros(9)}}


BASE = ("optimizer_state_dict", "base_optimizer_state")
MASTERS = ("optimizer_state_dict", "single_partition_of_fp32_groups")


TWO_GROUPS = [{"params": [0]}, {"params": [1]}]


def test_paths_of_an_optimizer_file() -> None:
    base = {"state": {0: moments(6), 1: moments(2)}, "param_groups": TWO_GROUPS}
    placed = optimizer_placements(optimizer_file(base, (6, 2)), groups_of(0), VOCAB)
    moved = {(*BASE, "state", group, kind) for group in (0, 1) for kind in ("exp_avg", "exp_avg_sq")}
    assert placed.keys() == moved | {(*MASTERS, 0), (*MASTERS, 1)}
    first = {"name": "a", "shape": [3, 2], "dim": None, "ranges": None, "local_shape": [3, 2], "start": 0}
    assert placed[(*MASTERS, 0)] == {
        "kind": "master", "padding": 0, "fragments": [first | {"numel": 6, "offset": 0}]
    }  # fmt: skip
    assert placed[(*BASE, "state", 1, "exp_avg_sq")]["kind"] == "exp_avg_sq"
    assert [f["name"] for f in placed[(*BASE, "state", 1, "exp_avg_sq")]["fragments"]] == ["c"]


def test_moments_may_keep_padding_that_masters_do_not() -> None:
    """As DeepSpeed saves them outside bf16; a partition may be nothing but padding."""
    base = {"state": {0: moments(6), 1: moments(2)}, "param_groups": TWO_GROUPS}
    placed = optimizer_placements(optimizer_file(base, (5, 0)), groups_of(1), VOCAB)
    assert placed[(*MASTERS, 0)]["padding"] == 0 and placed[(*BASE, "state", 0, "exp_avg")]["padding"] == 1
    assert placed[(*MASTERS, 1)] == {"kind": "master", "fragments": [], "padding": 0}
    assert placed[(*BASE, "state", 1, "exp_avg")] == {"kind": "exp_avg", "fragments": [], "padding": 2}


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ([moments(6), moments(2)], {(*BASE, 0, "exp_avg"), (*BASE, 0, "exp_avg_sq")}),  # elastic_checkpoint
        ({"state": {}, "param_groups": TWO_GROUPS}, set()),  # not stepped yet
        ({"state": {0: {"momentum_buffer": None}}, "param_groups": TWO_GROUPS}, set()),  # SGD without momentum
        (
            {"state": {0: {"momentum_buffer": torch.ones(6)}}, "param_groups": TWO_GROUPS},
            {(*BASE, "state", 0, "momentum_buffer")},
        ),
    ],
)
def test_other_optimizer_states(base: Any, expected: set[Any]) -> None:
    placed = optimizer_placements(optimizer_file(base, (6, 2)), groups_of(0), VOCAB)
    assert {path for path in placed if path[:2] == BASE and 1 not in path} == expected
    assert all(placed[path]["fragments"][0]["name"] == "a" for path in expected)


def test_gaps_between_parameters_are_padding() -> None:
    """As DeepSpeed leaves them with zero_optimization.parameter_alignment; and its order may be another."""
    table = [FlatParameter("b", ParameterSlice((5,)), 8), FlatParameter("a", ParameterSlice((3, 2)), 0)]
    held = fragments(FlatPartition(table, 0, 16), VOCAB)
    placed = shard_placement("master", held, 13)
    assert [(f["name"], f["offset"], f["numel"]) for f in placed["fragments"]] == [("a", 0, 6), ("b", 8, 5)]
    assert placed["padding"] == 2


def test_a_tensor_too_short_for_its_fragments() -> None:
    held = fragments(flat_partition(GROUPS[0], 0, 1), VOCAB)
    with pytest.raises(ValueError, match="exp_avg: a flat tensor of 10 elements cannot hold .* element 11"):
        shard_placement("exp_avg", held, 10)


def test_a_parameter_that_does_not_say_how_it_is_split() -> None:
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"5\.weight: .*Placement\.parameter"):
        slice_of(layer.weight, "5.weight")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((8, 2), 0, (4, 3)), "do not make up dimension 0"),
        (((8, 2), 0, (6, 2), 0, 4), "--tensor-model-parallel-size 4"),
        (((8, 2), None, (8,)), "need the dimension"),
    ],
)
def test_impossible_slices(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParameterSlice(*arguments)


@pytest.mark.slow
def test_cheap_and_without_data() -> None:
    """A stage of 100 parameters, on the meta device: nothing is read or copied."""
    layers = OrderedDict((str(i), modules("llama", 512, 0, 4, "meta")["5"]) for i in range(17))
    params = named(layers)
    assert len(params) > 100 and all(param.is_meta for param in params.values())

    def place_all() -> None:
        parts = [(name, slice_of(param, name)) for name, param in params.items()]
        for name, part in parts:
            weight_placement(name, part, VOCAB)
        fragments(flat_partition(parts, 1, 2), VOCAB)

    def seconds() -> float:
        start = time.thread_time()
        place_all()
        return time.thread_time() - start

    assert min(seconds() for _ in range(20)) < 0.05  # 0.002 s
