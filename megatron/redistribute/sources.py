"""Which file has which elements of which parameter: the index of a checkpoint, whatever layout it was saved on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from megatron.checkpoint_engines.base import PlacedTensor
from megatron.checkpoint_engines.errors import CheckpointMismatchError
from megatron.redistribute.runs import Runs, placement_runs, subtract, union

WEIGHT = "weight"  # the other kinds are those of the placements: "master", "exp_avg", "exp_avg_sq", ...


def kind_of(tensor: PlacedTensor) -> str:
    """WEIGHT, or what a flat tensor of ZeRO-1 holds."""
    return tensor.placement.get("kind", WEIGHT)


@dataclass(frozen=True)
class Source:
    """What a tensor is to give of a parameter; runs held in elements of the tensor."""

    tensor: PlacedTensor
    runs: Runs


@dataclass
class _Parameter:
    sources: list[Source] = field(default_factory=list)
    covered: Runs | None = None
    seen: set[str] = field(default_factory=set)  # parts that an earlier tensor has, too


class SourceIndex:
    """Finds the elements of a parameter. Of those that several ranks hold, the lowest rank's are taken.

    So of a tied embedding the first stage's masters and moments are, as its weight is the one in a file.
    """

    def __init__(self, tensors: Iterable[PlacedTensor]) -> None:
        """`tensors` in the order of the ranks that saved them."""
        self._parameters: dict[tuple[str, str], _Parameter] = {}
        self._vocabulary: dict[str, int] = {}  # true size, of parameters that count tokens
        for tensor in tensors:
            for placed in tensor.placement.get("fragments", [tensor.placement]):
                if "unpadded" in placed:
                    self._vocabulary[placed["name"]] = placed["unpadded"]
            for part, name, runs in _parts(tensor):
                self._add(
                    self._parameters.setdefault((kind_of(tensor), name), _Parameter()), tensor, part, runs
                )

    @staticmethod
    def _add(parameter: _Parameter, tensor: PlacedTensor, part: str, runs: Runs) -> None:
        if part in parameter.seen:
            return
        parameter.seen.add(part)
        if parameter.covered is not None:
            runs = subtract(runs, parameter.covered)
        if len(runs):
            parameter.sources.append(Source(tensor, runs))
            parameter.covered = runs if parameter.covered is None else union(parameter.covered, runs)

    def of(self, kind: str, name: str) -> list[Source]:
        """The sources of a parameter's weights ("weight"), masters ("master") or moments; [] if there are none."""
        found = self._parameters.get((kind, name))
        return found.sources if found else []

    def check_vocabulary(self, name: str, size: int) -> None:
        """Raises CheckpointMismatchError if the parameter called `name` was saved with another true vocabulary."""
        if self._vocabulary.get(name, size) != size:
            raise CheckpointMismatchError(
                f"{name} has {self._vocabulary[name]} tokens in the checkpoint and {size} here; give the tokenizer, or "
                "the --vocab-size, of the run that saved it"
            )

    def kinds(self) -> set[str]:
        """What is known of some parameter."""
        return {kind for kind, _ in self._parameters}


def _parts(tensor: PlacedTensor) -> Iterator[tuple[str, str, Runs]]:
    """(what tells equal parts of a parameter, its name, runs) for each parameter in `tensor`."""
    runs = placement_runs(tensor.placement)
    parts = tensor.placement.get("fragments", [tensor.placement])
    for part in parts:
        told = [part.get(key) for key in ("ranges", "start", "numel")]
        yield str(told), part["name"], runs[part["name"]]
