"""A checkpoint is loaded onto another layout: the same bits of every parameter, and the same training from there on.

By default two walks, one with each style of the model. Between them every pair of TP, PP and DP takes all values of 1
and 2, and each reaches 4. Every layout of at most 8 ranks from every other with both styles, which takes ten minutes:

    NIGHTLY=1 python -m pytest -m nightly tests/dist/test_redistribute.py
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from megatron.parallel.topology import Layout
from tests.dist.harness import Zygote, losses, records
from tests.dist.redistribute_runs import LAYOUTS, SAVED, Model, assembled, assert_same, shown
from tests.dist.tiny_runs import Launcher

SCRIPTS = Path(__file__).parent / "scripts"
ALL_THREE = Layout(2, 2, 2)
WALKS = {
    "llama": [ALL_THREE, Layout(4, 1, 1), Layout(1, 2, 2), Layout(2, 1, 2), Layout(1, 1, 4)],
    "classic": [ALL_THREE, Layout(1, 4, 1), Layout(2, 2, 1), Layout(1, 1, 1)],
}


@pytest.fixture(scope="module", params=["llama", "classic"])
def model(
    request: pytest.FixtureRequest, zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Model:
    launcher = Launcher(zygote, dataset, tmp_path_factory.mktemp(request.param))
    return Model(launcher, request.param)


@pytest.fixture
def half_precision(zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(Launcher(zygote, dataset, tmp_path_factory.mktemp("fp16")), "classic_fp16")


def walk_over(model: Model, walk: list[Layout]) -> None:
    """Each layout from the one before."""
    expected = assembled(model.train(walk[0], shown(walk[0]), SAVED))
    for old, new in itertools.pairwise(walk):
        assert_same(assembled(model.train(new, shown(new), SAVED, shown(old))), expected)


def test_a_walk_over_layouts_keeps_every_bit(model: Model) -> None:
    walked = set(WALKS["llama"] + WALKS["classic"])
    axes = ("tp", "pp", "dp")
    assert all(max(getattr(layout, axis) for layout in walked) == 4 for axis in axes)
    for one, other in itertools.combinations(axes, 2):
        pairs = {(getattr(layout, one), getattr(layout, other)) for layout in walked}
        assert pairs >= set(itertools.product((1, 2), repeat=2)), (one, other)
    walk_over(model, WALKS[model.style])


# The suite has fp16, this norm and these experts in test_universal_checkpoint.py, whose universal checkpoint is written
# by DeepSpeed: each direct load there is compared with it. Below are the losses of the norm, and divided experts.
@pytest.mark.nightly(minutes=1)
def test_a_walk_in_fp16(half_precision: Model) -> None:
    walk_over(half_precision, [Layout(2, 1, 2), Layout(1, 4, 1), Layout(1, 1, 1)])


@pytest.mark.nightly(minutes=1)
@pytest.mark.parametrize("model", ["moe"], indirect=True)
def test_a_walk_with_experts_in_every_second_layer(model: Model) -> None:
    walk_over(model, [Layout(2, 2, 1), Layout(1, 1, 2), Layout(4, 1, 1)])


@pytest.mark.parametrize("model", ["moe"], indirect=True)
def test_a_walk_with_experts_divided_over_replicas(model: Model) -> None:
    """Each expert is cut into partitions of other ranks on each layout."""
    walk_over(model, [Layout(2, 1, 2, ep=2), Layout(1, 1, 4), Layout(1, 2, 2, ep=2), Layout(1, 1, 4, ep=4)])


@pytest.mark.nightly(minutes=1)
@pytest.mark.parametrize("model", ["bloom"], indirect=True)
def test_a_walk_with_a_norm_that_the_first_stage_has_alone(model: Model) -> None:
    walk_over(model, [Layout(2, 2, 1), Layout(1, 1, 2), Layout(4, 1, 1)])


@pytest.mark.parametrize(
    ("model", "old", "new"),
    [
        pytest.param("llama", Layout(1, 2, 2), Layout(4, 1, 1), marks=pytest.mark.nightly(minutes=1)),
        ("classic", Layout(2, 2, 1), Layout(1, 1, 4)),
        ("moe", Layout(1, 1, 4, ep=2), Layout(2, 1, 1)),
        pytest.param("moe", Layout(2, 1, 1), Layout(1, 1, 4, ep=2), marks=pytest.mark.nightly(minutes=1)),
    ],  # fmt: skip
    indirect=["model"],
    ids=lambda value: value if isinstance(value, str) else shown(value),
)
def test_from_a_checkpoint_of_engine_torch(model: Model, old: Layout, new: Layout) -> None:
    """Which keeps no placements. Saved by torch there, by lazy here, so that the test can read it.

    From TP2 PP2 DP2 in the LLaMA style, and of experts that all hold: test_universal_checkpoint.py.
    """
    same = assembled(model.moved(old, old, "torch"))
    assert_same(assembled(model.moved(old, new, "torch")), same)
    weights = model.moved(old, new, "torch", "--no-load-optim")
    for (kind, parameter), values in assembled(weights, ("weight", "master")).items():
        if kind == "weight":
            assert torch.equal(values, same[kind, parameter])


@pytest.mark.parametrize(
    ("engine", "old", "new"),
    [
        ("fastpersist", Layout(2, 1, 2), Layout(1, 2, 1)),
        # The same writer, in a process of its own.
        pytest.param("fastpersist-decoupled", Layout(2, 1, 1), Layout(1, 2, 1), marks=pytest.mark.nightly(minutes=1)),
    ],
    ids=lambda value: value if isinstance(value, str) else shown(value),
)
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_from_a_checkpoint_of_engine_fastpersist(model: Model, engine: str, old: Layout, new: Layout) -> None:
    """Files of torch.save, by other writers: what is in them is the same."""
    expected = assembled(model.launcher.directory / model.saved(old))
    assert_same(assembled(model.moved(old, new, engine)), expected)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_from_files_that_ranks_share(model: Model) -> None:
    """Two files of eight ranks hold what eight files do, and other layouts read from them what they need."""
    expected = assembled(model.launcher.directory / model.saved(ALL_THREE))
    save = model.train(ALL_THREE, "shared", SAVED, None, "--checkpoint-files-per-node", "2")
    files = sorted(path.name for path in (save / f"global_step{SAVED}").glob("*.safetensors"))
    assert files == ["ranks_00000-00003.safetensors", "ranks_00004-00007.safetensors"]
    assert_same(assembled(save), expected)
    for new in (Layout(4, 1, 1), Layout(1, 2, 1)):
        moved = model.train(new, f"shared_to_{shown(new)}", SAVED, "shared", "--checkpoint-files-per-node", "1")
        assert len(list((moved / f"global_step{SAVED}").glob("*.safetensors"))) == 1
        assert_same(assembled(moved), expected)
    weights = model.train(Layout(1, 2, 2), "weights", SAVED, "shared", "--no-load-optim")
    for (kind, parameter), values in assembled(weights, ("weight", "master")).items():
        if kind == "weight":
            assert torch.equal(values, expected[kind, parameter])


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_from_compressed_files(model: Model) -> None:
    """Other layouts read what they need of them; what these save may be compressed, or not."""
    expected = assembled(model.launcher.directory / model.saved(ALL_THREE))
    compressing = "--checkpoint-compression", "zstd"
    save = model.train(ALL_THREE, "compressed", SAVED, None, *compressing)
    files = sorted(path.name for path in (save / f"global_step{SAVED}").glob("rank_*"))
    assert files == [f"rank_{rank:05d}.safetensors.cblk" for rank in range(ALL_THREE.world_size)]
    assert_same(assembled(save), expected)
    for new, more in ((Layout(4, 1, 1), compressing), (Layout(1, 2, 1), ())):
        moved = model.train(new, f"compressed_to_{shown(new)}", SAVED, "compressed", *more)
        assert_same(assembled(moved), expected)


@pytest.mark.nightly(minutes=10)
@pytest.mark.parametrize("old", LAYOUTS, ids=shown)
def test_every_layout_from_every_other(model: Model, old: Layout) -> None:
    expected = assembled(model.launcher.directory / model.saved(old))
    for new in LAYOUTS:
        if new != old:
            assert_same(assembled(model.moved(old, new)), expected)


@pytest.mark.parametrize(
    ("model", "old", "new"),
    [
        ("llama", Layout(2, 2, 1), Layout(1, 4, 1)),
        ("classic", Layout(1, 2, 1), Layout(2, 1, 2)),
        # Its norm and its slopes: test_universal_checkpoint.py and test_parallel_equivalence.py.
        pytest.param("bloom", Layout(2, 2, 1), Layout(4, 1, 2), marks=pytest.mark.nightly(minutes=1)),
    ],
    indirect=["model"],
    ids=str,
)
def test_training_goes_on_as_if_nothing_had_changed(model: Model, old: Layout, new: Layout) -> None:
    """The same samples, learning rates and losses: these up to the order of sums, and the rounding of bf16."""
    name = f"goes_on_{shown(old)}"
    model.train(old, name, 5)
    resumed = model.train(new, f"{name}_elsewhere", 5, name, "--load-tag", f"global_step{SAVED}")
    before, after = (losses(model.launcher.directory / name / "restart_trace"), losses(resumed / "restart_trace"))
    assert sorted(after) == [3, 4, 5]
    tolerance = 2e-2 if model.style == "llama" else 2e-5
    for step, loss in after.items():
        assert loss == pytest.approx(before[step], rel=tolerance)
    spans = [r for r in records(resumed / "restart_trace", rank=0) if r["type"] == "span" and r["operation"] == "load"]
    phases = {(r["phase"], r.get("detail")) for r in spans}
    assert {("load", "read"), ("load", "verify"), ("redistribute", "reshard")} <= phases
    ways = {way for phase, way in phases if phase == "redistribute"}
    assert ("broadcast" in ways) == (new.dp > 1) and ("all_gather" in ways) == (new.dp == 1), "and the trace says which"


@pytest.mark.parametrize(
    "model", ["llama", pytest.param("classic", marks=pytest.mark.nightly(minutes=1))], indirect=True
)
def test_weights_are_those_that_deepspeed_gathers(model: Model) -> None:
    """On every replica, bit for bit: gloo broadcasts the parts in place, and DeepSpeed gathers them (NCCL)."""
    new = Layout(1, 1, 4)
    load = model.launcher.directory / model.saved(Layout(2, 2, 1))
    argv = [*model.flags, "--load", str(load), "--train-iters", str(SAVED)]
    run = model.launcher.run(new, *argv, script=str(SCRIPTS / "weights_both_ways.py"))
    assert run.ok, run.output[-6000:]
    assert run.output.count("both ways give the same weights") == new.world_size


@pytest.mark.parametrize(
    "model", ["llama", pytest.param("classic", marks=pytest.mark.nightly(minutes=1))], indirect=True
)
def test_weights_alone(model: Model) -> None:
    """--no-load-optim: the masters are then the weights, and moments there are none before the next step."""
    old, new = Layout(2, 2, 1), Layout(1, 1, 2)
    expected = assembled(model.launcher.directory / model.saved(old))
    save = model.moved(old, new, "lazy", "--no-load-optim")
    found = assembled(save, ("weight", "master"))
    for (kind, name), values in found.items():
        if kind == "weight":
            assert torch.equal(values, expected[kind, name])
        elif kind == "master":
            assert torch.equal(values, expected["weight", name].float())
    # Both DP replicas hold all weights; between them they read each once, with little beside it.
    ends = [r for r in records(save / "restart_trace") if r["type"] == "operation_end" and r["operation"] == "load"]
    read = [end["bytes"] for end in ends]
    weights = sum(values.nbytes for (kind, _), values in expected.items() if kind == "weight")
    assert len(read) == 2 and max(read) < 0.8 * sum(read) and weights <= sum(read)
