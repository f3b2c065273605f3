"""Decodes a damaged file line by line: every record that can be read, and a reason for each that cannot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_MATCHES = {"int": int, "float": (int, float), "str": str, "bool": bool}


@dataclass(frozen=True)
class LineFault:
    """Why a line could not be read. `torn`: it is the last one and lacks its newline."""

    number: int
    reason: str
    torn: bool


def parse_json(line: bytes) -> Any:
    """What a line holds. Raises ValueError if it is no JSON, or nested deeper than any record is."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def decode_lines(text: bytes, column_types: dict[str, str]) -> tuple[list[dict[str, Any]], list[LineFault]]:
    """Return (records cut down to the columns of `column_types`, faults) of text that ends in a newline.

    `column_types` maps a field name to "int", "float", "str" or "bool". A record also keeps its `values`, as
    JSON text.
    """
    records: list[dict[str, Any]] = []
    faults: list[LineFault] = []
    for number, line in enumerate(text.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            decoded = parse_json(line)
        except ValueError:  # includes UnicodeDecodeError
            faults.append(LineFault(number, "not a JSON record", False))
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
    if "values" in decoded:
        record["values"] = json.dumps(decoded["values"])
    return record, None
