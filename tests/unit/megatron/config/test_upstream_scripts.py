"""The command lines of upstream's 55 shell scripts that run pretrain_gpt.py: which are accepted, and why not the rest.

tests/golden/upstream_scripts.json holds them; record_upstream_scripts.py beside it says how they were counted and
recorded. Their DeepSpeed files are another matter: an empty one stands for each.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megatron.config import Config, ConfigError
from megatron.config.arguments import actions_of, build_parser, config_from_args, parse_args
from megatron.config.unsupported_flags import NO_EFFECT, UNSUPPORTED

RUNS: dict[str, list[tuple[int, str]]] = json.loads(
    (Path(__file__).resolve().parents[3] / "golden" / "upstream_scripts.json").read_text()
)
_DS = "examples_deepspeed/"
_DISTILL = "knowledge distillation is not part of this fork"
REFUSED = {
    "MoE/ds_pretrain_gpt_1.3B_PR-MoE64or128_MoS.sh": _DISTILL,
    "MoE/ds_pretrain_gpt_350M_PR-MoE32or64_MoS.sh": _DISTILL,
    "compression/ds_pretrain_gpt_1.3B_dense_cl_kd.sh": _DISTILL,
    "compression/ds_pretrain_gpt_125M_dense_cl_kd.sh": _DISTILL,
    "compression/ds_pretrain_gpt_125M_dense_kd.sh": _DISTILL,
    "sequence_parallel/ds_pretrain_gpt_6.7B_fpdt_32k.sh": "--ds-sequence-parallel-fpdt is not supported",
    "zero_bubble_pp/zbh1_pretrain_gpt_1.3b.sh": "--enable-zbh1-pipeline is not supported",
}


def configure(script: str, tmp_path: Path) -> list[Config]:
    """The configurations of all launches of `script`. Raises ConfigError."""
    empty = tmp_path / "ds.json"
    empty.write_text("{}")
    found = []
    for ranks, line in RUNS[script]:
        words = shlex.split(line)
        for i, word in enumerate(words):
            if word.startswith("--deepspeed_config="):
                words[i] = f"--deepspeed_config={empty}"
            elif word == "--deepspeed_config":
                words[i + 1] = str(empty)
        env = {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
        found.append(config_from_args(parse_args(words, env), env))
    return found


def test_scripts_are_counted() -> None:
    assert len(RUNS) == 55 and {_DS + name for name in REFUSED} <= set(RUNS)
    assert len(REFUSED) == 7


@pytest.mark.parametrize("script", RUNS)
def test_script_is_accepted_or_refused_for_the_stated_reason(script: str, tmp_path: Path) -> None:
    reason = REFUSED.get(script.removeprefix(_DS))
    if reason is None:
        assert configure(script, tmp_path)
        return
    with pytest.raises(ConfigError) as caught:
        configure(script, tmp_path)
    assert reason in str(caught.value)


def test_every_flag_of_the_scripts_has_an_answer() -> None:
    """Nothing is taken without a word: a flag sets a field, is noted as without effect, or is refused by name."""
    known = set(actions_of(build_parser()))
    used = {word.split("=")[0] for runs in RUNS.values() for _, line in runs for word in shlex.split(line)}
    flags = {word for word in used if word.startswith("--")}
    assert len(flags) > 100
    assert flags <= known | set(UNSUPPORTED)
    assert set(NO_EFFECT) <= known


def test_a_dense_script_of_the_moe_folder_means_what_it_says(tmp_path: Path) -> None:
    """Length and schedules in samples and tokens, and a ramp of the batch size, as upstream counts them."""
    (config,) = configure(_DS + "MoE/ds_pretrain_gpt_1.3B_dense.sh", tmp_path)
    training, optimizer = config.training, config.optimizer
    assert (training.train_tokens, training.train_samples) == (300_000_000_000, 439_453_125)
    assert (optimizer.lr_warmup_tokens, optimizer.lr_decay_tokens) == (375_000_000, 260_000_000_000)
    assert training.rampup_batch_size == (32, 32, 1953125)
    sizes = training.batch_sizes
    assert [sizes.at(n) for n in (0, 130_208, 130_209, 1_953_125, 1_953_126)] == [32, 32, 64, 512, 512]
    assert training.train_iters == upstreams_iterations((32, 32, 1953125), 512, training.train_samples or 0)
    assert config.data.tokenizer_type == "GPT2BPETokenizer"
    texts = [note.text for note in config.notes]
    assert "--num-experts 1: no effect, the model is dense" in texts


def test_a_script_of_long_sequences_means_what_it_says(tmp_path: Path) -> None:
    """Of 8 ranks each 4 share a sequence, and the optimizer is divided over all."""
    (config,) = configure(_DS + "sequence_parallel/ds_pretrain_gpt_1.3B_seq_parallel_32k.sh", tmp_path)
    parallel = config.parallel
    assert (parallel.ds_sequence_parallel_size, parallel.data_parallel_size, parallel.sizes) == (4, 2, (1, 1, 8))
    assert config.training.num_micro_batches == 1


def test_a_pyramid_of_experts_lies_where_upstream_has_it(tmp_path: Path) -> None:
    """Every second of 24 layers; the last two of these have twice as many experts."""
    (config,) = configure(_DS + "MoE/ds_pretrain_gpt_350M_PR-MoE32or64.sh", tmp_path)
    assert config.parallel.layout == {"tp": 1, "pp": 1, "dp": 64, "ep": 64}
    assert config.model.experts_per_layer == [1, 32] * 10 + [1, 64] * 2
    assert config.model.mlp_type == "residual" and config.model.moe_loss_coeff == 0.01
    assert config.model.expert_capacity(2048, 32, training=True) == 64


def upstreams_iterations(ramp: tuple[int, int, int], final: int, train_samples: int) -> int:
    """The number of iterations by upstream's definition of the ramp, written down step by step."""
    start, increment, samples = ramp
    per_step = samples / ((final - start) // increment)
    consumed = count = 0
    while consumed <= samples:
        consumed += start + int(consumed / per_step) * increment
        count += 1
    return count + (train_samples - consumed) // final
