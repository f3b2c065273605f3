"""Strict JSON: refuses ambiguous or meaningless input that json.loads accepts.

For files that another program may have written or that may be damaged: configurations, manifests, directory owners.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, NoReturn

from restart_trace.regular import read_regular

_SHOWN = 60  # characters of a key or number in a message


class StrictJsonError(ValueError):
    """The input is not strict JSON; the message says why, without the name of the file."""


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text.

    Raises StrictJsonError if it is not UTF-8, not JSON, nested too deeply for Python, or contains a duplicate key, NaN,
    Infinity or a number that is too large for a float.
    """
    try:
        text = content if isinstance(content, str) else content.decode()
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite)
    except StrictJsonError:
        raise
    except UnicodeDecodeError as error:
        raise StrictJsonError(f"it is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise StrictJsonError("it is nested too deeply") from None
    except ValueError as error:
        raise StrictJsonError(str(error)) from None


def read_json(path: str | os.PathLike[str], limit: int) -> Any:
    """As `parse_json`, for the regular file at `path`. Also raises as `read_regular` does."""
    return parse_json(read_regular(path, limit))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise StrictJsonError(f"key {_shown(ascii(twice))} is given twice in one object")
    return found


def _no_constant(text: str) -> NoReturn:
    raise StrictJsonError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise StrictJsonError(f"{_shown(text)} is too large for a number")
    return value


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
