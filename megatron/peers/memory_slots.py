"""Host memory that outlives a rank: slots for saves, held by the launcher and written by the ranks that it forks.

A slot is two anonymous files in memory (memfd_create(2)): the data of a save, and the record that seals it. The
launcher makes them, empty, before it forks; every rank inherits those of all ranks of its host. What a killed rank has
written stays, and all of it is gone with the launcher and the last rank, however they end: there is no name to remove.

A record is written last, at once, with its length and CRC-32. So a slot without a whole record was being written when
its rank ended, and holds nothing. Before a byte of the data changes, the record is removed. Standard library only.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

VARIABLE = "MEGATRON_MEMORY_SLOTS"  # numbers of the descriptors, rank by rank
SLOTS_PER_RANK = 2  # one of them is always whole
_NAME = "megatron_slot"
_LINK = re.compile(rf"/memfd:{_NAME}\.(\d+)\.(data|record)\b")  # of a descriptor: which slot of its process, and what
_HEAD = struct.Struct("<QI")  # of a record: bytes and CRC-32 of what follows
_LARGEST_RECORD = 1 << 30
_OWN = "/proc/self/fd"
_NUMBERS = itertools.count()  # of the slots that this process makes; one that it forks counts on


class Slot:
    """Room for one save of one rank."""

    def __init__(self, data: int, record: int) -> None:
        """`data`, `record`: descriptors of files in memory."""
        self.data = data
        self.record_file = record

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that its data has."""
        return os.fstat(self.data).st_size

    def resize(self, num_bytes: int) -> None:
        """Give the data that many bytes, with memory behind each of them. It must not be sealed.

        Whether there is so much memory is the caller's to know: the kernel does not refuse, but kills processes.
        """
        present = self.num_bytes
        if num_bytes > present:
            os.posix_fallocate(self.data, present, num_bytes - present)
        elif num_bytes < present:
            os.ftruncate(self.data, num_bytes)

    def unseal(self) -> None:
        """From now on it holds nothing."""
        os.ftruncate(self.record_file, 0)

    def seal(self, record: Mapping[str, Any]) -> None:
        """What the data holds is whole, and `record`, which JSON can hold, says what it is."""
        content = json.dumps(record).encode()
        whole = _HEAD.pack(len(content), zlib.crc32(content)) + content
        if os.pwrite(self.record_file, whole, 0) != len(whole):
            raise OSError(errno.ENOSPC, "the record of a slot in host memory could not be written")

    def record(self) -> dict[str, Any] | None:
        """What it was sealed with; None if it holds nothing whole."""
        size = os.fstat(self.record_file).st_size
        if size > _LARGEST_RECORD:
            return None
        whole = os.pread(self.record_file, size, 0)
        if len(whole) <= _HEAD.size:  # by now, too: a rank that runs may have unsealed it
            return None
        length, crc = _HEAD.unpack_from(whole)
        content = whole[_HEAD.size :]
        if len(content) != length or zlib.crc32(content) != crc:
            return None
        found = json.loads(content)
        return found if isinstance(found, dict) else None

    def close(self) -> None:
        os.close(self.data)
        os.close(self.record_file)


def new_slots(ranks: int) -> list[list[Slot]]:
    """Empty slots: those of each of so many ranks."""
    return [[_new_slot(next(_NUMBERS)) for _ in range(SLOTS_PER_RANK)] for _ in range(ranks)]


def _new_slot(number: int) -> Slot:
    data, record = (os.memfd_create(f"{_NAME}.{number}.{part}", os.MFD_CLOEXEC) for part in ("data", "record"))
    return Slot(data, record)


def hold_slots(ranks: int) -> None:
    """In a launcher, before it forks: make the slots of this host's ranks, which they find by their environment."""
    slots = new_slots(ranks)
    os.environ[VARIABLE] = ",".join(str(fd) for mine in slots for slot in mine for fd in (slot.data, slot.record_file))


def let_go_of_slots() -> None:
    """In a process that has no more ranks to fork: give back what `hold_slots` made. Ranks that run keep theirs."""
    for mine in held_slots() or []:
        for slot in mine:
            slot.close()
    os.environ.pop(VARIABLE, None)


def held_slots() -> list[list[Slot]] | None:
    """In a rank: the slots of each rank of this host, by local rank; None if no launcher holds any.

    The environment alone says nothing: a process that was started, not forked, has inherited no descriptor.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    numbers = [int(number) for number in text.split(",")]
    if any(_slot_file(f"{_OWN}/{number}") is None for number in numbers):
        return None
    return _by_rank([Slot(data, record) for data, record in zip(numbers[::2], numbers[1::2], strict=True)])


def slots_held_by(pid: int) -> list[list[Slot]]:
    """From outside of a launch: the slots that its launcher holds, as `held_slots`; none if it holds none.

    The descriptors are this process's own, and for it to close. Raises OSError if the process is gone, or another
    user's.
    """
    directory = f"/proc/{pid}/fd"
    # By what they are called: numbers of descriptors are in no order, and a mapping has a descriptor of its own.
    files = {_slot_file(path): path for path in (f"{directory}/{number}" for number in os.listdir(directory))}
    numbers = sorted(found[0] for found in files if found is not None and found[1] == "record")
    return _by_rank(
        [
            Slot(*(os.open(files[number, part], os.O_RDWR | os.O_CLOEXEC) for part in ("data", "record")))
            for number in numbers
        ]
    )


def _by_rank(slots: Sequence[Slot]) -> list[list[Slot]]:
    return [list(slots[i : i + SLOTS_PER_RANK]) for i in range(0, len(slots), SLOTS_PER_RANK)]


def _slot_file(path: str) -> tuple[int, str] | None:
    """(number of the slot, data or record) of a path below /proc/PID/fd; None if it is no file of a slot."""
    try:
        found = _LINK.match(os.readlink(path))
    except OSError:
        return None
    return (int(found[1]), found[2]) if found else None
