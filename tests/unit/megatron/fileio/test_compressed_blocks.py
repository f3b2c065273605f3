"""Blocks are restored to the bit, whatever they hold; what is no whole block is refused, and takes no memory."""

from __future__ import annotations

import random
import struct
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fileio.checksums import crc32
from megatron.fileio.compressed_blocks import HEAD_BYTES, MOST_BYTES, WIDTHS, BlockCodec, DamagedBlockError

CODEC = BlockCodec()
SPECIAL = {  # bits of floats: signalling and quiet NaNs with payloads, denormals, zeros of both signs, infinities
    2: (0x7F81, 0xFF81, 0x7FC1, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x807F, 0x7C01, 0xFE55, 0x03FF),
    4: (0x7F800001, 0xFFA5A5A5, 0x7FC00000, 0x7F800000, 0xFF800000, 0x80000000, 0, 1, 0x807FFFFF),
    8: (0x7FF0000000000001, 0xFFF8DEADBEEF0001, 0x7FF0000000000000, 1 << 63, 0, 1, 0x800FFFFFFFFFFFFF),
}
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
]  # fmt: skip


def restored(content: bytes, width: int) -> tuple[bytes, int]:
    """(what comes back, bytes of the block), into memory whose other bytes must not change."""
    block, room = CODEC.pack(content, width), bytearray(b"\xa5" * (len(content) + 9))
    found = CODEC.unpack(block, memoryview(room))
    assert found == (len(content), crc32(content)) and bytes(room[len(content) :]) == b"\xa5" * 9
    return bytes(room[: len(content)]), len(block)


def trained(width: int, values: int) -> bytes:
    """Like weights: a few exponents, and mantissas that look random."""
    found = torch.randn(values, generator=torch.Generator().manual_seed(3)) * 0.02
    return found.to({2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[width]).view(torch.uint8).numpy().tobytes()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=300), st.sampled_from(WIDTHS), st.integers(0, 200))
def test_any_bytes_are_restored(content: bytes, width: int, times: int) -> None:
    """Few and many, repeated and not, and a number of bytes that is no multiple of a value's."""
    found, size = restored(content * times, width)
    assert found == content * times and size <= len(found) + HEAD_BYTES


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from((2, 4, 8)), st.lists(st.integers(0, 11), max_size=40), st.integers(1, 600))
def test_special_floats_are_restored(width: int, chosen: list[int], times: int) -> None:
    bits = [SPECIAL[width][number % len(SPECIAL[width])] for number in chosen] * times
    content = b"".join(value.to_bytes(width, "little") for value in bits)
    assert restored(content, width)[0] == content


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_are_restored(dtype: torch.dtype) -> None:
    """Also one that is not contiguous, once it is copied, as a save does; the block itself must be contiguous."""
    width = min(8, dtype.itemsize)
    drawn = torch.randint(0, 256, (64, 48 * dtype.itemsize), dtype=torch.uint8, generator=torch.Generator())
    tensor = (drawn % 2).bool() if dtype is torch.bool else drawn.view(dtype)
    for one in (tensor, tensor[::2, 1:30:3], tensor.t(), tensor[:0]):
        content = one.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert restored(content, width)[0] == content


def test_a_block_lies_anywhere_and_has_any_buffer_for_its_source() -> None:
    content = trained(4, 5000)
    room = bytearray(len(content) + 1)
    CODEC.unpack(memoryview(b"x" + CODEC.pack(memoryview(b"y" + content)[1:], 4))[1:], memoryview(room)[1:])
    assert bytes(room[1:]) == content
    assert CODEC.pack(np.frombuffer(content, np.float32), 4) == CODEC.pack(content, 4)


@pytest.mark.parametrize(("width", "most"), [(2, 0.70), (4, 0.87), (8, 0.93)])
def test_floats_like_those_of_a_trained_model_become_smaller(width: int, most: float) -> None:
    content = trained(width, 100_000)
    assert restored(content, width)[1] < most * len(content)


