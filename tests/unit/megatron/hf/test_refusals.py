"""What cannot be converted is refused by name, nothing is overwritten, and nothing unfinished looks complete."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.config import ModelConfig
from megatron.hf.checkpoints import SavedModel, newest_checkpoint
from megatron.hf.configs import architecture_of
from megatron.hf.errors import ConversionError
from megatron.hf.exporting import export
from megatron.hf.importing import import_model
from megatron.hf.output import new_directory
from megatron.hf.tensors import parameters
from megatron.parallel.topology import Layout
from tests.dist.harness import ROOT, wait_for
from tests.unit.megatron.hf.models import BLOOM, GPT2, LLAMA, PADDED, drawn, save
from tools import hf_convert

SINGLE = Layout(1, 1, 1)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training saved."""
    directory = tmp_path_factory.mktemp("ours") / "save"
    model = ModelConfig(**LLAMA)
    save(directory, model, drawn(model), SINGLE, "torch")
    return directory


@pytest.fixture
def theirs(ours: Path, tmp_path: Path) -> Path:
    """A model directory that a test may change."""
    export(ours, tmp_path / "hf", None, 1 << 30)
    return tmp_path / "hf"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (LLAMA | {"normalization": "layernorm"}, "--normalization layernorm: LlamaForCausalLM"),
        (LLAMA | {"swiglu": False}, "no --swiglu: LlamaForCausalLM"),
        (LLAMA | {"rotary_percent": 0.5}, "--rotary-percent 0.5: LlamaForCausalLM"),
        (LLAMA | {"hidden_size": 50, "kv_channels": 12}, "--num-attention-heads 4, which does not divide --hidden-s"),
        (GPT2 | {"normalization": "rmsnorm", "swiglu": True}, "--normalization rmsnorm, --swiglu: GPT2LMHeadModel"),
        (GPT2 | {"add_bias_linear": False}, "--disable-bias-linear: GPT2LMHeadModel"),
        (GPT2 | {"num_key_value_heads": 2}, "--num-key-value-heads 2: GPT2LMHeadModel"),
        (GPT2 | {"kv_channels": 16}, "--kv-channels 16: GPT2LMHeadModel"),
        (GPT2 | {"add_position_embedding": False}, "--no-position-embedding: GPT2LMHeadModel"),
        (BLOOM | {"embed_layernorm": False}, "no --embed-layernorm: BloomForCausalLM"),
        (BLOOM | {"swiglu": True}, "--swiglu: BloomForCausalLM"),
        (BLOOM | {"add_bias_linear": False}, "--disable-bias-linear: BloomForCausalLM"),
        (BLOOM | {"bias_gelu_fusion": False}, "--no-bias-gelu-fusion: BloomForCausalLM"),
        (BLOOM | {"ffn_hidden_size": 96}, "--ffn-hidden-size 96: BloomForCausalLM"),
        (BLOOM | {"num_key_value_heads": 2}, "--num-key-value-heads 2: BloomForCausalLM"),
        (BLOOM | {"kv_channels": 16}, "--kv-channels 16: BloomForCausalLM"),
        (GPT2 | {"embed_layernorm": True}, "--embed-layernorm: GPT2LMHeadModel"),
        (GPT2 | {"num_experts": (4,)}, "--num-experts 4: GPT2LMHeadModel"),
    ],
)
def test_a_model_that_no_architecture_expresses_is_refused_by_its_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=re.escape(message)):
        architecture_of(ModelConfig(**changes))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "falcon", "only llama, mistral, gpt2, bloom"),
        ("model_type", ["llama"], "only llama, mistral, gpt2"),
        ("architectures", ["LlamaForSequenceClassification"], "only LlamaForCausalLM"),
        ("architectures", ["LlamaModel"], "only LlamaForCausalLM"),
        ("hidden_act", "gelu", "only 'silu'"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "not scaled here"),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 10000.0}, "not scaled here"),
        ("rope_parameters", {"rope_theta": 10000.5}, "a whole number"),
        ("rope_parameters", {"rope_theta": math.inf}, "a whole number"),
        ("rope_parameters", {"rope_theta": math.nan}, "a whole number"),
        ("rope_parameters", "linear", "not scaled here"),
        ("partial_rotary_factor", 0.5, "only 1.0"),
        ("sliding_window", 16, "no window here"),
        ("attention_bias", True, "mlp_bias is False"),
        ("quantization_config", {"bits": 4}, "before its quantization"),
        ("num_key_value_heads", 3, "must divide --num-attention-heads 4"),
        ("hidden_size", "48", "a whole number from 1 on"),
        ("rms_norm_eps", None, "a number above 0"),
        ("rms_norm_eps", math.inf, "a number above 0"),
        ("rms_norm_eps", 10**400, "a number above 0"),
        ("tie_word_embeddings", "no", "must be true or false"),
        ("num_hidden_layers", 5, r"lacks model\.layers\.4\.input_layernorm\.weight and 8 more"),
        ("num_hidden_layers", 3, r"has also model\.layers\.3\.input_layernorm\.weight and 8 more"),
        ("num_hidden_layers", 10**9, "is 1000000000: there are only 39 tensors"),
        ("vocab_size", 100, r"model\.embed_tokens\.weight has the shape \[101, 48\], and \[100, 48\] by config\.json"),
    ],
)
def test_a_config_that_is_not_ours_is_refused_by_its_key(theirs: Path, key: str, value: Any, message: str) -> None:
    path = theirs / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConversionError, match=message) as refused:
        import_model(theirs, theirs.parent / "out", None, 128)
    assert str(theirs) in str(refused.value)
    assert [path.name for path in theirs.parent.iterdir()] == ["hf"]


