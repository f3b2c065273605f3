"""Strict JSON: what json.loads lets pass though it means two things, or nothing, is refused.

For files that another program, or damage, may have written: configurations, manifests, owners of directories.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, NoReturn

from restart_trace.regular import read_regular

_SHOWN = 60  # characters of a key or number in a message


class StrictJsonError(ValueError):
    """What was read is no JSON in the strict sense; the message says why, without naming the file."""


def parse_json(content: str | bytes) -> Any:
    """The value that `content` says.

    Raises StrictJsonError if it is not UTF-8, not JSON, nested deeper than Python goes, or holds an object with a key
    twice, NaN, Infinity or a number that no float can be.
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
    """As `parse_json`, of the regular file at `path`. Raises as `read_regular`, too."""
    return parse_json(read_regular(path, limit))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise StrictJsonError(f"key {_shown(ascii(twice))} is given twice in one object")
    return found


def _no_constant(text: str) -> NoReturn:
    raise StrictJsonError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise StrictJsonError(f"{_shown(text)} is more than a number can be")
    return value


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
