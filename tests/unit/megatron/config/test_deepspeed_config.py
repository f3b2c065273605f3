"""The DeepSpeed dict: what the flags make of it, and how a --deepspeed_config file is merged."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.config import Config, ConfigError
from megatron.config.arguments import config_from_args, parse_args
from megatron.config.deepspeed_config import build_deepspeed_config
from megatron.config.deepspeed_file import load_deepspeed_file

BASE = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 10 --lr 1e-3
--data-path /data/text --tokenizer-type NullTokenizer --vocab-size 500
"""
BATCH = "--micro-batch-size 2 --global-batch-size 8 "
TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
# What an upstream run on TP2 PP2 DP2 was configured with.
UPSTREAM_FILE = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 100,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "data_types": {"grad_accum_dtype": "fp32"},
}


def configure(extra: str, world_size: int = 1) -> Config:
    place = {"RANK": "0", "WORLD_SIZE": str(world_size)}
    return config_from_args(parse_args(shlex.split(BASE + extra), place), place)


def with_file(tmp_path: Path, content: Any, extra: str = BATCH, world_size: int = 1) -> Config:
    file = tmp_path / "ds_config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return configure(f"{extra} --deepspeed_config {file}", world_size)


@pytest.mark.parametrize(("flags", "value"), [("--sequence-parallel", True), ("", False)])
def test_stages_send_shares_unless_sequences_are_split(tmp_path: Path, flags: str, value: bool) -> None:
    keys = ("pipe_partitioned", "grad_partitioned")
    for key in keys:
        with pytest.raises(
            ConfigError, match=rf"pipeline\.{key} is {value}, but .*--sequence-parallel makes it {not value}"
        ):
            with_file(tmp_path, {"pipeline": {key: value}}, BATCH + TP2_PP2 + flags, world_size=8)
    agreeing = with_file(tmp_path, {"pipeline": dict.fromkeys(keys, not value)}, BATCH + TP2_PP2 + flags, world_size=8)
    assert build_deepspeed_config(agreeing)["pipeline"] == dict.fromkeys(keys, not value)


def test_the_flops_profiler_is_refused_for_compiled_layers(tmp_path: Path) -> None:
    content = {"flops_profiler": {"enabled": True}}
    build_deepspeed_config(with_file(tmp_path, content))
    with pytest.raises(ConfigError, match=r"flops_profiler\.enabled is True.*drop it, or --torch-compile"):
        with_file(tmp_path, content, BATCH + "--torch-compile --hidden-dropout 0 --attention-dropout 0")


def test_golden_bf16() -> None:
    assert build_deepspeed_config(configure(BATCH + TP2_PP2 + "--bf16", world_size=8)) == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 2147483647,
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "gradient_clipping": 1.0,
        "data_types": {"grad_accum_dtype": "fp32"},
        "checkpoint": {"tag_validation": "Fail"},
    }


def test_golden_fp16() -> None:
    config = configure(BATCH + "--fp16 --hysteresis 3 --loss-scale-window 500 --clip-grad 0.5")
    assert build_deepspeed_config(config) == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "steps_per_print": 2147483647,
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": 1},
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 500,
            "hysteresis": 3,
            "min_loss_scale": 1,
        },
        "gradient_clipping": 0.5,
        "data_types": {"grad_accum_dtype": "fp16"},
        "checkpoint": {"tag_validation": "Fail"},
    }


def test_golden_fp32() -> None:
    built = build_deepspeed_config(configure(BATCH))
    assert "bf16" not in built and "fp16" not in built
    assert built["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("--fp16 --accumulate-allreduce-grads-in-fp32", "fp32"), ("--fp16", "fp16"), ("--bf16", "fp32")],
)
def test_gradient_accumulation_dtype(flags: str, dtype: str) -> None:
    assert build_deepspeed_config(configure(BATCH + flags))["data_types"] == {"grad_accum_dtype": dtype}


def test_static_loss_scale() -> None:
    built = build_deepspeed_config(configure(BATCH + "--fp16 --loss-scale 128 --initial-loss-scale 1024"))
    assert (built["fp16"]["loss_scale"], built["fp16"]["initial_scale_power"]) == (128.0, 10)


def test_file_and_flags_agree_with_flags_alone(tmp_path: Path) -> None:
    flags = BATCH + TP2_PP2 + "--bf16 --clip-grad 1 --zero-stage 1"
    alone = build_deepspeed_config(configure(flags, world_size=8))
    merged = build_deepspeed_config(with_file(tmp_path, UPSTREAM_FILE, flags, world_size=8))
    assert merged.pop("steps_per_print") == 100
    alone.pop("steps_per_print")
    assert merged == alone


