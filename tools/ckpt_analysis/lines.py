"""Reads one damaged file line by line: every record that can be read, and a reason for each that cannot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MATCHES = {"int": int, "float": (int, float), "str": str, "bool": bool}


@dataclass(frozen=True)
class LineFault:
    """Why a line could not be read. `torn`: it is the last one and lacks its newline."""

    number: int
    reason: str
    torn: bool


def read_lines(path: Path, column_types: dict[str, str]) -> tuple[list[dict[str, Any]], list[LineFault]]:
    """Return (records cut down to the columns of `column_types`, faults).

    `column_types` maps a field name to "int", "float", "str" or "bool". Raises OSError if the file cannot be
    read.
    """
    records: list[dict[str, Any]] = []
    faults: list[LineFault] = []
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            torn = not line.endswith(b"\n")
            if not line.strip():
                continue
            try:
                decoded = json.loads(line)
            except ValueError:  # includes UnicodeDecodeError
                reason = "cut short" if torn else "not a JSON record"
                faults.append(LineFault(number, reason, torn))
                continue
            record, reason = _typed(decoded, column_types)
            if reason:
                faults.append(LineFault(number, reason, False))
            else:
                records.append(record)
    return records, faults


def _typed(decoded: object, column_types: dict[str, str]) -> tuple[dict[str, Any], str | None]:
    if not isinstance(decoded, dict):
        return {}, "not a JSON object"
    record: dict[str, Any] = {}
    for name, json_type in column_types.items():
        value = decoded.get(name)
        if value is None:
            continue
        if not isinstance(value, _MATCHES[json_type]) or (json_type == "int" and isinstance(value, bool)):
            return {}, f"field {name} is not {json_type}: {value!r}"
        if json_type == "int" and not -(1 << 63) <= value < 1 << 63:
            return {}, f"field {name} is out of range: {value}"
        record[name] = value
    return record, None
