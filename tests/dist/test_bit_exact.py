"""A run that is resumed goes on as if nothing had happened: every loss and every stored bit is that of the run
that was never interrupted. Dropout is on, so this holds for the random state of every rank too.

After a SIGKILL of all ranks, and with every engine: test_engines_training.py.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.parallel.topology import Layout
from tests.dist.harness import BLOOM_STYLE, EXPERTS, LLAMA_STYLE, Run, Zygote, kill_all, losses, records, wait_for
from tests.dist.hold import HELD_TRAINING
from tests.dist.tiny_runs import (
    DROPOUT,
    MODEL,
    PRECISIONS,
    RECOMPUTE,
    SINGLE,
    TRAINING,
    Launcher,
    assert_same_checkpoint,
    buffered_saving,
    from_iteration,
    hashes,
    load_file,
    losses_of_ranks,
    sha256,
)

ALL_THREE = Layout(tp=2, pp=2, dp=2)
TENSOR_PARALLEL = Layout(tp=2, pp=1, dp=1)
STAGES = Layout(tp=1, pp=2, dp=1)
FOUR_STAGES = Layout(tp=1, pp=4, dp=1)
DIVIDED_EXPERTS = Layout(tp=1, pp=1, dp=4, ep=2)
EXPERTS_OVER_STAGES = Layout(tp=1, pp=2, dp=2, ep=2)
STAGES_OF_TWO = Layout(tp=2, pp=2, dp=1)
STAGES_IN_PARTS = Layout(tp=1, pp=2, dp=2)
# Each layout and each precision, and both of DeepSpeed's optimizers, bf16's own and the one for all else, over TP, PP
# and DP: what they do depends on one another no further.
RESUMED = [
    (ALL_THREE, "bf16"),
    (SINGLE, "fp32"),
    # In the suite fp16 is resumed by test_fp16_loss_scale_goes_on, and stages by the tests of tied embeddings.
    pytest.param(Layout(tp=2, pp=1, dp=2), "fp16", marks=pytest.mark.nightly(minutes=1)),
    pytest.param(FOUR_STAGES, "fp32", marks=pytest.mark.nightly(minutes=1)),
]
LLAMA = [*MODEL, *LLAMA_STYLE, "--num-key-value-heads", "2", *TRAINING, *DROPOUT, *RECOMPUTE]
CLASSIC = [*MODEL, *TRAINING, *DROPOUT, *RECOMPUTE]
FIVE = ["--train-iters", "5"]
RESUME = ["--load-tag", "global_step3"]
WORKERS = ["--num-workers", "2"]  # data-loading processes, as by default


Whole = Callable[..., Path]


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


@pytest.fixture(scope="module")
def whole(zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Trains five iterations without interruption, saved after three and at the end, once per layout and flags."""
    launcher = Launcher(zygote, dataset, tmp_path_factory.mktemp("whole"))
    number = itertools.count()

    @functools.cache
    def train(layout: Layout, *flags: str) -> Path:
        save = launcher.directory / f"run_{next(number)}"
        launcher.train(layout, *flags, *FIVE, *buffered_saving(save, 3))
        return save

    return train


def printed_by_iteration(run: Run, name: str) -> dict[int, str]:
    """Iteration -> what the iteration line says after `name`."""
    found = re.findall(rf"iteration +(\d+)/.*?{name}: *(\S+)", run.output)
    return {int(step): value for step, value in found}


def number_of_saves(save: Path, step: int, rank: int = 0) -> int:
    """How often `rank` began to save `step`, over all cycles."""
    begun = (r for r in records(save / "restart_trace", rank=rank) if r["type"] == "operation_begin")
    return sum(r["operation"] == "save" and r["step"] == step for r in begun)


