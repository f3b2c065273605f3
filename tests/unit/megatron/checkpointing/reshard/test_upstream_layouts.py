"""An upstream checkpoint on another layout: every bit of every master and moment, out of its files alone."""

from __future__ import annotations

import argparse
import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing.agreement import CheckpointRejectedError
from megatron.checkpointing.engines.base import EngineOptions
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from megatron.checkpointing.engines.torch.engine import TorchEngine
from megatron.checkpointing.reshard.reading import Reading
from megatron.checkpointing.reshard.sources import WEIGHT, SourceIndex
from megatron.checkpointing.reshard.targets import Target, plan
from megatron.checkpointing.reshard.torch_shards import TorchShards
from megatron.checkpointing.reshard.upstream_manifest import with_manifest
from megatron.checkpointing.state.shard_metadata import fragments, shard_placement, weight_placement
from megatron.checkpointing.store.search import Candidate
from megatron.checkpointing.store.upstream import ForeignCheckpoint, describe, read_header
from megatron.parallel.control_plane import ControlPlane
from megatron.parallel.parameter_slice import ParameterSlice
from megatron.parallel.topology import Layout
from restart_trace.recorder import untraced_operation
from tests.flat_partitions import flat_partition
from tests.placement_reader import Reader, bits
from tests.upstream_files import (
    GOLDEN,
    GROUPED,
    KINDS,
    SINCE_BLOCKS,
    State,
    UpstreamModel,
    assembled,
    interleaved,
    is_split_by_columns,
    is_split_by_rows,
    load_known,
    some_state,
    write_upstream,
)

pytestmark = pytest.mark.slow  # each reads a whole upstream checkpoint

UPSTREAM = Path(__file__).resolve().parents[4] / "golden" / "upstream_run" / "global_step5"
SAVED = Layout(2, 2, 2)
OP = untraced_operation()
TIED = "tied_modules.embed.word_embeddings.weight"


def surveyed(directory: Path, model: UpstreamModel, with_optimizer: bool = True) -> tuple[Candidate, ForeignCheckpoint]:
    found = Candidate(directory, directory.name, 5, None)
    reader = TorchEngine(EngineOptions())
    return with_manifest(found, reader, model.vocab, with_optimizer, ControlPlane(0, 1), OP)


def part_of(model: UpstreamModel, name: str, shape: tuple[int, ...], tp: int, size: int) -> ParameterSlice:
    vocabulary = "word_embeddings" in name or "lm_head" in name
    if is_split_by_columns(name):
        return ParameterSlice(shape, 1, (shape[1],), tp, size)
    if not is_split_by_rows(name):
        return ParameterSlice(shape)
    return ParameterSlice(shape, 0, tuple(model.parts(name)) or (shape[0],), tp, size, vocabulary)


def parts_here(model: UpstreamModel, layout: Layout, tp: int, pp: int) -> dict[str, ParameterSlice]:
    """The parameters of a stage of this program, as a TP rank holds them."""
    stage = model.stages(layout.pp)[pp]
    return {name: part_of(model, name, shape, tp, layout.tp) for name, shape in stage.items()}


