"""Models go to Hugging Face and back, bit for bit, from every engine and layout, and compute the same there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import Config, ModelConfig
from megatron.config.arguments import config_from_args, parse_args
from megatron.hf.checkpoints import SavedModel, newest_checkpoint
from megatron.hf.errors import ConversionError
from megatron.hf.exporting import export
from megatron.hf.importing import import_model
from megatron.hf.source import SOURCE, Source
from megatron.hf.tensors import parameters
from megatron.parallel.parameter_slice import slice_of
from megatron.parallel.topology import Layout
from tests.unit.megatron.hf.models import BLOOM, GPT2, LLAMA, PADDED, VOCAB, drawn, layers, logits, save

pytestmark = pytest.mark.slow
SINGLE, SPLIT = Layout(1, 1, 1), Layout(2, 2, 1)
SHARD = 30_000
IDS = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
STYLES = {
    "llama": LLAMA,
    "llama_tied_biased": LLAMA
    | {
        "kv_channels": 16,
        "num_key_value_heads": 4,
        "untie_embeddings_and_output_weights": False,
        "add_bias_linear": True,
    },
    "llama_bf16": LLAMA | {"params_dtype": "bf16"},
    "gpt2": GPT2,
    "gpt2_untied_exact": GPT2
    | {"untie_embeddings_and_output_weights": True, "bias_gelu_fusion": False, "ffn_hidden_size": 40},
    "bloom": BLOOM,
    "bloom_untied": BLOOM | {"untie_embeddings_and_output_weights": True},
}
# Each engine, and each style, on a split layout once.
SAVED = [
    ("llama", "lazy"),
    ("llama_tied_biased", "torch"),
    ("llama_bf16", "dcp"),
    ("gpt2", "torchsnapshot"),
    ("gpt2_untied_exact", "fastpersist"),
    ("bloom", "lazy"),
    ("bloom_untied", "torch"),
]
HF: dict[str, tuple[str, dict[str, Any]]] = {  # their classes of configurations, and the options of these
    "llama": ("LlamaConfig", dict(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, rms_norm_eps=0.1, attention_dropout=0.25,
        initializer_range=0.05,
    )),
    "llama_tied_biased": ("LlamaConfig", dict(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True, max_position_embeddings=64,
    )),
    "mistral": ("MistralConfig", dict(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=64, sliding_window=None, head_dim=12,
    )),
    "gpt2": ("GPT2Config", dict(vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, n_positions=64)),
    "gpt2_untied_exact": ("GPT2Config", dict(
        vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=4, n_positions=64, n_inner=40, activation_function="gelu",
        tie_word_embeddings=False, layer_norm_epsilon=0.1, attn_pdrop=0.25, resid_pdrop=0.3,
    )),
    "bloom": ("BloomConfig", dict(vocab_size=VOCAB, hidden_size=48, n_layer=3, n_head=6)),
    "bloom_untied": ("BloomConfig", dict(
        vocab_size=VOCAB, hidden_size=48, n_layer=2, n_head=4, tie_word_embeddings=False, layer_norm_epsilon=0.1,
        attention_dropout=0.25, hidden_dropout=0.3, initializer_range=0.05,
    )),
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Its import takes a second, and collecting these tests needs none of it."""
    import transformers

    return transformers


@pytest.fixture(scope="module")
def hf(transformers: Any) -> dict[str, Any]:
    return {style: getattr(transformers, name)(**options) for style, (name, options) in HF.items()}


