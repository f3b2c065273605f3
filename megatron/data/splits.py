"""Which documents, and which weighted datasets, belong to training, validation and test."""

from __future__ import annotations

import math
from collections.abc import Sequence

SPLIT_NAMES = ("train", "valid", "test")


def split_ranges(fractions: Sequence[float], num_documents: int) -> list[tuple[int, int]]:
    """Document range ``[start, stop)`` of train, valid and test, of which each gets its fraction.

    As Megatron's ``get_train_valid_test_split_``: each share is rounded by itself, and what the rounded
    shares are too many or too few moves all inner borders. Where that would put a border before document 0,
    it stays at 0.
    """
    borders = [0]
    for fraction in fractions:
        borders.append(borders[-1] + int(round(fraction * float(num_documents))))
    excess = borders[-1] - num_documents
    borders = [0] + [max(0, border - excess) for border in borders[1:]]
    return list(zip(borders[:-1], borders[1:], strict=True))


def blended_num_samples(weights: list[float], num_samples: int) -> list[int]:
    """Samples to index in each dataset of a blend: its share and half a percent more, rounded up.

    The 1.005 is upstream's: a blend takes from each dataset its share only nearly.
    """
    return [math.ceil(num_samples * weight * 1.005) for weight in weights]