@pytest.mark.parametrize(("layout", "precision"), RESUMED, ids=lambda value: str(value).replace(" ", ""))
def test_resumed_run_equals_uninterrupted_one(launcher: Launcher, whole: Whole, layout: Layout, precision: str) -> None:
    resumed = launcher.directory / "resumed"
    flags = [*LLAMA, *PRECISIONS[precision]]
    if layout == FOUR_STAGES:
        flags += ["--num-layers", "4"]
    if layout == ALL_THREE:
        flags += WORKERS
    saved = whole(layout, *flags)
    launcher.train(layout, *flags, *FIVE, *buffered_saving(resumed, 3), "--load", saved, *RESUME)

    expected = losses_of_ranks(saved, layout)
    assert [list(mine) for mine in expected] == [list(range(1, 6))] * layout.world_size
    assert losses_of_ranks(resumed, layout) == from_iteration(expected, 4)
    assert len(set(expected[0].values())) == 5
    # The load compared what it restored with the hashes at 3; training has changed every optimizer tensor since.
    at_3, at_5 = hashes(saved / "global_step3", layout), hashes(saved / "global_step5", layout)
    assert hashes(resumed / "global_step5", layout) == at_5
    for before, after in zip(at_3, at_5, strict=True):
        trained = [name for name in before if name.startswith(("master/", "optimizer/"))]
        assert len(trained) >= 6  # master weights and two moments of two groups
        assert all(before[name] != after[name] for name in trained if not name.endswith("/step"))
    assert_same_checkpoint(saved / "global_step5", resumed / "global_step5")


def test_resumed_run_with_sequence_parallelism(launcher: Launcher, whole: Whole) -> None:
    """Each TP rank draws its own dropout masks, and what all hold, norms and positions, stays the same on all."""
    resumed = launcher.directory / "resumed"
    flags = [*CLASSIC, "--bf16", "--sequence-parallel"]
    layout = STAGES_OF_TWO
    saved = whole(layout, *flags)
    launcher.train(layout, *flags, *FIVE, *buffered_saving(resumed, 3), "--load", saved, *RESUME)
    assert losses_of_ranks(resumed, layout) == from_iteration(losses_of_ranks(saved, layout), 4)
    assert_same_checkpoint(saved / "global_step5", resumed / "global_step5")
    held_by_all = 0
    for path in (saved / "global_step5").glob("layer_*-model_00-model_states.pt"):
        one, other = load_file(path), load_file(path.with_name(path.name.replace("model_00", "model_01")))
        for name in one:
            if "layernorm" in name or "position" in name or name.endswith(("dense.bias", "4h_to_h.bias")):
                assert torch.equal(one[name], other[name]), name
                held_by_all += 1
    assert held_by_all == 2 * 6 + 1  # two norms and two biases of each layer, and the positions


def test_recorded_hashes_are_those_of_the_files(whole: Whole) -> None:
    """So that comparing a live state with them compares it with what lies on the disk."""
    checkpoint = whole(TENSOR_PARALLEL, *LLAMA, "--bf16") / "global_step3"
    for rank, recorded in enumerate(hashes(checkpoint, TENSOR_PARALLEL)):
        stored = {}
        for path in checkpoint.glob(f"layer_*-model_{rank:02d}-model_states.pt"):
            number = int(path.name[6:8])
            stored |= {f"weight/{number}.{name}": sha256(t) for name, t in load_file(path).items()}
        shard = load_file(checkpoint / f"bf16_zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt")
        state = shard["optimizer_state_dict"]
        for index, master in enumerate(state["single_partition_of_fp32_groups"]):
            stored[f"master/{index}"] = sha256(master)
        for index, moments in state["base_optimizer_state"]["state"].items():
            tensors = {name: value for name, value in moments.items() if isinstance(value, torch.Tensor)}
            assert {"exp_avg", "exp_avg_sq"} <= tensors.keys()
            stored |= {f"optimizer/{index}/{name}": sha256(tensor) for name, tensor in tensors.items()}
        assert recorded == stored


