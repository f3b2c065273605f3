"""Between them, the ranks verify every byte of what any of them needs a part of, and read it once for that."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpointing.engines.base import PlacedTensor
from megatron.checkpointing.reshard.reading import Reading
from megatron.checkpointing.reshard.runs import merged, positions
from megatron.checkpointing.reshard.targets import Transfer
from megatron.checkpointing.reshard.verifying import Share, damage, joined, shares_of_each, to_verify
from megatron.fileio.checksums import CheckedBytes, RangeChecksum
from restart_trace.recorder import untraced_operation

FILE = "file"
SIZE = 60


def share(intervals: list[tuple[int, int]], checked: list[CheckedBytes]) -> Share:
    reads = merged([positions([start], [stop]) for start, stop in intervals])
    return Share({FILE: reads}, {FILE: {record.start: record for record in checked}})


@st.composite
def some_shares(draw: st.DrawFn) -> tuple[list[CheckedBytes], list[Share]]:
    """Records with gaps between them, and ranks each of which reads some of the file and needs some of the records."""
    edges = sorted(draw(st.sets(st.integers(0, SIZE), min_size=2, max_size=8)))
    records = [CheckedBytes(f"record {a}", a, b, 0) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    shares = []
    for _ in range(draw(st.integers(1, 4))):
        needed = draw(st.lists(st.sampled_from(records), max_size=3)) if records else []
        intervals = [
            (record.start, draw(st.integers(record.start + 1, record.stop))) for record in needed
        ]  # a rank reads a part of what it needs, and perhaps of what lies between
        intervals += draw(st.lists(st.tuples(st.integers(0, 50), st.integers(51, SIZE)), max_size=1))
        shares.append(share(intervals, needed))
    return records, shares


@pytest.mark.slow
@given(some_shares())
def test_every_byte_of_what_is_needed_is_verified_by_one_rank(case: tuple[list[CheckedBytes], list[Share]]) -> None:
    _, shares = case
    needed = {record for found in shares for record in found.checked[FILE].values()}
    expected = sorted(byte for record in needed for byte in range(record.start, record.stop))
    verified: list[int] = []
    for rank, mine in enumerate(shares):
        runs = to_verify(shares_of_each(shares)[rank], rank)[FILE]
        for start, length in zip(runs.full.tolist(), runs.length.tolist(), strict=True):
            verified += range(start, start + length)
            assert any(r.start <= start and start + length <= r.stop for r in needed), "it is within one record"
            read = merged([mine.reads[FILE]])
            for byte in range(start, start + length):
                others = any(
                    (other.reads[FILE].full <= byte).any()
                    and (
                        (other.reads[FILE].full <= byte) & (byte < other.reads[FILE].full + other.reads[FILE].length)
                    ).any()
                    for r, other in enumerate(shares)
                    if r != rank
                )
                reads_it = ((read.full <= byte) & (byte < read.full + read.length)).any()
                assert reads_it or not others, "only what nobody reads is read for its checksum alone"
    assert sorted(verified) == expected


def test_a_rank_is_told_of_the_files_that_it_reads_alone() -> None:
    reads = [("a", "b"), ("b",), ("c",), ("a", "c")]
    shares = [Share({file: positions([0], [1]) for file in files}, {}) for files in reads]
    told = [{rank: set(share.reads) for rank, share in mine.items()} for mine in shares_of_each(shares)]
    assert told == [
        {0: {"a", "b"}, 1: {"b"}, 3: {"a"}},
        {0: {"b"}, 1: {"b"}},
        {2: {"c"}, 3: {"c"}},
        {0: {"a"}, 2: {"c"}, 3: {"a", "c"}},
    ]


def checked_content(data: bytes, *edges: int) -> list[CheckedBytes]:
    pairs = zip(edges[:-1], edges[1:], strict=True)
    return [CheckedBytes(f"tensor {a}", a, b, zlib.crc32(data[a:b])) for a, b in pairs]


def test_pieces_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(SIZE)
    records = checked_content(data, 10, 30, 50)
    shares = [share([(10, 20), (30, 50)], records), share([(15, 30)], records[:1])]
    pieces = [
        RangeChecksum(FILE, a, b - a, zlib.crc32(data[a:b]))
        for a, b in ((30, 40), (10, 15), (40, 50), (15, 20), (20, 30))
    ]
    of_all = dict(enumerate(shares))
    mine = joined(pieces[:-1], of_all)
    assert [(piece.start, piece.length) for piece in mine] == [(10, 10), (30, 20)], "of a record, never beyond it"
    assert damage(of_all, [*mine, pieces[-1]], tmp_path) == {}
    wrong = [mine[0]._replace(crc32=mine[0].crc32 ^ 1), mine[1], pieces[-1]]
    why = f"{tmp_path / FILE}: tensor 10 does not have the checksum it was saved with"
    assert damage(of_all, wrong, tmp_path) == {FILE: [why]}
    for missing in (mine, [*mine[1:], pieces[-1]], [mine[0], pieces[-1]]):
        with pytest.raises(RuntimeError, match="was verified up to byte"):
            damage(of_all, missing, tmp_path)


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, direct_io: str) -> None:
    """Two ranks that read parts of two tensors, one of them both; padding that nobody needs is verified, too."""
    path, data = tmp_path / FILE, bytearray(random.Random(2).randbytes(50_000))
    records = checked_content(bytes(data), 1000, 30_000, 48_000)
    parts = [[(records[0], 2000, 9000), (records[1], 30_000, 700)], [(records[0], 9500, 12_000)]]

    def found() -> dict[str, list[str]]:
        path.write_bytes(data)
        ranks = [
            Reading([moving(path, *part) for part in mine], {path: 50_000}, direct_io, 2, block=8192, gap=64)
            for mine in parts
        ]
        shares = [rank.share() for rank in ranks]
        told = shares_of_each(shares)
        pieces = [piece for i, rank in enumerate(ranks) for piece in rank.run(told[i], i, untraced_operation())]
        return damage(dict(enumerate(shares)), pieces, tmp_path)

    assert found() == {}
    for at, name in ((1000, "1000"), (11_000, "1000"), (29_999, "1000"), (30_000, "30000"), (47_999, "30000")):
        data[at] ^= 16
        assert found() == {FILE: [f"{path}: tensor {name} does not have the checksum it was saved with"]}
        data[at] ^= 16
    data[999] ^= 1  # of no tensor
    assert found() == {}


def moving(path: Path, record: CheckedBytes, start: int, length: int) -> Transfer:
    placed = PlacedTensor(path, record.name, torch.uint8, record.start, {}, record)
    one = [np.array([value]) for value in (start, 0, length)]
    return Transfer(placed, torch.zeros(length, dtype=torch.uint8), *one)