def test_planes_that_do_not_become_smaller_are_stored() -> None:
    noise = random.Random(1).randbytes(400_000)
    for width in WIDTHS:
        assert restored(noise, width)[1] <= len(noise) + HEAD_BYTES
    assert restored(bytes(MOST_BYTES), 4)[1] < 1000, "every plane of zeros is compressed"
    rounded = trained(2, 50_000)  # as master weights that are their weights still: their last two bytes are zeros
    wide = np.frombuffer(rounded, np.uint16).astype(np.uint32) << np.uint32(16)
    assert restored(wide.tobytes(), 4)[1] < 0.8 * len(rounded)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_byte_that_is_altered_or_missing_is_noticed(width: int) -> None:
    content = trained(2, 1500) + b"abc"
    block = CODEC.pack(content, width)
    generator = random.Random(width)
    for position in range(len(block)):
        for damaged in (
            block[:position],
            block[:position] + bytes([block[position] ^ 1 << generator.randrange(8)]) + block[position + 1 :],
            block[:position] + block[position + 1 :],
        ):
            room = bytearray(len(content))
            try:
                CODEC.unpack(damaged, memoryview(room))
            except DamagedBlockError:
                continue
            assert room == content, "bits of a frame that mean nothing may change"
    with pytest.raises(DamagedBlockError, match="tells of another number"):
        CODEC.unpack(block + b"x", memoryview(bytearray(len(content))))


def block_of(plane: bytes, size: int) -> bytes:
    """A block of single bytes with that frame in it."""
    return struct.pack("<4sBBHIII", b"CBLK", 1, 1, 0, size, 0, len(plane)) + plane


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (b"", "of 0 bytes has no complete header"),
        (b"PK\3\4".ljust(40), "no header of compressed tensors"),
        (struct.pack("<4sBBHIII", b"CBLK", 2, 1, 0, 0, 0, 0), "has version 2, and this program reads version 1"),
        (struct.pack("<4sBBHIII", b"CBLK", 1, 3, 0, 0, 0, 0), "no header of compressed tensors"),
        (struct.pack("<4sBBHIII", b"CBLK", 1, 1, 0, MOST_BYTES + 1, 0, 0), f"at most {MOST_BYTES} are allowed"),
        (struct.pack("<4sBBHIII", b"CBLK", 1, 1, 0, 100_001, 0, 0), "100001 bytes, and 100000 are expected"),
        (struct.pack("<4sBBHIII", b"CBLK", 1, 4, 0, 8, 0, 0), "no complete header"),
        (struct.pack("<4sBBHIII", b"CBLK", 1, 1, 0, 5, 0, 6) + b"abcdef", "longer than in the original"),
        (struct.pack("<4sBBHIII", b"CBLK", 1, 1, 0, 3, 7, 3) + b"abc", "was packed with 00000007"),
        (block_of(b"no frame at all", 90_000), "cannot be decompressed"),
    ],
)
def test_what_is_no_block_is_refused(block: bytes, why: str) -> None:
    with pytest.raises(DamagedBlockError, match=why):
        CODEC.unpack(block, memoryview(bytearray(100_000)))


def test_a_frame_of_another_size_takes_no_memory() -> None:
    """One that announces a GiB, one that is as long without saying so, and one with bytes behind it."""
    huge = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))
    silent = zstandard.ZstdCompressor(level=19, write_content_size=False).compress(bytes(64 << 20))
    right = zstandard.ZstdCompressor().compress(bytes(50_000))
    tracemalloc.start()
    for frame, why in ((huge, "has 67108864 bytes"), (silent, "has 0 bytes|18446744073709551615 bytes")):
        with pytest.raises(DamagedBlockError, match=f"a plane of a block {why}, and 50000 are expected"):
            CODEC.unpack(block_of(frame, 50_000), memoryview(bytearray(50_000)))
    with pytest.raises(DamagedBlockError, match="cannot be decompressed"):
        CODEC.unpack(block_of(right + b"more", 50_000), memoryview(bytearray(50_000)))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="values of 3 bytes: only values of 1, 2, 4, 8"):
        CODEC.pack(b"abc", 3)
    with pytest.raises(ValueError, match=f"a block of {MOST_BYTES + 1} bytes: at most {MOST_BYTES}"):
        CODEC.pack(bytes(MOST_BYTES + 1), 1)
    with pytest.raises(ValueError, match="must be contiguous"):
        CODEC.pack(np.zeros(10, np.float32)[::2], 4)
