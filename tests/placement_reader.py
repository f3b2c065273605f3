"""Puts full parameters together from the tensors of all ranks and their placements, and from nothing else.

Written from the description of the format, by index arithmetic, and independent of the code under test.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.checkpointing.engines.lazy.placement_check import check_placement


@dataclass
class Assembled:
    """One parameter, its master or a moment of it. `seen`: how often each element was there, flattened."""

    values: torch.Tensor
    seen: torch.Tensor
    unpadded: int | None = None

    def put(self, positions: torch.Tensor, values: torch.Tensor, where: str, rounding: float) -> None:
        """Lay `values` at flat `positions`. What is there already stays, and must be the same bit for bit.

        With `rounding` it may differ by so much of the largest.
        """
        flat = self.values.view(-1)
        known = self.seen[positions] > 0
        there, replica = flat[positions][known], values[known]
        if rounding and replica.numel():
            difference = (there - replica).abs().max() / replica.abs().max()
            assert difference <= rounding, f"{where}: replicas differ by {difference}"
        else:
            assert torch.equal(bits(there), bits(replica)), f"{where}: replicas differ"
        flat[positions[~known]] = values[~known]
        self.seen[positions] += 1


@dataclass
class Reader:
    """Collects tensors; `parameters` is by (kind, global name), kind "weight" for weights.

    `rounding`: name -> how far copies of its master and moments may be apart, in parts of the largest.
    """

    rounding: dict[str, float] = field(default_factory=dict)
    parameters: dict[tuple[str, str], Assembled] = field(default_factory=dict)
    padding: int = 0  # elements, of all flat tensors
    cut: Counter[str] = field(default_factory=Counter)  # fragments that are not a whole slice, by name

    def add(self, tensor: torch.Tensor, placement: dict[str, Any]) -> None:
        check_placement(json.loads(json.dumps(placement)), tensor.numel())  # a load would take it
        if "fragments" not in placement:
            positions = positions_of(placement)
            assert tensor.shape == positions.shape, placement["name"]
            self._put("weight", placement, positions.reshape(-1), tensor.reshape(-1))
            return
        assert tensor.dim() == 1
        covered = torch.zeros(len(tensor), dtype=torch.int64)
        for fragment in placement["fragments"]:
            start, numel, offset = fragment["start"], fragment["numel"], fragment["offset"]
            positions = positions_of(fragment)
            assert list(positions.shape) == fragment["local_shape"]
            assert start + numel <= positions.numel() and offset + numel <= len(tensor)
            self.cut[fragment["name"]] += numel < positions.numel()
            mine = positions.reshape(-1)[start : start + numel]
            self._put(placement["kind"], fragment, mine, tensor[offset : offset + numel])
            covered[offset : offset + numel] += 1
        assert not (covered > 1).any(), "fragments overlap"
        assert int((covered == 0).sum()) == placement["padding"]
        self.padding += placement["padding"]

    def _put(self, kind: str, part: dict[str, Any], positions: torch.Tensor, values: torch.Tensor) -> None:
        key = kind, part["name"]
        found = self.parameters.get(key)
        if found is None:
            whole = torch.zeros(part["shape"], dtype=values.dtype)
            found = Assembled(whole, torch.zeros(whole.numel(), dtype=torch.int64), part.get("unpadded"))
            self.parameters[key] = found
        assert list(found.values.shape) == part["shape"] and found.unpadded == part.get("unpadded")
        rounding = 0.0 if kind == "weight" else self.rounding.get(part["name"], 0.0)
        found.put(positions, values, f"{kind} of {part['name']}", rounding)

    def whole(self, kind: str) -> dict[str, torch.Tensor]:
        """Name -> full tensor. Every element must have been there, and all of a parameter equally often."""
        found = {name: parameter for (of, name), parameter in self.parameters.items() if of == kind}
        for name, parameter in found.items():
            times = parameter.seen.unique().tolist()
            assert len(times) == 1 and times[0] > 0, f"{kind} of {name}: its elements were seen {times} times"
        return {name: parameter.values for name, parameter in found.items()}

    def replicas(self, kind: str) -> dict[str, int]:
        """Name -> how many copies of the parameter there were."""
        return {name: int(found.seen[0]) for (of, name), found in self.parameters.items() if of == kind}


def positions_of(part: dict[str, Any]) -> torch.Tensor:
    """For each element of a local tensor, its flat position in the full parameter; shape of the local tensor."""
    shape = part["shape"]
    positions = torch.arange(torch.Size(shape).numel()).reshape(shape)
    if part["dim"] is None:
        assert part["ranges"] is None
        return positions
    pieces = [positions.narrow(part["dim"], start, stop - start) for start, stop in part["ranges"]]
    return torch.cat(pieces, dim=part["dim"])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a 1-D tensor: NaN equals itself here, and -0.0 is not 0.0."""
    return tensor.contiguous().view(torch.uint8)