def loaded(directory: Path, here: UpstreamModel, layout: Layout) -> Reader:
    """What all ranks of `layout` read of an upstream checkpoint: masters and moments."""
    found, foreign = surveyed(directory, here)
    manifest = found.manifest
    assert manifest is not None
    rounding = {TIED: float("inf")} if layout.pp > 1 else {}
    reader, engine = Reader(rounding), TorchEngine(EngineOptions())
    sizes = {directory / name: file.num_bytes for name, file in manifest.files.items()}

    def shards_for(parts: dict[str, ParameterSlice]) -> TorchShards:
        return TorchShards(engine, directory, manifest, parts, here.vocab, foreign, OP)

    groups = shards_for({}).flat_groups(range(foreign.layout.world_size), foreign.model["params_dtype"])
    for tp, pp in itertools.product(range(layout.tp), range(layout.pp)):
        parts = parts_here(here, layout, tp, pp)
        index = SourceIndex(shards_for(parts).optimizer_tensors(groups))
        for dp, decays in itertools.product(range(layout.dp), (True, False)):
            mine = [(name, part) for name, part in parts.items() if (len(part.shape) > 1) == decays]
            partition = flat_partition(mine, dp, layout.dp)
            placements = [shard_placement(k, fragments(partition, here.vocab), partition.size) for k in KINDS]
            targets = [Target(torch.full((partition.size,), 7.0), p["kind"], p) for p in placements]
            reading = Reading(plan(targets, index), sizes, "off", 1)
            reading.run({0: reading.share()}, 0, OP)
            for target in targets:
                reader.add(target.tensor, dict(target.placement))
    return reader


def assert_same(reader: Reader, expected: State, vocab: int) -> None:
    """Bit for bit, and the rows of no token where both have them; new ones are zero."""
    for kind in KINDS:
        found = reader.whole(kind)
        assert found.keys() == expected[kind].keys()
        for name, values in found.items():
            rows = min(len(values), len(expected[kind][name]))
            assert torch.equal(bits(values[:rows].reshape(-1)), bits(expected[kind][name][:rows].reshape(-1)))
            assert rows >= vocab or "word_embeddings" not in name
            assert not values[rows:].any(), name


@pytest.mark.parametrize(
    "layout",
    [Layout(1, 1, 1), Layout(1, 4, 2), Layout(2, 1, 3), Layout(1, 2, 5), Layout(4, 1, 2), Layout(4, 4, 1)],
    ids=str,
)
def test_upstreams_own_files_on_every_layout(layout: Layout) -> None:
    """A real run's; with 1, 3 and 5 replicas the partitions are cut at other places than upstream's two."""
    expected = assembled(GOLDEN, UPSTREAM, SAVED)
    assert len(expected["master"]) == 2 + 4 * 6 + 1
    assert_same(loaded(UPSTREAM, GOLDEN, layout), expected, GOLDEN.vocab)


@pytest.mark.parametrize("padded", [500, 768])
def test_another_padding_of_the_vocabulary(padded: int) -> None:
    """Where TP does not divide upstream's: its 12 rows of no token go, or as many as are new are zero."""
    here = replace(GOLDEN, padded=padded)
    assert_same(loaded(UPSTREAM, here, Layout(4, 1, 1)), assembled(GOLDEN, UPSTREAM, SAVED), 500)


