"""What a compiler makes of a layer's passes: each run of passes over memory becomes one kernel.

A run ends at a matrix product, at attention and at a collective, which compilers call and do not fuse. The kernel reads
what comes from outside the run, and writes what is read outside of it, which is the best that a compiler can do; that
torch.compile may also choose to compute something again in the backward pass is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from .layers import LayerPasses
from .passes import Pass


def fused(layer: LayerPasses) -> LayerPasses:
    """The layer as one graph for each direction."""
    forward = tuple(_fused(layer.forward, _read_by(layer.backward) | layer.kept))
    return LayerPasses(forward, tuple(_fused(layer.backward, layer.kept)), layer.kept)


def _read_by(passes: Sequence[Pass]) -> frozenset[int]:
    return frozenset(storage for each in passes for storage, _ in each.reads)


def _fused(passes: Sequence[Pass], kept: frozenset[int]) -> Iterator[Pass]:
    position = 0
    for is_memory, group in itertools.groupby(passes, lambda each: each.kind == "memory"):
        run = list(group)
        position += len(run)
        if is_memory:
            yield from _kernel(run, kept | _read_by(passes[position:]))
        else:
            yield from run


def _kernel(run: Sequence[Pass], needed: frozenset[int]) -> Iterator[Pass]:
    """One pass for `run`; none if nothing of what it writes is needed."""
    read: dict[int, int] = {}
    written: dict[int, int] = {}
    for each in run:
        for storage, size in each.reads:
            if storage not in written:
                read[storage] = max(size, read.get(storage, 0))
        for storage, size in each.writes:
            written[storage] = max(size, written.get(storage, 0))
    writes = tuple((storage, size) for storage, size in written.items() if storage in needed)
    if writes:
        yield Pass("fused", "memory", tuple(read.items()), writes, run[0].backward)
