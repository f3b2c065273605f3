"""Copies that travel compressed: restored to the bit, paced as others, and refused by name if damaged."""

from __future__ import annotations

import os
import struct
import sys
from typing import Any

import numpy as np
import pytest
import zstandard

from megatron.fileio.compressed_blocks import BlockCodec
from megatron.peers.client import ask, fetch_parts, send_copies
from megatron.peers.pacing import MEASURED
from megatron.peers.traffic import step_times
from megatron.peers.wire import PeerError, connect
from tests.unit.megatron.peers.test_copies import (  # noqa: F401
    DEADLINE_S,
    EXTENT,
    KEY,
    SAVED,
    Host,
    content,
    fill,
    got,
    liar,
    message,
    record_of,
    reserve,
    resident,
    tls,
    two,
)  # fmt: skip


def packed_record(content: bytes, save: str, widths: list[tuple[int, int]]) -> dict[str, Any]:
    record = record_of(content, save)
    return record | {"file": record["file"] | {"widths": widths}}


@pytest.fixture
def floats() -> bytes:
    """A header, fp32, bf16, and a byte: more than one block, and extents that are none of theirs."""
    wide = np.random.default_rng(5).standard_normal(400_000).astype(np.float32)
    return content(4096) + wide.tobytes() + (wide.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes() + b"x"


WIDTHS = [(4096, 1), (1_600_000, 4), (800_000, 2), (1, 1)]


@pytest.mark.parametrize("encrypted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_save_is_copied_compressed_and_given_back(
    request: pytest.FixtureRequest, floats: bytes, encrypted: bool
) -> None:
    if encrypted:
        request.getfixturevalue("tls")
    one, other = request.getfixturevalue("two")
    reserve(other, len(floats))
    fill(one.slots[0], floats, "s1")
    one.slots[0].seal(packed_record(floats, "s1", WIDTHS))
    sent = send_copies(one.peer, 0, [other.peer], None, DEADLINE_S)
    assert sent[:2] == (len(floats), []) and sent.wire_bytes < 0.85 * len(floats)
    assert sent.compressed["processor_s"] > 0
    assert got(other.peer, "s1") == got(one.peer, "s1") == floats
    part = bytearray(len(floats))
    wanted = [(5000, 1_700_000), (4, 4), (1_603_000, 1_700_001), (len(floats) - 1, len(floats))]
    fetch_parts(other.peer, "s1", KEY, wanted, memoryview(part), DEADLINE_S)
    for start, stop in wanted:
        assert part[start:stop] == floats[start:stop]
    assert not any(part[:5000])
    fetch_parts(other.peer, "s1", KEY, [], memoryview(part), DEADLINE_S)


def test_a_compressed_copy_waits_for_its_turn_and_goes_when_training_waits(
    two: tuple[Host, Host],  # noqa: F811
    floats: bytes,
) -> None:
    one, other = two
    reserve(other, len(floats))
    fill(one.slots[0], floats, "s1")
    one.slots[0].seal(packed_record(floats, "s1", WIDTHS))
    (times,) = step_times(one.process.step_times_file)
    times.set_waiting(True)
    sent = send_copies(one.peer, 0, [other.peer], None, DEADLINE_S, interleave=MEASURED)
    assert sent.errors == [] and sent.interleaved["at_once_bytes"] == sent.wire_bytes < len(floats)
    assert got(other.peer, "s1") == floats


def test_a_slot_that_is_altered_after_its_seal_is_not_taken_compressed(two: tuple[Host, Host], floats: bytes) -> None:  # noqa: F811
    one, other = two
    reserve(other, len(floats))
    fill(one.slots[0], floats, "s1")
    one.slots[0].seal(packed_record(floats, "s1", WIDTHS))
    os.pwrite(one.slots[0].data, b"x", 70_000)
    ((_, (error,), *_)) = send_copies(one.peer, 0, [other.peer], None, DEADLINE_S)
    assert f"has a damaged copy: bytes {EXTENT} to {2 * EXTENT}" in error
    assert ask(other.peer, DEADLINE_S, ask="list")["kept"] == []


@pytest.mark.parametrize(
    ("widths", "why"),
    [
        ([(4096, 1)], "says that a file has 2404097 bytes, and its values have 4096"),
        ([(4096, 3)], "says that 4096 bytes are values of 3"),
        ([(-1, 1), (1, 1)], "says that -1 bytes are values of 1"),
        ([7], "sends a record with wrong widths of values"),
    ],
)
def test_wrong_widths_are_refused(two: tuple[Host, Host], floats: bytes, widths: Any, why: str) -> None:  # noqa: F811
    one, other = two
    reserve(other, len(floats))
    fill(one.slots[0], floats, "s1")
    one.slots[0].seal(packed_record(floats, "s1", widths))
    ((_, (error,), *_)) = send_copies(one.peer, 0, [other.peer], None, DEADLINE_S)
    assert why in error


BLOCK = BlockCodec().pack(SAVED[:EXTENT], 1)
COMPRESSED = message(record=packed_record(SAVED, "s1", [(len(SAVED), 1)]), compressed=True)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (COMPRESSED + message(len(BLOCK)) + BLOCK[:-1], "has ended the connection 1 bytes too early"),
        (COMPRESSED + message(8) + b"no block", "sends a damaged copy: a block of 8 bytes has no complete header"),
        (COMPRESSED + message(len(BLOCK)) + BLOCK[:-1] + b"x", "sends a damaged copy: a block has checksum"),
        (COMPRESSED + message(1 << 40), f"sends a block of {1 << 40} bytes"),
        (COMPRESSED + message(0), "sends a damaged copy: a block of 0 bytes"),
        (COMPRESSED + (EMPTY := message(20) + BlockCodec().pack(b"", 1)) + EMPTY, "sends an empty block"),
        (COMPRESSED + message(len(BLOCK)) + BLOCK + message(len(BLOCK)) + BLOCK, "65536 bytes, and 34464 are expected"),
        (COMPRESSED + message(error="cannot go on"), "cannot go on"),
    ],
)
def test_a_peer_that_sends_no_blocks_is_named(answer: bytes, why: str) -> None:
    with pytest.raises(PeerError, match=rf"^liar \(127.0.0.1:\d+\) .*{why}"):
        got(liar(lambda connected: connected.sendall(answer)), "s1", deadline_s=DEADLINE_S)


