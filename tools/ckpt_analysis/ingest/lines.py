"""Decodes a damaged file line by line: every record that can be read, and a reason for each that cannot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from restart_trace.schema import RECORD_FIELDS, SCHEMA_VERSION, check_record


@dataclass(frozen=True)
class LineFault:
    """Why a line could not be read. `torn`: it is the last one and lacks its newline."""

    number: int
    reason: str
    torn: bool


def parse_json(line: bytes) -> Any:
    """What a line holds. Raises ValueError if it is no JSON (NaN is none), or nested deeper than any record is."""
    try:
        decoded = _DECODER.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
        if b"\\ud" not in line.lower():
            return decoded
        # JSON's escapes can name halves of characters, as of a file name that is not UTF-8: nothing could print them.
        return json.loads(json.dumps(decoded, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)  # json.loads would make one for each line


def decode_lines(text: bytes, column_types: dict[str, str]) -> tuple[list[dict[str, Any]], list[LineFault]]:
    """Return (records cut down to the columns of `column_types`, faults) of text that ends in a newline.

    A record also keeps its `values`, as JSON text. Process records, and those of other versions, are judged elsewhere.
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
    kind = decoded.get("type")
    fields = RECORD_FIELDS.get(kind, {}) if isinstance(kind, str) else {}
    if decoded.get("v") == SCHEMA_VERSION and kind != "process":
        faults = check_record({name: value for name, value in decoded.items() if not fields or name in fields})
        if faults:  # what is there and wrong tells more than what is not
            return {}, min(faults, key=lambda fault: fault.startswith("missing"))
    record = {name: value for name, value in decoded.items() if _fits(value, column_types.get(name))}
    if "values" in fields and "values" in decoded:
        record["values"] = json.dumps(decoded["values"])
    return record, None


def _fits(value: Any, json_type: str | None) -> bool:
    """Whether a column takes the value: nothing is promised of what another version wrote."""
    if json_type == "int":
        return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63
    if json_type == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return json_type is not None and isinstance(value, str if json_type == "str" else bool)
