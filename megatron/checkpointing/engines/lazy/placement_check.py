"""Validates placements (checkpointing.state.shard_metadata), by which loads onto another layout compute offsets."""

from __future__ import annotations

import math
from typing import Any

_MOST = 1 << 56  # elements of a parameter: products with sizes of elements stay within 64 bits


def check_placement(placement: Any, numel: int) -> None:
    """Raises ValueError if `placement` does not fit a tensor of `numel` elements."""
    if type(placement) is not dict:
        raise ValueError(f"a placement that is not an object: {ascii(placement)[:80]}")
    if "fragments" not in placement:
        if _check_part(placement) != numel:
            raise ValueError(f"a placement with another number of elements than the tensor's {numel}")
        return
    if type(placement.get("kind")) is not str or type(placement["fragments"]) is not list:
        raise ValueError("a placement with an invalid `kind` or invalid `fragments`")
    end = 0
    for fragment in placement["fragments"]:
        if type(fragment) is not dict:
            raise ValueError("a fragment that is not an object")
        held = _check_part(fragment)
        offset, start, count = (_integer(fragment.get(key)) for key in ("offset", "start", "numel"))
        if math.prod(_integers(fragment.get("local_shape"))) != held or start + count > held:
            raise ValueError("a fragment that lies beyond its part of the parameter")
        if offset < end or offset + count > numel:
            raise ValueError("fragments that overlap, or lie beyond the tensor")
        end = offset + count


def _check_part(part: dict[str, Any]) -> int:
    """The number of elements of the parameter that a rank holds by `part`."""
    if type(part.get("name")) is not str:
        raise ValueError("a placement without the name of a parameter")
    shape, dim, ranges = _integers(part.get("shape")), part.get("dim"), part.get("ranges")
    if math.prod(shape) > _MOST or _integer(part.get("unpadded", 0)) > _MOST:
        raise ValueError(f"a parameter of shape {str(shape)[:80]}")
    if dim is None or ranges is None:
        if dim is not ranges:
            raise ValueError("a placement with one of `dim` and `ranges`")
        return math.prod(shape)
    if _integer(dim) >= len(shape) or type(ranges) is not list:
        raise ValueError(f"a placement along dimension {ascii(dim)[:80]} of {len(shape)}")
    width = 0
    for pair in ranges:
        first, last = _integers(pair) if type(pair) is list and len(pair) == 2 else (1, 0)
        if not first <= last <= shape[dim]:
            raise ValueError(f"a range {ascii(pair)[:80]} of a dimension of {shape[dim]}")
        width += last - first
    return math.prod(shape[:dim]) * width * math.prod(shape[dim + 1 :])


def _integer(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{ascii(value)[:80]} in place of a number of elements")
    return value


def _integers(values: Any) -> list[int]:
    if type(values) is not list:
        raise ValueError(f"{ascii(values)[:80]} in place of numbers of elements")
    return [_integer(value) for value in values]
