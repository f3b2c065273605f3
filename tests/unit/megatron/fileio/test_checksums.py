"""CRC-32s of ranges, combined, against zlib's of the whole."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fileio.checksums import by_file, checksum_text, combine, range_checksum

CONTENT = bytes(range(256)) * 4


@pytest.mark.slow
@given(st.sets(st.integers(1, len(CONTENT) - 1), max_size=9), st.data())
def test_ranges_in_any_order_give_the_checksum_of_the_whole(edges: set[int], data: st.DataObject) -> None:
    cuts = [0, *sorted(edges), len(CONTENT)]
    parts = [range_checksum("file", a, CONTENT[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    known = by_file(data.draw(st.permutations(parts)))["file"]
    start, stop = sorted(data.draw(st.lists(st.sampled_from(cuts), min_size=2, max_size=2)))
    found = combine(known, start, stop)
    assert (found.start, found.stop, found.crc32) == (start, stop, zlib.crc32(CONTENT[start:stop]))
    missing = data.draw(st.sampled_from(parts))
    del known[missing.start]
    assert combine(known, 0, len(CONTENT)).stop == missing.start


def test_text_is_what_a_manifest_has() -> None:
    assert (checksum_text(10), checksum_text(None)) == ("crc32:0000000a", "none")
