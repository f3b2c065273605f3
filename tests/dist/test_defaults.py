"""The default of every flag is one with which a real training of this suite runs.

Fixtures name small sizes, no evaluation and no data workers, so that many tests are quick; a default that all of them
override is one that only users run. These trainings name what a training cannot do without (REQUIRED), and to switch on
what another flag is about (NEEDED); all else is as a user has it who gives no flag. A new flag is among them by itself;
one with a default that means nothing without another flag belongs in NEEDED.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.config.arguments import GROUPS
from megatron.config.flags import flag_name, spec_of
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from megatron.parallel.topology import Layout
from tests.dist.harness import ROOT, Zygote
from tests.dist.test_launch import environment
from tests.dist.tiny_runs import SINGLE, Launcher, load_file

REQUIRED = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --lr 1e-3"
# A value that means something only with other flags -> these.
NEEDED = {
    **dict.fromkeys(("rotary_percent", "rope_theta"), "--use-rotary-position-embeddings"),
    **dict.fromkeys(
        ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), "--fp16"
    ),
    "sgd_momentum": "--optimizer sgd",
    **dict.fromkeys(("checkpoint_num_layers", "recompute_num_layers"), "--checkpoint-activations"),
    **dict.fromkeys(
        (
            "tensorboard_log_interval",
            "tensorboard_queue_size",
            "log_learning_rate_to_tensorboard",
            "log_loss_scale_to_tensorboard",
        ),
        "--tensorboard-dir",
    ),
    "sequence_parallel": "--tensor-model-parallel-size",
    **dict.fromkeys(
        ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler", "verify_restored_state"), "--load"
    ),
    **dict.fromkeys(("profile_steps", "profile_ranks"), "--profile"),
    **dict.fromkeys(
        (
            "persist_interval",
            "replicas",
            "failure_domain",
            "replica_compression",
            "replication_traffic",
            "peer_timeout",
            "comm_profile_steps",
            "span_threshold",
            "span_alpha",
            "max_blocks_in_span",
            "snapshot_buffer_size",
        ),
        "--checkpoint-engine memory",
    ),
    **dict.fromkeys(
        ("host_cache_size", "io_block_size", "direct_io", "checkpoint_compression"), "--checkpoint-engine lazy"
    ),
    "exit_signal": "--exit-signal-handler",
}
# Object storage needs a server: tests/dist/test_object_storage.py gives neither flag in most of its trainings.
ELSEWHERE = ("storage_cache", "storage_deadline")

SAVE = "--save {save} --save-interval 50"
SHORT = f"--train-iters 3 --eval-iters 0 {SAVE}"  # for what the first one does not show
TRAININGS = {
    "plain": f"--train-iters 101 {SAVE} --exit-signal-handler --export-hf-interval 100",
    "fp16": f"{SHORT} --fp16 --use-rotary-position-embeddings --optimizer sgd --checkpoint-activations "
    "--deepspeed-activation-checkpointing --tensorboard-dir {save}/tensorboard --profile pt "
    "--checkpoint-engine lazy",
    "memory": f"{SHORT} --checkpoint-engine memory --keep-last 1 --checkpoint-activations "
    "--deepspeed-activation-checkpointing",
}
# What goes on from the checkpoint of one of these.
RESUMED = {
    "plain": "--load {save} --train-iters 102 --lr-decay-iters 101 --eval-iters 0",
    "fp16": "--tensor-model-parallel-size 2 --partition-activations "
    "--load {save} --prefetch-on-start --train-iters 4 --lr-decay-iters 3",
}

FIELDS = {field.name: field for cls in GROUPS.values() for field in dataclasses.fields(cls)}
SPECS = {name: spec for name, field in FIELDS.items() if (spec := spec_of(field)) is not None}


def given(words: str) -> set[str]:
    """The fields whose flags are among `words`."""
    return {name for name, spec in SPECS.items() if set(spec.names) & set(words.split())}


def all_trainings() -> list[str]:
    return [*TRAININGS.values(), *(f"{TRAININGS[name]} {resumed}" for name, resumed in RESUMED.items())]


def test_every_default_is_in_use_somewhere_here(corpus: list[str]) -> None:
    assert not NEEDED.keys() - SPECS.keys(), "flags that there are none of any more"
    required = given(f"{REQUIRED} --train-iters 1 {' '.join(corpus)} {SAVE}")
    for name, spec in SPECS.items():
        default = FIELDS[name].default
        if name in required or name in ELSEWHERE:
            assert name in ELSEWHERE or default in (dataclasses.MISSING, None, ()), f"{name}: its default is not run"
            continue
        needed = NEEDED.get(name, "" if spec.needs is None else flag_name(spec.needs))
        runs = [
            words for words in all_trainings() if name not in given(words) and set(needed.split()) <= set(words.split())
        ]
        assert runs, (
            f"{spec.names[0]}: no training here runs with its default ({default}); needed: {needed or 'nothing'}"
        )


@pytest.fixture(scope="module")
def corpus(dataset: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of the fixture's dataset, which has too few documents for the default --split, several times over.

    Without what the fixture sets for the sake of speed.
    """
    named = dict(zip(dataset[::2], dataset[1::2], strict=True))
    prefix = tmp_path_factory.mktemp("corpus") / "corpus"
    documents = MMapIndexedDataset(named["--data-path"])
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", documents.dtype)
    for document in 4 * [*map(documents.get, range(len(documents)))]:
        builder.add_doc(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    named["--data-path"] = str(prefix)
    return [word for flag in ("--data-path", "--tokenizer-type", "--tokenizer-model") for word in (flag, named[flag])]


def defaults_of(checkpoint: Path, words: str) -> dict[str, tuple[Any, Any]]:
    """Setting -> (value that the training ran with, default), of those that were not given and are not derived."""
    args = load_file(checkpoint / "mp_rank_00_model_states.pt")["args"]
    found = {}
    for name in SPECS:
        default = FIELDS[name].default
        if name not in given(words) and default not in (None, dataclasses.MISSING, ()):
            found[name] = getattr(args, name), list(default) if isinstance(default, tuple) else default
    return found


@pytest.mark.parametrize("name", TRAININGS)
def test_trainings_with_defaults(zygote: Zygote, corpus: list[str], tmp_path: Path, name: str) -> None:
    """Trained, saved and resumed; the first one is evaluated and logged, and its checkpoint tells its settings."""
    save = tmp_path / "save"
    launcher = Launcher(zygote, corpus, tmp_path)
    words = f"{REQUIRED} {TRAININGS[name]}".format(save=save)
    run = launcher.train(SINGLE, *words.split())
    if name == "plain":
        assert "validation loss" in run.output and "iteration      100/" in run.output
        for setting, (ran_with, default) in defaults_of(save / "global_step101", words).items():
            # In fp32 gradients are accumulated so.
            expected = True if setting == "accumulate_allreduce_grads_in_fp32" else default
            assert ran_with == expected, f"{setting}: {ran_with}, and the default is {default}"
    if name in RESUMED:
        resumed = f"{words} {RESUMED[name]}".format(save=save).split()
        layout = Layout(tp=2, pp=1, dp=1) if "--tensor-model-parallel-size" in resumed else SINGLE
        assert "resumed from iteration" in launcher.train(layout, *resumed).output


def test_a_launch_without_a_flag_of_the_launcher(corpus: list[str], tmp_path: Path) -> None:
    """One rank, no restarts, a free port: all that restart-launch does by default."""
    words = f"{REQUIRED} --train-iters 2 --eval-iters 0 --save {tmp_path}/save --save-interval 2".split()
    command = [sys.executable, str(ROOT / "megatron" / "launch"), str(ROOT / "pretrain_gpt.py"), *corpus]
    ended = subprocess.run([*command, *words], env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert (tmp_path / "save" / "global_step2").is_dir()