def test_blooms_residual_branches_are_of_one_kind(tmp_path: Path) -> None:
    model = ModelConfig(**BLOOM)
    save(tmp_path / "save", model, drawn(model), SINGLE, "torch")
    export(tmp_path / "save", tmp_path / "hf", None, 1 << 30)
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"apply_residual_connection_post_layernorm": True}))
    with pytest.raises(ConversionError, match="apply_residual_connection_post_layernorm is True: only False"):
        import_model(tmp_path / "hf", tmp_path / "out", None, 128)


def test_keys_that_are_absent_are_those_of_mistral(theirs: Path) -> None:
    path = theirs / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    path.write_text(json.dumps(config | {"max_position_embeddings": 4097}))
    with pytest.raises(ConversionError, match=r"sliding_window is 4096: .*an absent key is 4096"):
        import_model(theirs, theirs.parent / "out", None, 128)
    path.write_text(json.dumps(config))
    import_model(theirs, theirs.parent / "short", None, 128)
    path.write_text(json.dumps(config | {"max_position_embeddings": 4097, "sliding_window": None}))
    assert "--seq-length 4097" in import_model(theirs, theirs.parent / "null", None, 128)
    del config["num_key_value_heads"]
    path.write_text(json.dumps(config))
    with pytest.raises(ConversionError, match="--num-key-value-heads 8: must divide --num-attention-heads 4"):
        import_model(theirs, theirs.parent / "out", None, 128)


def test_a_checkpoint_of_more_tokens_than_rows_is_refused(tmp_path: Path) -> None:
    model = ModelConfig(**GPT2)
    save(tmp_path / "save", model, drawn(model, padded=96), SINGLE, "torch", padded=96)
    with pytest.raises(CheckpointDamagedError, match="101 tokens of 96 rows"):
        export(tmp_path / "save", tmp_path / "out", None, 1 << 30)
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


def test_the_directory_at_work_is_no_place_to_write_to(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (Path(), Path("../here"), tmp_path / "here", Path("new/..")):
        with pytest.raises(ConversionError, match=f"--out {out}: .*name a new one"):
            import_model(theirs, out, None, 128)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "here"} and not list(Path().iterdir())
    words = shlex.split(import_model(theirs, Path("an import"), None, 128))
    assert words[:3] == ["--load", str(tmp_path / "here" / "an import"), "--finetune"]