def test_file_fills_flags_that_were_not_given(tmp_path: Path) -> None:
    content = UPSTREAM_FILE | {"gradient_clipping": 0.25, "data_types": {}}
    config = with_file(tmp_path, content, extra="")
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (2, 8)
    assert (config.model.params_dtype, config.optimizer.clip_grad, config.parallel.zero_stage) == ("bf16", 0.25, 1)


def test_file_fills_loss_scaling(tmp_path: Path) -> None:
    fp16 = {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 4, "min_loss_scale": 2}
    config = with_file(tmp_path, {"fp16": fp16, "data_types": {"grad_accum_dtype": "fp32"}}, BATCH + "--fp16")
    training = config.training
    assert (training.loss_scale, training.initial_loss_scale, training.hysteresis) == (None, 4096.0, 4)
    assert (training.min_loss_scale, training.accumulate_allreduce_grads_in_fp32) == (2, True)
    assert build_deepspeed_config(config)["fp16"]["enabled"] is True


def test_auto_values_are_filled(tmp_path: Path) -> None:
    content = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": "auto"},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "steps_per_print": "auto",
    }
    built = build_deepspeed_config(with_file(tmp_path, content, BATCH + "--bf16"))
    assert built.pop("fp16") == {"enabled": False}
    assert built == build_deepspeed_config(configure(BATCH + "--bf16"))


def test_sections_of_no_flag_pass_through(tmp_path: Path) -> None:
    content = {
        "comms_logger": {"enabled": True, "verbose": True},
        "log_level": "INFO",
        "zero_optimization": {"reduce_bucket_size": 1000},
        "checkpoint": {"tag_validation": "fail"},
        "steps_per_print": 5,
        "wall_clock_breakdown": True,
    }
    built = build_deepspeed_config(with_file(tmp_path, content))
    assert built["comms_logger"] == {"enabled": True, "verbose": True} and built["log_level"] == "info"
    assert built["zero_optimization"] == {"reduce_bucket_size": 1000, "stage": 1}
    assert (built["checkpoint"], built["wall_clock_breakdown"]) == ({"tag_validation": "Fail"}, True)
    built = build_deepspeed_config(with_file(tmp_path, {"bfloat16": {"enabled": True}}))
    assert built["bf16"] == {"enabled": True, "immediate_grad_update": True} and "bfloat16" not in built


@pytest.mark.parametrize("given", [True, False, None])
def test_gradients_are_added_at_once_unless_the_file_says_otherwise(tmp_path: Path, given: bool | None) -> None:
    content = {"bf16": {"enabled": True, "immediate_grad_update": given}}
    built = build_deepspeed_config(with_file(tmp_path, content))
    assert built["bf16"]["immediate_grad_update"] is (given is not False)


CONFLICTS = [
    ({"train_batch_size": 16}, BATCH, "train_batch_size is 16, but --global-batch-size makes it 8"),
    ({"train_micro_batch_size_per_gpu": 1}, BATCH, "is 1, but --micro-batch-size makes it 2"),
    ({"gradient_accumulation_steps": 3}, BATCH, "gradient_accumulation_steps is 3, but --global-batch-size /"),
    ({"zero_optimization": {"stage": 0}}, "--zero-stage 1", "stage is 0, but --zero-stage makes it 1"),
    ({"zero_optimization": {"stage": 1}}, "--zero-stage 2", "stage is 1, but --zero-stage makes it 2"),
    ({"zero_optimization": {"stage": 2}}, "--zero-stage 0", "stage is 2, but --zero-stage makes it 0"),
    ({"gradient_clipping": 0.5}, "--clip-grad 1.0", "gradient_clipping is 0.5, but --clip-grad makes it 1.0"),
    ({"bf16": {"enabled": False}}, "--bf16", "bf16.enabled is False, but --bf16 makes it True"),
    ({"fp16": {"enabled": True}}, "--bf16", "fp16.enabled is True, but the run's bf16 makes it False"),
    ({"fp16": {"hysteresis": 4}}, "--fp16 --hysteresis 3", "fp16.hysteresis is 4, but --hysteresis makes it 3"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "--bf16", "is 'bf16', but --bf16 makes it 'fp32'"),
]


