"""The files that torch.save writes to and torch.load reads from: bytes, counts, times and checksums."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fileio.checksums import CheckedBytes
from megatron.fileio.files import DamagedFileError
from megatron.fileio.timed_files import TimedReader, TimedWriter, Timeline
from megatron.fileio.zip_records import read_records


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "state.pt"
    torch.save({"large": torch.arange(100_000.0), "small": torch.ones(3), "text": "text"}, path)
    return path


# Writing


def test_pieces_of_every_size_arrive_in_order(tmp_path: Path) -> None:
    writer = TimedWriter(tmp_path / "file", Timeline())
    pieces = [b"a" * 10, b"b" * 70_000, b"c", b"", b"d" * 65_535, b"e" * 65_536, b"f" * 3]
    counts = [writer.write(piece) for piece in pieces]
    writer.flush()
    writer.close()
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert counts == [len(piece) for piece in pieces]
    assert writer.num_bytes == sum(counts)


def test_small_pieces_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every header of a zip archive would be a system call of its own otherwise."""
    sizes: list[int] = []
    real_write = os.write

    def write(fd: int, data: bytes) -> int:
        sizes.append(len(data))
        return real_write(fd, data)

    monkeypatch.setattr(os, "write", write)
    writer = TimedWriter(tmp_path / "file", Timeline())
    for _ in range(1000):
        writer.write(b"x" * 100)
    writer.flush()
    writer.close()
    assert sum(sizes) == 100_000 and len(sizes) == 2


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes at most 2 GiB at a time; here a pipe-sized piece stands for that."""
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:4096]))
    writer = TimedWriter(tmp_path / "file", Timeline())
    content = os.urandom(100_000)
    writer.write(content)
    writer.close()
    assert (tmp_path / "file").read_bytes() == content
    assert writer.num_bytes == 100_000


def test_position_and_content_are_known_while_it_is_written(tmp_path: Path) -> None:
    """Libraries note where in a file each tensor begins, and what was written is read back for its checksum."""
    timeline = Timeline()
    with TimedWriter(tmp_path / "file", timeline, checksum=True) as writer:
        writer.write(b"abc")
        assert writer.tell() == 3 and writer.num_bytes == 0
        writer.write(b"d" * 100_000)
        assert writer.tell() == 100_003
        writer.flush()
        assert os.pread(writer.fileno(), 5, 0) == b"abcdd" and writer.num_bytes == 100_003
    assert writer.crc == zlib.crc32(b"abc" + b"d" * 100_000) and timeline.total("checksum") > 0


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(FileExistsError):
        TimedWriter(tmp_path / "file", Timeline())
    assert (tmp_path / "file").read_text() == "old"


def test_torch_save_writes_the_same_bytes(tmp_path: Path) -> None:
    state = {"large": torch.arange(100_000.0), "small": torch.ones(3)}
    expected = io.BytesIO()
    torch.save(state, expected)
    timeline = Timeline()
    writer = TimedWriter(tmp_path / "file", timeline)
    torch.save(state, writer)  # type: ignore[arg-type]
    writer.flush()
    writer.close()
    assert (tmp_path / "file").read_bytes() == expected.getvalue()
    assert writer.num_bytes == len(expected.getvalue()) and timeline.total("write") > 0


# Reading


class Counted(TimedReader):
    """Notes which bytes were read."""

    def __init__(self, path: Path, timeline: Timeline, *, verify: bool = True) -> None:
        with path.open("rb") as file:
            checked = [record.checked for record in read_records(file)] if verify else []
        super().__init__(path, timeline, checked)
        self.reads: list[tuple[int, int]] = []

    def readinto(self, buffer: Any, /) -> int:
        start = self.tell()
        count = super().readinto(buffer)
        self.reads.append((start, start + count))
        return count


@pytest.mark.parametrize("verify", [False, True])
def test_reads_like_any_file(saved: Path, verify: bool) -> None:
    content, timeline = saved.read_bytes(), Timeline()
    reader = Counted(saved, timeline, verify=verify)
    assert reader.seekable() and reader.readable() and reader.tell() == 0
    assert reader.read(10) == content[:10]
    assert reader.seek(-7, os.SEEK_END) == len(content) - 7
    assert reader.read() == content[-7:] and reader.read() == b"" and reader.read(5) == b""
    reader.seek(100)
    buffer = bytearray(len(content))
    assert reader.readinto(buffer) == len(content) - 100
    assert buffer[: len(content) - 100] == content[100:]
    reader.finish()
    reader.close()
    assert timeline.total("read") > 0


def test_torch_load_verifies_in_passing(saved: Path) -> None:
    """What torch.load read whole is not read a second time."""
    timeline = Timeline()
    with saved.open("rb") as file:
        records = {record.name.rpartition("/")[2]: record.checked for record in read_records(file)}
    with Counted(saved, timeline) as reader:
        state = torch.load(reader, weights_only=True)  # type: ignore[arg-type]
        assert torch.equal(state["large"], torch.arange(100_000.0)) and state["text"] == "text"
        before = len(reader.reads)
        reader.finish()
        again = reader.reads[before:]
    assert timeline.total("verify") > 0 and timeline.total("read") > 0
    for name in ("0", "1", "data.pkl"):
        assert not any(start < records[name].stop and stop > records[name].start for start, stop in again), name


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("ending", ["data/0", "data.pkl", "version"])
@pytest.mark.parametrize("read_first", [True, False])
def test_flipped_bit_is_found_and_its_record_named(saved: Path, ending: str, read_first: bool) -> None:
    """Whether the record was read whole, in part, or not at all."""
    with saved.open("rb") as file:
        record = next(r for r in read_records(file) if r.name.endswith(ending))
    flip(saved, record.offset + record.size - 1)
    reader = Counted(saved, Timeline())
    if read_first:
        reader.seek(record.offset)
        reader.read(record.size)
    else:
        reader.seek(record.offset + record.size // 2)
        reader.read(1)
    with pytest.raises(DamagedFileError) as caught:
        reader.finish()
    assert str(caught.value) == f"{saved}: record {record.name} does not have the checksum it was saved with"
    reader.close()


def test_reading_twice_does_not_spoil_the_checksum(saved: Path) -> None:
    reader = Counted(saved, Timeline())
    for _ in range(2):
        reader.seek(0)
        reader.read()
    reader.finish()
    reader.close()


@pytest.mark.parametrize("parts", [[(0, 100)], [(0, 100), (100, 300)], [(500, 700), (0, 100), (100, 600)]])
def test_what_was_read_in_part_is_read_to_its_end(tmp_path: Path, parts: list[tuple[int, int]]) -> None:
    """In several blocks, wherever reading had stopped."""
    path, content = tmp_path / "file", os.urandom(3 << 19)
    path.write_bytes(content)
    with TimedReader(path, Timeline(), [CheckedBytes("all", 0, len(content), zlib.crc32(content))]) as reader:
        for start, stop in parts:
            reader.seek(start)
            assert reader.read(stop - start) == content[start:stop]
        reader.finish()


def test_parts_that_overlap_are_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    """As the directory of a damaged archive may have them."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    checked = [CheckedBytes("one", 0, 900, zlib.crc32(bytes(900))), CheckedBytes("two", 100, 200, 5)]
    with TimedReader(path, Timeline(), checked) as reader:
        reader.seek(150)
        reader.read(700)
        with pytest.raises(DamagedFileError, match="does not have the checksum"):
            reader.finish()


def test_truncated_file(saved: Path) -> None:
    os.truncate(saved, saved.stat().st_size - 1)
    with pytest.raises(zipfile.BadZipFile):
        Counted(saved, Timeline())
