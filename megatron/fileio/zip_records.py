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
# torch's reader takes such a record for a directory: it leaves its memory as it was allocated, whatever its size.
_DIRECTORY_ATTRIBUTE = 0x10  # of MS-DOS (APPNOTE.TXT, 4.4.15)
_UTF8_NAME = 0x800  # bit of the general purpose flags (4.4.4)


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
    """All records of the archive, by offset.

    Raises zipfile.BadZipFile if headers are damaged, or say what would make torch's reader return other bytes than
    those whose CRC-32 is in the directory.
    """
    with _bad_zip_only(), zipfile.ZipFile(file) as archive:
        records = [_record(file, info) for info in archive.infolist()]
    return sorted(records, key=lambda record: record.offset)


def _record(file: BinaryIO, info: zipfile.ZipInfo) -> Record:
    name = info.orig_filename
    if info.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"record {name} is compressed; torch.save stores records as is")
    if info.external_attr & _DIRECTORY_ATTRIBUTE or name.endswith("/"):
        raise zipfile.BadZipFile(f"record {name} is marked as a directory; torch.save writes none")
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) != _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"record {name} has a damaged header")
    name_length, extra_length = _LOCAL_HEADER.unpack(header)[-2:]
    own_name = file.read(name_length)
    if own_name != name.encode("utf-8" if info.flag_bits & _UTF8_NAME else "cp437"):
        raise zipfile.BadZipFile(f"record {name} of the directory names itself {own_name!r}")
    offset = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    return Record(name, offset, info.file_size, info.CRC)


@contextmanager
def _bad_zip_only() -> Iterator[None]:
    """zipfile has other exceptions too for what damaged headers make it do, an impossible seek for one."""
    try:
        yield
    except (NotImplementedError, ValueError, OverflowError, struct.error, OSError) as exc:
        if isinstance(exc, OSError) and exc.errno != errno.EINVAL:
            raise
        raise zipfile.BadZipFile(f"{type(exc).__name__}: {exc}") from exc
