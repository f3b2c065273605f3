"""How copies of saves travel: JSON messages over TCP, and the bytes of a file in extents, each with a CRC-32.

A message is its length (4 bytes, little endian) and a JSON object. Nothing is read of a message before both ends have
proved that they know the secret of the launch (megatron.net.handshake). Whoever waits for bytes has a deadline: none at
all for so long, or too few for the time, and the other end counts as stalled. What is received is worth nothing before
the checksum of each extent has been compared with the record that the save was sealed with
(megatron.processes.memory_slots).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron.fileio.checksums import crc32
from megatron.net import handshake
from megatron.net.secret import SecretError, required_secret
from megatron.net.tls import is_encrypted

_LENGTH = struct.Struct("<I")
_LONGEST = 256 << 20  # bytes of a message: a record has the names of all tensors
_CHUNK = 1 << 20  # bytes of one call of the kernel
_SLOWEST = 1e6  # bytes a second: a peer that is slower counts as stalled, however steadily it sends
CONNECT_S = 5.0  # for one attempt

Key = tuple[int, ...]  # sizes of tp, pp, dp and the coordinates tp, pp, dp: whose save it is


class PeerError(Exception):
    """What another process did not do, or did wrong; the message names neither process nor save."""


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


class Channel:
    """One end of a connection. `deadline_s`: how long the other end may say nothing."""

    def __init__(self, connected: socket.socket, deadline_s: float) -> None:
        connected.settimeout(deadline_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self.deadline_s = deadline_s

    def extend(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._socket.settimeout(deadline_s)

    def notice_loss(self) -> None:
        """From now on notice within some 10 s that the other end's host is gone, however long the deadline is."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 4), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def tell(self, **message: Any) -> None:
        """Send a message. Raises PeerError."""
        content = json.dumps(message).encode()
        try:
            self._socket.sendall(_LENGTH.pack(len(content)) + content)
        except OSError as error:
            raise self._failed(error) from error

    def hear(self) -> dict[str, Any]:
        """The next message. Raises PeerError if there is none, or if it says `error`."""
        head = bytearray(_LENGTH.size)
        self.receive_into(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > _LONGEST:
            raise PeerError(f"sends a message of {length} bytes")
        content = bytearray(length)
        self.receive_into(memoryview(content))
        try:
            message = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise PeerError("sends what is no message") from error
        if not isinstance(message, dict):
            raise PeerError("sends what is no message")
        if "error" in message:
            raise PeerError(str(message["error"]))
        return message

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`. Raises PeerError."""
        until = time.monotonic() + self.deadline_s + len(view) / _SLOWEST
        position = 0
        while position < len(view):
            try:
                got = self._socket.recv_into(view[position : position + _CHUNK])
            except OSError as error:
                raise self._failed(error) from error
            if not got:
                raise PeerError(f"has ended the connection {len(view) - position} bytes too early")
            position += got
            if time.monotonic() > until:
                raise PeerError(f"is stalled: it sent {position} of {len(view)} bytes in the time for all of them")

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

    def send_file(self, fd: int, num_bytes: int, before: Callable[[int], int] | None = None, *, start: int = 0) -> None:
        """Send bytes [start, num_bytes) of a file; without TLS, the kernel copies none of them. Raises PeerError.

        `before` is asked before each chunk: how many bytes of so many may go now. It may wait.
        """
        waiting = select.poll()
        waiting.register(self._socket, select.POLLOUT)
        send = self._send_encrypted if is_encrypted(self._socket) else self._send_by_kernel
        position = start
        while position < num_bytes:
            count = min(_CHUNK, num_bytes - position)
            count = before(count) if before is not None else count
            stop = position + count
            while position < stop:
                if not waiting.poll(self.deadline_s * 1000):
                    raise PeerError(f"is stalled: it took nothing for {self.deadline_s:g} s")
                try:
                    sent = send(fd, position, stop - position)
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise self._failed(error) from error
                if not sent:
                    raise PeerError("was to get more bytes than there are")
                position += sent

    def _send_by_kernel(self, fd: int, position: int, count: int) -> int:
        return os.sendfile(self._socket.fileno(), fd, position, count)

    def _send_encrypted(self, fd: int, position: int, count: int) -> int:
        """All that was read: what TLS has begun to send is not to be read again."""
        part = os.pread(fd, count, position)
        self._socket.sendall(part)
        return len(part)

    def abort(self) -> None:
        """From another thread: whatever is waited for, and all that follows, fails."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _failed(self, error: OSError) -> PeerError:
        if isinstance(error, TimeoutError):
            return PeerError(f"is stalled: it said nothing for {self.deadline_s:g} s")
        return PeerError(f"cannot be reached: {error.strerror or error}")


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
