"""The checkpoint plan: presets, sizes, what it says and what it refuses. tests/dist compares it with real saves."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.utils import partition_balanced

from megatron.checkpointing.engines.host_staging import Staging, stage_on_host
from megatron.checkpointing.engines.registry import engine_class
from megatron.config import ConfigError
from megatron.parallel.topology import Layout
from tests.unit.tools.ckpt_analysis.upstream_log_factory import LogOptions, upstream_log
from tools.ckpt_plan.cli import main, parse_arguments
from tools.ckpt_plan.engines import ENGINES, torch_file_size, torch_named_file_size
from tools.ckpt_plan.kinds import TENSOR_KINDS
from tools.ckpt_plan.listing import compare, human_size, parse_listing
from tools.ckpt_plan.plan import make_plan
from tools.ckpt_plan.presets import config_for, config_from_flags, layout_of, preset_layout
from tools.ckpt_plan.rank_state import planned_files
from tools.ckpt_plan.tensors import plan_tensors, stage_bounds
from tools.ckpt_replay.options import parse_arguments as parse_replay_arguments
from tools.common.tensor_trees import map_tensors, tensors_of
from tools.restart_bench.presets import model_names

pytestmark = pytest.mark.usefixtures("own_environment")
GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "upstream_run"
HEADINGS = ("\n## JSON\n", "\n## What a run needs\n")
FLAGS = [
    "--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8",
    "--micro-batch-size", "1", "--train-iters", "4", "--lr", "1e-3", "--data-path", "none",
    "--tokenizer-type", "NullTokenizer", "--vocab-size", "99", "--bf16",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning tells on stderr how far it is every few seconds, which it may take on a busy machine."""
    monkeypatch.setattr("tools.ckpt_plan.cli.REPORT_EVERY_S", math.inf)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, err = run(capsys, "--format", "json", *arguments)
    assert status == 0, err
    return json.loads(out)


