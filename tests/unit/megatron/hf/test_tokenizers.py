"""The tokenizer of a run goes with its model, and gives the same tokens there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron.fileio.content_identity import content_identity
from megatron.hf.tokenizers import end_of_text, tokenizer_flags, write_tokenizer
from megatron.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[4]
SENTENCEPIECE = str(ROOT / "tests" / "golden" / "upstream_run" / "data" / "tokenizer.model")
TEXT = "The quick brown fox's jumping over the lazy dogs, isn't it? 1234 times it's naïve.\n\n  Überall "


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run with a byte-level BPE has in its arguments."""
    from tokenizers import ByteLevelBPETokenizer

    directory = tmp_path_factory.mktemp("bpe")
    trained = ByteLevelBPETokenizer(add_prefix_space=False)
    trained.train_from_iterator([TEXT * 5], vocab_size=300, special_tokens=["<|endoftext|>"])
    trained.save_model(str(directory))
    return {"vocab_file": str(directory / "vocab.json"), "merge_file": str(directory / "merges.txt")}


def of_run(kind: str, files: dict[str, Any]) -> argparse.Namespace:
    contents = {name: [content_identity(path)] for name, path in files.items()}
    return argparse.Namespace(tokenizer_type=kind, **files, input_contents=contents)


@pytest.mark.slow
def test_the_tokens_are_the_same_there(bpe: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    arguments, ours = of_run("GPT2BPETokenizer", bpe), build_tokenizer("GPT2BPETokenizer", **bpe)
    assert write_tokenizer(arguments, 64, tmp_path) == "tokenizer files: vocab.json, merges.txt, tokenizer_config.json"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode(TEXT) == ours.tokenize(TEXT) and theirs.decode(theirs.encode(TEXT)) == TEXT
    assert theirs.eos_token_id == ours.eod == end_of_text(arguments, ours.vocab_size)
    assert len(theirs) == ours.vocab_size
    assert tokenizer_flags(tmp_path, ours.vocab_size) == (
        f"--tokenizer-type GPT2BPETokenizer --vocab-file {tmp_path}/vocab.json --merge-file {tmp_path}/merges.txt"
    )


@pytest.mark.parametrize("kind", ["GPTSentencePieceTokenizer", "GPT2BPETokenizer"])
def test_a_tokenizer_of_another_size_is_told(
    bpe: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    files: dict[str, Any] = {"tokenizer_model": SENTENCEPIECE} if kind != "GPT2BPETokenizer" else bpe
    write_tokenizer(of_run(kind, files), 64, tmp_path)
    size = build_tokenizer(kind, **files).vocab_size
    assert f"--tokenizer-type {kind} " in tokenizer_flags(tmp_path, size) and not caplog.messages
    assert f"--tokenizer-type {kind} " in tokenizer_flags(tmp_path, size + 3)
    (told,) = caplog.messages
    assert str(tmp_path) in told and f"has {size} tokens: the weights have vocab_size {size + 3}: " in told
    assert f"--tokenizer-type NullTokenizer --vocab-size {size + 2}" in told
    (tmp_path / ("vocab.json" if kind == "GPT2BPETokenizer" else "tokenizer.model")).write_text("damage")
    tokenizer_flags(tmp_path, size)
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("kind", ["GPTSentencePieceTokenizer", "SentencePieceTokenizer"])
def test_the_model_of_sentencepiece_is_copied(tmp_path: Path, kind: str) -> None:
    arguments, ours = (
        of_run(kind, {"tokenizer_model": SENTENCEPIECE}),
        build_tokenizer(kind, tokenizer_model=SENTENCEPIECE),
    )
    assert "tokenizer.model" in write_tokenizer(arguments, 64, tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == Path(SENTENCEPIECE).read_bytes()
    assert end_of_text(arguments, ours.vocab_size) == ours.eod
    assert end_of_text(arguments, ours.vocab_size + 1) is None  # of another model
    assert tokenizer_flags(tmp_path, 500).endswith(f"--tokenizer-model {tmp_path}/tokenizer.model")


def test_a_tokenizer_that_is_not_the_one_of_the_run_is_left_out(bpe: dict[str, Any], tmp_path: Path) -> None:
    copy = tmp_path / "vocab.json"
    copy.write_bytes(Path(bpe["vocab_file"]).read_bytes())
    arguments = of_run("GPT2BPETokenizer", bpe | {"vocab_file": str(copy)})
    copy.write_text(copy.read_text().replace("a", "b", 1))
    out = tmp_path / "out"
    out.mkdir()
    for change, why in [
        ({}, f"--vocab-file {copy} is not the file that the run was trained with"),
        ({"merge_file": str(tmp_path / "gone")}, f"--merge-file {tmp_path}/gone of the run cannot be read"),
        ({"merge_file": None}, "the run had no --merge-file"),
    ]:
        known = vars(arguments) | ({"vocab_file": bpe["vocab_file"]} | change if change else {})
        told = write_tokenizer(argparse.Namespace(**known), 64, out)
        assert told.startswith("no tokenizer files, since ") and why in told and told.endswith("; copy them there")
        assert end_of_text(argparse.Namespace(**known), 300) is None
    assert not list(out.iterdir())


def test_a_run_without_a_file_has_no_tokenizer_to_copy(tmp_path: Path) -> None:
    arguments = argparse.Namespace(tokenizer_type="NullTokenizer")
    assert write_tokenizer(arguments, 64, tmp_path).startswith("no tokenizer files") and not list(tmp_path.iterdir())
    assert (end_of_text(arguments, 101), end_of_text(argparse.Namespace(), 101)) == (100, None)
    assert tokenizer_flags(tmp_path, 101) == "--tokenizer-type NullTokenizer --vocab-size 100"
