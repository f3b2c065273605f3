"""Tokenizers by --tokenizer-type."""

from megatron.config.data import TOKENIZER_TYPES
from megatron.tokenizer.errors import TokenizerError
from megatron.tokenizer.tokenizer import Tokenizer, build_tokenizer, tokenizer_info

__all__ = ["TOKENIZER_TYPES", "Tokenizer", "TokenizerError", "build_tokenizer", "tokenizer_info"]
