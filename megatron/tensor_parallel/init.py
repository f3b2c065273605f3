"""Weight initialisation that does not depend on the layout.

Every parameter draws its *full* matrix from a generator seeded by (seed, parameter name) and keeps its slice,
so that the same seed gives the same model whatever TP, PP and DP are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from megatron.topology import TensorParallelGroup


def parameter_seed(seed: int, name: str) -> int:
    """63-bit seed for the parameter called `name`."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def init_normal_(
    param: torch.Tensor,
    *,
    std: float,
    seed: int,
    name: str,
    tp: TensorParallelGroup,
    split_dim: int | None,
    block_sizes: Sequence[int] | None = None,
) -> None:
    """Fill `param` (this rank's slice) with N(0, std^2).

    `split_dim` is the dimension split over TP, None for a replicated parameter. Where several matrices are
    fused along dim 0 (query, key and value; gate and up), `block_sizes` are their full sizes there, and the
    slice of a rank is its slice of each, in order.
    """
    size = tp.size if split_dim is not None else 1
    rank = tp.rank if split_dim is not None else 0
    local_rows = 0
    blocks = block_sizes or [param.shape[0] * (size if split_dim == 0 else 1)]
    with torch.no_grad():
        for index, rows in enumerate(blocks):
            generator = torch.Generator(device=param.device)
            generator.manual_seed(parameter_seed(seed, f"{name}/{index}"))
            full_shape = [rows, *param.shape[1:]]
            if split_dim is not None and split_dim != 0:
                full_shape[split_dim] *= size
            full = torch.empty(full_shape, dtype=torch.float32, device=param.device)
            full.normal_(0.0, std, generator=generator)
            mine = full if split_dim is None else full.chunk(size, dim=split_dim)[rank]
            param[local_rows : local_rows + mine.shape[0]].copy_(mine)
            local_rows += mine.shape[0]
