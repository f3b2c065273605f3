"""The one exception of the configuration layer, and the helpers that raise it."""

from __future__ import annotations

from typing import NoReturn

REPEATED = 65
"""Exit code of a start that would end with the error of the starts before it: EX_DATAERR of sysexits.h."""


class ConfigError(ValueError):
    """A flag, a file or a combination that cannot be run; the message says which, its value and the fix."""


def refuse(flag: str, value: object, why: str) -> NoReturn:
    """Raise ConfigError "<flag> <value>: <why>"."""
    raise ConfigError(f"{flag} {shown(value)}: {why}")


def shown(value: object) -> str:
    """A flag's value as on the command line."""
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def require_at_least(flag: str, value: float | None, least: float) -> None:
    """Raise ConfigError unless `value` is None or at least `least`."""
    if value is not None and not value >= least:
        refuse(flag, value, f"must be at least {least}")


def require_one_of(flag: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        refuse(flag, value, f"choose one of {', '.join(choices)}")
