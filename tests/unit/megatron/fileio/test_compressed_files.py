"""Files in compressed blocks: any range is that of the original, and what is damaged is told of as such."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fileio import compressed_blocks, compressed_files
from megatron.fileio.compressed_blocks import HEAD_BYTES, MOST_BYTES, BlockCodec
from megatron.fileio.compressed_files import CompressedFile, StoredBlock, cuts, encode_index
from megatron.fileio.direct_files import aligned_memory
from megatron.fileio.files import DamagedFileError
from megatron.fileio.open_files import OpenFile

SIZE = 3 * MOST_BYTES + 12_345
CONTENT = (np.random.default_rng(1).standard_normal(SIZE // 4 + 1, np.float32) * 0.02).tobytes()[:SIZE]


def written(path: Path, content: bytes, steps: list[int], *, order: int = 1, gap: int = 0) -> list[StoredBlock]:
    """The content in blocks, cut at `steps` first, in any order and with gaps between them; the blocks as stored."""
    codec, text, blocks = BlockCodec(), b"", []
    edges = sorted({0, *steps, len(content)})
    pieces = [piece for start, stop in zip(edges, edges[1:], strict=False) for piece in cuts(start, stop)]
    random.Random(order).shuffle(pieces)
    for start, stop in pieces:
        packed = codec.pack(content[start:stop], 4)
        blocks.append(StoredBlock(start, len(text), len(packed)))
        text += packed + b"\xee" * gap
    path.write_bytes(text + encode_index(blocks, len(content)))
    return blocks


@contextmanager
def opened(path: Path, mode: str = "auto") -> Iterator[CompressedFile]:
    with closing(CompressedFile(OpenFile(path, path.stat().st_size, mode), str(path))) as file:
        yield file


def read(file: CompressedFile, position: int, num_bytes: int) -> bytes:
    room = bytearray(b"\xa5" * num_bytes)
    file.read(memoryview(room), position)
    return bytes(room)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compressed") / f"x{compressed_files.SUFFIX}"
    written(path, CONTENT, [4096, 5000, MOST_BYTES - 1, 2 * MOST_BYTES], gap=70_000)
    return path


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, SIZE), st.integers(0, SIZE))
def test_any_range_is_that_of_the_original(compressed: Path, start: int, num_bytes: int) -> None:
    with opened(compressed) as file:
        assert file.num_bytes == SIZE and file.block % MOST_BYTES == 0
        found, left = read(file, start, num_bytes), CONTENT[start : start + num_bytes]
    assert found[: len(left)] == left and set(found[len(left) :]) <= {0xA5}, "what is beyond the end stays as it is"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.binary(max_size=200), st.integers(0, 50), st.lists(st.integers(0, 10_000), max_size=6))
def test_any_content_comes_back(
    tmp_path_factory: pytest.TempPathFactory, part: bytes, times: int, at: list[int]
) -> None:
    content = part * times
    path = tmp_path_factory.mktemp("any") / "x"
    written(path, content, [step for step in at if step < len(content)])
    with opened(path) as file:
        assert read(file, 0, len(content)) == content


@pytest.mark.parametrize("mode", ["on", "off"])
def test_only_the_blocks_of_a_range_are_read(compressed: Path, mode: str) -> None:
    with opened(compressed, mode) as file:
        assert file.num_bytes == SIZE
        before = file.read_bytes
        count = file.read(memoryview(bytearray(1000)), 2 * MOST_BYTES + 7)
        assert count == file.read_bytes - before <= MOST_BYTES + HEAD_BYTES + 2 * 4096
        assert file.unpack_ns() > 0 and file.unpack_ns() == 0, "of this thread, since it asked last"


def test_neighbours_are_read_at_once(tmp_path: Path) -> None:
    """However they are ordered, as the threads of a save leave them."""
    path = tmp_path / "x"
    written(path, CONTENT, [], order=2)
    calls: list[int] = []

    class Counting(OpenFile):
        def read(self, view: memoryview, position: int) -> int:
            calls.append(position)
            return super().read(view, position)

    with closing(CompressedFile(Counting(path, path.stat().st_size, "off"), "x")) as file:
        assert file.num_bytes == SIZE
        calls.clear()
        assert read(file, 0, SIZE) == CONTENT and len(calls) == 1


def test_a_thread_keeps_no_more_for_more_files(compressed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load keeps the files of all ranks that saved open, while each of its threads reads from all of them."""
    held = {2: memory_for(2, compressed, monkeypatch), 12: memory_for(12, compressed, monkeypatch)}
    assert held[12] == held[2] and min(held[2]) > 0