def test_restored_state_that_differs_is_refused(launcher: Launcher, whole: Whole) -> None:
    load, save = launcher.directory / "load", launcher.directory / "run"
    shutil.copytree(whole(TENSOR_PARALLEL, *LLAMA), load)
    path = load / "global_step3" / "tensor_hashes_rank_00001.json"
    recorded = json.loads(path.read_text())
    path.write_text(json.dumps(recorded | {"master/0": "0" * 64}))
    finished = launcher.run(TENSOR_PARALLEL, *LLAMA, *FIVE, *buffered_saving(save, 3), "--load", load, *RESUME)
    assert 0 not in finished.exit_codes
    assert f"{path}: restored state differs from what was saved in master/0" in finished.output
    assert not (save / "global_step5").exists()


def test_resumed_twice(launcher: Launcher, whole: Whole) -> None:
    parts = launcher.directory / "parts"
    flags = [*LLAMA, "--bf16"]
    for stop in ("2", "4", "5"):
        launcher.train(
            TENSOR_PARALLEL, *flags, *FIVE, *buffered_saving(parts, 2), "--load", parts, "--exit-interval", stop
        )
    expected = losses_of_ranks(whole(TENSOR_PARALLEL, *flags), TENSOR_PARALLEL)
    for cycle, steps in enumerate(([1, 2], [3, 4], [5])):
        part = losses_of_ranks(parts, TENSOR_PARALLEL, cycle)
        assert part == [{step: mine[step] for step in steps} for mine in expected]
    assert_same_checkpoint(whole(TENSOR_PARALLEL, *flags) / "global_step5", parts / "global_step5")


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.nightly(minutes=1))])
def test_classic_model_with_tied_embedding_over_stages(launcher: Launcher, whole: Whole, precision: str) -> None:
    """Learned positions, LayerNorm, GELU, biases; first and last stage hold a copy each of the embedding."""
    resumed = launcher.directory / "resumed"
    flags = [*CLASSIC, *PRECISIONS[precision]]
    saved = whole(STAGES, *flags)
    launcher.train(STAGES, *flags, *FIVE, *buffered_saving(resumed, 3), "--load", saved, *RESUME)
    assert losses_of_ranks(resumed, STAGES) == from_iteration(losses_of_ranks(saved, STAGES), 4)
    first, last = hashes(resumed / "global_step5", STAGES)
    embedding = "weight/tied_modules.embed.word_embeddings.weight"
    assert [name for name in first if "word_embeddings" in name] == [embedding]
    assert first[embedding] == last[embedding]
    assert_same_checkpoint(saved / "global_step5", resumed / "global_step5")


def killed_and_resumed(launcher: Launcher, layout: Layout, flags: list[str]) -> tuple[Path, str]:
    """Five iterations with a SIGKILL after the fourth, resumed from the third: the directory, and what was printed."""
    save = launcher.directory / "killed"
    flags = [*flags, *FIVE, *buffered_saving(save, 3), "--load", str(save)]

    def kill_after_iteration_4(pids: list[int]) -> None:
        wait_for(lambda: 4 in losses(save / "restart_trace"), "iteration 4")
        kill_all(pids)

    held = {"HELD_CYCLES": "1", "HELD_AFTER": "4"}
    killed = launcher.run(layout, *flags, during=kill_after_iteration_4, script=HELD_TRAINING, env=held)
    assert killed.exit_codes == [-9] * layout.world_size, killed.output[-4000:]
    return save, launcher.train(layout, *flags).output


