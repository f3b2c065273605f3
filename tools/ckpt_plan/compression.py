"""Whether compressing copies to peers, or files, shortens their way, from measured rates. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..common.formatting import seconds, size

MB = 1e6


@dataclass(frozen=True)
class Rates:
    """What was measured. Rates in bytes a second; `share`: compressed bytes over those before.

    `compress`: of one processor. `link`: of a host's way, None if only the break-even is asked for.
    """

    share: float
    compress: float
    link: float | None = None


class Way(NamedTuple):
    """What is compressed on its way, in the words of the output."""

    flag: str
    what: str
    link: str
    takes: str


COPIES = Way("--replica-compression zstd", "copies for each save", "a host's network", "copies take")
FILES = Way("--checkpoint-compression zstd", "a host's files", "its way to the storage", "writing them takes")


@dataclass(frozen=True)
class Verdict:
    """Of what a host sends for one save, `num_bytes` before compression, from `threads` threads.

    Compressing and sending are two stages of a pipeline. A copy takes the time of the slower one if they overlap
    completely, and the sum of both if they do not at all:

        as they are    B / L
        at least       max(s B / L, B / (n c))
        at most        s B / L + B / (n c)

    with B bytes, L the rate of the link, s the share, n threads and c the rate of one. At most is less than B / L for
    L < (1 - s) n c, and at least for L < n c. A block is sent while the next one is compressed, so that the truth is
    near `at least`. Taken for granted: processors are free (on a busy machine copies took longer than `at most`), and
    restoring is not slower than compressing; docs/results/compression.md has both.
    """

    num_bytes: int
    threads: int
    rates: Rates
    way: Way = COPIES

    @property
    def pays_below(self) -> float:
        """Bytes a second of a link, even if nothing overlaps."""
        return (1 - self.rates.share) * self.threads * self.rates.compress

    @property
    def pays_never_above(self) -> float:
        """Bytes a second of a link."""
        return self.threads * self.rates.compress

    def times(self) -> tuple[float, float, float] | None:
        """Seconds as they are, at least and at most; None without the rate of the link."""
        if self.rates.link is None:
            return None
        sent, packed = self.num_bytes / self.rates.link, self.num_bytes / self.pays_never_above
        return sent, max(self.rates.share * sent, packed), self.rates.share * sent + packed


def to_dict(verdict: Verdict | None) -> dict[str, Any] | None:
    """Fields of the JSON, as docs/ckpt_plan.md defines them."""
    if verdict is None:
        return None
    times = verdict.times() or (None, None, None)
    return {
        "sent_bytes": verdict.num_bytes,
        "compressed_bytes": int(verdict.rates.share * verdict.num_bytes),
        "threads": verdict.threads,
        "pays_below_MBps": verdict.pays_below / MB,
        "pays_never_above_MBps": verdict.pays_never_above / MB,
        "sent_s": times[0],
        "compressed_at_least_s": times[1],
        "compressed_at_most_s": times[2],
    }


def render(verdict: Verdict) -> list[str]:
    """Lines for a terminal."""
    threads = "1 thread" if verdict.threads == 1 else f"{verdict.threads} threads"
    way, compressed = verdict.way, int(verdict.rates.share * verdict.num_bytes)
    lines = [
        f"{way.flag}: {size(verdict.num_bytes, 2)} of {way.what} become {size(compressed, 2)}, by {threads}: pays, if "
        f"processors are free, below {verdict.pays_below / MB:.0f} MB/s of {way.link}, never above "
        f"{verdict.pays_never_above / MB:.0f} MB/s"
    ]
    times = verdict.times()
    if times is not None:
        sent, least, most = map(seconds, times)
        lines.append(f"{way.takes} {sent} s as they are, {least} to {most} s compressed")
    return lines