def _overwrite(path: Path, position: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


WEIGHTS = "model.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda it: (it / "config.json").unlink(), r"config\.json: missing"),
    "no JSON": (lambda it: (it / "config.json").write_text("{"), r"config\.json: not a JSON file"),
    "a list": (lambda it: (it / "config.json").write_text("[]"), r"config\.json: holds a list"),
    "no tensors": (lambda it: (it / WEIGHTS).unlink(), "save the model with transformers' save_pretrained"),
    "cut": (lambda it: os.truncate(it / WEIGHTS, 40_000), r"model\.safetensors: ends within model\."),
    "no header": (lambda it: os.truncate(it / WEIGHTS, 5), r"model\.safetensors: 5 bytes, too few"),
    "a header of something else": (lambda it: _overwrite(it / WEIGHTS, 8, b"?"), "not a safetensors file"),
    "an index that leads out": (
        lambda it: (it / f"{WEIGHTS}.index.json").write_text('{"weight_map": {"a": "../a"}}'),
        r"names '\.\./a', which is no file beside it",
    ),
    "an index of a file that is missing": (
        lambda it: (it / f"{WEIGHTS}.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}'),
        r"model-2\.safetensors: missing",
    ),
    "an index of another tensor": (
        lambda it: (it / f"{WEIGHTS}.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}'),
        r"index\.json: a is not in model\.safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_refused_by_its_file(theirs: Path, damage: str) -> None:
    make, message = DAMAGE[damage]
    make(theirs)
    with pytest.raises(ConversionError, match=message):
        import_model(theirs, theirs.parent / "out", None, 128)
    assert [path.name for path in theirs.parent.iterdir()] == ["hf"]


def test_types_are_refused_unless_they_may_be_rounded(theirs: Path) -> None:
    tensors = load_file(theirs / WEIGHTS)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()
    save_file(tensors, theirs / WEIGHTS)
    with pytest.raises(ConversionError, match=r"several types \(bf16, fp32\); choose one with --params-dtype"):
        import_model(theirs, theirs.parent / "out", None, 128)
    import_model(theirs, theirs.parent / "out", "fp32", 128)
    tensors["model.norm.weight"] = torch.full((48,), 1e6)
    save_file(tensors, theirs / WEIGHTS)
    with pytest.raises(ConversionError, match=r"model\.norm\.weight has values that torch\.float16 does not hold"):
        import_model(theirs, theirs.parent / "half", "fp16", 128)
    tensors["model.norm.weight"] = torch.zeros(48, dtype=torch.int8)
    save_file(tensors, theirs / WEIGHTS)
    with pytest.raises(ConversionError, match="is of type I8, and only F32, F16, BF16"):
        import_model(theirs, theirs.parent / "whole", None, 128)


def test_a_head_that_is_said_to_be_tied_and_is_not_is_refused(theirs: Path) -> None:
    path, tensors = theirs / "config.json", load_file(theirs / WEIGHTS)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(ConversionError, match="set that to false"):
        import_model(theirs, theirs.parent / "out", None, 128)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, theirs / WEIGHTS)
    assert "--untie" not in import_model(theirs, theirs.parent / "out", None, 128)


def test_a_checkpoint_that_cannot_be_exported_is_refused(ours: Path, tmp_path: Path) -> None:
    for load, tag, message in [
        (tmp_path / "nowhere", None, "no such directory"),
        (tmp_path, None, "holds no complete checkpoint; give what a training had as --save"),
        (ours, "global_step7", "holds no complete checkpoint called global_step7"),
    ]:
        with pytest.raises(ConversionError, match=f"--load .*{message}"):
            export(load, tmp_path / "out", tag, 1 << 30)
    save(tmp_path / "save", ModelConfig(**LLAMA), drawn(ModelConfig(**LLAMA)), SINGLE, "torch")
    layer = tmp_path / "save" / "global_step5" / "layer_03-model_00-model_states.pt"
    _overwrite(layer, layer.stat().st_size // 2, b"damage")
    with pytest.raises(CheckpointDamagedError, match=r"layer_03.*; give another checkpoint with --load-tag"):
        export(tmp_path / "save", tmp_path / "out", None, 1 << 30)
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


@pytest.mark.parametrize("engine", ["torch", "lazy"])
def test_a_checkpoint_that_is_removed_meanwhile_is_named(tmp_path: Path, engine: str) -> None:
    """As --keep-last does."""
    model = ModelConfig(**LLAMA)
    directory = save(tmp_path / "save", model, drawn(model), SINGLE, engine)
    saved = SavedModel(newest_checkpoint(tmp_path / "save", None))
    shutil.rmtree(directory)
    layer = [each for each in parameters(model, architecture_of(model), PADDED) if each.layer == 2]
    with pytest.raises(CheckpointDamagedError, match=f"{directory}/.*: file is missing; give another checkpoint with"):
        saved.layer(layer)


def test_nothing_is_overwritten(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("full", "file", "link"):
        with pytest.raises(ConversionError, match=f"--out .*{name}: is there already, and nothing is overwritten"):
            export(ours, tmp_path / name, None, 1 << 30)
    assert {path.name for path in tmp_path.iterdir()} == {"full", "file", "link"}
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    export(ours, tmp_path / "empty", None, 1 << 30)
    assert (tmp_path / "empty" / WEIGHTS).is_file()


WRITES = """
import sys, time
from pathlib import Path
from megatron.hf.output import new_directory
with new_directory(Path(sys.argv[1])) as directory:
    (directory / "config.json").write_text("{}")
    print("written", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    writer = subprocess.Popen([sys.executable, "-c", WRITES, out], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "written\n"
        (left,) = tmp_path.iterdir()
        assert left.name.startswith(".incomplete_out_")
        with new_directory(tmp_path / "out2"):  # of another name; and this one is under way
            pass
        with pytest.raises(RuntimeError, match="ends here"), new_directory(out):
            assert left.is_dir()
            raise RuntimeError("ends here")
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert left.is_dir() and not out.exists()
    wait_for(lambda: writer.poll() is not None, "the end of the writer")
    with new_directory(out) as directory:
        (directory / "config.json").write_text("{}")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out2"}


@pytest.mark.usefixtures("own_environment")
def test_the_command_answers_with_one_line(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", "--load", str(ours), "--out", str(tmp_path / "hf"), "--max-shard-size", "30KB"]
    assert hf_convert.main(words) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"{tmp_path}/hf: LlamaForCausalLM of {ours}/global_step5, ") and told.err == ""
    assert hf_convert.main(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(f"hf-convert: error: --out {tmp_path}/hf: is there already")
    words = ["import", "--load", str(tmp_path / "hf"), "--out", str(tmp_path / "back")]
    assert hf_convert.main(words) == 0
    assert capsys.readouterr().out.startswith(f"--load {tmp_path}/back --finetune --num-layers 4 ")
    assert hf_convert.main([*words[:-1], "/proc/nowhere"]) == 2
    assert re.fullmatch("hf-convert: error: .*/proc/.*: give a --load that .*\n", capsys.readouterr().err)
    for direction, flag, value, message in [
        ("export", "--max-shard-size", "0", "must be at least 1"),
        ("import", "--make-vocab-size-divisible-by", "0", "must be at least 1"),
        ("export", "--load", "s3://bucket/run", "conversions read and write directories"),
        ("import", "--out", "s3://bucket/run", "conversions read and write directories"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            hf_convert.main([direction, "--load", "a", "--out", "b", flag, value])
        assert re.search(f"{flag}:? {re.escape(value)}: {message}", capsys.readouterr().err)


def test_the_file_is_a_command(tmp_path: Path) -> None:
    """From any directory, without what only a conversion needs."""
    words = [sys.executable, "-S", "-E", ROOT / "tools" / "hf_convert.py", "import", "--help"]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "usage: hf-convert import " in told
