"""The least that any code of single bytes can reach."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.compression.planes import Bytes, split


def bits_of_planes(blocks: Sequence[Bytes], width: int) -> list[float]:
    """Shannon's entropy of each byte plane in bits per value, that of the exponents first; 8 is incompressible.

    Of each block by itself, as each may have its own code; the mean over all values.
    """
    bits = np.zeros(width)
    for block in blocks:
        for number, plane in enumerate(split(block, width).reshape(width, -1)):
            counts = np.bincount(plane, minlength=256)
            found = counts[counts > 0]
            bits[number] -= (found * np.log2(found / len(plane))).sum()
    return [float(one) for one in bits / (sum(map(len, blocks)) // width)]
