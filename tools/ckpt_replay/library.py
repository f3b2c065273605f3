"""What a replay measures in place of an engine: a checkpointing library that names and completes its files itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from megatron.checkpointing.engines import codec
from megatron.checkpointing.engines.base import FileState
from megatron.checkpointing.engines.state_files import pack, unpack
from restart_trace.recorder import Operation

_SKELETON = "skeleton"
_STATE = "state/"
PlaceT = TypeVar("PlaceT", contravariant=True)  # of the checkpoints of a library: a directory or an object's prefix


@dataclass
class LibrarySave:
    """A save of one rank, which is complete on all ranks: a library that saves asynchronously has its own kind.

    `blocked_ns`: for how long the thread that trains has waited; `moving_ns`: of the call that writes this rank's
    tensors. `start_ns` and `committed_ns`, its end, are monotonic.
    """

    op: Operation
    start_ns: int
    blocked_ns: int = 0
    moving_ns: int = 0
    committed_ns: int = 0

    def release_state(self) -> None:
        """Wait until the state that is saved may change."""

    def join(self) -> None:
        """Wait until the checkpoint is complete on all ranks; collective. Raises what the library raises."""


class Library(Protocol[PlaceT]):
    """A library for one rank. Each method raises what the library raises.

    `asynchronous`: whether `save` returns before the checkpoint is complete. `loads_in_place`: as of an engine.
    """

    asynchronous: bool
    loads_in_place: bool

    def save(self, place: PlaceT, step: int, files: Sequence[FileState]) -> LibrarySave:
        """Begin to save `files` as the checkpoint `place`; collective."""
        ...

    def load_into(
        self, live: Sequence[FileState], planned: Sequence[FileState], place: PlaceT
    ) -> tuple[dict[str, Any], int]:
        """(the states of the checkpoint `place` by name, ns within the call that reads).

        Reads into the tensors of `live` where it has them; `planned`: the states that were saved, of meta tensors.
        """
        ...

    def close(self) -> None: ...


def tensors_of(file: FileState) -> dict[str, torch.Tensor]:
    """A state by names, for a library that takes tensors: one more tensor has what is none."""
    skeleton, tensors = codec.split(file.state)
    return {_SKELETON: pack(skeleton)} | {_STATE + name: tensor.detach() for name, tensor in tensors.items()}


def targets_of(
    live: FileState, planned: FileState, new: Callable[[torch.Tensor], torch.Tensor | None]
) -> dict[str, torch.Tensor | None]:
    """By the names of `tensors_of`: the tensors of `live`, where it has them, or `new` of the planned one."""
    there = tensors_of(live)
    del there[_SKELETON]
    return {name: there[name] if name in there else new(tensor) for name, tensor in tensors_of(planned).items()}


def state_of(tensors: dict[str, Any], where: Any) -> Any:
    """The state of which `tensors_of` has made `tensors`. Raises CheckpointDamagedError, naming `where`."""
    found = {name.removeprefix(_STATE): tensor for name, tensor in tensors.items() if name != _SKELETON}
    return codec.join(unpack(tensors[_SKELETON], where), found)
