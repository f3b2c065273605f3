"""The tokenizer that --tokenizer-type names, its size and its end-of-document token."""

from __future__ import annotations

import os
from typing import Protocol

from megatron.config.data import TOKENIZER_TYPES
from megatron.tokenizer.errors import TokenizerError


class Tokenizer(Protocol):
    """Text to token ids.

    name: the --tokenizer-type. vocab_size: ids are in [0, vocab_size). eod: id of the end-of-document token.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int: ...

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``, without special tokens around them. Raises TokenizerError."""
        ...


def build_tokenizer(
    tokenizer_type: str,
    *,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
) -> Tokenizer:
    """Load a tokenizer; each type uses its own of the four options and ignores the others.

    Raises TokenizerError naming the flag and the file when one is missing, unreadable or of another kind.
    """
    if tokenizer_type == "GPT2BPETokenizer":
        from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer

        return GPT2BPETokenizer(*_gpt2_files(vocab_file, merge_file))
    if tokenizer_type in ("GPTSentencePieceTokenizer", "SentencePieceTokenizer"):
        from megatron.tokenizer import sentence_piece

        return getattr(sentence_piece, tokenizer_type)(
            _needed_file(tokenizer_type, "--tokenizer-model", tokenizer_model)
        )
    if tokenizer_type == "NullTokenizer":
        return NullTokenizer(vocab_size)
    raise TokenizerError(f"--tokenizer-type {tokenizer_type}: use one of {', '.join(TOKENIZER_TYPES)}")


def tokenizer_info(
    tokenizer_type: str,
    *,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
) -> tuple[int, int]:
    """``(vocab_size, eod)`` of the tokenizer that ``build_tokenizer`` would load, all that training needs of
    it.

    Reads no merges and imports no ``tokenizers``. Raises TokenizerError as ``build_tokenizer`` does, but does
    not look into the merge file.
    """
    if tokenizer_type == "GPT2BPETokenizer":
        from megatron.tokenizer.gpt2_bpe import read_vocab

        return read_vocab(_gpt2_files(vocab_file, merge_file)[0])
    tokenizer = build_tokenizer(
        tokenizer_type,
        tokenizer_model=tokenizer_model,
        vocab_file=vocab_file,
        merge_file=merge_file,
        vocab_size=vocab_size,
    )
    return tokenizer.vocab_size, tokenizer.eod


class NullTokenizer:
    """Text that consists of token ids, separated by white space; one more id ends documents."""

    name = "NullTokenizer"

    def __init__(self, vocab_size: int | None) -> None:
        if vocab_size is None or vocab_size < 1:
            raise TokenizerError(f"--vocab-size {vocab_size}: NullTokenizer needs the number of ids, 1 or more")
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(part) for part in text.split()]
        except ValueError as error:
            raise TokenizerError(f"NullTokenizer takes ids separated by white space: {error}") from error
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise TokenizerError(f"id {token}: not in [0, {self.vocab_size}): raise --vocab-size")
        return ids


def _gpt2_files(vocab_file: str | None, merge_file: str | None) -> tuple[str, str]:
    return (
        _needed_file("GPT2BPETokenizer", "--vocab-file", vocab_file),
        _needed_file("GPT2BPETokenizer", "--merge-file", merge_file),
    )


def _needed_file(tokenizer_type: str, flag: str, path: str | None) -> str:
    if path is None:
        raise TokenizerError(f"{flag} is missing: --tokenizer-type {tokenizer_type} needs it")
    if not os.path.isfile(path):
        what = "is a directory" if os.path.isdir(path) else "no such file"
        raise TokenizerError(f"{flag} {path}: {what}; correct the path: {tokenizer_type} needs this file")
    if not os.access(path, os.R_OK):
        raise TokenizerError(f"{flag} {path}: cannot be read: check its permissions")
    return path
