"""A file of engine `lazy` that several ranks share (docs/lazy_format.md): one safetensors file.

Each rank writes extents of its own, aligned for direct I/O, whatever the others write and when:

    header    for each rank in order an extent of `__metadata__`; then for each rank an extent of entries
    data      for each rank in order its tensors, as in a file of its own, then padding, which is a tensor too

Spaces fill the extents of the header, as JSON allows them between its tokens. So a rank needs to know only how much
room the others take: not their entries, nor their checksums, which come last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatron.checkpointing.engines.base import FilePart, HeaderExtent, SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointSaveError
from megatron.checkpointing.engines.lazy.format import (
    ALGORITHM,
    Contents,
    Shared,
    check_version,
    compact_json,
    decoding,
    descriptions,
    parsed_states,
    parsed_table,
    table,
)
from megatron.checkpointing.engines.lazy.header import (
    LENGTH,
    MAX_HEADER,
    PADDING,
    SHARED_BEGINNING,
    SHARED_VERSION,
    SUFFIX,
    part_entries,
    part_metadata,
)
from megatron.fileio.direct_files import align_up

CHECKSUM = f"{ALGORITHM}:parts"  # of a shared file: each part has its own
_FAR = 10**15  # a position with more digits than those of any file


class Room(NamedTuple):
    """What a rank needs of the file called `file`: bytes, multiples of the alignment but for `data`."""

    file: str
    rank: int
    metadata: int
    entries: int
    data: int


class Place(NamedTuple):
    """Where the extents of a rank lie: [start, stop) of the file. `last`: it is the last rank of the file."""

    metadata: tuple[int, int]
    entries: tuple[int, int]
    data: tuple[int, int]
    header_bytes: int
    file_bytes: int
    last: bool


def file_name(rank: int, local_rank: int, local_world_size: int, files_per_node: int) -> str:
    """Name of the file that a rank shares: its node's ranks, which follow each other, are divided evenly."""
    files = min(files_per_node, local_world_size)
    number = ((local_rank + 1) * files - 1) // local_world_size
    first, stop = (rank - local_rank + local_world_size * i // files for i in (number, number + 1))
    return f"ranks_{first:05d}-{stop - 1:05d}{SUFFIX}"


def room_for(contents: Contents, file: str, rank: int) -> Room:
    """The room that `contents` need wherever they will lie."""
    far = Place((0, 0), (0, 0), (_FAR, _FAR + contents.data_bytes), 0, 0, last=True)
    metadata, entries = _texts(contents, rank, far)
    return Room(file, rank, align_up(len(metadata)), align_up(len(entries)), contents.data_bytes)


def place_parts(rooms: Sequence[Room]) -> list[Place]:
    """The place of each, in the order of `rooms`. Raises CheckpointSaveError if the header of a file is too long."""
    files: dict[str, list[Room]] = {}
    for room in sorted(rooms, key=lambda room: room.rank):
        files.setdefault(room.file, []).append(room)
    places = {room: place for sharing in files.values() for room, place in zip(sharing, _places(sharing), strict=True)}
    return [places[room] for room in rooms]


def _places(sharing: Sequence[Room]) -> list[Place]:
    metadata = _consecutive(0, [room.metadata for room in sharing])
    entries = _consecutive(metadata[-1][1], [room.entries for room in sharing])
    header = entries[-1][1]
    if header > MAX_HEADER:
        raise CheckpointSaveError(
            f"--checkpoint-files-per-node: the header of {sharing[0].file} would have {header} bytes, and readers of "
            f"safetensors take {MAX_HEADER}; give a larger number, or drop the flag"
        )
    padded = _consecutive(header, [align_up(room.data) for room in sharing])
    return [
        Place(
            metadata[i],
            entries[i],
            (padded[i][0], padded[i][0] + room.data),
            header,
            padded[-1][1],
            room is sharing[-1],
        )
        for i, room in enumerate(sharing)
    ]


def _consecutive(start: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    found = []
    for size in sizes:
        found.append((start, start + size))
        start += size
    return found


def part_of(contents: Contents, rank: int, place: Place, crc32s: Sequence[str], file: str) -> SavedFile:
    """What the manifest is to tell of a part, as of a file that has no other."""
    header = zip((place.metadata, place.entries), crc32s, strict=True)
    extents = tuple(HeaderExtent(start, stop, crc) for (start, stop), crc in header)
    data = place.data[0], align_up(place.data[1])
    part = FilePart(rank, extents, data, tuple(contents.states))
    return SavedFile(file, place.file_bytes, CHECKSUM).with_parts([part])


def planned_part(contents: Contents, rank: int) -> SavedFile:
    """The part of a rank whose tensors may be on the meta device, alone in a file, with placeholders for checksums."""
    (place,) = place_parts([room_for(contents, "", rank)])
    return part_of(contents, rank, place, ["0" * 8] * 2, "")


def placed(files: Sequence[SavedFile]) -> list[SavedFile]:
    """Files of one part each, by rank, with the places that the parts have in the files of these names."""
    rooms = []
    for file in files:
        (part,) = file.parts
        metadata, entries = (extent.stop - extent.start for extent in part.header)
        rooms.append(Room(file.name, part.rank, metadata, entries, part.data[1] - part.data[0]))
    found = []
    for file, place in zip(files, place_parts(rooms), strict=True):
        (part,) = file.parts
        positions = zip((place.metadata, place.entries), part.header, strict=True)
        header = tuple(HeaderExtent(start, stop, extent.crc32) for (start, stop), extent in positions)
        moved = replace(part, header=header, data=place.data)
        found.append(SavedFile(file.name, place.file_bytes, CHECKSUM).with_parts([moved]))
    return found


def encode_part(contents: Contents, rank: int, place: Place) -> list[bytes]:
    """The extents of the header that tell of `contents`, whose positions count from where their data begin."""
    found = []
    for text, (start, stop) in zip(_texts(contents, rank, place), (place.metadata, place.entries), strict=True):
        if len(text) > stop - start:  # a bug must not overwrite what another rank has written
            raise RuntimeError(f"{len(text)} bytes for the header's bytes {start} to {stop}")
        found.append(text.ljust(stop - start))
    return found


def _texts(contents: Contents, rank: int, place: Place) -> tuple[bytes, bytes]:
    key = f"rank_{rank:05d}"
    first = place.metadata[0] == 0
    mine = {"lazy_format_version": SHARED_VERSION, "states": contents.states, "tensors": descriptions(contents)}
    metadata = _added({key: compact_json(mine)})
    start, stop = (position - place.header_bytes for position in place.data)
    tensors = table(contents, start)
    if align_up(stop) > stop:
        tensors[PADDING + key] = {
            "dtype": "U8",
            "shape": [align_up(stop) - stop],
            "data_offsets": [stop, align_up(stop)],
        }
    entries = _added(tensors)
    if first:
        metadata = LENGTH.pack(max(place.header_bytes - LENGTH.size, 0)) + SHARED_BEGINNING + metadata
    return metadata, b"}" * first + entries + b"}" * place.last


def _added(content: dict[str, object]) -> bytes:
    """What an object gets that holds some keys already."""
    return b"," + compact_json(content)[1:-1].encode() if content else b""


def decode_part(texts: Sequence[bytes], file: SavedFile, path: Path) -> Contents:
    """Parse the header of the only part that `file` has. Raises CheckpointDamagedError naming `path` if it is none."""
    (part,) = file.parts
    with decoding(path):
        mine = json.loads(part_metadata(texts[0])[f"rank_{part.rank:05d}"])
        check_version(mine["lazy_format_version"], SHARED_VERSION, path)
        content = {name: item for name, item in part_entries(texts[1]).items() if not name.startswith(PADDING)}
        base = min((item["data_offsets"][0] for item in content.values()), default=0)
        for item in content.values():
            item["data_offsets"] = [position - base for position in item["data_offsets"]]
        entries = parsed_table(content, mine["tensors"])
        states = parsed_states(mine["states"])
    contents = Contents(entries, states, part.data[0], Shared(file.num_bytes, part.header_bytes))
    if align_up(contents.data_bytes) != part.data[1] - part.data[0]:
        raise CheckpointDamagedError(
            f"{path}: the header of rank {part.rank}'s part describes {contents.data_bytes} bytes, but "
            f"{part.data[1] - part.data[0]} were saved"
        )
    if part.data[1] > file.num_bytes:
        raise CheckpointDamagedError(f"{path}: rank {part.rank}'s part ends at byte {part.data[1]} of {file.num_bytes}")
    return contents