def test_a_taker_that_gets_no_block_says_so_and_takes_nothing(two: tuple[Host, Host]) -> None:  # noqa: F811
    """One of this launch that sends garbage, and a frame that would restore 64 MiB in place of some kB."""
    _, other = two
    reserve(other, len(SAVED))
    huge = frame_of_64_mib()
    for block, why in ((b"garbage" * 9, "no header of compressed tensors"), (huge, "has 67108864 bytes, and 65536")):
        before = resident(other.pid)
        with connect("127.0.0.1", other.peer.port, DEADLINE_S) as channel:
            told = {"record": packed_record(SAVED, "s1", [(len(SAVED), 1)]), "timeout_s": DEADLINE_S, "keep": None}
            channel.tell(launch="launch0", ask="put", compressed=True, **told)
            assert channel.hear() == {"go": True}
            channel.send_payload({}, block)
            with pytest.raises(PeerError, match=why):
                channel.hear()
        assert ask(other.peer, DEADLINE_S, ask="list")["kept"] == []
        assert resident(other.pid) - before < 60 << 20, "NumPy and the package, and no 64 MiB"


def frame_of_64_mib() -> bytes:
    frame = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))
    return struct.pack("<4sBBHIII", b"CBLK", 1, 1, 0, EXTENT, 0, len(frame)) + frame


def test_without_the_package_compressed_copies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(PeerError, match=r"^liar \S+ sends compressed copies, for which .*: pip install zstandard$"):
        got(liar(lambda connected: connected.sendall(COMPRESSED)), "s1", deadline_s=DEADLINE_S)
