"""--deepspeed_config files as they come: upstream's, the restart studies', and ones that are no configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.config import Config, ConfigError
from megatron.config.deepspeed_config import build_deepspeed_config
from megatron.config.deepspeed_file import load_deepspeed_file
from tests.unit.megatron.config.test_deepspeed_config import BASE, BATCH, configure, with_file

ROOT = Path(__file__).resolve().parents[4]
# The configurations that upstream's examples ship or write, with what its scripts fill in.
_FP16 = {
    "enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
    "initial_scale_power": 11,
}  # fmt: skip
_GPT = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10,
    "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0, "prescale_gradients": True, "fp16": _FP16,
    "wall_clock_breakdown": False,
}  # fmt: skip
_CURRICULUM = {
    "enabled": False, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64,
    "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}  # fmt: skip
_STAGE_3 = {
    "stage": 3, "stage3_max_live_parameters": 3e9, "stage3_max_reuse_distance": 3e9,
    "stage3_param_persistence_threshold": 1e5, "stage3_prefetch_bucket_size": 5e7, "contiguous_gradients": True,
    "overlap_comm": True, "reduce_bucket_size": 90000000, "sub_group_size": 1e9,
    "offload_optimizer": {"device": "cpu", "buffer_count": 4, "pipeline_read": False, "pin_memory": True},
}  # fmt: skip
_BF16_OFF = {"fp16": {**_FP16, "enabled": False}, "bf16": {"enabled": True}}
LOADED = {
    "rebase/ds_config_gpt_TEMPLATE.json": _GPT,
    "MoE/ds_config_gpt_TEMPLATE.json, dense, bf16": {**_GPT, **_BF16_OFF, "curriculum_learning": _CURRICULUM},
    "finetune_hf_llama/ds_config_empty.json": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
                                               "steps_per_print": 100},
    "universal_checkpointing/ds_config.json": {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 1,
        "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
        "wall_clock_breakdown": False,
    },
    "universal_checkpointing/megatron_gpt/run_fp16.sh": {**_GPT, "bf16": {"enabled": False}},
    "deepspeed4science/megatron_long_seq_support/ds_config_gpt_TEMPLATE.json": {
        **_GPT, "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 3,
                                   "detailed": True, "output_file": None},
    },
    "run_deepspeed_example.sh": {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 1,
        "zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "initial_scale_power": 12},
        "wall_clock_breakdown": True,
    },
}  # fmt: skip
REFUSED = {
    "curriculum_learning/ds_config_gpt_slw_TEMPLATE.json": (
        {**_GPT, "curriculum_learning": {**_CURRICULUM, "enabled": True}}, "curriculum_learning is not supported",
    ),
    "curriculum_learning/ds_zero_stage_1_config_baseline.json": (
        {**_GPT, "optimizer": {"type": "Adam", "params": {"lr": 0.00015}}}, "optimizer is not supported",
    ),
    "compression/ds_config_gpt_TEMPLATE_compression.json": (
        {**_GPT, "compression_training": {"weight_quantization": {}}}, "compression_training is not supported",
    ),
    "data_efficiency/gpt/pretrain/ds_config_gpt_1clmetric_TEMPLATE.json": (
        {**_GPT, "dataloader_drop_last": True, "data_efficiency": {"enabled": True}}, "dataloader_drop_last is True",
    ),
    "azure/run-1t.sh, with prescaling": (
        {**_GPT, "zero_optimization": _STAGE_3}, "prescale_gradients is True; DeepSpeedZeroOptimizer_Stage3, which",
    ),
    "azure/run-1t.sh at stage 1": (
        {**_GPT, "zero_optimization": {**_STAGE_3, "stage": 1}}, "overlap_comm is True; DeepSpeedZeroOptimizer, which",
    ),
    "offload_pp/ds_config_gpt_TEMPLATE.json": (
        {**_GPT, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
        "zero_optimization.offload_optimizer.ratio is 0.3; only 1.0 is supported",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADED)
def test_upstreams_files_load(tmp_path: Path, name: str) -> None:
    built = build_deepspeed_config(with_file(tmp_path, LOADED[name], ""))
    assert built["train_batch_size"] == 8 and "curriculum_learning" not in built


def test_stage_3_of_a_file(tmp_path: Path) -> None:
    """Of azure/run-1t.sh, without its section aio: what the file says is what DeepSpeed gets."""
    content = {**_GPT, "prescale_gradients": False, "zero_optimization": _STAGE_3}
    config = with_file(tmp_path, content, "")
    assert config.parallel.zero_stage == 3 and config.optimizer.cpu_optimizer
    built = build_deepspeed_config(config)
    assert built["zero_optimization"]["stage3_max_live_parameters"] == 3_000_000_000
    assert built["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert built["zero_force_ds_cpu_optimizer"] is False
    flags = f"{BATCH}--cpu-optimizer --fp16"
    with pytest.raises(ConfigError, match="offload_optimizer.device is 'none', but --cpu-optimizer makes it 'cpu'"):
        with_file(tmp_path, {"zero_optimization": {"offload_optimizer": {"device": "none"}}}, flags)
    with pytest.raises(ConfigError, match="zero_force_ds_cpu_optimizer is True"):
        with_file(tmp_path, {"zero_force_ds_cpu_optimizer": True}, flags)


@pytest.mark.parametrize("stage", [0, 2])
def test_stages_that_compute_the_same_are_stage_1(tmp_path: Path, stage: int) -> None:
    """As --zero-stage, which the file stands for: upstream's MoE/ds_config_gpt_Zero2_TEMPLATE.json is one of them."""
    config = with_file(tmp_path, {**_GPT, "zero_optimization": {"stage": stage}}, "")
    assert build_deepspeed_config(config)["zero_optimization"]["stage"] == 1
    assert config.parallel.zero_stage_asked == stage
    with pytest.raises(ConfigError, match="--zero-stage makes it 1"):
        with_file(tmp_path, {**_GPT, "zero_optimization": {"stage": stage}}, "--zero-stage 1")