@pytest.mark.parametrize(("content", "flags", "message"), CONFLICTS, ids=[row[2] for row in CONFLICTS])
def test_conflict_names_file_and_both_values(tmp_path: Path, content: dict[str, Any], flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_file(tmp_path, content, BATCH + flags)
    assert message in str(caught.value)
    assert str(tmp_path / "ds_config.json") in str(caught.value)


BAD_FILES = [
    ("{", "not JSON"),
    ("[]", "holds a JSON list; it must be an object"),
    ('{"bf16": true}', "bf16 is True; it must be an object"),
    ('{"bf16": {"enabled": "yes"}}', "bf16.enabled is 'yes'; use true or false"),
    ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "bf16 and fp16 are both enabled"),
    ('{"train_batch_size": "8"}', "train_batch_size is '8'; it must be a number"),
    ('{"train_batch_size": 8.5}', "train_batch_size is 8.5; it must be a whole number"),
    ('{"zero_optimization": {"stage": 4}}', "--zero-stage 4: is no stage of ZeRO; use 1, or 3"),
    ('{"zero_optimization": {"reduce_bucket_size": "auto"}}', "zero_optimization.reduce_bucket_size is auto"),
    (
        '{"checkpoint": {"writer": {"type": "mock"}}}',
        "checkpoint.writer.type is 'mock'; it must be one of fast, python",
    ),
    ('{"nebula": {"enabled": true}}', "nebula is not supported; drop it and use --checkpoint-engine NAME"),
    ('{"checkpoint": {"load_universal": true}}', "checkpoint.load_universal is not supported"),
    ('{"optimizer": {"type": "Adam"}}', "optimizer is not supported; drop it and use --optimizer"),
    ('{"scheduler": {"type": "WarmupLR"}}', "scheduler is not supported; drop it and use --lr-decay-style"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES, ids=[row[0] for row in BAD_FILES])
def test_bad_file_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_file(tmp_path, content)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["absent.json", "."])
def test_unreadable_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        load_deepspeed_file(path)
    assert f"--deepspeed_config {path}: " in str(caught.value)


@pytest.mark.slow
def test_deepspeed_takes_what_is_built() -> None:
    built = [build_deepspeed_config(configure(BATCH + flags)) for flags in ("--bf16", "--fp16", "")]
    code = (
        "import json, sys\n"
        "from deepspeed.runtime.config import DeepSpeedConfig\n"
        "for content in json.load(sys.stdin):\n"
        "    config = DeepSpeedConfig(content)\n"
        "    print('result', config.gradient_accumulation_steps, config.zero_optimization_stage,\n"
        "          config.gradient_clipping, config.grad_accum_dtype)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(built), capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("result")]
    assert lines == ["result 4 1 1.0 fp32", "result 4 1 1.0 fp16", "result 4 1 1.0 fp32"]


def test_datastates_section_is_the_host_cache_size(tmp_path: Path) -> None:
    """DeepSpeed does not see it: it would start the library a second time."""
    engine = BATCH + "--checkpoint-engine datastates "
    content = {"datastates_ckpt": {"host_cache_size": 2.5}}
    for flags in (engine, engine + "--host-cache-size 2.5"):
        config = with_file(tmp_path, content, flags)
        assert config.checkpoint.host_cache_size == 2.5
        assert build_deepspeed_config(config) == build_deepspeed_config(configure(engine))


@pytest.mark.parametrize("section", [False, None])
def test_datastates_section_that_is_off(tmp_path: Path, section: object) -> None:
    config = with_file(tmp_path, {"datastates_ckpt": section})
    assert build_deepspeed_config(config) == build_deepspeed_config(configure(BATCH))


@pytest.mark.parametrize(
    ("section", "flags", "message"),
    [
        (
            {"host_cache_size": 4}, "--checkpoint-engine datastates --host-cache-size 8",
            "datastates_ckpt.host_cache_size is 4, but --host-cache-size makes it 8.0; make them agree or drop one",
        ),
        (
            {"host_cache_size": 4}, "--checkpoint-engine lazy",
            "datastates_ckpt names engine datastates, but --checkpoint-engine is lazy; give --checkpoint-engine datast",
        ),
        ({"parser_threads": 8}, "--checkpoint-engine datastates", "datastates_ckpt.parser_threads is 8; only 1 is"),
        (4, "--checkpoint-engine datastates", "datastates_ckpt is 4; it must be an object"),
        ({"host_cache_size": "8"}, "--checkpoint-engine datastates", "host_cache_size is '8'; it must be a number"),
    ],
)  # fmt: skip
def test_datastates_section_that_cannot_be(tmp_path: Path, section: object, flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        with_file(tmp_path, {"datastates_ckpt": section}, BATCH + flags)
    assert str(caught.value).startswith(f"--deepspeed_config {tmp_path / 'ds_config.json'}: datastates_ckpt")