def memory_for(count: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytes to read into, and codecs, that two threads make which both read all of so many files."""
    sizes: list[int] = []
    codecs: list[BlockCodec] = []

    def memory(num_bytes: int) -> memoryview:
        sizes.append(num_bytes)
        return aligned_memory(num_bytes)

    def codec() -> BlockCodec:
        codecs.append(BlockCodec())
        return codecs[-1]

    monkeypatch.setattr(compressed_files, "aligned_memory", memory)
    monkeypatch.setattr(compressed_files, "BlockCodec", codec)
    both = threading.Barrier(2)
    with ExitStack() as stack:
        files = [stack.enter_context(opened(path)) for _ in range(count)]
        assert all(file.num_bytes == SIZE for file in files)  # their indexes, read by this thread
        sizes.clear()
        codecs.clear()

        def work(_: int) -> None:
            both.wait()
            assert all(read(file, 0, SIZE) == CONTENT for file in files)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, range(2)))
    return sum(sizes), len(codecs)


def test_without_the_package_none_is_opened(compressed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_blocks, "PACKAGE", "no_such_package")
    found: list[BaseException] = []

    def open_it() -> None:  # in a thread that has no codec yet
        with pytest.raises(ImportError, match="no_such_package") as raised, opened(compressed):
            pass
        found.append(raised.value)

    thread = threading.Thread(target=open_it)
    thread.start()
    thread.join()
    assert found


def altered(position: Callable[[int], int]) -> Callable[[bytes], bytes]:
    def alter(text: bytes) -> bytes:
        at = position(len(text))
        return text[:at] + bytes([text[at] ^ 4]) + text[at + 1 :]

    return alter


def index_of(*blocks: tuple[int, int, int], total: int = 100) -> Callable[[bytes], bytes]:
    """The file with an index of these blocks, whose checksum is right."""
    return lambda text: text + encode_index([StoredBlock(*block) for block in blocks], total)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (altered(lambda _: 100), "of the original: a block has checksum|of the original: a plane"),
        (altered(lambda size: size - 10), "does not end as a compressed file|tells of an index|checksum"),
        (altered(lambda size: size - 50), "its index does not have the checksum"),
        (altered(lambda size: size - 1), "its index does not have the checksum"),
        (lambda text: text[:-1], "does not end as a compressed file"),
        (lambda text: text[:20], "20 bytes, too few"),
        (lambda text: b"", "0 bytes, too few"),
        (index_of((0, 0, 50), (200, 50, 50)), "does not tell of 100 bytes"),
        (index_of((1, 0, 50)), "does not tell of 100 bytes"),
        (index_of(), "does not tell of 100 bytes"),
        (index_of((0, 1 << 40, 50)), "does not tell of 100 bytes"),
        (index_of((0, 0, 1 << 63)), "does not tell of 100 bytes"),
        (index_of((0, 0, 50), total=1 << 63), f"does not tell of {1 << 63} bytes"),
        (index_of((0, 0, 50), total=MOST_BYTES + 1), f"does not tell of {MOST_BYTES + 1} bytes"),
        (index_of((0, 0, 50)), "bytes 0 to 100 of the original: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # of functions str would tell an address
)  # fmt: skip
def test_damage_is_told_of_with_the_name(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "x"
    written(path, CONTENT[:100_000], [4096])
    path.write_bytes(damage(path.read_bytes()))
    with opened(path) as file, pytest.raises(DamagedFileError, match=f"^{path}: .*({message})"):
        read(file, 0, file.num_bytes)
