"""The index of a checkpoint of any layout: which file holds which elements of which parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing.engines.base import PlacedTensor
from megatron.checkpointing.engines.errors import CheckpointMismatchError
from megatron.checkpointing.reshard.runs import Copies, Runs, intersect, make_runs, part_runs, parts_of, subtract, union

Part = Mapping[str, Any]  # of a placement: a fragment, or the placement of a weight
_Key = tuple[Any, ...]

WEIGHT = "weight"  # the other kinds are those of the placements: "master", "exp_avg", "exp_avg_sq", ...


def kind_of(tensor: PlacedTensor) -> str:
    """WEIGHT, or what a flat tensor of ZeRO-1 holds."""
    return tensor.placement.get("kind", WEIGHT)


@dataclass(frozen=True)
class Source:
    """What a tensor is to give of a parameter; runs held in elements of the tensor."""

    tensor: PlacedTensor
    runs: Runs


class SourceIndex:
    """Finds the elements of a parameter. Of those that several ranks hold, the lowest rank's are taken.

    So of a tied embedding the first stage's masters and moments are, as its weight is the one in a file. What is
    computed for a parameter's masters holds for its moments, which lie alike, and is computed once.
    """

    def __init__(self, tensors: Iterable[PlacedTensor]) -> None:
        """`tensors` in the order of the ranks that saved them."""
        self._parts: dict[tuple[str, str], list[tuple[PlacedTensor, Part]]] = {}
        self._vocabulary: dict[str, int] = {}  # true size, of parameters that count tokens
        self._runs: dict[_Key, Runs] = {}
        self._new: dict[tuple[_Key, ...], list[Runs]] = {}
        self._common: dict[tuple[int, int], Copies] = {}
        for tensor in tensors:
            for part in parts_of(tensor.placement):
                if "unpadded" in part:
                    self._vocabulary[part["name"]] = part["unpadded"]
                self._parts.setdefault((kind_of(tensor), part["name"]), []).append((tensor, part))

    def of(self, kind: str, name: str) -> list[Source]:
        """The sources of a parameter's weights ("weight"), masters ("master") or moments; [] if there are none."""
        found = self._parts.get((kind, name), [])
        keys = tuple(_key(part) for _, part in found)
        if keys not in self._new:
            self._new[keys] = self._not_yet_held([part for _, part in found])
        return [Source(tensor, runs) for (tensor, _), runs in zip(found, self._new[keys], strict=True) if len(runs)]

    def runs_of(self, part: Part) -> Runs:
        """Where the elements lie of a part of a parameter, in the tensor that it is in; the same object each time."""
        key = _key(part)
        if key not in self._runs:
            self._runs[key] = part_runs(part)
        return self._runs[key]

    def in_common(self, source: Runs, target: Runs) -> Copies:
        """As `intersect`, of runs that this index has given."""
        key = id(source), id(target)  # they live as long as the index
        if key not in self._common:
            self._common[key] = intersect(source, target)
        return self._common[key]

    def check_vocabulary(self, name: str, size: int) -> None:
        """Raises CheckpointMismatchError if the parameter called `name` was saved with another true vocabulary."""
        if self._vocabulary.get(name, size) != size:
            raise CheckpointMismatchError(
                f"{name} has {self._vocabulary[name]} tokens in the checkpoint and {size} here; give the tokenizer, or "
                "the --vocab-size, of the run that saved it"
            )

    def kinds(self) -> set[str]:
        """What is known of some parameter."""
        return {kind for kind, _ in self._parts}

    def _not_yet_held(self, parts: Sequence[Part]) -> list[Runs]:
        """The elements of each part that no part before it has."""
        found: list[Runs] = []
        seen: set[_Key] = set()
        covered = nothing = make_runs([], [], [])
        for part in parts:
            same = _key(part)[:-1]  # wherever it begins in its tensor
            if same in seen:
                found.append(nothing)
                continue
            seen.add(same)
            found.append(subtract(self.runs_of(part), covered))
            covered = union(covered, found[-1])
        return found


def _key(part: Part) -> _Key:
    """Equal for parts with the same runs. The last item is where the part begins in its tensor."""
    fields = [part.get(key) for key in ("shape", "dim", "ranges", "start", "numel")]
    return str(fields), part.get("offset")
