"""The protocol of copies: a frame (megatron.net.connection) has a message, and the bytes of a file as its payload.

The file has extents, each with a CRC-32 in the record that the save was sealed with (megatron.peers.memory_slots).
The receiver compares them before it uses a copy.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.fileio.checksums import crc32
from megatron.net import handshake
from megatron.net.connection import Connection, PeerError
from megatron.net.secret import SecretError, required_secret

_LONGEST = 256 << 20  # bytes of a message: a record has the names of all tensors
CONNECT_S = 5.0  # for one attempt

Key = tuple[int, ...]  # sizes of tp, pp, dp and the coordinates tp, pp, dp: whose save it is


class Extent(NamedTuple):
    """Bytes [start, stop) of a file, and their CRC-32."""

    start: int
    stop: int
    crc32: int


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

    def receive_file(self, view: memoryview, record: Mapping[str, Any]) -> None:
        """Fill `view` with the file that a record tells of, extent by extent, each verified. Raises PeerError."""
        for extent in extents_of(record):
            part = view[extent.start : extent.stop]
            self.receive_into(part)
            found = crc32(part)
            if found != extent.crc32:
                raise PeerError(
                    f"has a damaged copy: bytes {extent.start} to {extent.stop} have checksum {found:08x}, and were "
                    f"saved with {extent.crc32:08x}"
                )


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
