"""Text of traces and logs made safe for where it is shown: tags, file names and errors may hold any character.

Each kind of output has one function here. Renderers apply it to all that they are given, not column by column.
"""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")

# Control characters (C0, C1), what turns the direction of text or is invisible (bidi overrides and isolates, zero
# widths, tags), line and paragraph separators, halves of characters.
_HIDDEN = "\\x00-\\x1f\\x7f-\\x9f\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f"
_HIDDEN += "\\ufeff\\ufff9-\\ufffb"
_FOR_PYTHON = re.compile(f"[{_HIDDEN}\ud800-\udfff\U000e0000-\U000e007f]")
_NUMBER = re.compile(r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$")
# A spreadsheet computes cells that begin so (OWASP, CSV Injection); tab and carriage return are escaped anyway.
_FORMULA = ("=", "+", "-", "@")


def visible(text: str) -> str:
    r"""Text on one line whose control and direction characters are shown as escapes, such as \x1b, and do nothing."""
    return text if text.isascii() and text.isprintable() else _FOR_PYTHON.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def markdown(text: str) -> str:
    """Text within a line or cell of Markdown: `visible`, without effect as HTML, a link, code or a column's end."""
    return re.sub(r"([|\[\]`*])", r"\\\1", html.escape(visible(text), quote=False))


def csv_cell(value: Any) -> Any:
    """A cell of CSV: text is `visible`, and gets a ' in front where a spreadsheet would take it for a formula."""
    if not isinstance(value, str):
        return value
    text = visible(value)
    is_formula = text.startswith(_FORMULA) and not _NUMBER.match(text)
    return f"'{text}" if is_formula else text


def shown(value: Value, change: Callable[[str], str] = visible) -> Value:
    """`value` with every text in it changed: dataclasses, lists, tuples, dicts with their keys, and paths."""
    return _shown(value, change)


def _shown(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Path):
        return Path(change(str(value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: _shown(entry, change) for name, entry in fields.items()})
    if isinstance(value, dict):
        return {_shown(name, change): _shown(entry, change) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_shown(item, change) for item in value)
    return value
