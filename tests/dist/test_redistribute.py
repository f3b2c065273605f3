"""A checkpoint is loaded onto another layout: the same bits of every parameter, and the same training from there on.

By default a walk over all layouts with at most 8 ranks, so each is loaded from and onto once. Every layout from every
other, which takes ten minutes:

    REDISTRIBUTE_ALL=1 python -m pytest tests/dist/test_redistribute.py
"""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path

import pytest
import safetensors
import torch

from megatron.topology import Layout
from tests.dist.harness import LLAMA_STYLE, Zygote, losses, records
from tests.dist.tiny_runs import NO_DROPOUT, Launcher, saving
from tests.placement_reader import Reader, bits

# Sizes with few factors of two, so that flat groups need padding and partitions end within parameters.
SIZES = [
    "--num-layers", "4", "--hidden-size", "18", "--num-attention-heads", "8", "--seq-length", "16", *NO_DROPOUT,
    "--make-vocab-size-divisible-by", "8",
]  # fmt: skip
STYLES = {
    "llama": [*SIZES, *LLAMA_STYLE, "--num-key-value-heads", "4", "--kv-channels", "6", "--ffn-hidden-size", "12"],
    "classic": [*SIZES, "--kv-channels", "5", "--ffn-hidden-size", "20"],
}
PRECISIONS = {"llama": ["--bf16"], "classic": []}
TRAINING = [
    "--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "1e-3", "--lr-warmup-iters", "1",
    "--lr-decay-iters", "9", "--lr-decay-style", "cosine", "--log-interval", "1",
]  # fmt: skip
SAVED = 2
LAYOUTS = [
    Layout(tp, pp, dp) for tp, pp, dp in itertools.product((1, 2, 4), repeat=3) if tp * pp * dp <= 8
]
KINDS = ("weight", "master", "exp_avg", "exp_avg_sq")
TIED = "tied_modules.embed.word_embeddings.weight"
# The copies on the first and the last stage are summed and rounded apart: see test_checkpoint_placements.
TIED_ROUNDING = {TIED: 1e-6}


def shown(layout: Layout) -> str:
    return f"tp{layout.tp}_pp{layout.pp}_dp{layout.dp}"


class Model:
    """Trainings of one style of the model."""

    def __init__(self, launcher: Launcher, style: str) -> None:
        self.launcher = launcher
        self.warned = False  # by the last run, that checksums are not verified
        self._flags = [*STYLES[style], *PRECISIONS[style], *TRAINING]

    def run(
        self,
        layout: Layout,
        name: str,
        iterations: int,
        load: str | None = None,
        *flags: str,
        engine: str = "lazy",
    ) -> Path:
        """Train until `iterations` are done, from the checkpoint in `load`; the directory that it saved to."""
        save = self.launcher.directory / name
        resume = ["--load", str(self.launcher.directory / load), "--exit-on-missing-checkpoint"] if load else []
        saves = [*saving(save, SAVED)[:-1], "--checkpoint-engine", engine]  # no hashes: they are of one layout
        run = self.launcher.train(layout, *self._flags, *saves, "--train-iters", str(iterations), *resume, *flags)
        self.warned = "the checksums and hashes of its tensors" in run.log(0)
        return save


