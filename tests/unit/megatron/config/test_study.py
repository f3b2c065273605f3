"""The restart study's own command lines and DeepSpeed files, of its checkpoint approaches -c 0..7, as configurations.

tests/golden/study.json holds them; record_study.py beside it says how they were recorded. tests/dist/test_study.py
trains with them.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron.config import Config, ConfigError
from megatron.config.arguments import config_from_args, parse_args

_RECORDED = json.loads((Path(__file__).resolve().parents[3] / "golden" / "study.json").read_text())
LINES: dict[str, str] = _RECORDED["command_lines"]
FILES: dict[str, dict[str, Any]] = _RECORDED["deepspeed_configs"]
_DATASTATES = (("engine_type", "state_engine"), ("profile_engine", True))
APPROACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "0": ("none", {}),
    "1": ("torch", {}),
    "2": ("fastpersist-decoupled", {"direct_io": "on"}),
    "3": ("datastates", {"host_cache_size": 20, "library_options": (("engine_type", "simple_engine"), _DATASTATES[1])}),
    "4": ("datastates", {"host_cache_size": 20, "library_options": _DATASTATES}),
    "5": ("torchsnapshot", {}),
    "6": ("fastpersist-decoupled", {"direct_io": "on", "library_options": (("io_buffer_size", 4194304),)}),
    "7": (
        "datastates",
        {"host_cache_size": 20, "library_options": (("engine_type", "state_aggregated_engine"), _DATASTATES[1])},
    ),
}
SIZES = {
    "3": (3072, 8192, 28, 24, 8, 4, 1), "7": (4096, 14336, 32, 32, 8, 4, 2), "13": (5120, 13824, 40, 40, 40, 4, 4),
    "33": (6656, 17920, 60, 52, 4, 4, 8), "70": (8192, 28672, 80, 64, 8, 4, 20),
}  # fmt: skip


def configure(model: str, approach: str, tmp_path: Path, replicas: int = 1) -> Config:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(FILES[approach] | {"train_batch_size": 16 * replicas}))
    words = [
        f"--deepspeed_config={file}" if "--deepspeed_config" in word else word for word in shlex.split(LINES[model])
    ]
    words[words.index("--global-batch-size") + 1] = str(16 * replicas)
    env = {"RANK": "0", "WORLD_SIZE": str(replicas * SIZES[model][5] * SIZES[model][6])}
    return config_from_args(parse_args(words, env), env)


def test_all_approaches_of_all_models_were_recorded() -> None:
    assert list(LINES) == list(SIZES) and list(FILES) == [str(approach) for approach in range(8)]


@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("approach", APPROACHES)
def test_a_run_of_the_study_is_what_it_says(model: str, approach: str, tmp_path: Path) -> None:
    config = configure(model, approach, tmp_path)
    shape, parallel = config.model, config.parallel
    assert SIZES[model] == (
        shape.hidden_size, shape.ffn_hidden_size, shape.num_layers, shape.num_attention_heads,
        shape.num_key_value_heads,
        parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size,
    )  # fmt: skip
    assert (shape.seq_length, config.training.micro_batch_size, config.training.train_iters) == (2048, 16, 15)
    assert (config.checkpoint.save_interval, config.data.tokenizer_type) == (1, "GPT2BPETokenizer")
    engine, options = APPROACHES[approach]
    assert config.checkpoint.checkpoint_engine == engine
    assert {name: getattr(config.checkpoint, name) for name in options} == options


def test_fastpersist_s_data_parallel_is_refused_where_it_would_split_files(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="checkpoint.writer.data_parallel is 'replica', by which DeepSpeed's 2 data-par"
    ):
        configure("3", "6", tmp_path, replicas=2)
