"""The error that ends a command with one line and exit status 2."""

from __future__ import annotations


class CouldNotRunError(ValueError):
    """A command cannot do what was asked; the message names the flag or file, the value and the fix."""
