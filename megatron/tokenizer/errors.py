"""Errors of tokenizers."""

from __future__ import annotations


class TokenizerError(ValueError):
    """A tokenizer's file is missing or of the wrong kind, or a text cannot be tokenized."""


def require_unicode(text: str) -> None:
    """Raise TokenizerError when ``text`` has no UTF-8 form: JSON can write half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text is not valid Unicode (unpaired surrogate at character {error.start})"
        ) from error
