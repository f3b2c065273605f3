"""Upstream's flags that scripts give: those that set what another flag sets here, and those that change nothing."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from megatron.config import ConfigError
from megatron.config.training import samples_of_run
from megatron.config.unsupported_flags import NO_EFFECT
from tests.golden.upstream_flags import NAMES, answers
from tests.unit.megatron.config.test_arguments import SMALL, configure, small

ROOT = Path(__file__).resolve().parents[4]

REFUSALS = [
    ("--no-pipeline-parallel --pipeline-model-parallel-size 2", 2, "--no-pipeline-parallel contradicts"),
    ("--num-experts 8 --moe-expert-parallel-size 4", 2, "--moe-expert-parallel-size 4: does not divide the 2 replicas"),
    ("--num-experts 6 --moe-expert-parallel-size 4", 4, "-size 4: does not divide the 6 experts of a layer, nor they"),
    ("--num-experts 8 --moe-expert-parallel-size 2 --load x --universal-checkpoint", 2, "is loaded with 1; drop"),
    ("--ds-sequence-parallel-size 2", 3, "--ds-sequence-parallel-size 2: does not divide the 3 ranks that hold the"),
    ("--ds-sequence-parallel-size 3", 3, "--num-attention-heads 4: not divisible by --ds-sequence-parallel-size 3"),
    ("--ds-sequence-parallel-size 4 --num-key-value-heads 2", 4, "--num-key-value-heads 2: not divisible by --ds-seq"),
    ("--ds-sequence-parallel-size 4 --tensor-model-parallel-size 2", 8,
     "--num-attention-heads 4: not divisible by --tensor-model-parallel-size 2 x --ds-sequence-parallel-size 4"),
    ("--ds-sequence-parallel-size 2 --seq-length 33", 2, "--seq-length 33: not divisible by --ds-sequence-paralle"),
    ("--ds-sequence-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --seq-length 34", 4,
     "--seq-length 34: not divisible by --tensor-model-parallel-size 2 x --ds-sequence-parallel-size 2, over which"),
    ("--ds-sequence-parallel-size 2 --num-experts 4", 2, "--ds-sequence-parallel-size 2: splits the sequences whose"),
    ("--ds-sequence-parallel-size 2 --global-batch-size 3 --micro-batch-size 2", 4, "x data-parallel size 2 = 4; use"),
    ("--ds-sequence-parallel-fpdt", 1, "--ds-sequence-parallel-fpdt is not supported: a rank attends"),
    ("--sequence-parallel --tensor-model-parallel-size 2 --seq-length 33", 2, "--seq-length 33: not divisible by"),
    ("--sequence-parallel --tensor-model-parallel-size 2 --checkpoint-activations --deepspeed-activation-checkpointing "
     "--partition-activations", 2, "--sequence-parallel leaves none: drop --partition-activations"),
    ("--dataloader-type cyclic", 1, "--dataloader-type cyclic is not supported: data is read once"),
    ("--DDP-impl fsdp", 1, "--DDP-impl fsdp is not supported"),
    ("--transformer-impl transformer_engine", 1, "--transformer-impl transformer_engine is not supported: fp8"),
    ("--timing-log-level 3", 1, "--timing-log-level 3 is not supported: use 0, 1 or 2"),
    ("--train-samples 30", 1, "--train-iters 10: --train-samples 30 is given; drop one of them"),
    ("--lr-decay-samples 20", 1, "--lr-decay-samples 20: needs --train-samples instead of --train-iters"),
    ("--lr-warmup-samples 2", 1, "--lr-warmup-samples 2: needs --train-samples instead of --train-iters"),
    ("--rampup-batch-size 2 2 8", 1, "--rampup-batch-size 2 2 8: needs --train-samples instead of"),
    ("--lr-warmup-tokens 5", 1, "--lr-warmup-tokens 5: needs --lr-decay-tokens beside it"),
    ("--lr-warmup-tokens 5 --lr-decay-tokens 5", 1, "must be less than --lr-decay-tokens 5"),
    ("--lr-warmup-tokens 5 --lr-decay-tokens 9 --lr-warmup-iters 1", 1, "--lr-warmup-tokens sets the warm-up, too"),
    ("--recompute-method block", 1, "--recompute-method block: choose one of uniform"),
    ("--recompute-granularity selective --recompute-method uniform", 1, "is for --recompute-granularity full"),
    ("--recompute-activations --checkpoint-activations", 1, "recomputes whole layers, and --recompute-granularity sel"),
    ("--recompute-num-layers 2", 1, "--recompute-num-layers 2: add --recompute-granularity full"),
    ("--reset-iteration", 1, "--reset-iteration does nothing without --load DIR"),
    ("--universal-checkpoint", 1, "--universal-checkpoint does nothing without --load DIR"),
    ("--train-doc-idx-path d --train-sample-idx-path s", 1, "needs --train-shuffle-idx-path beside it"),
    ("--optimizer sgd --log-optimizer-states-to-tensorboard --tensorboard-dir /t", 1, "writes Adam's moments; drop"),
    ("--log-optimizer-states-to-tensorboard", 1, "does nothing without --tensorboard-dir DIR"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "world_size", "message"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_refusal_names_flag_value_and_fix(extra: str, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(extra, world_size)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_flag_without_effect_is_noted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    inert = NO_EFFECT[name]
    given = f"{name} {inert.accepted[0] if inert.accepted else '7'}" if inert.nargs else name
    with caplog.at_level(logging.INFO):
        small(given).log_notes(logging.getLogger("test"))
    assert f"{given}: no effect, {inert.why}" in caplog.messages


@pytest.mark.parametrize(
    ("extra", "level", "text"),
    [
        ("--loss-scale 128 --bf16", logging.WARNING, "--loss-scale 128.0: no effect, loss scaling is for --fp16"),
        ("--save-interval 5", logging.WARNING, "--save-interval: no effect, no checkpoint is saved without"),
        ("--zero-stage 0", logging.INFO, "--zero-stage 0: ZeRO-1 is used, which computes the same"),
        ("--zero-stage 2", logging.WARNING, "--zero-stage 2: ZeRO-1 is used, which computes the same but"),
        ("--no-pipeline-parallel", logging.INFO, "--no-pipeline-parallel: there is one stage"),
        ("--sequence-parallel", logging.INFO, "--sequence-parallel: no effect, --tensor-model-parallel-size is 1"),
    ],
)
def test_what_is_taken_otherwise_is_said(extra: str, level: int, text: str) -> None:
    config = small(extra)
    assert [note.level for note in config.notes if note.text.startswith(text)] == [level]
    assert config.parallel.zero_stage == 1


def test_recompute_flags_are_checkpoint_flags() -> None:
    for extra in (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "--activations-checkpoint-method uniform --activations-checkpoint-num-layers 2",
        "--checkpoint-activations --checkpoint-num-layers 2",
    ):
        model = small(extra).model
        assert (model.checkpoint_activations, model.checkpoint_num_layers) == (True, 2)
    for flags in ("--recompute-granularity selective", "--recompute-activations"):
        model = small(flags).model
        assert model.recomputes_selectively and not model.checkpoint_activations
    assert not small("--checkpoint-activations").model.recomputes_selectively


def test_length_and_schedule_in_samples() -> None:
    line = SMALL.replace("--train-iters 10", "--train-samples 41 --lr-warmup-samples 6 --global-batch-size 4")
    config = configure(line)
    assert (config.training.train_iters, config.training.train_samples) == (10, 41)
    assert (config.optimizer.lr_decay_samples, config.optimizer.lr_decay_iters) == (41, None)
    ramped = configure(line + "--rampup-batch-size 2 2 7").training  # 2 2 2 2, then 4
    assert [ramped.batch_sizes.at(n) for n in (0, 2, 4, 6, 8)] == [2, 2, 2, 2, 4]
    assert ramped.train_iters == 4 + (41 - 8) // 4
    assert [ramped.batch_sizes.consumed(n) for n in (0, 3, 4, 6)] == [0, 6, 8, 16]
    for extra, message in (
        ("--lr-warmup-iters 1", "--lr-warmup-iters 1: --train-samples 41 is given; use --lr-warmup-samples"),
        ("--lr-warmup-samples 41", "--lr-warmup-samples 41: must be less than the 41 samples of the decay"),
        ("--rampup-batch-size 2 2", "--rampup-batch-size 2 2: give three numbers"),
        ("--rampup-batch-size 1 1 7", "must be multiples of --micro-batch-size x data-parallel size = 2"),
        ("--rampup-batch-size 2 4 7", "steps of 4 do not lead from 2 to --global-batch-size 4"),
        ("--train-samples 3", "--train-samples 3: is less than the first batch"),
    ):
        with pytest.raises(ConfigError) as caught:
            configure(line + extra)
        assert message in str(caught.value)


def test_samples_of_the_run_decide_the_order_of_the_data() -> None:
    """Upstream indexes --train-samples, more than the whole batches that are read."""
    assert samples_of_run(10, 5, 2, 4) == (40, 24, 8)
    assert samples_of_run(10, 5, 2, 4, 41) == (41, 24, 8)


def test_the_page_counts_upstreams_flags_as_the_parser_has_them() -> None:
    text = " ".join((ROOT / "docs" / "upstream_flags.md").read_text().split())
    (counts,) = re.findall(r"(\d+) have an effect.*?, (\d+) are accepted.*?, and (\d+) are refused", text)
    assert tuple(map(int, counts)) == answers(NAMES.read_text().split()).counts()


def test_each_flag_of_upstream_is_printed_once_with_its_answer() -> None:
    upstream = NAMES.read_text().split()
    found = answers(upstream)
    lines = [line.partition(": ") for line in str(found).splitlines() if line.startswith("  ")]
    assert sorted([*found.effect, *(name for names, _, _ in lines for name in names.split())]) == sorted(set(upstream))
    printed = {name: answer for names, _, answer in lines for name in names.split()}
    assert printed["--model-parallel-size"] == "use --tensor-model-parallel-size"
    assert printed["--dataloader-type"] == "samples are read once, in order; accepted: single"
