"""The plan of a checkpoint against the checkpoint: every name, every size, every tensor, of real trainings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.parallel.topology import Layout
from tests.dist.harness import BLOOM_STYLE, EXPERTS, LLAMA_STYLE, Zygote
from tests.dist.tiny_runs import MODEL, NO_DROPOUT, RECOMPUTE, TRAINING, Launcher, load_file, parallel
from tools.ckpt_plan.kinds import TENSOR_KINDS, tensor_bytes_by_kind
from tools.ckpt_plan.plan import Plan, make_plan
from tools.ckpt_plan.presets import config_from_flags
from tools.ckpt_plan.rank_state import planned_files

STEP = 3
GROUPED_HEADS = ["--num-key-value-heads", "2"]
# No size that 2 or 4 divides, so that the flat groups of ZeRO-1 end in padding.
ODD = [
    "--num-layers", "3", "--hidden-size", "34", "--ffn-hidden-size", "49", "--num-attention-heads", "2",
    "--seq-length", "32",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A training to be planned and run."""

    name: str
    layout: Layout
    flags: Sequence[str]
    engine: str = "torch"
    model: Sequence[str] = tuple(MODEL)
    nightly: bool = False  # each of its values is in another case, with the same code to plan it


CASES = [
    Case("gpt_bf16", Layout(2, 2, 2), ["--bf16", *RECOMPUTE]),
    Case("llama_bf16", Layout(2, 2, 1), ["--bf16", *LLAMA_STYLE, *GROUPED_HEADS], nightly=True),
    Case("gpt_fp32", Layout(1, 2, 2), [], nightly=True),
    Case("llama_fp16", Layout(2, 1, 2), ["--fp16", *LLAMA_STYLE, *GROUPED_HEADS]),
    Case("gpt_fp16_static_scale", Layout(2, 1, 1), ["--fp16", "--loss-scale", "128"]),
    Case("gpt_bf16_padded", Layout(1, 1, 2), ["--bf16"], model=tuple(ODD)),
    Case("gpt_fp32_padded", Layout(1, 2, 2), [], model=tuple(ODD)),
    Case("bloom_bf16", Layout(2, 2, 1), ["--bf16", *BLOOM_STYLE]),
    Case("moe_bf16", Layout(2, 2, 1), ["--bf16", *EXPERTS, "--mlp-type", "residual"], nightly=True),
    Case("sequences_bf16", Layout(1, 1, 2), ["--bf16", "--ds-sequence-parallel-size", "2"]),
    Case("replicas_fp32", Layout(1, 1, 2), ["--data-parallel-random-init"]),
    Case("moe_divided", Layout(2, 1, 2, ep=2), ["--bf16", *EXPERTS, "--mlp-type", "residual"]),
    Case("moe_divided_fp32", Layout(1, 1, 4, ep=2), [*EXPERTS, "--num-experts", "2"], engine="lazy", nightly=True),
    Case("llama_bf16_sgd", Layout(1, 2, 1), ["--bf16", *LLAMA_STYLE, "--optimizer", "sgd"]),
    Case("llama_no_optim", Layout(2, 1, 2), ["--bf16", *LLAMA_STYLE, "--no-save-optim"]),
    Case("gpt_no_rng", Layout(1, 1, 1), ["--bf16", "--no-save-rng"]),
    Case("lazy", Layout(2, 1, 2), ["--bf16", *LLAMA_STYLE], engine="lazy"),
    Case(
        "lazy_shared", Layout(2, 1, 2), ["--bf16", *LLAMA_STYLE, "--checkpoint-files-per-node", "2"], engine="lazy",
    ),
    Case("fastpersist", Layout(1, 1, 2), ["--bf16"], engine="fastpersist"),
    Case("decoupled", Layout(1, 1, 1), ["--bf16", *LLAMA_STYLE], engine="fastpersist-decoupled", nightly=True),
]  # fmt: skip


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=pytest.mark.nightly(minutes=1) if case.nightly else ()) for case in CASES],
)
def test_the_plan_is_what_a_training_saves(case: Case, launcher: Launcher) -> None:
    save = launcher.directory / "save"
    flags = [
        *case.model, *TRAINING, *case.flags, *NO_DROPOUT, "--train-iters", str(STEP), "--save", str(save),
        "--save-interval", str(STEP), "--checkpoint-engine", case.engine,
    ]  # fmt: skip
    launcher.train(case.layout, *flags)
    planned = config_from_flags([*launcher.dataset, *parallel(case.layout), *flags], case.layout.dp, None)
    plan = make_plan(planned, case.engine)
    checkpoint = save / f"global_step{STEP}"

    expected = {file.name: file.num_bytes for file in (*plan.files, *plan.commit_files)}
    real = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    real |= {f"../{path.name}": path.stat().st_size for path in save.iterdir() if path.is_file()}
    assert expected == real
    if case.engine == "torch":
        for rank in range(case.layout.world_size):
            _check_states(planned, rank, checkpoint)
        assert {kind: plan.by_kind[kind] for kind in TENSOR_KINDS} == _tensor_bytes(checkpoint)
    _check_totals(plan)


