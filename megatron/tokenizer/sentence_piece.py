"""SentencePiece models, with upstream's two treatments of special tokens."""

from __future__ import annotations

import re

from megatron.tokenizer.errors import TokenizerError, require_unicode


class GPTSentencePieceTokenizer:
    """The unchanged model; its end-of-sequence piece ends documents."""

    name = "GPTSentencePieceTokenizer"

    def __init__(self, model_file: str) -> None:
        self._processor = _load(model_file)
        self.vocab_size = self._processor.get_piece_size()
        self.eod = self._processor.eos_id()
        if self.eod < 0:
            raise TokenizerError(
                f"--tokenizer-model {model_file}: has no end-of-sequence piece (eos_id -1), which ends "
                "documents: train it with one, or use --tokenizer-type SentencePieceTokenizer"
            )

    def tokenize(self, text: str) -> list[int]:
        require_unicode(text)
        return self._processor.encode_as_ids(text)


class SentencePieceTokenizer:
    """The model and upstream's special tokens, which are added after its vocabulary if it lacks them.

    Ids as upstream's ``SentencePieceTokenizer`` gives them: ``<CLS>``, ``<SEP>``, ``<EOD>``, ``<MASK>``,
    padding, begin and end of sequence. Where such a token stands in a text, it becomes its id.
    """

    name = "SentencePieceTokenizer"

    def __init__(self, model_file: str) -> None:
        self._processor = _load(model_file)
        self.vocab_size = self._processor.get_piece_size()
        self._special: dict[str, int] = {}
        for token in ("<CLS>", "<SEP>", "<EOD>", "<MASK>"):
            self._add_special(token)
        for piece_id, fallback in (
            (self._processor.pad_id(), "<PAD>"),
            (self._processor.bos_id(), "<BOS>"),
            (self._processor.eos_id(), "<EOS>"),
        ):
            self._add_special(self._processor.id_to_piece(piece_id) if piece_id >= 0 else fallback)
        self.eod = self._special["<EOD>"]
        # The group keeps the special tokens among the parts of a split.
        self._pattern = re.compile("(" + "|".join(map(re.escape, self._special)) + ")")

    def _add_special(self, token: str) -> None:
        if token in self._special:
            return
        token_id = self._processor.piece_to_id(token)
        if self._processor.id_to_piece(token_id) != token:  # unknown pieces get the id of <unk>
            token_id = self.vocab_size
            self.vocab_size += 1
        self._special[token] = token_id

    def tokenize(self, text: str) -> list[int]:
        require_unicode(text)
        ids: list[int] = []
        for part in self._pattern.split(text):
            if part in self._special:
                ids.append(self._special[part])
            else:
                ids.extend(self._processor.encode_as_ids(part))
        return ids


def _load(model_file: str):
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_file=model_file)
    except (RuntimeError, OSError) as error:
        raise TokenizerError(
            f"--tokenizer-model {model_file}: not a complete SentencePiece model ({error}); give a tokenizer.model "
            "file, or --tokenizer-type GPT2BPETokenizer for vocab.json and merges.txt"
        ) from error