@pytest.mark.parametrize("by_heads", [False, True], ids=["blocks", "heads"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    "old", [pytest.param(Layout(2, 2, 3), marks=pytest.mark.slow), Layout(1, 1, 1), Layout(1, 2, 2)], ids=str
)
def test_tied_embeddings_and_grouped_heads(tmp_path: Path, old: Layout, dtype: str, by_heads: bool) -> None:
    """Also on the layout that saved them: the last stage has a position embedding more, QKV other rows."""
    state = some_state(GROUPED)
    directory = write_upstream(tmp_path / "global_step5", GROUPED, state, old, dtype, by_heads)
    prefix = "bf16_zero" if dtype == "bf16" else "zero"
    assert len(list(directory.glob(f"{prefix}_pp_rank_*"))) == old.world_size
    for new in (Layout(1, 1, 1), Layout(2, 1, 2), Layout(1, 2, 1), old):
        assert_same(loaded(directory, GROUPED, new), state, GROUPED.vocab)


def test_rows_by_heads_are_those_of_upstreams_split() -> None:
    """As it takes them apart: view [groups, query heads of a group + 2, channels], then split."""
    rows = torch.arange(24).reshape(24, 1)  # 4 query heads, 2 groups, 3 channels: Q 0-11, K 12-17, V 18-23
    found = interleaved(rows, GROUPED).reshape(2, 4, 3)
    query, key, value = found.split([2, 1, 1], dim=1)
    assert query.flatten().tolist() == [*range(12)]
    assert key.flatten().tolist() == [*range(12, 18)] and value.flatten().tolist() == [*range(18, 24)]


@pytest.mark.parametrize("by_heads", [False, True], ids=["blocks", "heads"])
def test_weights_alone(tmp_path: Path, by_heads: bool) -> None:
    """--no-load-optim: out of the layer files; the shards need not be there."""
    state = some_state(GROUPED)
    directory = write_upstream(tmp_path / "global_step5", GROUPED, state, SAVED, "fp32", by_heads)
    for path in directory.glob("zero_*"):
        path.unlink()
    found, foreign = surveyed(directory, GROUPED, with_optimizer=False)
    manifest = found.manifest
    assert manifest is not None and foreign.heads_interleaved == by_heads
    reader, layout = Reader(), Layout(1, 1, 1)
    parts = parts_here(GROUPED, layout, 0, 0)
    engine = TorchEngine(EngineOptions())
    shards = TorchShards(engine, directory, manifest, parts, GROUPED.vocab, foreign, OP)
    layers: dict[int, dict[str, str]] = {}
    for name in parts:
        number, _, key = name.replace("tied_modules.embed", "1").partition(".")
        layers.setdefault(int(number), {})[key] = name
    index = SourceIndex(shards.weights(layers))
    targets = [
        Target(torch.empty(p.local_shape), WEIGHT, weight_placement(n, p, GROUPED.vocab)) for n, p in parts.items()
    ]
    sizes = {directory / name: file.num_bytes for name, file in manifest.files.items()}
    reading = Reading(plan(targets, index), sizes, "off", 1)
    reading.run({0: reading.share()}, 0, OP)
    for target in targets:
        reader.add(target.tensor, dict(target.placement))
    for name, values in reader.whole(WEIGHT).items():
        assert torch.equal(bits(values.reshape(-1)), bits(state["master"][name].reshape(-1))), name


# What cannot be done


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(UPSTREAM, tmp_path / "global_step5"))


