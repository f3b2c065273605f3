"""The protocol of copies: a frame (megatron.net.connection) has a message, and the bytes of a file as its payload.

The file has extents, each with a CRC-32 in the record that the save was sealed with (megatron.peers.memory_slots).
The receiver compares them before it uses a copy.

With --replica-compression the record also has `widths`: [bytes, bytes of a value] of consecutive ranges of the file.
Its bytes then go in blocks (megatron.fileio.compressed_blocks), each the payload of a frame, and none across extents.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.fileio.checksums import RangeChecksum, crc32
from megatron.net import handshake
from megatron.net.connection import Connection, PeerError
from megatron.net.secret import SecretError, required_secret

if TYPE_CHECKING:
    from megatron.fileio.compressed_blocks import BlockCodec

_LONGEST = 256 << 20  # bytes of a message: a record has the names of all tensors
CONNECT_S = 5.0  # for one attempt

Key = tuple[int, ...]  # sizes of tp, pp, dp and the coordinates tp, pp, dp: whose save it is


class Extent(NamedTuple):
    """Bytes [start, stop) of a file, and their CRC-32."""

    start: int
    stop: int
    crc32: int


class Compressed(NamedTuple):
    """What it took to send copies compressed: bytes of their blocks, and processor time to make these."""

    wire_bytes: int
    processor_s: float


def key_of(record: Mapping[str, Any]) -> Key:
    """Whose save a record tells of. Raises PeerError if it does not say so."""
    try:
        layout, place = record["layout"], record["place"]
        return tuple(int(part[name]) for part in (layout, place) for name in ("tp", "pp", "dp"))
    except (KeyError, TypeError, ValueError) as error:
        raise PeerError(f"sends a record without a layout and coordinates ({error!r})") from error


def file_size(record: Mapping[str, Any]) -> int:
    """Bytes of the file that a record tells of. Raises PeerError."""
    try:
        size = record["file"]["num_bytes"]
    except (KeyError, TypeError) as error:
        raise PeerError(f"sends a record without a file ({error!r})") from error
    if type(size) is not int or size < 0:
        raise PeerError(f"says that a file has {size!r} bytes")
    return size


def file_summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """What those who read a part of a file need to know of it: all but the checksums of its extents, `file`.

    `header_bytes`: of its first extent. Empty of a save that has no checksums, of which nothing is read in parts.
    """
    described = record.get("file", {})
    if not described.get("extents"):
        return {}
    facts = {name: described.get(name) for name in ("name", "num_bytes", "checksum", "states")}
    return {"file": facts | {"header_bytes": described["extents"][0][0]}}


def extents_of(record: Mapping[str, Any]) -> list[Extent]:
    """The extents of the file that a record tells of, which cover it. Raises PeerError if they do not."""
    size, found, position = file_size(record), [], 0
    try:
        for length, crc in record["file"]["extents"]:
            if type(length) is not int or length <= 0:
                raise PeerError(f"says that an extent has {length!r} bytes")
            found.append(Extent(position, position + length, int(crc, 16)))
            position += length
    except (KeyError, TypeError, ValueError) as error:
        raise PeerError(f"sends a record without checksums ({error!r})") from error
    if position != size:
        raise PeerError(f"says that a file has {size} bytes, and its extents have {position}")
    return found


def widths_of(record: Mapping[str, Any]) -> list[tuple[int, int, int]] | None:
    """(start, stop, bytes of a value) of ranges that cover the file; None: it is not compressed. Raises PeerError."""
    size, found, position = file_size(record), [], 0
    if "widths" not in record["file"]:
        return None
    try:
        for length, width in record["file"]["widths"]:
            if type(length) is not int or length <= 0 or width not in (1, 2, 4, 8):
                raise PeerError(f"says that {length!r} bytes are values of {width!r}")
            found.append((position, position + length, width))
            position += length
    except (TypeError, ValueError) as error:
        raise PeerError(f"sends a record with wrong widths of values ({error!r})") from error
    if position != size:
        raise PeerError(f"says that a file has {size} bytes, and its values have {position}")
    return found


def _blocks(
    parts: Sequence[tuple[int, int]], widths: Sequence[tuple[int, int, int]], most: int
) -> Iterator[tuple[int, int, int]]:
    """(position, bytes, bytes of a value) of the blocks of these parts, in their order."""
    for start, stop in parts:
        for begin, end, width in widths:
            last = min(stop, end)
            for position in range(max(start, begin), last, most):
                yield position, min(most, last - position), width


class Channel(Connection):
    """One end of a connection to a process that holds copies. It waits for the other end, and raises PeerError."""

    def __init__(self, connected: socket.socket, deadline_s: float) -> None:
        super().__init__(connected, _LONGEST, deadline_s=deadline_s)

    def notice_loss(self) -> None:
        """From now on notice within some 10 s that the other end's host is gone, however long the deadline is."""
        self.keep_alive(idle_s=4, interval_s=2, count=3)

    def tell(self, **message: Any) -> None:
        """Send a message. Raises PeerError."""
        with self._why():
            self.put(message)
            self.drain()

    def send_file(
        self,
        content: Mapping[str, Any],
        fd: int,
        parts: Sequence[tuple[int, int]],
        before: Callable[[int], int] | None = None,
    ) -> None:
        with self._why():
            super().send_file(content, fd, parts, before)

    def send_blocks(
        self,
        fd: int,
        parts: Sequence[tuple[int, int]],
        widths: Sequence[tuple[int, int, int]],
        before: Callable[[int], int] | None = None,
    ) -> Compressed:
        """Send bytes [start, stop) of a file, for each of `parts`, compressed. Raises PeerError.

        `widths` as of `widths_of`; `before` as of `send_file`, of the bytes of a block.
        """
        from megatron.fileio.compressed_blocks import MOST_BYTES  # brings NumPy

        codec, wire_bytes, processor_s = _codec("is to be sent"), 0, 0.0
        for position, count, width in _blocks(parts, widths, MOST_BYTES):
            began = time.thread_time()
            content = os.pread(fd, count, position)
            if len(content) < count:
                raise PeerError("was to get more bytes than there are")
            block = codec.pack(content, width)
            processor_s += time.thread_time() - began
            wire_bytes += len(block)
            with self._why():
                self.send_payload({}, block, before)
        return Compressed(wire_bytes, processor_s)

    @contextlib.contextmanager
    def _why(self) -> Iterator[None]:
        """Where nothing more can be sent, the error is what the other end has said of it, if it has."""
        try:
            yield
        except PeerError as error:
            for message, _ in self.receive():
                if "error" in message:
                    raise PeerError(str(message["error"])) from error
            raise

    def hear(self) -> dict[str, Any]:
        """The next message. Raises PeerError if there is none, or if it says `error`."""
        message = self.next_object()
        if "error" in message:
            raise PeerError(str(message["error"]))
        return message

    def receive_file(self, view: memoryview, record: Mapping[str, Any], compressed: bool) -> None:
        """Fill `view` with the file that a record tells of, extent by extent, each verified. Raises PeerError."""
        codec = _codec("sends") if compressed else None
        for extent in extents_of(record):
            part = view[extent.start : extent.stop]
            told = self._receive(part, codec)
            found = crc32(part) if told is None else told
            if found != extent.crc32:
                raise PeerError(
                    f"has a damaged copy: bytes {extent.start} to {extent.stop} have checksum {found:08x}, and were "
                    f"saved with {extent.crc32:08x}"
                )

    def receive_parts(self, parts: Sequence[memoryview], compressed: bool) -> None:
        """Fill one after the other; what is not compressed is not verified. Raises PeerError."""
        codec = _codec("sends") if compressed else None
        for part in parts:
            self._receive(part, codec)

    def _receive(self, part: memoryview, codec: BlockCodec | None) -> int | None:
        """Fill `part`; its CRC-32, if compressed blocks have told it."""
        if codec is not None:
            return self._receive_blocks(part, codec)
        self.receive_into(part)
        return None

    def _receive_blocks(self, part: memoryview, codec: BlockCodec) -> int:
        """Fill `part` from compressed blocks; its CRC-32, of those of the blocks, which are verified."""
        from megatron.fileio.compressed_blocks import DamagedBlockError

        until, found = self.deadline_for(len(part)), RangeChecksum("", 0, 0, 0)
        while found.length < len(part):
            self.hear()
            if self.payload_left > len(codec.room):  # no more memory than for one block, whatever is announced
                raise PeerError(f"sends a block of {self.payload_left} bytes")
            block = codec.room[: self.payload_left]
            self.receive_into(block, until)
            try:
                got = codec.unpack(block, part[found.stop :])
            except DamagedBlockError as error:
                raise PeerError(f"sends a damaged copy: {error}") from error
            if not got.num_bytes:
                raise PeerError("sends an empty block")
            found = found.followed_by(RangeChecksum("", found.stop, got.num_bytes, got.crc32))
        return found.crc32


def _codec(who: str) -> BlockCodec:
    """For one connection. `who`: what the other end does with compressed copies. Raises PeerError."""
    from megatron.fileio.compressed_blocks import PACKAGE, BlockCodec

    try:
        return BlockCodec()
    except ImportError as error:
        what = f"compressed copies, for which this host lacks a package: pip install {PACKAGE}"
        raise PeerError(f"{who} {what}") from error


def connect(host: str, port: int, deadline_s: float) -> Channel:
    """A connection to the process that holds copies there, which has proved to be of this launch. Raises PeerError."""
    try:
        at_most_s = min(CONNECT_S, deadline_s)
        opened = handshake.connect((host, port), required_secret(), handshake.COPIES, at_most_s, answer_s=deadline_s)
        return Channel(opened, deadline_s)
    except TimeoutError as error:
        raise PeerError("does not answer") from error
    except (OSError, SecretError) as error:
        raise PeerError(f"cannot be reached: {getattr(error, 'strerror', None) or error}") from error
