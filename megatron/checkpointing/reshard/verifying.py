"""Divides the verification of a load onto another layout over its ranks.

Together the ranks read and verify completely every tensor of which any rank needs a part. A checksum covers a whole
tensor (engine lazy) or a whole zip record (torch), and a rank reads parts of some. So the ranks tell each other what
they will read. Of bytes that several ranks read, the lowest rank computes the CRC-32; the lowest rank that needs a part
of a tensor also reads the bytes that no rank needs (padding, and what is stored twice). Rank 0 combines the CRC-32s of
the parts and compares them with those that were saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.checkpointing.reshard.runs import Runs, intersect, make_runs, merged, positions, subtract
from megatron.fileio.checksums import CheckedBytes, RangeChecksum, by_file, combine


@dataclass(frozen=True)
class Share:
    """What a rank is going to read: file name -> bytes; and by file name and first byte, what it needs parts of."""

    reads: Mapping[str, Runs]
    checked: Mapping[str, Mapping[int, CheckedBytes]]


# By rank, in order. A rank needs those that tell of files that it reads, and of these only what they tell of such.
Shares = Mapping[int, Share]


def shares_of_each(shares: Sequence[Share]) -> list[Shares]:
    """What each rank needs of the `shares` of all, by rank."""
    readers: dict[str, list[int]] = {}
    for rank, share in enumerate(shares):
        for file in share.reads:
            readers.setdefault(file, []).append(rank)
    found: list[Shares] = []
    for rank, mine in enumerate(shares):
        files: dict[int, list[str]] = {rank: []}
        for file in mine.reads:
            for reader in readers[file]:
                files.setdefault(reader, []).append(file)
        found.append({reader: _restricted(shares[reader], files[reader]) for reader in sorted(files)})
    return found


def _restricted(share: Share, files: Sequence[str]) -> Share:
    checked = {file: share.checked[file] for file in files if file in share.checked}
    return Share({file: share.reads[file] for file in files}, checked)


def to_verify(shares: Shares, rank: int) -> dict[str, Runs]:
    """File name -> bytes that `rank` is to take CRC-32s of, in runs that do not leave a CheckedBytes.

    Of all ranks, every byte of every CheckedBytes is in what exactly one rank gets.
    """
    found = {}
    needed = _lowest_that_needs(shares, shares[rank].reads)
    for file, mine in shares[rank].reads.items():
        lower = [share.reads[file] for other, share in shares.items() if other < rank and file in share.reads]
        everybody = [share.reads[file] for share in shares.values() if file in share.reads]
        needed_by = needed.get(file, {})
        checked = _bytes_of(record for record, _ in needed_by.values())
        own = intersect(checked, subtract(mine, merged(lower)))
        rest = subtract(_bytes_of(record for record, lowest in needed_by.values() if lowest == rank), merged(everybody))
        starts = np.concatenate((own.source, rest.full))
        found[file] = make_runs(starts, starts, np.concatenate((own.length, rest.length)))
    return found


def joined(parts: Iterable[RangeChecksum], shares: Shares) -> list[RangeChecksum]:
    """`parts` in order, those that are neighbours in one CheckedBytes as one."""
    found: list[RangeChecksum] = []
    parts = sorted(parts, key=lambda part: (part.file, part.start))
    starts = _lowest_that_needs(shares, {part.file for part in parts})
    for part in parts:
        last = found[-1] if found else None
        follows = last is not None and (last.file, last.stop) == (part.file, part.start)
        if last is not None and follows and part.start not in starts[part.file]:
            found[-1] = last.followed_by(part)
        else:
            found.append(part)
    return found


def damage(shares: Shares, parts: Iterable[RangeChecksum], directory: Path) -> dict[str, list[str]]:
    """The tensors without the checksum that they were saved with: file name -> messages that name file and tensor.

    Raises RuntimeError if the parts of all ranks are not the whole of what is to be verified: an error of this
    program, and a load that was not verified must not look like one that was.
    """
    checksums = by_file(parts)
    wrong: dict[str, list[str]] = {}
    for file, needed_by in sorted(_lowest_that_needs(shares, None).items()):
        for _, (checked, _) in sorted(needed_by.items()):
            what = f"{directory / file}: {checked.name}"
            found = combine(checksums.get(file, {}), checked.start, checked.stop)
            if found.stop != checked.stop:
                raise RuntimeError(f"{what} was verified up to byte {found.stop} only")
            if found.crc32 != checked.crc32:
                wrong.setdefault(file, []).append(f"{what} does not have the checksum it was saved with")
    return wrong


def _lowest_that_needs(shares: Shares, files: Collection[str] | None) -> dict[str, dict[int, tuple[CheckedBytes, int]]]:
    """File name -> first byte -> (bytes to verify, the lowest rank that needs a part of them), for `files` (None: all).

    In one pass over what the ranks read: a look at each file of each rank would be ranks times files.
    """
    found: dict[str, dict[int, tuple[CheckedBytes, int]]] = {}
    for rank, share in shares.items():
        for file, checked in share.checked.items():
            if files is None or file in files:
                needed_by = found.setdefault(file, {})
                for start, record in checked.items():
                    needed_by.setdefault(start, (record, rank))
    return found


def _bytes_of(checked: Iterable[CheckedBytes]) -> Runs:
    pairs = [(record.start, record.stop) for record in checked]
    return positions([start for start, _ in pairs], [stop for _, stop in pairs])
