"""Tokenizers against small reference implementations, and their bad files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.tokenizer import TOKENIZER_TYPES, Tokenizer, TokenizerError, build_tokenizer, tokenizer_info

ROOT = Path(__file__).resolve().parents[4]
MODEL = str(ROOT / "tests" / "golden" / "upstream_run" / "data" / "tokenizer.model")
TEXT = "The quick brown fox's jumping over the lazy dogs, isn't it? 1234 times it's naïve.\n\n  Überall "


# --- GPT-2 BPE ---


@pytest.fixture(scope="module")
def bpe_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A byte-level BPE of 400 entries, trained on this file."""
    from tokenizers import ByteLevelBPETokenizer

    directory = tmp_path_factory.mktemp("bpe")
    trained = ByteLevelBPETokenizer(add_prefix_space=False)
    trained.train_from_iterator(
        [Path(__file__).read_text(encoding="utf-8")] * 2, vocab_size=400, special_tokens=["<|endoftext|>"]
    )
    trained.save_model(str(directory))
    return {"vocab_file": str(directory / "vocab.json"), "merge_file": str(directory / "merges.txt")}


@pytest.fixture(scope="module")
def bpe(bpe_files: dict[str, Any]) -> Tokenizer:
    return build_tokenizer("GPT2BPETokenizer", **bpe_files)


class ReferenceBPE:
    """GPT-2's encoder, written from its description: split into words, bytes to letters, merge by rank."""

    # GPT-2's pattern with \p{L} and \p{N} spelled for the standard library.
    words = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?\d+| ?(?:_|[^\s\w])+|\s+(?!\S)|\s+")

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        self.vocab = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        lines = Path(merge_file).read_text(encoding="utf-8").split("\n")[1:]
        self.ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines) if line}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self.letter = {byte: chr(byte) for byte in printable}
        self.letter |= {byte: chr(256 + n) for n, byte in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        return [self.vocab[part] for word in self.words.findall(text) for part in self.merged(word)]

    def merged(self, word: str) -> list[str]:
        parts = [self.letter[byte] for byte in word.encode("utf-8")]
        while True:
            pairs = [pair for pair in zip(parts[:-1], parts[1:], strict=True) if pair in self.ranks]
            if not pairs:
                return parts
            best = min(pairs, key=lambda pair: self.ranks[pair])
            joined: list[str] = []
            while parts:
                if tuple(parts[:2]) == best:
                    joined.append(parts[0] + parts[1])
                    parts = parts[2:]
                else:
                    joined.append(parts[0])
                    parts = parts[1:]
            parts = joined


def test_bpe_equals_the_reference(bpe: Tokenizer, bpe_files: dict[str, Any]) -> None:
    reference = ReferenceBPE(**bpe_files)
    for text in (TEXT, Path(__file__).read_text(encoding="utf-8"), "", " ", "\n\t \n", "a  b   c"):
        assert bpe.tokenize(text) == reference.encode(text)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("aetns 'sd\n\t_-.,01äßπ中🙂"), max_size=40))
def test_bpe_equals_the_reference_on_any_text(bpe: Tokenizer, bpe_files: dict[str, Any], text: str) -> None:
    assert bpe.tokenize(text) == ReferenceBPE(**bpe_files).encode(text)


def test_bpe_size_and_end_of_document(bpe: Tokenizer, bpe_files: dict[str, Any]) -> None:
    vocab = json.loads(Path(bpe_files["vocab_file"]).read_text(encoding="utf-8"))
    assert (bpe.name, bpe.vocab_size, bpe.eod) == ("GPT2BPETokenizer", 400, vocab["<|endoftext|>"])
    assert tokenizer_info("GPT2BPETokenizer", **bpe_files) == (bpe.vocab_size, bpe.eod)
    # As upstream's: in a text it is plain text, so no document can end another one.
    assert bpe.eod not in bpe.tokenize("<|endoftext|>")


def test_bpe_size_comes_without_the_library(bpe_files: dict[str, Any]) -> None:
    program = (
        "import sys; from megatron.tokenizer import tokenizer_info;"
        f"tokenizer_info('GPT2BPETokenizer', **{bpe_files!r}); sys.exit('tokenizers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("vocab", "message"),
    [
        ("not json", "--vocab-file .*vocab.json: .*give a vocab.json"),
        ("[1]", "has no <|endoftext|>"),
        ('{"a": 0}', "has no <|endoftext|>"),
        ('{"<|endoftext|>": 1}', "ids are not 0 to 0"),
        ('{"<|endoftext|>": "0"}', "ids are not 0 to 0"),
    ],
)
def test_a_bad_vocab_file_is_named(tmp_path: Path, bpe_files: dict[str, Any], vocab: str, message: str) -> None:
    (tmp_path / "vocab.json").write_text(vocab)
    for load in (build_tokenizer, tokenizer_info):
        with pytest.raises(TokenizerError, match=message.replace("|", r"\|")):
            load("GPT2BPETokenizer", vocab_file=str(tmp_path / "vocab.json"), merge_file=bpe_files["merge_file"])


def test_a_vocabulary_without_all_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "<|endoftext|>": 2}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(TokenizerError, match="254 of the 256 byte symbols are missing"):
        build_tokenizer(
            "GPT2BPETokenizer", vocab_file=str(tmp_path / "vocab.json"), merge_file=str(tmp_path / "merges.txt")
        )


