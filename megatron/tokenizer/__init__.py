"""Tokenizers by --tokenizer-type."""

from megatron.tokenizer.tokenizer import (
    TOKENIZER_TYPES,
    Tokenizer,
    TokenizerError,
    build_tokenizer,
    tokenizer_info,
    vocab_size_with_padding,
)

__all__ = [
    "TOKENIZER_TYPES",
    "Tokenizer",
    "TokenizerError",
    "build_tokenizer",
    "tokenizer_info",
    "vocab_size_with_padding",
]
