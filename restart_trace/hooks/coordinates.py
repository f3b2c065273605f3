"""Coordinates of a rank: from DeepSpeed's grid or device mesh, the program's mpu, expert groups, or torch's FSDP."""

from __future__ import annotations

import math
from typing import Any

from restart_trace.schema import AXES

# axis -> its names in a grid, a device mesh or an mpu, the most common first
_NAMES = {
    "tp": ("tensor_model_parallel", "model_parallel", "slice_parallel", "tensor_parallel", "tp"),
    "pp": ("pipeline_model_parallel", "pipe_parallel", "pp"),
    "dp": ("data_parallel",),
    "cp": ("context_parallel", "sequence_parallel", "cp"),
    "ep": ("expert_model_parallel", "expert_parallel"),
}
_ALWAYS = ("tp", "pp", "dp")
_Coordinate = tuple[int, int]  # coordinate, size


def coordinates_of(engine: Any, groups: Any) -> dict[str, Any] | None:
    """Fields of the coordinates record of DeepSpeed's `engine`; `groups`: deepspeed.utils.groups.

    None if it has no grid, device mesh, mpu or experts: then only the rank's number is known.
    """
    mesh = getattr(engine, "mesh_device", None)
    source = getattr(engine, "grid", None) or getattr(engine, "mpu", None)
    found: dict[str, _Coordinate] = {}
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
    return _fields(found)


def coordinates_in_mesh(mesh: Any, dims: Any, rank: int, world_size: int) -> dict[str, Any] | None:
    """Fields of the coordinates record of a rank whose module torch's fully_shard shards over `mesh`.

    `dims`: a DataParallelMeshDims, which says which dimensions of the mesh shard and replicate; None: the last one
    shards, and the first of two replicates. Returns None if the mesh does not determine the coordinates of all ranks.
    """
    if mesh is None:  # over all ranks
        return _fields({"fsdp": (rank, world_size)})
    names = list(mesh.mesh_dim_names or ())
    sharded, replicated = [mesh.ndim - 1], list(range(mesh.ndim - 1))
    if dims is not None:
        sharded, replicated = ([names.index(name) for name in of] for of in (dims.shard_names, dims.replicate_names))
    if len(sharded) != 1 or len(replicated) > 1:
        return None
    found: dict[str, _Coordinate] = {"fsdp": _in_dimension(mesh, sharded[0])}
    if replicated:
        found["dp"] = _in_dimension(mesh, replicated[0])
    root = mesh._get_root_mesh()  # `mesh` may be a slice of it
    for axis in ("tp", "pp", "cp"):
        place = _in_mesh(root, _NAMES[axis])
        if place is not None:
            found[axis] = place
    return _fields(found) if math.prod(size for _, size in found.values()) >= world_size else None


def coordinates_in_groups(strategy: str, group: Any, replicas: Any, world_size: int) -> dict[str, Any] | None:
    """As `coordinates_in_mesh`, for FullyShardedDataParallel: its strategy's name, process group, group of replicas."""
    place = group.rank(), group.size()
    found = {"dp": place} if strategy == "NO_SHARD" else {"fsdp": place}
    if strategy.startswith(("HYBRID", "_HYBRID")):
        found["dp"] = replicas.rank(), replicas.size()
    return _fields(found) if math.prod(size for _, size in found.values()) >= world_size else None


def _fields(found: dict[str, _Coordinate]) -> dict[str, Any]:
    axes = [axis for axis in AXES if axis in _ALWAYS or found.get(axis, (0, 1))[1] > 1]
    places = {axis: found.get(axis, (0, 1)) for axis in axes}
    layout = {axis: size for axis, (_, size) in places.items()}
    return {axis: at for axis, (at, _) in places.items()} | {"layout": layout}


def _in_mesh(mesh: Any, names: tuple[str, ...]) -> _Coordinate | None:
    """(coordinate, size) in a torch.distributed.DeviceMesh; None if no dimension has one of these names."""
    if mesh is None:
        return None
    for dimension, name in enumerate(mesh.mesh_dim_names or ()):
        if name in names:
            return _in_dimension(mesh, dimension)
    return None


def _in_dimension(mesh: Any, dimension: int) -> _Coordinate:
    return int(mesh.get_local_rank(dimension)), int(mesh.size(dimension))


def _by_functions(source: Any, names: tuple[str, ...]) -> _Coordinate | None:
    """(coordinate, size) by the first of these names that a grid or an mpu has; None if it has none."""
    of_sequence = getattr(source, "get_sequence_parallel_rank", None)
    for name in names:
        size = getattr(source, f"get_{name}_world_size", None)
        rank = getattr(source, f"get_{name}_rank", None)
        if rank is of_sequence and name != "sequence_parallel":  # DeepSpeed's mpu for sequences has both names
            continue
        if size is not None and rank is not None:
            return int(rank()), int(size())
    return None


def _data_parallel(engine: Any, groups: Any, sequence_size: int) -> _Coordinate:
    """(coordinate, size) if no object has them: DeepSpeed's mpu for sequences puts ranks of a sequence side by side."""
    rank, size = groups._get_sequence_data_parallel_rank(), groups._get_sequence_data_parallel_world_size()
    return int(rank) // sequence_size, int(size) // sequence_size
