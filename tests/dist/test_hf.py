"""What trainings of several ranks saved is exported, and trainings begin from what was imported."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron.hf.exporting import export
from megatron.hf.importing import import_model
from megatron.hf.source import SOURCE
from megatron.parallel.topology import Layout
from tests.dist.harness import BLOOM_STYLE, LLAMA_STYLE, Zygote, losses
from tests.dist.tiny_runs import NO_DROPOUT, Launcher, buffered_saving

pytestmark = pytest.mark.slow
# Rows that pad the vocabulary, which are copies in what is imported, take part in the softmax: here there are none.
SIZES = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", *NO_DROPOUT,
    "--make-vocab-size-divisible-by", "1",
]  # fmt: skip
# In bf16 a weight is not its master; GPT-2's embedding is tied.
STYLES = {
    "llama": [*SIZES, *LLAMA_STYLE, "--num-key-value-heads", "2", "--bf16"],
    "gpt2": SIZES,
    "bloom": [*SIZES, *BLOOM_STYLE],
}
TRAINING = [
    "--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "1e-3", "--lr-decay-iters", "9", "--log-interval",
    "1",
]  # fmt: skip
SAVED = 2
FILES = {  # flags, and the names of the files
    "bloom": (["--checkpoint-files-per-node", "1"], "ranks_00000-00003.safetensors"),
    "gpt2": (["--checkpoint-compression", "zstd"], "rank_0000[0-3].safetensors.cblk"),
}
SHIFT, DIVISIBLE_BY = 40.0, 128


@pytest.mark.parametrize("style", STYLES)
def test_trainings_are_exported_and_begin_from_imports(
    zygote: Zygote, dataset: list[str], tmp_path: Path, style: str
) -> None:
    launcher = Launcher(zygote, dataset, tmp_path)
    flags = [*STYLES[style], *TRAINING, "--train-iters", str(SAVED), "--checkpoint-engine", "lazy"]
    saves = [tmp_path / "split", tmp_path / "single"]
    more, of_ranks = FILES.get(style, ([], "rank_0000[0-3].safetensors"))
    launcher.train(Layout(2, 2, 1), *flags, *buffered_saving(saves[0], SAVED)[:-1], *more)
    files = list((saves[0] / f"global_step{SAVED}").glob(of_ranks))
    assert len(files) == (1 if style == "bloom" else 4)
    launcher.train(Layout(1, 1, 1), *flags, *buffered_saving(saves[1], SAVED)[:-1], "--load", saves[0])
    exported = [tmp_path / "split_hf", tmp_path / "single_hf"]
    for save, out in zip(saves, exported, strict=True):
        export(save, out, None, 5_000)
    files = [{path.name: path.read_bytes() for path in out.iterdir()} for out in exported]
    assert all(found.pop(SOURCE) for found in files)  # which names the checkpoint
    assert files[0] == files[1] and {"tokenizer.model", "config.json", "generation_config.json"} <= files[0].keys()
    printed = shlex.split(import_model(exported[0], tmp_path / "imported", None, 1))
    begun = {"imported": printed, "saved": [*STYLES[style], "--load", str(saves[0]), "--finetune"]}
    for name, words in begun.items():
        trace = ["--restart-trace-dir", str(tmp_path / name / "trace")]
        launcher.train(Layout(2, 1, 1), *TRAINING, "--train-iters", "2", *words, *trace)
    of_run = {name: losses(tmp_path / name / "trace", 0, 0) for name in begun}
    assert of_run["imported"] == of_run["saved"] and len(of_run["saved"]) == 2
    if style == "gpt2":
        _make_logits_negative(exported[0])
        printed = shlex.split(import_model(exported[0], tmp_path / "padded", None, DIVISIBLE_BY))
        trace = ["--restart-trace-dir", str(tmp_path / "padded" / "trace")]
        launcher.train(Layout(2, 1, 1), *TRAINING, "--train-iters", "1", *printed, *trace)
        (loss,) = losses(tmp_path / "padded" / "trace", 0, 0).values()
        assert loss == pytest.approx(min(of_run["saved"].items())[1], abs=0.5)


def _make_logits_negative(model: Path) -> None:
    """Shift all logits of a GPT-2 by about -SHIFT, which changes no probability of a token by much."""
    from safetensors.torch import load_file, save_file

    tensors = {name: it for path in model.glob("*.safetensors") for name, it in load_file(path).items()}
    for path in model.glob("*.safetensors*"):
        path.unlink()
    # The input of the first block is what it was; the head is tied to the words.
    tensors["transformer.wte.weight"] += 4.0
    tensors["transformer.wpe.weight"] -= 4.0
    tensors["transformer.ln_f.bias"] -= SHIFT / (4.0 * 32)
    save_file(tensors, model / "model.safetensors")