def refusal(directory: Path, kind: type[CheckpointError], model: UpstreamModel = GOLDEN) -> str:
    with pytest.raises(kind) as caught:
        surveyed(directory, model)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "layer_03-model_01-model_states.pt",
        "mp_rank_02_model_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_03_optim_states.pt",
    ],
)
def test_a_missing_or_truncated_file_is_named(checkpoint: Path, name: str) -> None:
    path = checkpoint / name
    content = path.read_bytes()
    for size in (len(content) - 1, len(content) // 2, 0):
        path.write_bytes(content[:size])
        assert f"{path}: not a complete torch.save file" in refusal(checkpoint, CheckpointRejectedError)
    path.unlink()
    assert f"{path} is missing (1 of the 26 files of TP2 PP2 DP2 are)" in refusal(checkpoint, CheckpointRejectedError)
    path.mkdir()
    assert f"{path} is missing" in refusal(checkpoint, CheckpointRejectedError)


@pytest.mark.parametrize(
    ("name", "as_name", "told"),
    [
        ("bf16_zero_pp_rank_1_mp_rank_03_optim_states.pt", "bf16_zero_pp_rank_2_mp_rank_03_optim_states.pt", "of that"),
        ("mp_rank_03_model_states.pt", "mp_rank_04_model_states.pt", "another save lies in the same directory"),
        ("layer_02-model_00-model_states.pt", "layer_02-model_02-model_states.pt", "was saved on TP2 PP2 DP2 in bf16"),
        ("layer_02-model_00-model_states.pt", "layer_2_expert_0_mp_rank_00_model_states.pt", "not of that"),
    ],
)  # fmt: skip
def test_files_of_another_layout_are_named(checkpoint: Path, name: str, as_name: str, told: str) -> None:
    shutil.copy(checkpoint / name, checkpoint / as_name)
    message = refusal(checkpoint, CheckpointMismatchError)
    assert as_name in message and told in message


def test_more_ranks_than_files(checkpoint: Path) -> None:
    """A number of replicas is only a number; the weights alone do not need their shards."""
    changed(checkpoint, "mp_rank_00_model_states.pt", dp_world_size=1 << 40)
    message = refusal(checkpoint, CheckpointRejectedError)
    assert f"{checkpoint}: has 26 files, fewer than the ranks of TP2 PP2 DP{1 << 40}, of which" in message
    found, _ = surveyed(checkpoint, GOLDEN, with_optimizer=False)
    assert found.manifest is not None and len(found.manifest.files) == 18


def changed(checkpoint: Path, name: str, **content: Any) -> None:
    state = load_known(checkpoint / name)
    for key, value in content.items():
        if value is None:
            del state[key]
        else:
            state[key] = value
    if isinstance(state.get("args"), argparse.Namespace):
        del state["args"].model_type  # a class of upstream's
    torch.save(state, checkpoint / name)


def test_files_of_two_saves(checkpoint: Path) -> None:
    changed(checkpoint, "mp_rank_03_model_states.pt", iteration=4)
    message = refusal(checkpoint, CheckpointRejectedError)
    assert f"{checkpoint / 'mp_rank_03_model_states.pt'}: was saved after iteration 4" in message


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"args": None}, "no `args` in it, so it is not a Megatron-DeepSpeed checkpoint"),
        ({"args": {"num_layers": 4}}, "it lacks args.num_layers, "),
        ({"dp_world_size": None, "skipped_steps": None}, "it lacks dp_world_size, skipped_steps, which Megatron"),
    ],
)
def test_of_another_script(checkpoint: Path, content: dict[str, Any], told: str) -> None:
    changed(checkpoint, "mp_rank_00_model_states.pt", **content)
    assert told in refusal(checkpoint, CheckpointMismatchError)
    state = read_header(checkpoint)
    assert state is not None and state.keys() >= {"ds_version", "param_shapes"}
    with pytest.raises(CheckpointMismatchError, match="mp_rank_00_model_states.pt: "):
        describe(checkpoint, state)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"num_experts": [4]}, r"experts \(--num-experts 4\) was saved on several TP ranks without --enable-expert"),
        ({"num_experts": [4], "enable_expert_tensor_parallelism": True}, "was saved by an old DeepSpeed"),
        ({"squared_relu": True, "apply_layernorm_1p": True}, "saved with apply_layernorm_1p True, squared_relu True"),
    ],
)  # fmt: skip
def test_options_that_are_not_here(checkpoint: Path, args: dict[str, Any], told: str) -> None:
    state = load_known(checkpoint / "mp_rank_00_model_states.pt")
    vars(state["args"]).update(args)
    with pytest.raises(CheckpointMismatchError, match=told):
        describe(checkpoint, state)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"num_experts": [4, 2, 4]}, "not for 2 layers with experts"),
        ({"num_experts": [4], "moe_expert_parallel_size": 3}, "on 2 data-parallel ranks cannot be"),
        ({"num_experts": [3], "moe_expert_parallel_size": 2}, "divided over 2 ranks"),
        ({"num_experts": ["4"]}, "on 2 data-parallel ranks cannot be"),
    ],
)
def test_numbers_of_experts_that_cannot_be(checkpoint: Path, args: dict[str, Any], told: str) -> None:
    state = load_known(checkpoint / "mp_rank_00_model_states.pt")
    vars(state["args"]).update(args)
    with pytest.raises(CheckpointDamagedError, match=told):
        describe(checkpoint, state)


@pytest.mark.parametrize("interval", [0, None, 8, -1])
def test_a_dense_model_has_an_interval_that_nobody_reads(checkpoint: Path, interval: int | None) -> None:
    state = load_known(checkpoint / "mp_rank_00_model_states.pt")
    vars(state["args"]).update(num_experts=[1], expert_interval=interval)
    assert describe(checkpoint, state).experts == (1,) * state["args"].num_layers