def test_a_model_like_blooms_goes_on_after_sigkill(launcher: Launcher, whole: Whole) -> None:
    """ALiBi, and a norm of the word embeddings that the first stage has alone, though the last has these, too."""
    layout, flags = STAGES_OF_TWO, [*CLASSIC, *BLOOM_STYLE, "--bf16"]
    saved = whole(layout, *flags)
    save, _ = killed_and_resumed(launcher, layout, flags)
    assert losses_of_ranks(save, layout, cycle=1) == from_iteration(losses_of_ranks(saved, layout), 4)
    assert_same_checkpoint(saved / "global_step5", save / "global_step5")
    first, _, last, _ = hashes(save / "global_step5", layout)
    of_norm = [f"weight/tied_modules.embed.word_embeddings.norm.{part}" for part in ("bias", "weight")]
    assert sorted(name for name in first if "embeddings.norm" in name) == of_norm
    assert not [name for name in last if "embeddings.norm" in name]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        # The losses of such experts over all three: test_parallel_equivalence.py; their files: test_redistribute.py.
        pytest.param(ALL_THREE, "bf16", marks=pytest.mark.nightly(minutes=1)),
        (STAGES, "fp16"),
        (DIVIDED_EXPERTS, "bf16"),
        pytest.param(EXPERTS_OVER_STAGES, "fp32", marks=pytest.mark.nightly(minutes=1)),
    ],
    ids=str,
)
def test_a_mixture_of_experts_goes_on_after_sigkill(
    launcher: Launcher, whole: Whole, layout: Layout, precision: str
) -> None:
    """Experts that take no more than 2 of 32 tokens choose them at random: the random state must be the same."""
    flags = [*CLASSIC, *EXPERTS, "--expert-interval", "1", "--moe-train-capacity-factor", "0.2"]
    flags += ["--moe-min-capacity", "1", *PRECISIONS[precision]]
    saved = whole(layout, *flags)
    of_load = ["--ckpt-fully-parallel-load"] if layout.ep > 1 else []  # ranks with the same experts share them
    save, output = killed_and_resumed(launcher, layout, [*flags, *of_load])
    assert losses_of_ranks(save, layout, cycle=1) == from_iteration(losses_of_ranks(saved, layout), 4)
    assert_same_checkpoint(saved / "global_step5", save / "global_step5")
    printed = [float(loss) for loss in re.findall(r"moe loss: (\S+)", output)]
    assert len(printed) == 2 and all(0.19 < loss < 0.4 for loss in printed)  # 0.1 of each of two layers at the least
    if layout.ep > 1:
        first = [next(iter(records(save / "restart_trace", rank=rank))) for rank in range(layout.world_size)]
        assert [record["ep"] for record in first] == [rank % layout.ep for rank in range(layout.world_size)]
        assert all(record["layout"] == layout.as_dict() for record in first)


@pytest.mark.parametrize(
    "style", [pytest.param(LLAMA, marks=pytest.mark.nightly(minutes=1)), CLASSIC], ids=["llama", "classic"]
)
def test_ranks_that_share_sequences_go_on_after_sigkill(launcher: Launcher, whole: Whole, style: list[str]) -> None:
    """Each draws dropout masks of its own for its part of the sequence and of the heads, and gets its state back.

    Samples count once, however many ranks have a part of them.
    """
    layout = Layout(tp=1, pp=1, dp=2) if style is LLAMA else STAGES_IN_PARTS
    flags = [*style, *PRECISIONS["bf16" if style is LLAMA else "fp16"], "--ds-sequence-parallel-size", "2"]
    saved = whole(layout, *flags)
    save, output = killed_and_resumed(launcher, layout, flags)
    assert losses_of_ranks(save, layout, cycle=1) == from_iteration(losses_of_ranks(saved, layout), 4)
    assert_same_checkpoint(saved / "global_step5", save / "global_step5")
    prefix = "bf16_" if style is LLAMA else ""
    shards = [f"{prefix}zero_pp_rank_{dp}_mp_rank_00_optim_states.pt" for dp in (0, 1)]
    states = [load_file(save / "global_step3" / name)["rng_state"] for name in shards]
    assert not torch.equal(states[0]["torch_rng_state"], states[1]["torch_rng_state"])
    trackers = [state["rng_tracker_states"]["model-parallel-rng"] for state in states]
    assert not torch.equal(trackers[0], trackers[1])
    assert "global batch size:     4" in output
    common = load_file(save / "global_step5" / "mp_rank_00_model_states.pt")
    assert (common["global_samples"], common["args"].consumed_train_samples) == (20, 20)
    assert (common["args"].data_parallel_size, common["dp_world_size"]) == (1, 2)
    first = [next(iter(records(save / "restart_trace", rank=rank))) for rank in range(layout.world_size)]
    assert [(record["dp"], record["cp"]) for record in first] == [(0, 0), (0, 1)] * layout.pp
    assert first[0]["layout"] == {"tp": 1, "pp": layout.pp, "dp": 1, "cp": 2}


