"""The error of a conversion."""

from __future__ import annotations


class ConversionError(ValueError):
    """A checkpoint or a model directory cannot be converted; the message names flag or file, value and fix."""
