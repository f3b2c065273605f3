"""Declares which command-line flag sets a field of a configuration dataclass.

A configuration dataclass declares each field once, with `flag(default, "help")`; the parser is built from
these declarations, so a flag cannot be parsed and then dropped. Fields without `flag` are not flags: they
come from the environment or from another group.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from megatron.config.errors import ConfigError, refuse, shown

_KEY = "flag"
REQUIRED: Any = dataclasses.MISSING


class Bounds(NamedTuple):
    """What a number may be: at least `least`, more than `above`, less than `below`; None: no such bound."""

    least: float | None = None
    above: float | None = None
    below: float | None = None

    def check(self, shown: str, value: float) -> None:
        """Raise ConfigError about the flag `shown` unless `value`, which may be NaN, is within."""
        least, above, below = self
        if below is not None and not (value >= (least or 0) and value < below):
            refuse(shown, value, f"must be in [{least or 0}, {below})")
        if least is not None and not value >= least:
            refuse(shown, value, f"must be at least {least}")
        if above is not None and not value > above:
            refuse(shown, value, f"must be greater than {above}")


class FlagSpec(NamedTuple):
    """One command-line flag: its spellings, help, the parser of its value (None for a switch), and the
    constant a switch stores. `needs`: the field without which it does nothing."""

    names: tuple[str, ...]
    help: str
    parse: Callable[[str], Any] | None
    choices: tuple[str, ...] | None
    const: bool | None
    many: bool
    bounds: Bounds
    needs: str | None


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
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    needs: str | None = None,
) -> Any:
    """A dataclass field set by a flag. Without `names` the flag is the field's name with dashes.

    A bool field without `parse` is a switch that stores the opposite of its default. FlagGroup checks `choices`, the
    bounds (see Bounds) and `needs` (see FlagSpec).
    """
    declared = (names, help, choices, parse, Bounds(least, above, below), needs)
    return dataclasses.field(default=default, metadata={_KEY: declared})


def on_off(text: str) -> bool:
    """Parse the value of an {on,off} flag.

    Raises: argparse.ArgumentTypeError for anything else.
    """
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"expected on or off, got {text!r}")
    return text == "on"


@functools.cache
def spec_of(field: dataclasses.Field[Any]) -> FlagSpec | None:
    """The flag that sets `field`, or None when no flag does."""
    if _KEY not in field.metadata:
        return None
    names, help_text, choices, parse, bounds, needs = field.metadata[_KEY]
    names = names or (flag_name(field.name),)
    kind = str(field.type).removesuffix(" | None")
    if kind == "bool" and parse is None:
        return FlagSpec(names, help_text, None, None, not field.default, False, bounds, needs)
    many = kind.startswith("tuple")
    return FlagSpec(names, help_text, parse or _VALUE_TYPES[kind], choices, None, many, bounds, needs)


def flag_name(dest: str) -> str:
    """The customary spelling of a flag from its argparse destination."""
    return "--" + dest.replace("_", "-")


class FlagGroup:
    """Base of the dataclasses whose fields `flag` declares."""

    def check_values(self: Any) -> None:
        """Raise ConfigError for a value that its declaration excludes. A value of None is none."""
        for field in dataclasses.fields(self):
            spec, value = spec_of(field), getattr(self, field.name)
            if spec is None or value is None or value == ():
                continue
            if spec.choices and value not in spec.choices:
                refuse(spec.names[0], value, f"choose one of {', '.join(spec.choices)}")
            if spec.needs and value is not False and getattr(self, spec.needs) in (None, False):
                given = spec.names[0] + ("" if value is True else f" {shown(value)}:")
                raise ConfigError(f"{given} does nothing without {self._example(spec.needs)}: add it or drop the flag")
            if isinstance(value, int | float):
                spec.bounds.check(spec.names[0], value)
                if not math.isfinite(value):
                    refuse(spec.names[0], value, "must be a finite number")

    def _example(self: Any, name: str) -> str:
        """A flag that was not given, with a value if it takes one: "--save DIR"."""
        spec = next(spec_of(field) for field in dataclasses.fields(self) if field.name == name)
        if spec is None or spec.parse is None:
            return flag_name(name)
        value = "N" if spec.parse in (int, float) else "DIR"
        return f"{flag_name(name)} {spec.choices[0] if spec.choices else value}"

    def refuse(self: Any, name: str, why: str) -> NoReturn:
        """Raise ConfigError "<flag> <value>: <why>" about the field `name`."""
        spec = next(spec_of(field) for field in dataclasses.fields(self) if field.name == name)
        refuse(spec.names[0] if spec else flag_name(name), getattr(self, name), why)