def test_the_documentation_has_the_keys_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the plan, of what a run needs, and of their objects in lists."""
    page = (Path(__file__).resolve().parents[4] / "docs" / "ckpt_plan.md").read_text()
    documented = [set(re.findall(r"`(\w+)`", page.partition(heading)[2].partition("\n## ")[0])) for heading in HEADINGS]
    plan = plan_json(capsys, "--engine", "lazy", "--run", "--", *FLAGS)
    needs = plan.pop("run")
    for found, words in zip((plan, needs), documented, strict=True):
        in_lists = [each[0] for each in found.values() if isinstance(each, list) and each and isinstance(each[0], dict)]
        assert {key for each in (found, *in_lists) for key in each} <= words


def test_a_preset_without_a_script_has_no_layout() -> None:
    assert preset_layout("70b") == (8, 8)
    with pytest.raises(ConfigError, match="--model 405b: this preset has no layout of its own; give --tp and --pp"):
        preset_layout("405b")


def test_without_sizes_the_layout_is_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    """As ckpt-replay takes it; one size alone leaves the other at 1."""
    assert layout_of("13b", None, None) == preset_layout("13b") == (4, 4)
    assert (layout_of("13b", 2, None), layout_of("13b", None, 2)) == ((2, 1), (1, 2))
    assert plan_json(capsys, "--model", "tiny")["layout"] == {"tp": 2, "pp": 2, "dp": 1}


def test_help_names_all_presets(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (parse_arguments, parse_replay_arguments):
        with pytest.raises(SystemExit):
            command(["--help"])
        assert ", ".join(model_names()) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_whose_files_are_planned_has_its_memory(engine: str) -> None:
    plan = make_plan(config_from_flags(FLAGS, 1, None), engine)
    assert all(rank.host_bytes > 0 or engine == "none" for rank in plan.ranks)
    assert ENGINES[engine].placements == engine_class(engine).wants_placements


def test_an_engine_that_does_not_save_to_object_storage_is_not_planned_there() -> None:
    stored = ["--save", "s3://bucket/run", "--save-interval", "1", "--restart-trace", "off"]
    planned = config_from_flags([*FLAGS, *stored], 1, None)
    make_plan(planned, "lazy")
    with pytest.raises(ConfigError, match="^--checkpoint-engine memory: does not save to object storage: its restarts"):
        make_plan(planned, "memory")


SHARING = ["--save", "x", "--save-interval", "1", "--checkpoint-files-per-node", "1"]


def test_ranks_of_a_node_share_files(capsys: pytest.CaptureFixture[str]) -> None:
    """64 ranks of 8 nodes leave 8 files; of nodes with 3 ranks the last has one."""
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    flags = ["--dp", "16", "--engine", "lazy"]
    apart = plan_json(capsys, *flags, "--", *FLAGS, *layout)
    assert apart["num_files"] == 64
    shared = plan_json(capsys, *flags, "--", *FLAGS, *layout, *SHARING)
    assert [(file["name"], file["rank"]) for file in shared["files"]] == [
        (f"ranks_{8 * node:05d}-{8 * node + 7:05d}.safetensors", 8 * node) for node in range(8)
    ]
    assert shared["total_bytes"] == sum(file["bytes"] for file in shared["files"])
    assert shared["bytes_by_kind"]["moments"] == apart["bytes_by_kind"]["moments"]
    of_three = plan_json(capsys, "--ranks-per-host", "3", *flags, "--", *FLAGS, *layout, *SHARING)
    assert of_three["num_files"] == 22 and of_three["files"][-1]["name"] == "ranks_00063-00063.safetensors"
    status, _, told = run(capsys, "--engine", "torch", "--", *FLAGS, *SHARING)
    assert status == 2 and "--checkpoint-files-per-node 1: --checkpoint-engine torch has no files" in told


def test_presets_are_those_of_the_launchers() -> None:
    config, layout, vocab_sizes = config_for("70b", 8, 8, 2)
    assert layout == Layout(8, 8, 2)
    model = config.model
    assert (model.num_layers, model.hidden_size, model.num_key_value_heads) == (80, 8192, 8)
    assert model.params_dtype == "bf16"
    assert model.untie_embeddings_and_output_weights
    assert config.training.global_batch_size % 2 == 0
    assert vocab_sizes == (50257, 51200)  # GPT-2's, padded to a multiple of 128 x TP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "dp"),
    [
        (["--bf16", "--pipeline-model-parallel-size", "2"], 2),  # embedding and head are tied, and apart
        (["--fp16", "--tensor-model-parallel-size", "2", "--swiglu", "--ffn-hidden-size", "24",
          "--num-layers", "5"], 1),
        (["--use-rotary-position-embeddings", "--untie-embeddings-and-output-weights", "--normalization", "rmsnorm",
          "--disable-bias-linear", "--pipeline-model-parallel-size", "3", "--num-layers", "7",
          "--optimizer", "sgd"], 3),
        (["--bf16", "--position-embedding-type", "alibi", "--embed-layernorm", "--pipeline-model-parallel-size", "2",
          "--tensor-model-parallel-size", "2"], 1),
        (["--bf16", "--num-experts", "4", "--mlp-type", "residual", "--pipeline-model-parallel-size", "2",
          "--tensor-model-parallel-size", "2"], 1),
        (["--num-experts", "2", "--expert-interval", "1"], 2),
        (["--bf16", "--num-experts", "4", "8", "--num-layers", "4", "--moe-expert-parallel-size", "8"], 8),
        (["--num-experts", "4", "--expert-interval", "1", "--moe-expert-parallel-size", "2"], 4),
        (["--bf16", "--save", "none", "--save-interval", "2", "--no-save-optim",
          "--tensor-model-parallel-size", "2"], 2),
    ],
)  # fmt: skip
def test_tensors_by_arithmetic_are_those_of_the_plan(flags: list[str], dp: int) -> None:
    base = [flag for flag in FLAGS if flag != "--bf16"]
    planned = config_from_flags([*base, *flags], dp, None)
    by_kind = [{kind: rank.by_kind[kind] for kind in TENSOR_KINDS} for rank in make_plan(planned, "torch").ranks]
    assert [rank.by_kind for rank in plan_tensors(planned).ranks] == by_kind


@pytest.mark.parametrize("blocks", [1, 7, 28, 60, 80])
def test_stages_have_the_layers_that_deepspeed_gives_them(blocks: int) -> None:
    weights = [0, 0, *[1] * blocks, 0, 0]
    for stages in {1, 2, 3, 4, 8, 20} & set(range(len(weights))):
        assert stage_bounds(blocks, stages) == list(partition_balanced(weights, stages))


def test_the_shell_does_not_change_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    before = config_for("7b", 4, 2)
    for name, value in (("SEQ_LENGTH", "64"), ("EXTRA_ARGS", "--seed 5"), ("DP", "3"), ("VOCAB_SIZE", "9")):
        monkeypatch.setenv(name, value)
    assert config_for("7b", 4, 2) == before


def test_flags_overrule_a_preset() -> None:
    config, _, vocab_sizes = config_for("tiny", 1, 1, vocab_size=1000, flags=["--num-layers", "6", "--seed", "5"])
    assert (config.model.num_layers, config.training.seed) == (6, 5)
    assert vocab_sizes == (1000, 1024)


@pytest.mark.slow
def test_planning_leaves_the_random_state_alone() -> None:
    def state() -> tuple[Any, ...]:
        return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()

    planned = config_from_flags(FLAGS, 1, None)
    before = state()
    planned_files(planned[0], planned[1], planned[1].coordinates(0), planned[2])
    assert state() == before


def test_a_gpu_run_saves_random_states_of_its_own_form() -> None:
    sizes = {}
    for backend in ("nccl", "gloo"):
        config, layout, vocab_sizes = config_from_flags([*FLAGS, "--distributed-backend", backend], 1, None)
        files = planned_files(config, layout, layout.coordinates(0), vocab_sizes)
        (shard,) = [file.state for file in files if "optimizer_state_dict" in file.state]
        sizes[backend] = shard["rng_state"]["cuda_rng_state"].numel()
        assert shard["rng_state"]["rng_tracker_states"]["model-parallel-rng"].numel() == sizes[backend]
    assert sizes == {"nccl": 16, "gloo": torch.get_rng_state().numel()}


def test_weights_and_optimizer_are_on_the_meta_device() -> None:
    config, layout, vocab_sizes = config_for("70b", 8, 8)
    files = planned_files(config, layout, layout.coordinates(0), vocab_sizes)
    large = [tensor for file in files for _, tensor in tensors_of(file.state) if tensor.numel() > 10_000]
    assert len(large) > 40
    assert all(tensor.is_meta for tensor in large)


def test_placements_tell_the_part_of_each_tensor_parallel_rank() -> None:
    config, layout, vocab_sizes = config_from_flags([*FLAGS, "--tensor-model-parallel-size", "2"], 1, None)
    ranges = []
    for rank in range(2):
        at = layout.coordinates(rank)
        files = planned_files(config, layout, at, vocab_sizes, with_placements=True)
        (embedding,) = [file for file in files if file.name.startswith("layer_01-")]
        ranges.append(embedding.placements[("word_embeddings.weight",)]["ranges"])
    assert ranges == [[[0, 128]], [[128, 256]]]


def test_a_deepspeed_option_that_lays_shards_out_otherwise_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1, "round_robin_gradients": True}}))
    fp32 = [flag for flag in FLAGS if flag != "--bf16"]
    config, layout, vocab_sizes = config_from_flags([*fp32, "--deepspeed_config", str(path)], 1, None)
    with pytest.raises(ConfigError, match=r"ds\.json: zero_optimization\.round_robin_gradients"):
        planned_files(config, layout, layout.coordinates(0), vocab_sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_sizes_are_those_of_torch_save(dtype: torch.dtype, tmp_path: Path) -> None:
    one = torch.empty(1001, 3, dtype=dtype, device="meta")
    state = {"a": one, "b": [one, {"c": torch.empty(0, dtype=dtype, device="meta")}], "d": (1, "x"), "e": torch.ones(5)}
    real = map_tensors(state, lambda t: torch.zeros(t.shape, dtype=t.dtype) if t.is_meta else t)
    real = stage_on_host(real, Staging())  # as engine torch does
    buffer = io.BytesIO()
    torch.save(real, buffer)
    assert torch_file_size(state) == len(buffer.getvalue())
    torch.save(real, tmp_path / "with_a_long_name.pt")
    named = torch_named_file_size(state, "with_a_long_name.pt")
    assert named == (tmp_path / "with_a_long_name.pt").stat().st_size
    assert named > torch_file_size(state)


def test_a_tensor_larger_than_memory_can_be_planned() -> None:
    num_bytes = 1 << 42
    state = {"huge": torch.empty(num_bytes, dtype=torch.uint8, device="meta")}
    assert 0 < torch_file_size(state) - num_bytes < 10_000


# Upstream


def upstream_flags() -> list[str]:
    """Of the run in tests/golden/upstream_run."""
    return [
        "--num-layers", "4", "--hidden-size", "64", "--ffn-hidden-size", "176", "--num-attention-heads", "4",
        "--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "10",
        "--lr", "1e-3", "--bf16", "--use-rotary-position-embeddings", "--untie-embeddings-and-output-weights",
        "--swiglu", "--normalization", "rmsnorm", "--disable-bias-linear", "--data-path", "none",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", "499", "--tensor-model-parallel-size", "2",
        "--pipeline-model-parallel-size", "2",
    ]  # fmt: skip


def test_upstream_files_of_layers_are_planned_to_the_byte() -> None:
    plan = make_plan(config_from_flags(upstream_flags(), 2, None), "upstream")
    planned = {file.name: file.num_bytes for file in plan.files}
    real = {path.name: path.stat().st_size for path in (GOLDEN / "global_step5").glob("layer_*.pt")}
    assert len(real) == 14
    assert {name: planned[name] for name in real} == real
    for path in (GOLDEN / "global_step5").glob("*optim_states.pt"):
        assert abs(planned[path.name] - path.stat().st_size) <= 200  # other options of the optimizer
    for path in (GOLDEN / "global_step5").glob("mp_rank_*"):
        assert 0 < path.stat().st_size - planned[path.name] < 8000  # upstream's other settings


@pytest.mark.parametrize("flags", [["--position-embedding-type", "alibi"], ["--embed-layernorm"]])
def test_upstream_has_no_model_of_blooms(flags: list[str]) -> None:
    planned = config_from_flags([*FLAGS, *flags], 1, None)
    make_plan(planned, "torch")
    with pytest.raises(ConfigError, match=f"^{' '.join(flags)}: upstream Megatron-DeepSpeed has no such model; drop"):
        make_plan(planned, "upstream")


MOE = ("--num-experts", "4", "--expert-interval", "1", "--moe-expert-parallel-size", "2")


@pytest.mark.parametrize("flags", [(), ("--no-pipeline-parallel",)], ids=["stages", "whole"])
def test_upstreams_files_of_experts(flags: tuple[str, ...]) -> None:
    """Each rank of two writes two experts of each layer, and no file of a layer is there."""
    plan = make_plan(config_from_flags([*FLAGS, *MOE, *flags], 2, None), "upstream")
    blocks = plan.config.model.num_layers
    for rank in (0, 1):
        experts = [file for file in plan.files if file.rank == rank and "_expert_" in file.name]
        assert {file.name for file in experts} == {
            f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
            for layer in range(blocks)
            for expert in (2 * rank, 2 * rank + 1)
        }
        assert len({file.num_bytes for file in experts}) <= 2  # records contain names, which are padded
    assert not any("-model_" in file.name for file in plan.files)
    own = make_plan(config_from_flags([*FLAGS, *MOE], 2, None), "torch")
    assert {kind: num for kind, num in plan.by_kind.items() if kind != "metadata"} == {
        kind: num for kind, num in own.by_kind.items() if kind != "metadata"
    }


def test_upstreams_files_without_stages_hold_the_whole_model() -> None:
    plan = make_plan(config_from_flags([*FLAGS, "--no-pipeline-parallel"], 1, None), "upstream")
    (shard, model) = sorted(file.name for file in plan.files)
    assert model == "mp_rank_00_model_states.pt" and shard.endswith("zero_pp_rank_0_mp_rank_00_optim_states.pt")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--num-experts", "2", "--moe-expert-parallel-size", "4"), "--moe-expert-parallel-size 4: upstream divides"),
        (("--num-experts", "4", "--pipeline-model-parallel-size", "2"), "tied embeddings on several stages"),
    ],
)
def test_experts_that_upstream_has_not(flags: tuple[str, ...], told: str) -> None:
    planned = config_from_flags([*FLAGS, *flags], 4, None)
    with pytest.raises(ConfigError, match=told):
        make_plan(planned, "upstream")


def listing_line(num_bytes: str, name: str) -> str:
    return f"-rw-r--r-- 1 someone group {num_bytes:>4} Oct  1 01:52 {name}"


def study_listing() -> str:
    """What `ls -lh` shows of upstream's checkpoint of the 3b preset on TP4: 132 files."""
    sizes = {1: "75M", **dict.fromkeys(range(2, 30), "49M"), 30: "7.9K", 31: "75M"}
    lines = ["total 41G"]
    for tp in range(4):
        lines += [listing_line(size, f"layer_{n:02d}-model_{tp:02d}-model_states.pt") for n, size in sizes.items()]
        lines.append(listing_line("5.1M", f"mp_rank_{tp:02d}_model_states.pt"))
        lines.append(listing_line("8.8G", f"bf16_zero_pp_rank_0_mp_rank_{tp:02d}_optim_states.pt"))
    return "\n".join(lines)


