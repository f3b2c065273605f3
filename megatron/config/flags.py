"""Declares which command-line flag sets a field of a configuration dataclass.

A configuration dataclass declares each field once, with `flag(default, "help")`; the parser is built from
these declarations, so a flag cannot be parsed and then dropped. Fields without `flag` are not flags: they
come from the environment or from another group.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

_KEY = "flag"
REQUIRED: Any = dataclasses.MISSING


class FlagSpec(NamedTuple):
    """One command-line flag: its spellings, help, the parser of its value (None for a switch), and the
    constant a switch stores."""

    names: tuple[str, ...]
    help: str
    parse: Callable[[str], Any] | None
    choices: tuple[str, ...] | None
    const: bool | None
    many: bool


_VALUE_TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "tuple[str, ...]": str,
    "tuple[int, ...]": int,
}


def flag(
    default: Any,
    help: str,
    *,
    names: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """A dataclass field set by a flag. Without `names` the flag is the field's name with dashes.

    A bool field without `parse` is a switch that stores the opposite of its default.
    """
    return dataclasses.field(default=default, metadata={_KEY: (names, help, choices, parse)})


def on_off(text: str) -> bool:
    """Parse the value of an {on,off} flag.

    Raises: argparse.ArgumentTypeError for anything else.
    """
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"expected on or off, got {text!r}")
    return text == "on"


def spec_of(field: dataclasses.Field[Any]) -> FlagSpec | None:
    """The flag that sets `field`, or None when no flag does."""
    if _KEY not in field.metadata:
        return None
    names, help_text, choices, parse = field.metadata[_KEY]
    names = names or (flag_name(field.name),)
    kind = str(field.type).removesuffix(" | None")
    if kind == "bool" and parse is None:
        return FlagSpec(names, help_text, None, None, not field.default, False)
    return FlagSpec(names, help_text, parse or _VALUE_TYPES[kind], choices, None, kind.startswith("tuple"))


def flag_name(dest: str) -> str:
    """The customary spelling of a flag from its argparse destination."""
    return "--" + dest.replace("_", "-")
