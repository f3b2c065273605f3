"""Checksums of torch.save files without a second pass over the data.

torch.save writes a zip archive of stored (uncompressed) records whose central directory holds the CRC-32 of
each. The checksum of such a file here is the CRC-32 of that directory: through it, of every byte of every
record. (ZIP: APPNOTE.TXT 6.3.10, sections 4.3.7, 4.3.12, 4.3.14, 4.3.16; ZIP64 as Python's zipfile reads it.)
"""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib

ALGORITHM = "zip-directory-crc32"
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


@dataclass
class Record:
    """One stored record: where its data lies in the file and its CRC-32."""

    name: str
    offset: int
    size: int
    crc32: int


def directory_checksum(path: Path) -> str:
    """ "zip-directory-crc32:xxxxxxxx" of a zip archive. Raises zipfile.BadZipFile if it is none."""
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        start = archive.start_dir
        file.seek(start)
        return f"{ALGORITHM}:{isal_zlib.crc32(file.read()):08x}"


def read_records(file: BinaryIO) -> list[Record]:
    """All records of the archive, by offset. Raises zipfile.BadZipFile if headers are damaged."""
    records = []
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(
                    f"record {info.filename} is compressed; torch.save stores records as is"
                )
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER.size)
            if len(header) != _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
                raise zipfile.BadZipFile(f"record {info.filename} has a damaged header")
            name_length, extra_length = _LOCAL_HEADER.unpack(header)[-2:]
            offset = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            records.append(Record(info.filename, offset, info.file_size, info.CRC))
    return sorted(records, key=lambda record: record.offset)