STUDY = ("--model", "3b", "--tp", "4", "--pp", "1", "--dp", "1", "--vocab-size", "50257", "--upstream")


def test_the_plan_agrees_with_the_listing_of_the_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "listing"
    path.write_text(study_listing())
    status, out, _ = run(capsys, *STUDY, "--compare-listing", str(path))
    assert status == 0
    assert out == f"{path}: 132 of 132 listed files agree with the plan in name and size as listed\n"


def test_a_listing_within_a_log_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Between the lines of a training, as `ls` at the end of a job's script leaves it."""
    path = tmp_path / "log"
    path.write_text(upstream_log(LogOptions(listing=study_listing().splitlines())) + "job ended\n")
    status, out, _ = run(capsys, *STUDY, "--compare-listing", str(path))
    assert status == 0, out
    assert "132 of 132" in out


def test_every_difference_from_a_listing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = study_listing().replace("49M Oct  1 01:52 layer_09-model_02", "50M Oct  1 01:52 layer_09-model_02")
    text = text.replace("mp_rank_03_model_states.pt", "mp_rank_04_model_states.pt")
    path = tmp_path / "listing"
    path.write_text(text)
    status, out, _ = run(capsys, *STUDY, "--compare-listing", str(path))
    assert status == 1
    assert "130 of 132" in out
    assert "layer_09-model_02-model_states.pt: 49M planned, 50M listed" in out
    assert "mp_rank_03_model_states.pt: planned, not listed" in out
    assert "mp_rank_04_model_states.pt: listed, not planned" in out


