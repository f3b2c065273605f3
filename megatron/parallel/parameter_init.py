"""Weight initialisation that does not depend on the layout.

Every parameter draws its *full* matrix from a generator seeded by (seed, parameter name) and keeps its slice,
so that the same seed gives the same model whatever TP, PP and DP are.
"""

from __future__ import annotations

import hashlib

import torch

from megatron.parallel.parameter_slice import slice_of


def parameter_seed(seed: int, name: str) -> int:
    """63-bit seed for the parameter called `name`."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def init_normal_(param: torch.Tensor, *, std: float, seed: int, name: str) -> None:
    """Fill `param`, this rank's slice of the parameter called `name`, with N(0, std^2).

    Each of several fused matrices is drawn by a generator of its own.
    """
    part = slice_of(param, name)
    dim = part.dim or 0
    filled = 0
    with torch.no_grad():
        for index, (shape, start, stop) in enumerate(part.pieces):
            generator = torch.Generator(device=param.device)
            generator.manual_seed(parameter_seed(seed, f"{name}/{index}"))
            full = torch.empty(shape, dtype=torch.float32, device=param.device)
            full.normal_(0.0, std, generator=generator)
            param.narrow(dim, filled, stop - start).copy_(full.narrow(dim, start, stop - start))
            filled += stop - start
