"""A file object for torch.load that checks the CRC-32 of every record of the archive as it is read."""

from __future__ import annotations

import bisect
from pathlib import Path

from isal import isal_zlib

from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.fileio.timed_files import TimedReader
from megatron.fileio.zip_records import Record, read_records


class VerifyingReader(TimedReader):
    """Checks the CRC-32 of every record of a zip archive as it is read.

    Records that were not read whole and in order are read again by `finish`. Raises CheckpointDamagedError
    there if a record differs, and zipfile.BadZipFile on opening if the archive's headers are damaged.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._records = read_records(self._file)
        self._starts = [record.offset for record in self._records]
        self._done = [0] * len(self._records)
        self._crcs = [0] * len(self._records)
        self._file.seek(0)

    def _account(self, position: int, view: memoryview) -> None:
        """Feed what was read at `position` to the checksum of the record it belongs to."""
        index = bisect.bisect_right(self._starts, position) - 1
        if index < 0:
            return
        record = self._records[index]
        if position != record.offset + self._done[index]:
            return
        mine = view[: record.size - self._done[index]]
        self._crcs[index] = isal_zlib.crc32(mine, self._crcs[index])
        self._done[index] += len(mine)

    def finish(self) -> None:
        """Check all records; raises CheckpointDamagedError naming file and record."""
        for index, record in enumerate(self._records):
            if self._done[index] != record.size:
                self._read_again(index, record)
            if self._crcs[index] != record.crc32:
                raise CheckpointDamagedError(
                    f"{self.path}: record {record.name} does not have the checksum it was saved with"
                )

    def _read_again(self, index: int, record: Record) -> None:
        self._done[index] = self._crcs[index] = 0
        self._file.seek(record.offset)
        self.readinto(bytearray(record.size))