def test_our_own_files_differ_where_they_should(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """mp_rank_* holds no tensors of the arguments, and records have no file names; all else is as listed."""
    path = tmp_path / "listing"
    path.write_text(study_listing())
    status, out, _ = run(capsys, *STUDY[:-1], "--compare-listing", str(path))
    different = [line.split(":")[0].strip() for line in out.splitlines()[1:]]
    assert status == 1
    assert {name.split("-")[0][:8] for name in different} == {"layer_30", "mp_rank_"}
    assert len(different) == 8


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0"), (1023, "1023"), (1024, "1.0K"), (8010, "7.9K"), (10 * 1024, "10K"), (10 * 1024 + 1, "11K"),
     (1024 * 1023 + 1, "1.0M"), (9392130598, "8.8G"), (50347305, "49M")],
)  # fmt: skip
def test_sizes_as_ls_shows_them(num_bytes: int, shown: str) -> None:
    assert human_size(num_bytes) == shown


def test_lines_that_are_no_listing_are_passed_over() -> None:
    lines = ["loss: 3.4", "total 4K", listing_line("12", "latest"), "drwxr-xr-x 2 a b 4.0K Oct 1 2025 global_step5"]
    text = "\n".join(lines)
    assert parse_listing(text) == {"latest": "12"}
    assert compare({"latest": 12}, {"latest": "12"}).agrees
    with pytest.raises(ValueError, match="ls -lh"):
        parse_listing("nothing")


# What the tool says


def test_json_has_every_file_and_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, "--model", "tiny", "--tp", "2", "--pp", "2", "--dp", "2")
    shards, mp_ranks, layers = 8, 4, 2 * 7
    assert found["num_files"] == len(found["files"]) == shards + mp_ranks + layers
    assert all(set(file) == {"name", "bytes", "rank"} for file in found["files"])
    assert len({file["name"] for file in found["files"]}) == found["num_files"]
    assert found["total_bytes"] == sum(file["bytes"] for file in found["files"])
    assert found["total_bytes"] == sum(rank["bytes"] for rank in found["per_rank"])
    assert found["total_bytes"] == sum(found["bytes_by_kind"].values())
    assert [rank["rank"] for rank in found["per_rank"]] == list(range(8))
    for rank in found["per_rank"]:
        mine = [file for file in found["files"] if file["rank"] == rank["rank"]]
        assert (rank["num_files"], rank["bytes"]) == (len(mine), sum(file["bytes"] for file in mine))
    # Each is smaller than a part of an upload.
    assert found["object_storage_requests"] == {"save_put": 8 + 4 + 14 + 2, "save_list": 1, "load_get": 26 + 2}
    assert [file["name"] for file in found["commit_files"]] == [
        "manifest.json", "../latest", "../latest_checkpointed_iteration.txt",
    ]  # fmt: skip


