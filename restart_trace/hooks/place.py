"""Where a rank stands: from DeepSpeed's grid or device mesh, or the program's mpu, and its expert groups."""

from __future__ import annotations

from typing import Any

# axis -> the names that a grid, a device mesh or an mpu has for it, the better known first
_NAMES = {
    "tp": ("tensor_model_parallel", "model_parallel", "slice_parallel", "tensor_parallel"),
    "pp": ("pipeline_model_parallel", "pipe_parallel"),
    "dp": ("data_parallel",),
    "cp": ("context_parallel", "sequence_parallel"),
    "ep": ("expert_model_parallel", "expert_parallel"),
}
_ALWAYS = ("tp", "pp", "dp")


def place_of(engine: Any, groups: Any) -> dict[str, Any] | None:
    """Fields of the coordinates record of DeepSpeed's `engine`; `groups`: deepspeed.utils.groups.

    None if it has no grid, device mesh, mpu and experts: then all that is known of a rank is its number.
    """
    mesh = getattr(engine, "mesh_device", None)
    source = getattr(engine, "grid", None) or getattr(engine, "mpu", None)
    found: dict[str, tuple[int, int]] = {}
    for axis, names in _NAMES.items():
        place = _in_mesh(mesh, names) or _by_functions(source, names)
        if place is not None:
            found[axis] = place
    if getattr(engine, "has_moe_layers", False):
        largest = groups._get_max_expert_size_name()
        found["ep"] = groups._get_expert_parallel_rank(largest), groups._get_expert_parallel_world_size(largest)
    if not found:
        return None
    if "dp" not in found:
        found["dp"] = _data_parallel(engine, groups, found.get("cp", (0, 1))[1])
    layout = {axis: size for axis in _NAMES if (size := found.get(axis, (0, 1))[1]) > 1 or axis in _ALWAYS}
    return {axis: found.get(axis, (0, 1))[0] for axis in layout} | {"layout": layout}


def _in_mesh(mesh: Any, names: tuple[str, ...]) -> tuple[int, int] | None:
    """(coordinate, size) in a torch.distributed.DeviceMesh; None without a dimension of these names."""
    if mesh is None:
        return None
    for dimension, name in enumerate(mesh.mesh_dim_names or ()):
        if name in names:
            return int(mesh.get_local_rank(dimension)), int(mesh.size(dimension))
    return None


def _by_functions(source: Any, names: tuple[str, ...]) -> tuple[int, int] | None:
    """(coordinate, size) by the first name that a grid or an mpu knows; None if it knows none."""
    of_sequence = getattr(source, "get_sequence_parallel_rank", None)
    for name in names:
        size = getattr(source, f"get_{name}_world_size", None)
        rank = getattr(source, f"get_{name}_rank", None)
        if rank is of_sequence and name != "sequence_parallel":  # DeepSpeed's mpu for sequences has it by both names
            continue
        if size is not None and rank is not None:
            return int(rank()), int(size())
    return None


def _data_parallel(engine: Any, groups: Any, sequence_size: int) -> tuple[int, int]:
    """(coordinate, size) where nobody tells: ranks that share a sequence are neighbours in DeepSpeed's mpu for that."""
    rank, size = groups._get_sequence_data_parallel_rank(), groups._get_sequence_data_parallel_world_size()
    return int(rank) // sequence_size, int(size) // sequence_size