def test_experts_that_lie_on_other_ranks(checkpoint: Path) -> None:
    state = load_known(checkpoint / "mp_rank_00_model_states.pt")
    vars(state["args"]).update(num_experts=[4], enable_expert_tensor_parallelism=True)
    with pytest.raises(CheckpointMismatchError, match="use_data_before_expert_parallelism, which divides experts over"):
        describe(checkpoint, state | {"ds_config": {"use_data_before_expert_parallelism": True}})


def test_another_tokenizer(checkpoint: Path) -> None:
    message = refusal(checkpoint, CheckpointMismatchError, replace(GOLDEN, vocab=501))
    assert "its tokenizer has 500 tokens, and this one 501" in message


@pytest.mark.parametrize("key", ["param_slice_mappings", "elastic"])
def test_shards_that_do_not_say_what_they_hold(checkpoint: Path, key: str) -> None:
    name = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shard = load_known(checkpoint / name)["optimizer_state_dict"]
    if key == "elastic":
        shard["base_optimizer_state"] = [shard["base_optimizer_state"]["state"][0]]
    else:
        del shard[key]
    changed(checkpoint, name, optimizer_state_dict=shard)
    with pytest.raises(CheckpointMismatchError, match=f"{name}: .*ZeRO stage 1 .* or give --no-load-optim"):
        loaded(checkpoint, GOLDEN, Layout(1, 1, 1))


@pytest.mark.parametrize(("start", "numel"), [(-1, 64), (0, 65), (20_000, 16_384), (1 << 62, 1 << 62)])
def test_fragments_that_lie_elsewhere(checkpoint: Path, start: int, numel: int) -> None:
    """Bytes beyond a tensor are no part of it."""
    name = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shard = load_known(checkpoint / name)["optimizer_state_dict"]
    at = shard["param_slice_mappings"][0]["1.word_embeddings.weight"]
    shard["param_slice_mappings"][0]["1.word_embeddings.weight"] = type(at)(numel=numel, start=start)
    changed(checkpoint, name, optimizer_state_dict=shard)
    with pytest.raises(CheckpointError, match=f"{name}: .*1.word_embeddings.weight"):
        loaded(checkpoint, GOLDEN, Layout(1, 1, 1))


# Before torch is imported


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.marker,)


class Patch:
    """Its pickle sets an attribute of a class."""

    def __reduce__(self) -> tuple[Any, ...]:
        return argparse.Namespace, (), (None, {"patched": True})


def test_the_header_says_the_same_without_torch_and_runs_nothing(checkpoint: Path, tmp_path: Path) -> None:
    told = describe(checkpoint, load_known(checkpoint / "mp_rank_00_model_states.pt"))
    assert describe(checkpoint, read_header(checkpoint)) == told
    assert told.layout == SAVED and (told.step, told.vocab_size) == (5, 500) and not told.needs_rearranging
    state = load_known(checkpoint / "mp_rank_00_model_states.pt")
    del state["args"].model_type
    delattr(state["args"], SINCE_BLOCKS)
    torch.save(
        state | {"poison": Payload(tmp_path / "marker"), "patch": Patch()}, checkpoint / "mp_rank_00_model_states.pt"
    )
    older = describe(checkpoint, read_header(checkpoint))
    assert older.heads_interleaved and older.needs_rearranging and older.layout == SAVED
    assert not (tmp_path / "marker").exists() and not hasattr(argparse.Namespace, "patched")


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", b"PK\x05\x06" + bytes(18)])
def test_what_is_no_header_is_the_loads_to_tell(tmp_path: Path, content: bytes) -> None:
    assert read_header(tmp_path) is None
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(content)
    assert read_header(tmp_path) is None