@pytest.mark.parametrize("name", REFUSED)
def test_upstreams_files_that_cannot_be(tmp_path: Path, name: str) -> None:
    content, message = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        with_file(tmp_path, content)
    assert message in str(caught.value) and f"--deepspeed_config {tmp_path}" in str(caught.value)


# The body that restart studies of DeepSpeed's checkpoint engines give every run.
STUDY = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 1,
    "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
    "wall_clock_breakdown": True, "memory_breakdown": False, "flops_profiler": {"enabled": True},
}  # fmt: skip
WRITER = {"type": "FAST", "decoupled": True}
STANZAS: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({}, "torch", {}),
    ({"none_ckpt": True}, "none", {}),
    ({"none_ckpt_config": True}, "none", {}),
    ({"none_ckpt": False, "datastates_ckpt": False}, "torch", {}),
    ({"torchsnapshot_ckpt": {"enabled": True}}, "torchsnapshot", {}),
    ({"torchsnapshot_ckpt": {"enabled": False}}, "torch", {}),
    ({"checkpoint": {"writer": WRITER}}, "fastpersist-decoupled", {"direct_io": "on"}),
    ({"checkpoint": {"writer": {"type": "python"}}}, "fastpersist", {"direct_io": "off"}),
    ({"checkpoint": {"writer": {}}}, "fastpersist", {"direct_io": "auto"}),
    (
        {"checkpoint": {"writer": {"type": "fast", "io_buffer_size": 4194304, "show_statistics": False}}},
        "fastpersist", {"library_options": (("io_buffer_size", 4194304),)},
    ),
    (
        {"checkpoint": {"writer": {}}, "aio": {"block_size": 1048576, "intra_op_parallelism": 2, "queue_depth": 8}},
        "fastpersist", {"io_block_size": 1.0, "io_threads": 2},
    ),
    ({"datastates_ckpt": {"host_cache_size": 16}}, "datastates", {"host_cache_size": 16}),
    (
        {"datastates_ckpt": {"host_cache_size": 4, "engine_type": "simple_engine", "profile_engine": True}},
        "datastates",
        {"host_cache_size": 4, "library_options": (("engine_type", "simple_engine"), ("profile_engine", True))},
    ),
    ({"datastates_ckpt": {"pin_host_cache": True, "parser_threads": 1}}, "datastates", {}),
]  # fmt: skip


