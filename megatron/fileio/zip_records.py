"""Checksums of torch.save files without a second pass over the data.

torch.save writes a zip archive of stored (uncompressed) records whose central directory holds the CRC-32 of
each. The checksum of such a file here is the CRC-32 of that directory: through it, of every byte of every
record. (ZIP: APPNOTE.TXT 6.3.10, sections 4.3.7 and 4.3.12; the ends of the archive as Python's zipfile reads them.)
"""

from __future__ import annotations

import errno
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron.fileio.checksums import CheckedBytes, crc32

ALGORITHM = "zip-directory-crc32"
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


@dataclass
class Record:
    """One stored record: where its data lies in the file and its CRC-32."""

    name: str
    offset: int
    size: int
    crc32: int

    @property
    def checked(self) -> CheckedBytes:
        """The bytes of its data."""
        return CheckedBytes(f"record {self.name}", self.offset, self.offset + self.size, self.crc32)


def directory_checksum(path: Path) -> str:
    """ "zip-directory-crc32:xxxxxxxx" of a zip archive. Raises zipfile.BadZipFile if it is none."""
    with path.open("rb") as file:
        return open_directory_checksum(file.fileno())


def open_directory_checksum(fd: int) -> str:
    """As directory_checksum, of an open file; reads its last few kilobytes only."""
    with _bad_zip_only(), open(fd, "rb", closefd=False) as file, zipfile.ZipFile(file) as archive:
        file.seek(archive.start_dir)
        return f"{ALGORITHM}:{crc32(file.read()):08x}"


def read_records(file: BinaryIO) -> list[Record]:
    """All records of the archive, by offset. Raises zipfile.BadZipFile if headers are damaged."""
    records = []
    with _bad_zip_only(), zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"record {info.filename} is compressed; torch.save stores records as is")
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER.size)
            if len(header) != _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
                raise zipfile.BadZipFile(f"record {info.filename} has a damaged header")
            name_length, extra_length = _LOCAL_HEADER.unpack(header)[-2:]
            offset = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            records.append(Record(info.filename, offset, info.file_size, info.CRC))
    return sorted(records, key=lambda record: record.offset)


@contextmanager
def _bad_zip_only() -> Iterator[None]:
    """zipfile has other exceptions too for what damaged headers make it do, an impossible seek for one."""
    try:
        yield
    except (NotImplementedError, ValueError, OverflowError, struct.error, OSError) as exc:
        if isinstance(exc, OSError) and exc.errno != errno.EINVAL:
            raise
        raise zipfile.BadZipFile(f"{type(exc).__name__}: {exc}") from exc
