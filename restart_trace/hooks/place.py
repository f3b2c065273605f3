"""Where a rank stands: from DeepSpeed's grid, or the mpu that the program gave it."""

from __future__ import annotations

from typing import Any

# axis -> the names that a grid or an mpu has for it, the better known first
_NAMES = {
    "tp": ("tensor_model_parallel", "model_parallel", "slice_parallel"),
    "pp": ("pipeline_model_parallel", "pipe_parallel"),
    "dp": ("data_parallel",),
    "cp": ("context_parallel", "sequence_parallel"),
    "ep": ("expert_model_parallel", "expert_parallel"),
}
_ALWAYS = ("tp", "pp", "dp")


def place_of(engine: Any) -> dict[str, Any] | None:
    """Fields of the coordinates record of DeepSpeed's `engine`; None if it has neither grid nor mpu."""
    source = getattr(engine, "grid", None) or getattr(engine, "mpu", None)
    if source is None:
        return None
    place: dict[str, Any] = {}
    layout: dict[str, int] = {}
    for axis, names in _NAMES.items():
        at, size = _on_axis(source, names)
        if size > 1 or axis in _ALWAYS:
            place[axis], layout[axis] = at, size
    return place | {"layout": layout}


def _on_axis(source: Any, names: tuple[str, ...]) -> tuple[int, int]:
    """(coordinate, size) by the first name that the source knows; (0, 1) if it knows none."""
    for name in names:
        size = getattr(source, f"get_{name}_world_size", None)
        rank = getattr(source, f"get_{name}_rank", None)
        if size is not None and rank is not None:
            return int(rank()), int(size())
    return 0, 1