@pytest.mark.parametrize(("stanza", "engine", "options"), STANZAS, ids=[json.dumps(row[0]) for row in STANZAS])
def test_the_stanza_names_the_engine(
    tmp_path: Path, stanza: dict[str, Any], engine: str, options: dict[str, Any]
) -> None:
    for flags in ("", f"--checkpoint-engine {engine}"):
        config = with_file(tmp_path, STUDY | stanza, flags)
        assert config.checkpoint.checkpoint_engine == engine
        assert {name: getattr(config.checkpoint, name) for name in options} == options
        plain = with_file(tmp_path, STUDY, "")
        assert build_deepspeed_config(config) == build_deepspeed_config(plain)  # DeepSpeed starts none of its own


@pytest.mark.parametrize(
    ("stanza", "flags", "message"),
    [
        ({"none_ckpt": True}, "--checkpoint-engine torch", "none_ckpt names engine none, but --checkpoint-engine is"),
        ({"datastates_ckpt": {}}, "--checkpoint-engine lazy", "datastates_ckpt names engine datastates, but --checkp"),
        (
            {"none_ckpt": True, "torchsnapshot_ckpt": {"enabled": True}}, "",
            "torchsnapshot_ckpt (engine torchsnapshot) and none_ckpt (engine none) name different checkpoint engines",
        ),
        (
            {"checkpoint": {"writer": WRITER}}, "--checkpoint-engine fastpersist",
            "checkpoint.writer names engine fastpersist-decoupled, but --checkpoint-engine is fastpersist",
        ),
        ({"checkpoint": {"writer": WRITER}}, "--direct-io off", "type is 'fast', that is --direct-io on, but --dir"),
        ({"checkpoint": {"writer": {"type": "mock"}}}, "", "checkpoint.writer.type is 'mock'; it must be one of fast,"),
        ({"checkpoint": {"writer": {"data_parallel": "socket"}}}, "", "data_parallel is 'socket'; it must be one of"),
        ({"checkpoint": {"writer": {"show_statistics": True}}}, "", "show_statistics is True; only False is supported"),
        ({"checkpoint": {"writer": {"type": "python", "io_buffer_size": 8192}}}, "", "size is of the fast writer"),
        ({"checkpoint": {"writer": {"type": "fast", "io_buffer_size": 8192}}}, "--io-threads 3", "multiple of 24576"),
        ({"aio": {"block_size": 1048576}}, "", "aio is for DeepSpeed's checkpoint writer, and --checkpoint-engine is"),
        ({"datastates_ckpt": {"parser_threads": 8}}, "", "datastates_ckpt.parser_threads is 8; only 1 is supported"),
        ({"datastates_ckpt": {"engine_type": "aggregated_engine"}}, "", "must be one of simple_engine, state_"),
        ({"datastates_ckpt": {"host_cache_size": 0}}, "", "host_cache_size is 0; it must be more than 0"),
        ({"datastates_ckpt": {"hostcache_size": 4}}, "", "did you mean datastates_ckpt.host_cache_size?"),
        ({"datastates_ckpt": True}, "", "datastates_ckpt is True; it must be an object"),
        ({"none_ckpt": {"enabled": True}}, "", "none_ckpt is an object of 1; it must be true or false"),
        ({"torchsnapshot_ckpt": 1}, "", "torchsnapshot_ckpt is 1; it must be true or false or an object"),
        ({"torchsnapshot_ckpt": {"enable": True}}, "", "did you mean torchsnapshot_ckpt.enabled?"),
    ],
)  # fmt: skip
def test_stanzas_that_contradict_or_say_nothing(
    tmp_path: Path, stanza: dict[str, Any], flags: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        with_file(tmp_path, STUDY | stanza, flags)
    assert message in str(caught.value)


HOSTILE = [
    (b"[" * 100_000, "not JSON (it is nested too deeply)"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "not JSON (it is nested too deeply)"),
    (b"[" * 600 + b"]" * 600, "holds a JSON list"),
    (b'{"zero_optimization": {"stage": 1, "stage": 1}}', "key 'stage' is given twice in one object"),
    (b'{"gradient_clipping": NaN}', "NaN is not a JSON number"),
    (b'{"gradient_clipping": -Infinity}', "-Infinity is not a JSON number"),
    (b'{"gradient_clipping": 1e999}', "1e999 is too large for a number"),
    (b'{"train_batch_size": ' + b"9" * 5000 + b"}", "not JSON (Exceeds the limit"),
    (b'{"train_batch_size": ' + b"9" * 400 + b"}", "a number of more than 19 digits; it must be less than 2^63"),
    (b'{"gradient_clipping": 1.0}\xff', "not UTF-8 at byte 26"),
    (b'\xef\xbb\xbf{"gradient_clipping": 1.0}', "BOM"),
    (b'{\n  # a comment\n  "gradient_clipping": 1.0\n}', "the other liberties of Hjson"),
    (b'{"gradient_clipping": 1.0,}', "not JSON"),
    (b"", "not JSON"),
    (b"{}" + b" " * (1 << 20), "has 1048578 bytes; the limit is 1048576"),
    (b'{"bf16": {}, "bfloat16": {}}', "two names of one section"),
]


@pytest.mark.parametrize(("content", "message"), HOSTILE, ids=[row[1] for row in HOSTILE])
def test_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_deepspeed_file(str(file))
    assert str(caught.value).startswith(f"--deepspeed_config {file}: ") and message in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(file))