def assembled(save: Path, kinds: tuple[str, ...] = KINDS) -> dict[tuple[str, str], torch.Tensor]:
    """(kind, parameter) -> the full tensor, of the true vocabulary, by code that knows the placements alone."""
    reader = Reader(rounding=TIED_ROUNDING)
    for path in sorted((save / f"global_step{SAVED}").glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            described = json.loads(file.metadata()["tensors"])
            for name in file.keys():  # noqa: SIM118  it is no dict
                if "placement" in described[name]:
                    reader.add(file.get_tensor(name), described[name]["placement"])
    found = {}
    for kind in kinds:
        for name, values in reader.whole(kind).items():
            found[kind, name] = values[: reader.parameters[kind, name].unpadded]
    assert {kind for kind, _ in found} == set(kinds) == {kind for kind, _ in reader.parameters}
    return found


def assert_same(found: dict[tuple[str, str], torch.Tensor], expected: dict[tuple[str, str], torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert torch.equal(bits(found[key].reshape(-1)), bits(values.reshape(-1))), key


@pytest.fixture(scope="module", params=STYLES)
def model(
    request: pytest.FixtureRequest, zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Model:
    launcher = Launcher(zygote, dataset, tmp_path_factory.mktemp(request.param))
    return Model(launcher, request.param)


def test_a_walk_over_all_layouts_keeps_every_bit(model: Model) -> None:
    walk = random.Random(11).sample(LAYOUTS, len(LAYOUTS))
    expected = assembled(model.run(walk[0], shown(walk[0]), SAVED))
    for old, new in itertools.pairwise(walk):
        assert_same(assembled(model.run(new, shown(new), SAVED, shown(old))), expected)
        assert model.warned


@pytest.mark.parametrize(
    ("old", "new"),
    [(Layout(2, 2, 2), Layout(1, 4, 1)), (Layout(1, 2, 4), Layout(4, 1, 2)), (Layout(4, 2, 1), Layout(2, 1, 2))],
    ids=shown,
)
def test_from_a_checkpoint_of_engine_torch(model: Model, old: Layout, new: Layout) -> None:
    """Which keeps no placements. Saved by torch there, by lazy here, so that the test can read it."""
    name = f"torch_{shown(old)}"
    model.run(old, name, SAVED, engine="torch")
    same = assembled(model.run(old, f"{name}_same", SAVED, name))
    assert_same(assembled(model.run(new, f"{name}_to_{shown(new)}", SAVED, name)), same)
    weights = model.run(new, f"{name}_weights", SAVED, name, "--no-load-optim")
    for (kind, parameter), values in assembled(weights, ("weight", "master")).items():
        if kind == "weight":
            assert torch.equal(values, same[kind, parameter])


@pytest.mark.skipif("REDISTRIBUTE_ALL" not in os.environ, reason="takes 10 minutes; set REDISTRIBUTE_ALL to run it")
@pytest.mark.parametrize("old", LAYOUTS, ids=shown)
def test_every_layout_from_every_other(model: Model, old: Layout) -> None:
    expected = assembled(model.run(old, f"from_{shown(old)}", SAVED))
    for new in LAYOUTS:
        if new != old:
            there = model.run(new, f"{shown(old)}_to_{shown(new)}", SAVED, f"from_{shown(old)}")
            assert_same(assembled(there), expected)


@pytest.mark.parametrize(
    ("old", "new"), [(Layout(2, 2, 2), Layout(1, 4, 1)), (Layout(1, 2, 1), Layout(4, 1, 2))], ids=shown
)
def test_training_goes_on_as_if_nothing_had_changed(model: Model, old: Layout, new: Layout) -> None:
    """The same samples, learning rates and losses: these up to the order of sums, and the rounding of bf16."""
    name = f"goes_on_{shown(old)}"
    model.run(old, name, 5)
    resumed = model.run(new, f"{name}_elsewhere", 5, name, "--load-tag", f"global_step{SAVED}")
    before, after = losses(model.launcher.directory / name / "restart_trace"), losses(resumed / "restart_trace")
    assert sorted(after) == [3, 4, 5]
    tolerance = 2e-2 if "--bf16" in model._flags else 2e-5
    for step, loss in after.items():
        assert loss == pytest.approx(before[step], rel=tolerance)
    spans = [r for r in records(resumed / "restart_trace", rank=0) if r["type"] == "span" and r["operation"] == "load"]
    phases = {(r["phase"], r.get("detail")) for r in spans}
    assert {("load", "read"), ("redistribute", "reshard"), ("redistribute", "all_gather")} <= phases


def test_weights_alone(model: Model) -> None:
    """--no-load-optim: the masters are then the weights, and moments there are none before the next step."""
    old, new = Layout(2, 2, 1), Layout(1, 1, 2)
    expected = assembled(model.run(old, "with_all", SAVED))
    there = model.run(new, "weights_alone", SAVED, "with_all", "--no-load-optim")
    found = assembled(there, ("weight", "master"))
    for (kind, name), values in found.items():
        if kind == "weight":
            assert torch.equal(values, expected[kind, name])
        elif kind == "master":
            assert torch.equal(values, expected["weight", name].float())
