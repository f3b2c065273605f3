"""Which documents, and which weighted datasets, belong to training, validation and test."""

from __future__ import annotations

import math

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(splits_string: str) -> tuple[float, float, float]:
    """Fractions of train, valid and test out of ``"969,30,1"`` (or with ``/``); missing ones are 0; they sum
    to 1.

    Raises ValueError naming --split for anything but one to three numbers >= 0 with a sum > 0.
    """
    separator = "," if "," in splits_string else "/"
    try:
        parts = [float(part) for part in splits_string.split(separator)]
    except ValueError:
        parts = []
    if (
        not 1 <= len(parts) <= 3
        or not all(math.isfinite(part) and part >= 0 for part in parts)
        or sum(parts) <= 0
    ):
        raise ValueError(
            f"--split {splits_string!r}: give one to three numbers >= 0 separated by commas, "
            "the shares of train, valid and test, for example 969,30,1"
        )
    total = sum(parts)
    train, valid, test = ([part / total for part in parts] + [0.0, 0.0])[:3]
    return train, valid, test


def split_ranges(splits_string: str, num_documents: int) -> list[tuple[int, int]]:
    """Document range ``[start, stop)`` of train, valid and test.

    As Megatron's ``get_train_valid_test_split_``: each share is rounded by itself, and what the rounded
    shares are too many or too few moves all inner borders. Where that would put a border before document 0,
    it stays at 0.
    """
    borders = [0]
    for fraction in parse_split(splits_string):
        borders.append(borders[-1] + int(round(fraction * float(num_documents))))
    excess = borders[-1] - num_documents
    borders = [0] + [max(0, border - excess) for border in borders[1:]]
    return list(zip(borders[:-1], borders[1:], strict=True))


def parse_data_path(flag: str, data_path: list[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes and normalised weights of ``PREFIX`` (weights None) or ``WEIGHT PREFIX WEIGHT PREFIX ...``.

    Raises ValueError naming ``flag`` when the list has another form or a weight is not a number > 0.
    """
    if len(data_path) == 1:
        return [data_path[0].strip()], None
    if not data_path or len(data_path) % 2:
        raise ValueError(f"{flag} {' '.join(data_path)}: give one path prefix, or WEIGHT PREFIX pairs")
    weights = []
    for text in data_path[0::2]:
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"{flag}: {text!r} is where a weight > 0 must stand: give WEIGHT PREFIX pairs")
        weights.append(weight)
    # Summed one by one, like upstream: the blend follows the last bit of these weights.
    total = 0.0
    for weight in weights:
        total += weight
    return [prefix.strip() for prefix in data_path[1::2]], [weight / total for weight in weights]


def blended_num_samples(weights: list[float], num_samples: int) -> list[int]:
    """Samples to index in each dataset of a blend: its share and half a percent more, rounded up.

    The 1.005 is upstream's: a blend takes from each dataset its share only nearly.
    """
    return [math.ceil(num_samples * weight * 1.005) for weight in weights]