def files_of(directory: Path) -> dict[str, bytes]:
    """Of a model: without what names the checkpoint that it was exported from."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.name != SOURCE}


def their_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize(("style", "engine"), SAVED)
def test_a_checkpoint_of_any_engine_and_layout_computes_the_same_there(
    transformers: Any, tmp_path: Path, style: str, engine: str
) -> None:
    model = ModelConfig(**STYLES[style])
    ours = drawn(model)
    save(tmp_path / "split", model, ours, SPLIT, engine)
    save(tmp_path / "single", model, ours, SINGLE, "torch")
    told = export(tmp_path / "split", tmp_path / "from_split", None, SHARD)
    export(tmp_path / "single", tmp_path / "from_single", None, SHARD)
    assert files_of(tmp_path / "from_split") == files_of(tmp_path / "from_single")
    for name in ("split", "single"):
        assert Source.of_export(tmp_path / f"from_{name}") == Source.of_checkpoint(tmp_path / name / "global_step5")
    assert "global_step5" in told and f"{len(list((tmp_path / 'from_split').glob('*.safetensors')))} file(s)" in told
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "from_split", dtype="auto")
    assert next(theirs.parameters()).dtype == next(ours[1].parameters()).dtype
    expected, found = logits(model, ours, IDS)[..., :VOCAB], their_logits(theirs)
    rounding = 1e-4 if model.params_dtype == "fp32" else 0.1  # logits of up to some ten
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)
    import_model(tmp_path / "from_split", tmp_path / "back", None, 128)
    export(tmp_path / "back", tmp_path / "again", None, SHARD)
    names = set(files_of(tmp_path / "from_split")) - {"config.json", "generation_config.json"}  # without a tokenizer
    assert {name: files_of(tmp_path / "again")[name] for name in names} == {
        name: files_of(tmp_path / "from_split")[name] for name in names
    }


@pytest.mark.parametrize("style", HF)
def test_a_model_of_transformers_computes_the_same_here(
    transformers: Any, hf: dict[str, Any], tmp_path: Path, style: str
) -> None:
    theirs = transformers.AutoModelForCausalLM.from_config(hf[style])
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="30KB" if style != "gpt2" else "1GB")
    flags = import_model(tmp_path / "hf", tmp_path / "ours", None, 128)
    assert flags.startswith(f"--load {tmp_path / 'ours'} --finetune --num-layers ")
    saved = SavedModel(newest_checkpoint(tmp_path / "ours", None))
    assert (saved.vocab_size, saved.padded_vocab_size) == (VOCAB, PADDED)
    modules = layers(saved.model)
    for number, module in modules.items():
        keys = [each for each in parameters(saved.model, _architecture(style), PADDED) if each.layer == number]
        tensors = saved.layer(keys)
        module.load_state_dict({each.key: tensor for each, tensor in zip(keys, tensors, strict=True)}, strict=True)
    assert parse(flags).model == saved.model
    found = logits(saved.model, modules, IDS)[..., :VOCAB]
    torch.testing.assert_close(found, their_logits(theirs), rtol=1e-4, atol=1e-4)
    export(tmp_path / "ours", tmp_path / "back", None, SHARD)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    settings = [key for key in OF_TRAINING if hasattr(theirs.config, key)]
    assert settings and all(getattr(back.config, key) == getattr(theirs.config, key) for key in settings)
    again = back.state_dict()
    assert again.keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in theirs.state_dict().items())


OF_TRAINING = (
    "layer_norm_epsilon",
    "rms_norm_eps",
    "attn_pdrop",
    "attention_dropout",
    "resid_pdrop",
    "hidden_dropout",
    "initializer_range",
)


def parse(flags: str) -> Config:
    """What pretrain_gpt.py makes of the printed flags."""
    training = ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3", "--data-path", "unread"]
    return config_from_args(parse_args([*shlex.split(flags), *training], {}), {})


@pytest.mark.parametrize("style", ["gpt2", "gpt2_untied_exact"])
def test_rows_that_pad_the_vocabulary_hardly_change_a_loss_of_negative_logits(
    transformers: Any, hf: dict[str, Any], tmp_path: Path, style: str
) -> None:
    theirs = transformers.AutoModelForCausalLM.from_config(hf[style])
    with torch.no_grad():
        theirs.lm_head.weight += 1.0  # so a logit is the sum of ln_f's bias, and more
        theirs.transformer.ln_f.bias[:] = -1.0
    theirs.save_pretrained(tmp_path / "hf")
    assert their_logits(theirs).max() < -20
    import_model(tmp_path / "hf", tmp_path / "ours", None, 128)
    saved = SavedModel(newest_checkpoint(tmp_path / "ours", None))
    modules = layers(saved.model)
    for number, module in modules.items():
        keys = [each for each in parameters(saved.model, _architecture(style), PADDED) if each.layer == number]
        tensors = saved.layer(keys)
        module.load_state_dict({each.key: tensor for each, tensor in zip(keys, tensors, strict=True)}, strict=True)
    expected = their_logits(theirs)
    copies = torch.cat([expected, expected[..., -1:].expand(-1, -1, PADDED - VOCAB)], dim=-1)
    found = logits(saved.model, modules, IDS)
    torch.testing.assert_close(found, copies, rtol=1e-4, atol=1e-4)
    # What is left, by docs/hf.md: as if the last token were there 1 + 27 times.
    more = torch.log1p((PADDED - VOCAB) * expected.softmax(-1)[..., -1])
    torch.testing.assert_close(loss(found), loss(expected) + more, rtol=1e-4, atol=1e-4)


def loss(of_logits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(of_logits.movedim(-1, 1), IDS, reduction="none")


def _architecture(style: str) -> str:
    kinds = {"gpt2": "GPT2LMHeadModel", "bloom": "BloomForCausalLM"}
    return kinds.get(style.split("_")[0], "LlamaForCausalLM")


@pytest.mark.parametrize("style", ["llama_tied_biased", "llama", "gpt2", "gpt2_untied_exact", "bloom"])
def test_the_table_of_tensors_is_that_of_the_model(style: str) -> None:
    model = ModelConfig(**STYLES[style])
    live = {
        (number, key): slice_of(parameter, key)
        for number, module in layers(model).items()
        for key, parameter in module.named_parameters()
    }
    assert {(each.layer, each.key): each.part for each in parameters(model, _architecture(style), PADDED)} == live


def test_a_model_of_another_type_is_rounded_on_request(transformers: Any, hf: dict[str, Any], tmp_path: Path) -> None:
    theirs = transformers.LlamaForCausalLM(hf["llama"])
    theirs.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "ours", "bf16", 8)
    saved = SavedModel(newest_checkpoint(tmp_path / "ours", None))
    assert (saved.model.params_dtype, saved.padded_vocab_size) == ("bf16", 104)
    export(tmp_path / "ours", tmp_path / "back", None, SHARD)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto").state_dict()
    assert all(torch.equal(back[name], it.to(torch.bfloat16)) for name, it in theirs.state_dict().items())


def test_gpt2_is_read_as_it_was_first_distributed(transformers: Any, hf: dict[str, Any], tmp_path: Path) -> None:
    """Without the prefix of its names and the head, and with the masks of attention."""
    from safetensors.torch import load_file, save_file

    theirs = transformers.GPT2LMHeadModel(hf["gpt2"])
    theirs.save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    for dtype in (torch.float32, torch.uint8, torch.bool):  # by the version of transformers that wrote it
        masks = {"h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=dtype), "h.0.attn.masked_bias": torch.tensor(-1e4)}
        save_file(bare | masks, tmp_path / "hf" / "model.safetensors")
        ours, back = (tmp_path / f"{name}_{dtype}" for name in ("ours", "back"))
        import_model(tmp_path / "hf", ours, None, 128)
        export(ours, back, None, SHARD)
        found = transformers.AutoModelForCausalLM.from_pretrained(back).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in theirs.state_dict().items())


def test_bloom_is_read_as_it_was_first_distributed(transformers: Any, hf: dict[str, Any], tmp_path: Path) -> None:
    """Without the prefix of its names and the head, and with other keys in its config.json."""
    from safetensors.torch import load_file, save_file

    theirs = transformers.BloomForCausalLM(hf["bloom"])
    theirs.save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, tmp_path / "hf" / "model.safetensors")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    for key, first in (("hidden_size", "n_embed"), ("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads")):
        config[first] = config.pop(key)
    path.write_text(json.dumps(config | {"seq_length": 512}))
    assert "--seq-length 512 " in import_model(tmp_path / "hf", tmp_path / "ours", None, 128)
    export(tmp_path / "ours", tmp_path / "back", None, SHARD)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in theirs.state_dict().items())


@pytest.mark.parametrize(("name", "head"), [("gpt2", "GPT2LMHeadModel"), ("bloom", "BloomForCausalLM")])
def test_a_model_without_its_head_is_read_if_the_head_is_tied(
    name: str, head: str, transformers: Any, hf: dict[str, Any], tmp_path: Path
) -> None:
    theirs = getattr(transformers, head)(hf[name])
    theirs.base_model.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    assert config["architectures"] == [type(theirs.base_model).__name__]
    import_model(tmp_path / "hf", tmp_path / "ours", None, 128)
    export(tmp_path / "ours", tmp_path / "back", None, SHARD)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in theirs.state_dict().items())
    path.write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ConversionError, match=rf"architectures is .*not tied: only {head} can be imported"):
        import_model(tmp_path / "hf", tmp_path / "other", None, 128)


def test_what_is_left_out_does_not_decide_the_type(transformers: Any, hf: dict[str, Any], tmp_path: Path) -> None:
    """Rotary frequencies in fp32 beside fp16 weights, in a shard of their own; and a tied head."""
    from safetensors.torch import load_file, save_file

    theirs = transformers.LlamaForCausalLM(hf["llama_tied_biased"]).half()
    theirs.save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8, dtype=torch.float64)}
    more = {"more.safetensors": frequencies | {"lm_head.weight": tensors["model.embed_tokens.weight"].float()}}
    places = {}
    for file, content in {"model.safetensors": tensors, **more}.items():
        save_file(content, tmp_path / "hf" / file)
        places |= dict.fromkeys(content, file)
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert "--fp16" in import_model(tmp_path / "hf", tmp_path / "ours", None, 128).split()
    export(tmp_path / "ours", tmp_path / "back", None, 1 << 30)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], it) for name, it in tensors.items())


def test_the_newest_or_the_named_checkpoint_is_exported(tmp_path: Path) -> None:
    model = ModelConfig(**GPT2)
    for step in (1, 2):
        save(tmp_path / "save", model, drawn(model), SINGLE, "torch", step=step)
    tags = [export(tmp_path / "save", tmp_path / f"{tag}", tag, SHARD) for tag in ("global_step1", None)]
    assert "global_step1," in tags[0] and "global_step2," in tags[1]
    index = json.loads((tmp_path / "None" / "model.safetensors.index.json").read_text())
    sizes = {name: (tmp_path / "None" / name).stat().st_size for name in set(index["weight_map"].values())}
    assert sum(sizes.values()) > index["metadata"]["total_size"] and len(sizes) > 3
    assert (tmp_path / "None" / "model.safetensors.index.json").stat().st_mode & 0o444 == 0o444