def _check_states(planned: Any, rank: int, checkpoint: Path) -> None:
    config, layout, vocab_sizes = planned
    files = planned_files(config, layout, layout.coordinates(rank), vocab_sizes)
    for file in files:
        wrong = _differences(file.state, load_file(checkpoint / file.name), file.name)
        assert not wrong, wrong


def _tensor_bytes(checkpoint: Path) -> dict[str, int]:
    """Bytes of tensors by kind in the files on disk."""
    total = dict.fromkeys(TENSOR_KINDS, 0)
    for path in checkpoint.glob("*.pt"):
        state = load_file(path)
        if path.name.startswith("layer_"):
            total["weights"] += _bytes(state.values())
        elif "optimizer_state_dict" in state:
            optimizer = state["optimizer_state_dict"]
            total["master_weights"] += _bytes(optimizer["single_partition_of_fp32_groups"])
            moments = optimizer["base_optimizer_state"]["state"].values()
            total["moments"] += sum(_bytes(t for t in values.values() if _is_flat(t)) for values in moments)
    return total


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _check_totals(plan: Plan) -> None:
    assert plan.total_bytes == sum(plan.by_kind.values()) == sum(file.num_bytes for file in plan.files)
    assert [rank.rank for rank in plan.ranks] == list(range(plan.layout.world_size))
    assert all(file.rank == rank.rank for rank in plan.ranks for file in rank.files)


def _differences(planned: Any, real: Any, where: str) -> list[str]:
    """Where two nests differ in structure, type, dtype, shape or any value that is no tensor."""
    if type(planned) is not type(real):
        return [f"{where}: {type(planned).__name__} planned, {type(real).__name__} saved"]
    if isinstance(planned, torch.Tensor):
        same = planned.dtype == real.dtype and planned.shape == real.shape
        return [] if same else [f"{where}: {planned.dtype} {planned.shape} planned, {real.dtype} {real.shape} saved"]
    if isinstance(planned, argparse.Namespace):
        planned, real = vars(planned), vars(real)
        planned = planned | {"local_rank": real["local_rank"]}  # how ranks lie on hosts is not planned
    if isinstance(planned, np.ndarray):
        same = planned.dtype == real.dtype and np.array_equal(planned, real)
        return [] if same else [f"{where}: other numbers"]
    if isinstance(planned, Mapping):
        if list(planned) != list(real):
            return [f"{where}: keys {list(planned)} planned, {list(real)} saved"]
        pairs = [(f"{where}/{key}", planned[key], real[key]) for key in planned]
    elif isinstance(planned, (list, tuple)):
        if len(planned) != len(real):
            return [f"{where}: {len(planned)} items planned, {len(real)} saved"]
        pairs = [(f"{where}/{i}", a, b) for i, (a, b) in enumerate(zip(planned, real, strict=True))]
    elif hasattr(planned, "__dict__") and type(planned).__eq__ is object.__eq__:
        pairs = [(where, vars(planned), vars(real))]
    else:
        return [] if planned == real else [f"{where}: {planned!r} planned, {real!r} saved"]
    return [line for path, a, b in pairs for line in _differences(a, b, path)]


def test_the_odd_model_has_padding(launcher: Launcher) -> None:
    """Or the two cases named so would test nothing."""
    config, layout, vocab_sizes = config_from_flags(
        [*launcher.dataset, *ODD, *TRAINING, "--train-iters", str(STEP), "--bf16"], 2, None
    )
    files = planned_files(config, layout, layout.coordinates(1), vocab_sizes)
    (shard,) = [file.state for file in files if "optimizer_state_dict" in file.state]
    assert any(shard["optimizer_state_dict"]["group_paddings"])
    assert tensor_bytes_by_kind(files)["master_weights"] > 0