@pytest.mark.slow
def test_bytes_by_kind_follow_from_the_number_of_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, "--model", "70b", "--tp", "8", "--pp", "8", "--dp", "1")
    hidden, ffn, layers, vocab = 8192, 28672, 80, 51200
    block = hidden * (hidden + 2 * hidden // 8) + hidden**2 + 3 * hidden * ffn
    norms = (2 * layers + 1) * hidden
    parameters = layers * block + 2 * vocab * hidden + 8 * norms  # every TP rank has the norms
    kinds = found["bytes_by_kind"]
    assert kinds["weights"] == 2 * parameters
    assert kinds["master_weights"] == 4 * parameters
    assert kinds["moments"] == 8 * parameters
    assert kinds["metadata"] < 1e-4 * found["total_bytes"]
    first = found["per_rank"][0]["device_bytes_by_use"]
    assert first["gradients"] == 2 * first["weights"]  # in fp32
    assert first["moments"] == 2 * first["master_weights"] == 4 * first["weights"]
    assert sum(first.values()) == found["per_rank"][0]["device_bytes_estimate"] > first["activations"] > 0


def test_gradients_that_are_kept_take_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"immediate_grad_update": False}}))
    found = plan_json(capsys, "--model", "1b", "--tp", "1", "--pp", "1", "--", "--deepspeed_config", str(path))
    used = found["per_rank"][0]["device_bytes_by_use"]
    assert used["gradients"] == 3 * used["weights"]  # in fp32, and each parameter's own in bf16


