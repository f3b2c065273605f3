"""Where the records of a torch.save file lie, and the one checksum that covers them all."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.fileio.zip_records import directory_checksum, read_records

STATE = {"weight": torch.arange(100.0), "moments": [torch.ones(3, dtype=torch.bfloat16), None], "step": 7}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zip") / "state.pt"
    torch.save(STATE, path)
    return path


def test_records_are_those_of_zipfile_with_their_bytes(saved: Path) -> None:
    content = saved.read_bytes()
    with saved.open("rb") as file, zipfile.ZipFile(saved) as archive:
        records = read_records(file)
        assert {r.name for r in records} == set(archive.namelist())
        assert [r.offset for r in records] == sorted(r.offset for r in records)
        for record in records:
            data = content[record.offset : record.offset + record.size]
            assert data == archive.read(record.name)
            assert record.crc32 == zlib.crc32(data)
    assert any(r.name.endswith("data/0") and r.size == 400 for r in records)


def test_directory_checksum_is_the_crc_of_the_directory(saved: Path) -> None:
    with zipfile.ZipFile(saved) as archive:
        start = archive.start_dir
    assert directory_checksum(saved) == f"zip-directory-crc32:{zlib.crc32(saved.read_bytes()[start:]):08x}"


def test_checksum_differs_with_one_bit_of_a_tensor(tmp_path: Path, saved: Path) -> None:
    """It is of the directory, which holds the CRC-32 of every record."""
    other = tmp_path / "state.pt"
    changed = STATE["weight"].clone()  # type: ignore[union-attr]
    changed.view(torch.int32)[50] ^= 1
    torch.save(STATE | {"weight": changed}, other)
    assert other.stat().st_size == saved.stat().st_size
    assert directory_checksum(other) != directory_checksum(saved)


def test_zip64_archive(tmp_path: Path) -> None:
    path = tmp_path / "large.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive, archive.open("data", "w", force_zip64=True) as file:
        file.write(b"content")
    with path.open("rb") as stream:
        (record,) = read_records(stream)
    assert (record.size, record.crc32) == (7, zlib.crc32(b"content"))
    assert path.read_bytes()[record.offset : record.offset + 7] == b"content"


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "compressed.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data", b"x" * 1000)
    with path.open("rb") as file, pytest.raises(zipfile.BadZipFile, match="record data is compressed"):
        read_records(file)


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02}q\x00.", bytes(1000)])
def test_other_files_are_no_archives(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(zipfile.BadZipFile):
        directory_checksum(path)


@pytest.mark.slow
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=400
)
@given(st.data())
def test_any_damage_is_a_bad_zip_file_or_leaves_the_records_in_the_file(saved: Path, data: st.DataObject) -> None:
    """zipfile itself raises half a dozen other exceptions for damaged headers."""
    content = bytearray(saved.read_bytes())
    with zipfile.ZipFile(saved) as archive:
        start = archive.start_dir
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(start, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        records = read_records(io.BytesIO(content))
    except zipfile.BadZipFile:
        return
    assert all(0 <= record.offset <= len(content) for record in records)
