"""Slice, precision and device of a rank's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron.parallel.expert_parallel import ExpertParallel
from megatron.parallel.parameter_slice import ParameterSlice
from megatron.parallel.topology import SequenceGroup, TensorParallelGroup


@dataclass(frozen=True)
class Placement:
    """Given to every layer when it is built."""

    tp: TensorParallelGroup
    dtype: torch.dtype
    device: torch.device
    sequence: SequenceGroup = field(default_factory=SequenceGroup)
    experts: ExpertParallel = field(default_factory=ExpertParallel)

    def parameter(
        self, *shape: int, dim: int | None = None, blocks: Sequence[int] = (), vocabulary: bool = False
    ) -> torch.nn.Parameter:
        """This rank's slice of a parameter of full `shape`, as ParameterSlice describes it; no `blocks`: one.

        Zeros: values come from `reset_parameters` or from a checkpoint. The slice is kept as `tp_slice`;
        `tensor_model_parallel` is what DeepSpeed's gradient norm asks to count replicated parameters once.
        Raises ValueError if TP does not divide it.
        """
        if dim is not None and not blocks:
            blocks = (shape[dim],)
        part = ParameterSlice(shape, dim, tuple(blocks), self.tp.rank, self.tp.size, vocabulary)
        param = torch.nn.Parameter(torch.zeros(part.local_shape, dtype=self.dtype, device=self.device))
        param.tp_slice = part  # type: ignore[attr-defined]
        param.tensor_model_parallel = dim is not None  # type: ignore[attr-defined]
        return param