@pytest.mark.slow
def test_replicas_share_the_optimizer_and_write_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    one = plan_json(capsys, "--model", "3b", "--tp", "4", "--pp", "1", "--dp", "1")
    four = plan_json(capsys, "--model", "3b", "--tp", "4", "--pp", "1", "--dp", "4")
    assert one["bytes_by_kind"]["weights"] == four["bytes_by_kind"]["weights"]
    assert one["bytes_by_kind"]["moments"] == pytest.approx(four["bytes_by_kind"]["moments"], rel=1e-6)
    second = [file["name"] for file in four["files"] if file["rank"] == 4]
    assert second == ["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]


def test_lazy_writes_one_file_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    lazy = plan_json(capsys, "--model", "tiny", "--tp", "2", "--engine", "lazy")
    torch_ = plan_json(capsys, "--model", "tiny", "--tp", "2")
    assert [file["name"] for file in lazy["files"]] == ["rank_00000.safetensors", "rank_00001.safetensors"]
    for kind in ("weights", "master_weights", "moments"):
        assert lazy["bytes_by_kind"][kind] == torch_["bytes_by_kind"][kind]


def test_what_a_run_needs_follows_from_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the formulas of docs/ckpt_plan.md, for an engine that writes while training waits and one that does not."""
    flags = ["--save", str(tmp_path / "not_yet" / "there"), "--save-interval", "1", "--keep-last", "2"]
    flags += ["--export-hf-interval", "3"]
    targets = ["--ranks-per-host", "2", "--blocked-target", "4", "--durable-target", "0.5"]
    arguments = ["--model", "tiny", "--tp", "2", "--pp", "2", "--dp", "2", "--run", *targets]
    found = plan_json(capsys, *arguments, "--", *flags)
    needs, ranks = found["run"], found["per_rank"]
    one = found["total_bytes"] + sum(file["bytes"] for file in found["commit_files"])
    assert (needs["saves"], needs["kept_at_most"], needs["kept_bytes"]) == (12, 3, 3 * one)
    assert needs["free_of"] == str(tmp_path) and needs["free_bytes"] > 0 and needs["lack"] is None
    assert (needs["exports"], needs["export_bytes"]) == (4, 4 * found["bytes_by_kind"]["weights"])
    assert needs["storage_GBps_for_durable"] == pytest.approx(one / 0.5e9)
    assert needs["storage_GBps_for_blocked"] == pytest.approx(one / 4e9)
    assert needs["rank_GBps_for_durable"] == pytest.approx(max(rank["bytes"] for rank in ranks) / 0.5e9)
    hosts = [ranks[first : first + 2] for first in range(0, 8, 2)]
    assert needs["host_bytes_estimate"] == max(sum(rank["host_bytes_estimate"] for rank in host) for host in hosts)
    assert needs["host_GBps_for_durable"] == pytest.approx(
        max(sum(rank["bytes"] for rank in host) for host in hosts) / 0.5e9
    )
    assert {"hidden_size": 128, "keep_last": 2}.items() <= needs["configuration"].items()
    assert "seed" not in needs["configuration"]
    assert plan_json(capsys, *arguments, "--engine", "lazy", "--", *flags)["run"]["storage_GBps_for_blocked"] is None


def test_host_memory_of_saves_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """That of the slots is by the parameters that the stages really have, here with tied embeddings and biases, too."""
    layout = ("--model", "tiny", "--tp", "2", "--pp", "2", "--dp", "2", "--engine", "memory")
    flags = ("--", "--save", "x", "--untie-embeddings-and-output-weights", "--replicas", "3")
    found = plan_json(capsys, *layout, "--run", "--ranks-per-host", "2", *flags)
    memory = found["run"]["memory"]
    hosts = [found["per_rank"][first : first + 2] for first in range(0, 8, 2)]
    slots = [sum(rank["host_bytes_estimate"] for rank in host) for host in hosts]
    assert (memory["hosts"], memory["replicas"]) == (4, 3) and memory["slots_bytes"] in slots
    assert sum(slots) > 2 * found["total_bytes"]
    # A ring of four: the host with the most holds what the two before it have.
    assert memory["host_bytes"] == memory["slots_bytes"] + memory["copies_bytes"]
    assert memory["host_bytes"] == max(slots[i] + slots[i - 1] + slots[i - 2] for i in range(4))
    assert memory["lack"] is None and 0 < memory["available_bytes"] <= memory["limit_bytes"]
    status, out, err = run(capsys, *layout, "--host-memory", "--ranks-per-host", "2", "--format", "json", *flags)
    alone = json.loads(out) | {"available_bytes": memory["available_bytes"]}
    assert alone.pop("compression") is None
    assert (status, err, alone) == (0, "", memory)
    uncoordinated = (*layout, "--ranks-per-host", "2", "--no-coordinator")
    own = plan_json(capsys, *uncoordinated, "--run", "--", *flags[1:-2])["run"]["memory"]
    assert (own["replicas"], own["copies_bytes"], own["host_bytes"]) == (1, 0, max(slots))
    status, _, err = run(capsys, *uncoordinated, "--host-memory", *flags)
    assert status == 2 and "--replicas 3: " in err


def test_the_rate_up_to_which_compressed_files_pay(capsys: pytest.CaptureFixture[str]) -> None:
    """Two hosts of two ranks with two threads each."""
    layout = ("--model", "tiny", "--tp", "2", "--pp", "2", "--engine", "lazy", "--ranks-per-host", "2")
    rates, flags = ("--compress-rate", "500", "--compressed-share", "0.8"), ("--", "--save", "x", "--io-threads", "2")
    status, out, err = run(capsys, *layout, *rates, "--link-rate", "200", "--format", "json", *flags)
    assert (status, err) == (0, "")
    plan = json.loads(out)
    sizes = [rank["bytes"] for rank in plan["per_rank"]]
    host = max(sum(sizes[:2]), sum(sizes[2:]))
    assert plan["compression"] == pytest.approx({
        "sent_bytes": host, "compressed_bytes": int(0.8 * host), "threads": 4, "pays_below_MBps": 400.0,
        "pays_never_above_MBps": 2000.0, "sent_s": host / 200e6, "compressed_at_least_s": 0.8 * host / 200e6,
        "compressed_at_most_s": 0.8 * host / 200e6 + host / 2e9,
    })  # fmt: skip
    _, out, _ = run(capsys, *layout, *rates, *flags)
    assert ": pays, if processors are free, below 400 MB/s of its way to the storage, never above 2000 MB/s\n" in out
    flagged = run(capsys, *layout[:6], *layout[8:], *rates, *flags, "--checkpoint-engine", "lazy")
    assert flagged == (0, out, ""), "as with --engine lazy"
    status, _, err = run(capsys, *layout, *rates, *flags, "--checkpoint-files-per-node", "1")
    told = "--compress-rate 500: files that ranks share are not compressed; drop it or --checkpoint-files-per-node 1"
    assert status == 2 and told in err
    status, _, err = run(capsys, *layout[:-2], *flags, "--checkpoint-compression", "zstd")
    assert status == 2 and "--checkpoint-compression zstd: what its files take depends on the values in them" in err


def test_the_rate_up_to_which_compressing_copies_pays(capsys: pytest.CaptureFixture[str]) -> None:
    """Two hosts of four ranks; each sends half of its slots, the newest save, to the other."""
    layout = ("--model", "tiny", "--tp", "2", "--pp", "2", "--dp", "2", "--engine", "memory")
    arguments = (*layout, "--host-memory", "--ranks-per-host", "4")
    rates, flags = ("--compress-rate", "500", "--compressed-share", "0.8"), ("--", "--save", "x")
    status, out, err = run(capsys, *arguments, *rates, "--link-rate", "125", "--format", "json", *flags)
    assert (status, err) == (0, "")
    memory = json.loads(out)
    found, sent = memory["compression"], max(memory["slots_bytes"], memory["copies_bytes"]) / 2
    assert found == pytest.approx({
        "sent_bytes": sent, "compressed_bytes": int(0.8 * sent), "threads": 4, "pays_below_MBps": 400.0,
        "pays_never_above_MBps": 2000.0,
        "sent_s": sent / 125e6, "compressed_at_least_s": 0.8 * sent / 125e6,
        "compressed_at_most_s": 0.8 * sent / 125e6 + sent / 2e9,
    })  # fmt: skip
    _, out, _ = run(capsys, *arguments, *rates, "--link-rate", "400", "--format", "json", *flags)
    even = json.loads(out)["compression"]
    assert even["compressed_at_most_s"] == pytest.approx(even["sent_s"]), "even if nothing overlaps"
    _, out, _ = run(capsys, *arguments, *rates, "--link-rate", "2000", "--format", "json", *flags)
    even = json.loads(out)["compression"]
    assert even["compressed_at_least_s"] == pytest.approx(even["sent_s"]), "even if all of it does"
    _, out, _ = run(capsys, *arguments, *rates, *flags)
    assert ": pays, if processors are free, below 400 MB/s of a host's network, never above 2000 MB/s\n" in out
    assert "copies take" not in out
    _, out, _ = run(capsys, *arguments, *rates, "--link-rate", "125", *flags)
    assert " s as they are, " in out


def test_host_memory_that_does_not_fit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("--model", "70b", "--tp", "8", "--pp", "8", "--engine", "memory", "--host-memory")
    status, out, err = run(
        capsys, *layout, "--ranks-per-host", "64", "--", "--save", "x", "--ffn-hidden-size", "28672000"
    )
    assert (status, err) == (0, "")
    assert "saves in host memory, one host, 64 ranks: " in out and "no copies of other hosts'" in out
    assert "one host: no other holds copies, so that a lost host is restored from --save\n" in out
    assert "a host like it refuses the run; run fewer ranks on a host, or use engine lazy\n" in out


@pytest.mark.slow
def test_storage_without_room_for_a_single_checkpoint_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of hundreds of TB, for which no machine that runs this has room."""
    words = ["--model", "70b", "--engine", "lazy", "--run", "--", "--ffn-hidden-size", "28672000"]
    status, out, err = run(capsys, *words, "--save", str(tmp_path))
    assert status == 1 and "storage: 3 saves" in out and "room for" not in out
    (said,) = err.splitlines()
    assert said.startswith(f"ckpt-plan: error: --save {tmp_path}: ")
    assert said.endswith("no save could succeed; free space, give another --save, or train without --save")
    status, out, err = run(capsys, *words, "--save", str(tmp_path / "mounted" / "elsewhere" / "run"))
    assert (
        status == 0
        and "error" not in err
        and f"This is the room in {tmp_path}, as --save is not there on this host" in out
    )
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "manifest.json").touch()
    status, out, err = run(capsys, *words, "--save", str(tmp_path), "--load", str(tmp_path))
    assert (status, err) == (0, "") and "room for 0 checkpoints" in out  # a run that resumes trains on without saves