@pytest.mark.slow
def test_deep_nest_under_any_key_is_one_error(tmp_path: Path) -> None:
    """Whatever the depth at which Python gives up."""
    for depth in (1, 50, 300, 900, 990, 1100):
        for key in ("unknown", "seed", "curriculum_learning", "timers", "none_ckpt", "train_batch_size", "stages"):
            nest = "[" * depth + "]" * depth
            with pytest.raises(ConfigError, match="--deepspeed_config"):
                with_file(tmp_path, f'{{"{key}": {nest}}}')
            with pytest.raises(ConfigError, match="--deepspeed_config"):
                with_file(tmp_path, f'{{"{key}": ' + '{"a":' * depth + "1" + "}" * depth + "}")


@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "dangling", "unreadable name"])
def test_no_regular_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "ds.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to(tmp_path / "absent")
    name = {"device": "/dev/zero", "unreadable name": "a\0b"}.get(kind, str(path))
    with pytest.raises(ConfigError, match="--deepspeed_config"):
        load_deepspeed_file(name)


def test_ends_with_2_before_torch_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"gradient_cliping": 1.0}')
    code = (
        "import sys\n"
        "from megatron.config.arguments import parse_or_exit\n"
        "try:\n    parse_or_exit()\n"
        "finally:\n    print({'torch', 'deepspeed', 'numpy'} & set(sys.modules))\n"
    )
    command = [sys.executable, "-c", code, *(BASE + BATCH).split(), "--deepspeed_config", str(file)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env={"PATH": ""})
    assert (run.returncode, run.stdout) == (2, "set()\n")
    assert run.stderr == (
        f"error: --deepspeed_config {file}: unknown key gradient_cliping: did you mean gradient_clipping?\n"
    )


def test_flag_error_names_the_key_that_gave_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        with_file(tmp_path, {"train_batch_size": 7}, "--micro-batch-size 2")
    assert f"(train_batch_size in --deepspeed_config {tmp_path / 'ds_config.json'} says it)" in str(caught.value)
    assert isinstance(configure(BATCH), Config)
