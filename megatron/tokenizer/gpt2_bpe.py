"""GPT-2's byte-level BPE out of ``vocab.json`` and ``merges.txt``, run by the ``tokenizers`` library."""

from __future__ import annotations

import json

from megatron.tokenizer.errors import TokenizerError, require_unicode

_EOD = "<|endoftext|>"


class GPT2BPETokenizer:
    """Byte-level BPE: any text has ids that give it back. Special tokens in a text are plain text."""

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        self.vocab_size, self.eod = read_vocab(vocab_file)
        try:
            model = models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:  # the library raises Exception itself
            raise TokenizerError(
                f"--merge-file {merge_file}: {error}: give the merges.txt that belongs to --vocab-file {vocab_file}"
            ) from error
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        missing = [symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if model.token_to_id(symbol) is None]
        if missing:
            # The library would silently leave such bytes out of a text.
            raise TokenizerError(
                f"--vocab-file {vocab_file}: {len(missing)} of the 256 byte symbols are missing: not a "
                "byte-level BPE vocabulary: give GPT-2's vocab.json"
            )

    def tokenize(self, text: str) -> list[int]:
        require_unicode(text)
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def read_vocab(vocab_file: str) -> tuple[int, int]:
    """Number of entries of a ``vocab.json`` and the id of its ``<|endoftext|>``. Raises TokenizerError."""
    try:
        with open(vocab_file, encoding="utf-8") as file:
            vocab = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"--vocab-file {vocab_file}: {error}: give a vocab.json (token to id)") from error
    if not isinstance(vocab, dict) or _EOD not in vocab:
        raise TokenizerError(f"--vocab-file {vocab_file}: has no {_EOD}: give GPT-2's vocab.json (token to id)")
    if any(type(token) is not int or not 0 <= token < len(vocab) for token in vocab.values()):
        raise TokenizerError(f"--vocab-file {vocab_file}: its ids are not 0 to {len(vocab) - 1}: give a vocab.json")
    return len(vocab), vocab[_EOD]