def test_storage_that_has_no_room_for_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--save", str(tmp_path), "--save-interval", "1", "--train-iters", "1000000000"]
    status, out, err = run(capsys, "--model", "tiny", "--run", "--", *flags)
    assert (status, err) == (0, "")
    (lack,) = [line for line in out.splitlines() if line.startswith("storage: --save")]
    assert f"--save {tmp_path}: " in lack and "and 1000000000 more are needed" in lack
    assert "blocked for at most 10 s: the storage must take " in out and "durable within 60 s: " in out


def test_no_engine_no_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, "--model", "tiny", "--engine", "none")
    assert (found["files"], found["total_bytes"], found["commit_files"]) == ([], 0, [])


def test_the_iteration_names_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, "--model", "tiny", "--iteration", "1000")
    pointers = {file["name"]: file["bytes"] for file in found["commit_files"]}
    assert pointers["../latest"] == len("global_step1000")
    assert pointers["../latest_checkpointed_iteration.txt"] == len("1000")


def test_the_table_lists_every_file_with_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "tiny", "--tp", "2", "--pp", "2", "--dp", "2")
    files = plan_json(capsys, *arguments)["files"]
    status, table, _ = run(capsys, *arguments, "--files")
    assert status == 0
    words = {tuple(line.split()) for line in table.splitlines()}
    assert {(str(file["bytes"]), str(file["rank"]), file["name"]) for file in files} <= words
    assert "estimate" in table  # of memory, which is not exact as sizes are
    assert "the fullest device, rank " in table and table.count("; fits 80 GB, fits 40 GB\n") == 1
    _, summary, err = run(capsys, *arguments, "--verbose")
    assert "layer_02" not in summary and len(summary.splitlines()) < 40
    assert "planned in" in err