def test_momentum_of_sgd(launcher: Launcher, whole: Whole) -> None:
    resumed = launcher.directory / "resumed"
    flags = [*LLAMA, "--optimizer", "sgd"]
    saved = whole(TENSOR_PARALLEL, *flags)
    launcher.train(TENSOR_PARALLEL, *flags, *FIVE, *buffered_saving(resumed, 3), "--load", saved, *RESUME)
    expected = from_iteration(losses_of_ranks(saved, TENSOR_PARALLEL), 4)
    assert losses_of_ranks(resumed, TENSOR_PARALLEL) == expected
    assert "optimizer/0/momentum_buffer" in hashes(saved / "global_step3", TENSOR_PARALLEL)[0]
    assert_same_checkpoint(saved / "global_step5", resumed / "global_step5")


def test_ranks_with_random_streams_of_their_own(launcher: Launcher, whole: Whole) -> None:
    """With --data-parallel-random-init replicas differ in dropout too, and each gets its own state back."""
    layout = Layout(tp=1, pp=1, dp=2)
    resumed = launcher.directory / "resumed"
    flags = [*LLAMA, "--data-parallel-random-init"]
    saved = whole(layout, *flags)
    launcher.train(layout, *flags, *FIVE, *buffered_saving(resumed, 3), "--load", saved, *RESUME)
    shards = [f"zero_pp_rank_{dp}_mp_rank_00_optim_states.pt" for dp in (0, 1)]
    states = [load_file(saved / "global_step3" / name)["rng_state"] for name in shards]
    assert not torch.equal(states[0]["torch_rng_state"], states[1]["torch_rng_state"])
    assert losses_of_ranks(resumed, layout) == from_iteration(losses_of_ranks(saved, layout), 4)
    assert_same_checkpoint(saved / "global_step5", resumed / "global_step5")


@pytest.mark.parametrize("style", [LLAMA, CLASSIC], ids=["llama", "classic"])
def test_dropout_streams_of_tensor_parallel_ranks(whole: Whole, style: list[str]) -> None:
    """Replicated activations are dropped alike on both ranks, the attention of different heads is not.

    So what both ranks hold of the same weights stays equal.
    """
    save = whole(TENSOR_PARALLEL, *style)
    states = [
        load_file(save / f"global_step{step}" / f"zero_pp_rank_0_mp_rank_{tp:02d}_optim_states.pt")["rng_state"]
        for step in (3, 5)
        for tp in (0, 1)
    ]
    replicated = [sha256(state["torch_rng_state"]) for state in states]
    own = [sha256(state["rng_tracker_states"]["model-parallel-rng"]) for state in states]
    assert replicated[0] == replicated[1] != replicated[2] == replicated[3]
    assert len(set(own)) == 4
    replicated_names = re.compile(r"(.*layernorm\.)?(weight|bias)|.*(dense|4h_to_h)\.bias|position_embeddings\.weight")
    compared = 0
    for path in (save / "global_step5").glob("layer_*-model_00-model_states.pt"):
        one, other = load_file(path), load_file(path.with_name(path.name.replace("model_00", "model_01")))
        for name in filter(replicated_names.fullmatch, one):
            assert torch.equal(one[name], other[name]), f"{path.name}: {name}"
            compared += 1
    assert compared == (5 if style is LLAMA else 15)  # 2 norms a layer and the last; their biases, 2 more, positions


