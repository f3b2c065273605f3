"""OTLP/JSON of OpenTelemetry: values and attributes, and the names under which records are kept in it.

The encoding is that of the OpenTelemetry protocol 1.x ("JSON Protobuf Encoding"): names in lowerCamelCase, ids of
traces and spans in hex, 64-bit integers as decimal strings. A file has one TracesData object per line, as the OTLP
file exporter writes them.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

PREFIX = "restart_trace."  # of attributes that hold a field of a record
END_PREFIX = f"{PREFIX}end."  # of those of an operation's end, whose begin and end are one span
TYPE, LINE, END_LINE = f"{PREFIX}type", f"{PREFIX}line", f"{PREFIX}end_line"
FILE, PROCESS, OFFSET_NS = f"{PREFIX}file", f"{PREFIX}process", f"{PREFIX}clock_offset_ns"
CLAIM = f"{PREFIX}claim"  # content of a cycle_CCC.json
_LARGEST = 1 << 63


def any_value(value: Any) -> dict[str, Any]:
    """An AnyValue of a JSON value; that of null is empty. Raises ValueError if a number exceeds 64 bits."""
    if value is None:
        return {}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(integer(value))}
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("a number that exceeds 64 bits")
        return {"doubleValue": value}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": attributes(value)}}
    if isinstance(value, list):
        return {"arrayValue": {"values": [any_value(item) for item in value]}}
    return {"stringValue": value}


def attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    """A list of KeyValue."""
    return [{"key": key, "value": any_value(value)} for key, value in values.items()]


def plain_value(value: Any) -> Any:
    """The JSON value of an AnyValue. Raises ValueError if it is none; an integer may be a number, too."""
    if value == {}:
        return None
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("no AnyValue")
    ((kind, held),) = value.items()
    if kind == "intValue":
        return integer(held)
    if kind == "doubleValue" and isinstance(held, (int, float)) and not isinstance(held, bool) and math.isfinite(held):
        return float(held)
    if kind == "kvlistValue" and isinstance(held, dict):
        return plain_attributes(held.get("values", []))
    if kind == "arrayValue" and isinstance(held, dict) and isinstance(held.get("values", []), list):
        return [plain_value(item) for item in held.get("values", [])]
    if (kind, type(held)) in (("boolValue", bool), ("stringValue", str)):
        return held
    raise ValueError(f"no AnyValue that is known: {kind}")


def plain_attributes(pairs: Any) -> dict[str, Any]:
    """The values of a list of KeyValue, by key. Raises ValueError if it is none."""
    if not isinstance(pairs, list) or not all(
        isinstance(pair, dict) and type(pair.get("key")) is str for pair in pairs
    ):
        raise ValueError("no list of attributes")
    return {pair["key"]: plain_value(pair.get("value")) for pair in pairs}


def integer(value: Any) -> int:
    """A 64-bit integer, which is a string of digits or a number. Raises ValueError if it is none."""
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and value.isascii() and len(value) < 21:
        value = int(value)
    if type(value) is int and abs(value) < _LARGEST:
        return value
    raise ValueError(f"{value!r:.60} is no 64-bit integer")


def identifier(num_bytes: int, *parts: object) -> str:
    """An id in hex that is the same whenever it is of the same parts."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[: 2 * num_bytes]