# What it refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model 70b --tp 3", "--num-attention-heads 64: not divisible by --tp 3; use"),
        ("--model 70b --tp 16", "--num-key-value-heads 8: not divisible by --tp 16; use"),
        ("--model 70b --tp 8 --pp 81", "--num-layers 80: is less than --pp 81"),
        ("--model 70b --tp 8 --pp 8 --dp 0", "--dp 0: must be at least 1"),
        ("--model 7b --tp 0", "--tp 0: must be at least 1"),
        ("--model 7b --pp -1", "--pp -1: must be at least 1"),
        ("--model 7b --vocab-size 0", "--vocab-size 0: must be at least 1"),
        ("--model 7b --zero 2", "--zero 2: "),
        ("--model 1b --tp 1 --pp 1 -- --zero-stage 3", " 3: only checkpoints of ZeRO-1 shards are planned; use"),
        ("--model 8b", f"--model 8b: no such preset; there are: {', '.join(model_names())}"),
        ("--model 7b --engine nope", "--engine nope: no such engine; those that can be planned are: torch"),
        ("--model 7b --engine dcp", "--engine dcp: its files cannot be planned"),
        ("--model 7b --engine lazy --upstream", "--engine lazy: upstream writes with torch.save"),
        ("--model 7b --iteration 0", "--iteration 0: must be at least 1"),
        ("--model 7b --compare-listing /no/listing", "--compare-listing /no/listing: "),
        ("--model 7b --files --compare-listing x", "--files: not printed with --compare-listing; drop one of the two"),
        ("--model 7b --run --compare-listing x", "--run: not printed with --compare-listing; drop one of the two"),
        ("--model 7b --format json --compare-listing x", "--format json: not printed with --compare-listing; drop"),
        ("--model 7b --files --format json", "--files: --format json has every file without it; drop one of the two"),
        ("--model tiny -- --save x --save-interval 1 --verify-restored-state", "--verify-restored-state: "),
        ("--model tiny -- --num-layer 3", "unknown flag --num-layer: did you mean --num-layers?"),
        ("--tp 2 -- --num-layers 2", "--tp 2: without --model, give --tensor-model-parallel-size 2"),
        ("-- --num-layers 2", "required flags are missing: --hidden-size"),
        ("--dp 2", f"--model is missing: give one of {', '.join(model_names())}"),
        (
            "--model 7b --ranks-per-host 4",
            "--ranks-per-host 4: add --run or --host-memory or --step-time or --compress-rate or "
            "--checkpoint-files-per-node, or drop it",
        ),
        ("--model tiny --host-memory", "--host-memory: engine torch keeps no saves in memory; give --engine memory"),
        (
            "--model tiny --engine memory --no-coordinator",
            "--no-coordinator: is about what a run needs; add --run or --host-memory, or drop it",
        ),
        (
            "--model tiny --engine memory --host-memory --run",
            "--run: not printed with --host-memory; drop one of the two",
        ),
        (
            "--model tiny --engine memory --host-memory -- --save x --replicas 2",
            "--replicas 2: more copies than hosts (1); give 1 at most, or more hosts",
        ),
        (
            "--model tiny --engine lazy -- --save x --replicas 2",
            "--replicas 2: --checkpoint-engine lazy keeps no saves",
        ),
        ("--model 7b --run --blocked-target 0", "--blocked-target 0: must be more than 0"),
        (
            "--model 7b --compress-rate 500",
            "--compress-rate 500: is about copies of saves in memory, with --host-memory, or about the files of",
        ),
        (
            "--model tiny --engine memory --host-memory --compress-rate 500",
            "--compress-rate 500: whether compression pays depends on --compressed-share, too; add it",
        ),
        (
            "--model tiny --engine memory --host-memory --link-rate 125 --compressed-share 0.8",
            "--compressed-share 0.8: whether compression pays depends on --compress-rate, too; add it",
        ),
        (
            "--model tiny --engine memory --host-memory --compress-rate 500 --compressed-share 1",
            "--compressed-share 1: must be less than 1",
        ),
        (
            "--model tiny --engine memory --host-memory --compress-rate -1 --compressed-share 0.8",
            "--compress-rate -1: must be more than 0",
        ),
        (
            "--model tiny --engine memory --host-memory --compress-rate 500 --compressed-share 0.8 -- --save x",
            "--compress-rate 500: no host holds copies for another; drop it",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *arguments.split())
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_flags_of_the_trainer_without_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, "--dp", "2", "--", *FLAGS)
    assert found["layout"] == {"tp": 1, "pp": 1, "dp": 2}
    assert (found["vocab_size"], found["padded_vocab_size"]) == (100, 128)
    without = plan_json(capsys, "--dp", "2", "--", *FLAGS, "--save", "x", "--save-interval", "1", "--no-save-optim")
    assert without["bytes_by_kind"]["moments"] == without["bytes_by_kind"]["master_weights"] == 0
    for rank, bare in zip(found["per_rank"], without["per_rank"], strict=True):
        assert bare["device_bytes_estimate"] == pytest.approx(rank["device_bytes_estimate"], rel=1e-3)


def test_host_memory_of_lazy_is_bounded_by_its_cache() -> None:
    config, layout, vocab_sizes = config_for("3b", 4, 1)
    checkpoint = dataclasses.replace(config.checkpoint, host_cache_size=1.0)
    small = make_plan((dataclasses.replace(config, checkpoint=checkpoint), layout, vocab_sizes), "lazy")
    assert {rank.host_bytes for rank in small.ranks} == {1 << 30}
    assert all(rank.host_bytes > 8 << 30 for rank in make_plan((config, layout, vocab_sizes), "lazy").ranks)


def test_more_ranks_than_can_be_planned_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "tiny", "--tp", "1", "--dp", "1000000"]) == 2
    said = capsys.readouterr().err
    assert "1000000 ranks; at most 65536 are planned" in said and "--dp" in said and said.count("\n") == 1


def test_a_long_planning_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.ckpt_plan.cli.REPORT_EVERY_S", 0.0)
    assert main(["--model", "tiny", "--tp", "1", "--dp", "2"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in told] == [f"ckpt-plan: {n} of 2 ranks planned" for n in (1, 2)]


def test_tensors_alone_are_those_of_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "3b", "--tp", "2", "--pp", "1", "--format", "json"]
    assert main([*words, "--tensors"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["files"] is None and "without the headers" in alone["notes"][0]
    assert main(words) == 0
    planned = json.loads(capsys.readouterr().out)
    assert alone["bytes_by_kind"] == {kind: planned["bytes_by_kind"][kind] for kind in alone["bytes_by_kind"]}
    assert main([*words, "--tensors", "--run"]) == 2
    assert "--run: not printed with --tensors; drop one of the two" in capsys.readouterr().err


def test_what_a_run_needs_fits_a_screen_unless_all_of_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "1b", "--tp", "1", "--pp", "1"]
    assert main([*words, "--run", "--", "--save", "/x"]) == 0
    brief = capsys.readouterr().out
    assert len(brief.splitlines()) <= 40 and "configuration, where" not in brief and "manifest.json" not in brief
    assert main(["--model", "13b", "--run", "--", "--save", "/x"]) in (0, 1)
    many = capsys.readouterr().out.splitlines()
    assert sum(-(-len(line) // 100) for line in many if line) + many.count("") <= 35  # a script's DRY_RUN adds five
    assert main([*words, "--run", "--all", "--", "--save", "/x"]) == 0
    whole = capsys.readouterr().out
    assert "configuration, where it is not the default:" in whole and "manifest.json" in whole
    assert main([*words, "--all"]) == 2
    assert "--all: adds to the table of --run" in capsys.readouterr().err