@pytest.mark.parametrize("merges", ["a b c d\n", "#version: 0.2\nzz qq\n"])
def test_a_bad_merge_file_is_named(tmp_path: Path, bpe_files: dict[str, Any], merges: str) -> None:
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(TokenizerError, match=r"--merge-file .*merges.txt: .*belongs to --vocab-file"):
        build_tokenizer("GPT2BPETokenizer", vocab_file=bpe_files["vocab_file"], merge_file=str(tmp_path / "merges.txt"))


# --- SentencePiece ---


def test_sentencepiece_equals_the_library() -> None:
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=MODEL)
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=MODEL)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("GPTSentencePieceTokenizer", 500, 2)
    assert tokenizer_info("GPTSentencePieceTokenizer", tokenizer_model=MODEL) == (500, 2)
    text = "regokimu si supugu megolepo banakole."
    assert tokenizer.tokenize(text) == library.encode(text)
    assert tokenizer.tokenize("") == []


def test_sentencepiece_with_special_tokens() -> None:
    """The model has <unk>, <s>, </s> and no padding: five tokens are added behind its 500."""
    plain = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=MODEL)
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model=MODEL)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("SentencePieceTokenizer", 505, 502)
    first, second = plain.tokenize("gumu si"), plain.tokenize("regoki")
    assert tokenizer.tokenize("gumu si") == first
    text = "<CLS>gumu si<SEP><EOD>regoki<MASK><PAD><s></s>"
    assert tokenizer.tokenize(text) == [500, *first, 501, 502, *second, 503, 504, 1, 2]


def test_a_model_without_end_of_sequence_is_refused(tmp_path: Path) -> None:
    import sentencepiece

    words = " ".join(f"{a}{b}" for a in "bcdfg" for b in "aeiou")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([words] * 20), model_prefix=str(tmp_path / "m"), vocab_size=18, eos_id=-1, minloglevel=2
    )
    with pytest.raises(TokenizerError, match=r"m\.model: has no end-of-sequence piece"):
        build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=str(tmp_path / "m.model"))
    assert build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "m.model")).eod == 20


def test_a_file_that_is_no_model_is_named() -> None:
    for load in (build_tokenizer, tokenizer_info):
        with pytest.raises(TokenizerError, match=r"--tokenizer-model .*test_tokenizer\.py: .*SentencePiece"):
            load("GPTSentencePieceTokenizer", tokenizer_model=__file__)


# --- all ---


@pytest.mark.parametrize("load", [build_tokenizer, tokenizer_info])
@pytest.mark.parametrize(
    ("tokenizer_type", "flag", "option"),
    [
        ("GPT2BPETokenizer", "--vocab-file", "vocab_file"),
        ("GPT2BPETokenizer", "--merge-file", "merge_file"),
        ("GPTSentencePieceTokenizer", "--tokenizer-model", "tokenizer_model"),
        ("SentencePieceTokenizer", "--tokenizer-model", "tokenizer_model"),
    ],
)
def test_missing_files_are_named(
    tmp_path: Path, bpe_files: dict[str, Any], load: Any, tokenizer_type: str, flag: str, option: str
) -> None:
    given_files: dict[str, str | None] = {**bpe_files, "tokenizer_model": MODEL}
    for path, message in (
        (None, f"{flag} is missing"),
        (str(tmp_path / "nowhere"), f"{flag} .*nowhere: no such file"),
        (str(tmp_path), f"{flag} .*: is a directory"),
    ):
        with pytest.raises(TokenizerError, match=message):
            load(tokenizer_type, **{**given_files, option: path})


@pytest.mark.parametrize("load", [build_tokenizer, tokenizer_info])
@pytest.mark.parametrize("tokenizer_type", ["HFTokenizer", "BertWordPieceCase", ""])
def test_other_types_are_refused(load: Any, tokenizer_type: str) -> None:
    with pytest.raises(TokenizerError, match=f"--tokenizer-type {tokenizer_type}: use one of .*NullTokenizer"):
        load(tokenizer_type)


@pytest.mark.parametrize("tokenizer_type", [name for name in TOKENIZER_TYPES if name != "NullTokenizer"])
def test_half_a_surrogate_pair_is_refused(bpe_files: dict[str, Any], tokenizer_type: str) -> None:
    tokenizer = build_tokenizer(tokenizer_type, tokenizer_model=MODEL, **bpe_files)
    with pytest.raises(TokenizerError, match="unpaired surrogate at character 2"):
        tokenizer.tokenize("ab\ud800c")


def test_null_tokenizer() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("NullTokenizer", 101, 100)
    assert tokenizer_info("NullTokenizer", vocab_size=100) == (101, 100)
    assert tokenizer.tokenize("0 5  100\n7") == [0, 5, 100, 7]


@pytest.mark.parametrize("text", ["a", "1.5", "101", "-1"])
def test_null_tokenizer_refuses_other_text(text: str) -> None:
    with pytest.raises(TokenizerError, match="id"):
        build_tokenizer("NullTokenizer", vocab_size=100).tokenize(text)


@pytest.mark.parametrize("vocab_size", [None, 0, -5])
def test_null_tokenizer_needs_a_size(vocab_size: int | None) -> None:
    with pytest.raises(TokenizerError, match=f"--vocab-size {vocab_size}"):
        build_tokenizer("NullTokenizer", vocab_size=vocab_size)
