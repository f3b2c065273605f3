"""Checkpoints that DeepSpeed's own save_checkpoint wrote of models with upstream's names, with experts, go on here.

Not of a real run of upstream's: of a model with its names of parameters, whose experts are DeepSpeed's MoE
(scripts/deepspeed_experts.py). A training of this program gives their state, and must go on from DeepSpeed's files as
from its own, bit for bit.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.parallel.topology import Layout
from tests.dist.harness import EXPERTS, Zygote, losses
from tests.dist.redistribute_runs import SAVED, Model, read
from tests.dist.scripts.deepspeed_experts import Given
from tests.dist.tiny_runs import Launcher, load_file, parallel
from tests.placement_reader import bits
from tests.upstream_files import KINDS, SINCE_BLOCKS, UpstreamModel
from tools.ckpt_plan.plan import make_plan
from tools.ckpt_plan.presets import config_from_flags

SCRIPT = str(Path(__file__).parent / "scripts" / "deepspeed_experts.py")
LLAMA = UpstreamModel(4, 18, 12, 8, 4, 6, 0, 0, True)
CLASSIC = UpstreamModel(4, 18, 20, 8, 8, 5, 0, 0, False)
# What a training of this program has beyond upstream's.
_OURS = ("indexed_samples", "input_contents", "position_embedding_type", "embed_layernorm")


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


def given_by(model: Model, layout: Layout, sizes: UpstreamModel, zero_stage: int, pipeline: bool) -> Given:
    """The state of a training of this program after SAVED iterations."""
    own = model.launcher.directory / model.saved(layout, "torch") / f"global_step{SAVED}"
    common = load_file(own / "mp_rank_00_model_states.pt")
    reader = read(model.moved(layout, Layout(1, 1, 1), "torch"))
    args = argparse.Namespace(**{name: value for name, value in vars(common["args"]).items() if name not in _OURS})
    args.num_experts, args.enable_expert_tensor_parallelism = list(args.num_experts), True
    args.no_pipeline_parallel = not pipeline
    setattr(args, SINCE_BLOCKS, False)
    client = {name: common[name] for name in ("iteration", "checkpoint_version", "tokens", "lr_scheduler")}
    client |= {name: common[name] for name in ("global_steps", "global_samples", "skipped_steps")}
    (experts,) = args.num_experts
    per_block = [experts if block % 2 else 1 for block in range(sizes.layers)]
    state = {kind: reader.whole(kind) for kind in KINDS}
    return Given(
        layout, pipeline, zero_stage, "bf16" if args.bf16 else "fp32", sizes, per_block, args.mlp_type == "residual",
        state, client | {"args": args}, common["universal_checkpoint_info"],
    )  # fmt: skip


def saved_by_deepspeed(launcher: Launcher, given: Given, name: str = "deepspeed") -> Path:
    """Where its checkpoint lies."""
    path, save = launcher.directory / "given.pt", launcher.directory / name
    torch.save(given, path)
    run = launcher.run(given.layout, script=SCRIPT, env={"GIVEN_STATE": str(path), "SAVED_TO": str(save)})
    assert run.ok, run.output[-6000:]
    return save


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(bits(found[name].reshape(-1)), bits(values.reshape(-1))), name


@pytest.mark.parametrize(
    ("style", "layout", "zero_stage", "pipeline"),
    [
        ("moe", Layout(1, 1, 4, ep=2), 1, False),  # each expert's shard is on two ranks
        ("moe", Layout(2, 1, 2, ep=2), 1, False),
        ("moe", Layout(1, 2, 2, ep=2), 1, True),  # each stage counts its layers with experts by itself
        ("classic_moe", Layout(1, 1, 2, ep=2), 2, False),
        ("classic", Layout(1, 1, 2), 1, False),
    ],
    ids=["replicas", "tp", "stages", "fp32", "dense"],
)
def test_goes_on_as_the_run_that_gave_the_state(
    launcher: Launcher, style: str, layout: Layout, zero_stage: int, pipeline: bool
) -> None:
    model = Model(launcher, style.removesuffix("_moe"))
    if style == "classic_moe":
        model.flags += [*EXPERTS, "--disable-moe-token-dropping"]
    given = given_by(model, layout, LLAMA if style == "moe" else CLASSIC, zero_stage, pipeline)
    directory = saved_by_deepspeed(launcher, given) / f"global_step{SAVED}"
    files = {path.name: path.stat().st_size for path in directory.iterdir()}
    assert ("layer_0_expert_3_mp_rank_00_model_states.pt" in files) == (style != "classic")
    flags = [*launcher.dataset, *parallel(layout), *model.flags, "--train-iters", str(SAVED)]
    flags += [] if pipeline else ["--no-pipeline-parallel"]
    plan = make_plan(config_from_flags(flags, layout.dp, None), "upstream")
    planned = {file.name: file.num_bytes for file in plan.files}
    assert planned.keys() == files.keys()
    assert {name: planned[name] for name in files if "_expert_" in name} == {
        name: num_bytes for name, num_bytes in files.items() if "_expert_" in name
    }

    own = model.train(layout, "own", SAVED + 2, model.saved(layout, "torch"))
    theirs = model.train(layout, "theirs", SAVED + 2, "deepspeed")
    assert "has no manifest (upstream wrote it" in model.run.log(0)  # type: ignore[union-attr]
    curve = losses(own / "restart_trace")
    assert set(curve) == {3, 4} and losses(theirs / "restart_trace") == curve

    elsewhere = read(model.train(Layout(2, 1, 1), "elsewhere", SAVED, "deepspeed"))
    for kind in KINDS:
        assert_same_bits(elsewhere.whole(kind), given.state[kind])
    weights = read(model.train(Layout(1, 1, 2), "weights", SAVED, "deepspeed", "--no-load-optim")).whole("weight")
    dtype = torch.bfloat16 if given.dtype == "bf16" else torch.float32
    assert_same_bits(weights, {name: values.to(dtype) for name, values in given.state["master"].items()})


def test_what_cannot_be_loaded_is_named(launcher: Launcher) -> None:
    model, layout = Model(launcher, "moe"), Layout(1, 1, 2, ep=2)
    given = given_by(model, layout, LLAMA, 1, False)
    save = saved_by_deepspeed(launcher, given)

    def message(*flags: str, **changed: Any) -> str:
        path = save / f"global_step{SAVED}" / "mp_rank_00_model_states.pt"
        content = load_file(path)
        args = argparse.Namespace(**vars(content["args"]) | changed)
        torch.save(content | {"args": args}, path)
        run = model.resume(layout, save, *flags)
        torch.save(content, path)
        assert set(run.exit_codes) == {2}
        return run.output

    assert "another model: num_experts is 2 in the checkpoint and 4 here" in message(
        "--train-iters", "3", num_experts=[2]
    )
    lost = save / f"global_step{SAVED}" / "layer_1_expert_2_mp_rank_00_model_states.pt"
    content = lost.read_bytes()
    lost.unlink()
    assert f"{lost.name} is missing" in message("--train-iters", "3")
    lost.write_bytes(content)
    unsharded = saved_by_deepspeed(launcher, replace(given, zero_stage=0, dtype="fp32"), "unsharded")
    run = model.resume(layout, unsharded, "--train-iters", "3")
    assert set(run.exit_codes) == {2} and "ZeRO stage 0, whose expp_rank_0_mp_rank_00_optim_states.pt" in run.output
