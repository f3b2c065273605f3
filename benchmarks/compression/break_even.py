"""From ratios and speeds to the time of a save over storage or a network of some speed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STORED = "stored"  # as it is
LINKS_MBPS = {"1 Gbit/s": 125.0, "200 MB/s": 200.0, "1 GB/s": 1000.0, "10 Gbit/s": 1250.0}


@dataclass(frozen=True)
class Rate:
    """One way with one kind. `ratio`: bytes stored per byte; MB/s of the uncompressed bytes and of one core."""

    ratio: float
    compress_MBps: float
    decompress_MBps: float


@dataclass(frozen=True)
class Best:
    """The ways, by kind, with which a save is shortest, and its time and a load's as shares of those without."""

    ways: dict[str, str]
    save: float
    load: float


def best(shares: Mapping[str, float], rates: Mapping[str, Mapping[str, Rate]], link: float, cores: float) -> Best:
    """Compression and transfer overlap: each takes its time, and the longer one decides.

    `shares`: of the bytes by kind; `rates`: by kind and way; `link`: MB/s; `cores`: how many compress all the time.
    """
    found = [Best(dict.fromkeys(shares, STORED), 1.0, 1.0)]
    for ways in itertools.product(*([STORED, *_worth_trying(rates[kind])] for kind in shares)):
        chosen = {kind: rates[kind][way] for kind, way in zip(shares, ways, strict=True) if way != STORED}
        moved = sum(share * (chosen[kind].ratio if kind in chosen else 1.0) for kind, share in shares.items())
        packing = sum(shares[kind] / rate.compress_MBps for kind, rate in chosen.items()) * link / cores
        unpacking = sum(shares[kind] / rate.decompress_MBps for kind, rate in chosen.items()) * link / cores
        found.append(Best(dict(zip(shares, ways, strict=True)), max(moved, packing), max(moved, unpacking)))
    return min(found, key=lambda one: (one.save, one.load))


def _worth_trying(rates: Mapping[str, Rate]) -> list[str]:
    """The ways than which none is better in size and both speeds."""

    def beats(one: Rate, other: Rate) -> bool:
        better = one.ratio <= other.ratio, one.compress_MBps >= other.compress_MBps
        return all(better) and one.decompress_MBps >= other.decompress_MBps and one != other

    return [name for name, rate in rates.items() if not any(beats(other, rate) for other in rates.values())]


def table(
    shares: Mapping[str, float], rates: Mapping[str, Mapping[str, Rate]], cores: Sequence[float]
) -> list[dict[str, object]]:
    """A row for each link and number of cores."""
    rows: list[dict[str, object]] = []
    for (name, link), count in itertools.product(LINKS_MBPS.items(), cores):
        found = best(shares, rates, link, count)
        rows.append({"link": name, "cores": count, "save": found.save, "load": found.load, "ways": found.ways})
    return rows
