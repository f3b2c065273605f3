"""Where the parameters of a rank live: which slice, in which precision, on which device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.topology import TensorParallelGroup


@dataclass(frozen=True)
class Placement:
    """Given to every layer when it is built."""

    tp: TensorParallelGroup
    dtype: torch.dtype
    device: torch.device

    def zeros(self, *shape: int) -> torch.Tensor:
        """Storage for a parameter; values come from `reset_parameters` or from a checkpoint."""
        return torch.zeros(*shape, dtype=self.dtype, device=self.device)