def test_recomputing_activations_repeats_their_dropout(launcher: Launcher, whole: Whole) -> None:
    """The recomputation draws the masks of the forward pass again, and leaves the random streams as they were."""
    without_it = launcher.directory / "without"
    stored = [flag for flag in LLAMA if flag not in RECOMPUTE]
    launcher.train(TENSOR_PARALLEL, *stored, "--bf16", *FIVE, *buffered_saving(without_it, 5))
    with_it = whole(TENSOR_PARALLEL, *LLAMA, "--bf16")
    assert losses_of_ranks(with_it, TENSOR_PARALLEL) == losses_of_ranks(without_it, TENSOR_PARALLEL)
    assert hashes(with_it / "global_step5", TENSOR_PARALLEL) == hashes(without_it / "global_step5", TENSOR_PARALLEL)


@pytest.mark.parametrize("iterations", ["4", "8"])
def test_other_train_iters_keep_the_data_order(launcher: Launcher, whole: Whole, iterations: str) -> None:
    resumed = launcher.directory / "resumed"
    flags = [*LLAMA, "--lr-decay-iters", "8"]
    saved = whole(SINGLE, *flags)
    launcher.train(
        SINGLE, *flags, "--train-iters", iterations, *buffered_saving(resumed, 3), "--load", saved, *RESUME
    )  # fmt: skip
    (expected,), (found,) = losses_of_ranks(saved, SINGLE), losses_of_ranks(resumed, SINGLE)
    assert list(found) == list(range(4, int(iterations) + 1))
    assert {step: loss for step, loss in found.items() if step <= 5}.items() <= expected.items()


def test_last_checkpoint_is_written_once(launcher: Launcher, whole: Whole) -> None:
    save = launcher.directory / "run"
    shutil.copytree(whole(TENSOR_PARALLEL, *LLAMA), save)
    assert [number_of_saves(save, step, rank) for step in (3, 5) for rank in (0, 1)] == [1, 1, 1, 1]
    before = (save / "global_step5").stat()
    # Nothing is left to train, so nothing to save.
    again = launcher.train(TENSOR_PARALLEL, *LLAMA, *FIVE, *buffered_saving(save, 3), "--load", save)
    assert "resumed from iteration 5" in again.log(0)
    assert number_of_saves(save, 5) == 1
    after = (save / "global_step5").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_evaluation_does_not_disturb(launcher: Launcher) -> None:
    plain, whole, resumed = (launcher.directory / name for name in ("plain", "whole", "resumed"))
    flags = [*LLAMA, "--bf16", "--train-iters", "4", "--split", "80,20,0", "--eval-iters", "2"]
    evaluating = [*flags, "--eval-interval", "2"]
    launcher.train(STAGES, *flags, "--eval-interval", "0", *buffered_saving(plain, 3))
    first = launcher.train(STAGES, *evaluating, *buffered_saving(whole, 3))
    second = launcher.train(STAGES, *evaluating, *buffered_saving(resumed, 3), "--load", whole, *RESUME)
    expected = losses_of_ranks(whole, STAGES)
    assert losses_of_ranks(plain, STAGES) == expected
    assert losses_of_ranks(resumed, STAGES) == from_iteration(expected, 4)
    validation = re.findall(r"validation loss at iteration (\d+) \| lm loss value: (\S+)", first.output)
    assert [step for step, _ in validation] == ["2", "4", "4"]
    assert re.findall(r"validation loss at iteration (\d+) \| lm loss value: (\S+)", second.output) == validation[1:]
    assert_same_checkpoint(whole / "global_step4", resumed / "global_step4")


def test_fp16_loss_scale_goes_on(launcher: Launcher) -> None:
    """Overflows lower a scale that starts far too high before the save, and quiet iterations raise it after."""
    whole, resumed = launcher.directory / "whole", launcher.directory / "resumed"
    flags = [
        *LLAMA, "--fp16", "--train-iters", "16", "--initial-loss-scale", str(2**28), "--hysteresis", "2",
        "--loss-scale-window", "3",
    ]  # fmt: skip
    first = launcher.train(STAGES, *flags, *buffered_saving(whole, 8))
    second = launcher.train(STAGES, *flags, *buffered_saving(resumed, 8), "--load", whole, "--load-tag", "global_step8")
    scales = printed_by_iteration(first, "loss scale")
    skipped = printed_by_iteration(first, "number of skipped iterations")
    assert float(scales[8]) < 2**28
    assert "1" in [skipped[step] for step in range(1, 9)]
    assert len({scales[step] for step in range(9, 17)}) > 1
    assert printed_by_iteration(second, "loss scale") == {step: scales[step] for step in range(9, 17)}
    assert losses_of_ranks(resumed, STAGES) == from_iteration(losses_of_ranks(whole, STAGES), 9)
    assert_same_checkpoint(whole / "global_step16", resumed / "global_step16")


def test_no_load_optim(launcher: Launcher, whole: Whole) -> None:
    """Weights, progress and random state are restored; moments and step count of Adam begin anew."""
    resumed = launcher.directory / "resumed"
    flags = [*LLAMA, "--bf16"]
    saved = whole(STAGES, *flags)
    launcher.train(
        STAGES, *flags, *FIVE, *buffered_saving(resumed, 3)[:-1], "--load", saved, *RESUME, "--no-load-optim"
    )  # fmt: skip
    expected, found = losses_of_ranks(saved, STAGES)[0], losses_of_ranks(resumed, STAGES)[0]
    assert list(found) == [4, 5]
    assert found[4] == expected[4]
    assert found[5] != expected[5]
    assert (adam_steps(saved / "global_step5"), adam_steps(resumed / "global_step5")) == (5.0, 2.0)


def adam_steps(checkpoint: Path) -> float:
    """How many steps the optimizer of rank 0 has counted."""
    shard = load_file(checkpoint / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return float(shard["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"])


def test_no_load_rng(launcher: Launcher, whole: Whole) -> None:
    """The same weights under other dropout masks: those that a fresh start draws."""
    flags = [*LLAMA, "--bf16"]
    saved = whole(STAGES, *flags)
    found = []
    for name in ("one", "two"):
        save = launcher.directory / name
        launcher.train(STAGES, *flags, *FIVE, *buffered_saving(save, 3), "--load", saved, *RESUME, "--no-load-rng")
        found.append(losses_of_ranks(save, STAGES)[0])
    expected = losses_of_ranks(saved, STAGES)[0]
    assert list(found[0]) == [4, 5]
    assert found[0] == found[1]
    assert all(found[0][step] != expected[step] for step in (4, 5))


def test_finetune_takes_the_weights_alone(launcher: Launcher, whole: Whole) -> None:
    tuned = launcher.directory / "tuned"
    saved = whole(STAGES, *LLAMA, "--bf16")
    # With a learning rate that changes no bit of a bf16 weight, what is saved is what was loaded.
    slow = ["--lr", "1e-12", "--min-lr", "0", "--lr-warmup-iters", "0", "--train-iters", "2"]
    launcher.train(STAGES, *LLAMA, "--bf16", *slow, *buffered_saving(tuned, 2)[:-1], "--load", saved, "--finetune")
    assert list(losses_of_ranks(tuned, STAGES)[0]) == [1, 2]
    for path in (saved / "global_step5").glob("layer_*.pt"):
        before, after = load_file(path), load_file(tuned / "global_step2" / path.name)
        assert all(torch.equal(before[name], after[name]) for name in before)
    state = load_file(tuned / "global_step2" / "mp_rank_00_model_states.pt")
    assert (state["iteration"], state["global_steps"], state["args"].consumed_train_samples) == (2, 2, 8)
    assert losses_of_ranks(tuned, STAGES)[0][1] < losses_of_ranks(saved, STAGES)[0][1]
