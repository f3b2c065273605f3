"""Frames between two parts of a launch: a JSON object, and bytes that go with it, its payload.

    4 bytes    length of the object, little endian
    8 bytes    length of the payload
    ...        the object, in UTF-8
    ...        the payload

Coordinator and agents, the processes that hold copies of saves, and the ranks in the tree of agreements all use them,
once both ends have proved that they know the secret of the launch (handshake.py). Lengths are bounded, and memory grows
with the bytes that have arrived, not with those that were announced.

A loop over several connections calls `put`, `flush` and `receive`, which never wait, and looks at `ended`. A thread
that serves one connection calls `drain`, `next_object`, `receive_into`, `send_file` and `send_payload`. They wait while
the other end makes progress, and raise PeerError.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from megatron.net.tls import is_encrypted

_HEAD = struct.Struct("<IQ")  # lengths of object and payload
_PART = 1 << 16  # bytes of one recv(2) in `receive`
_CHUNK = 1 << 20  # bytes of one call where a payload is moved
_SLOWEST = 1e6  # bytes a second: an end that sends more slowly counts as stalled, however steadily it sends
_Self = TypeVar("_Self", bound="Connection")


class PeerError(Exception):
    """What the other end did not do, or did wrong. The message is a sentence without its subject: "is stalled"."""


class Frame(NamedTuple):
    content: dict[str, Any]
    payload: bytes


class Connection:
    """One end of a connection, for one thread; `connected` belongs to it from then on.

    `longest`, `longest_payload`: bytes of an object, and of a payload that `receive` returns; a frame that is longer
    ends the connection. `most_unsent`: bytes after which an end that reads nothing counts as gone. `deadline_s`: for
    how long a call that waits lets the other end be silent.

    `ended`: why nothing more can be received or sent, as in PeerError; None while the connection works.
    """

    def __init__(
        self,
        connected: socket.socket,
        longest: int,
        *,
        longest_payload: int = 0,
        most_unsent: float = math.inf,
        deadline_s: float = math.inf,
    ) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ended: str | None = None
        self.deadline_s = deadline_s
        self._socket = connected
        self._longest, self._longest_payload, self._most_unsent = longest, longest_payload, most_unsent
        self._received = bytearray()  # of frames that are not complete
        self._unsent: deque[memoryview] = deque()  # what is left of each frame
        self._begun = False  # whether a part of the first of these is sent, or is in a TLS record that will be
        self._payload_left = 0  # bytes that follow the object which `next_object` has returned

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something that was put has to be flushed."""
        return bool(self._unsent)

    def keep_alive(self, idle_s: int, interval_s: int, count: int) -> None:
        """Have the kernel ask after `idle_s` of silence whether the other host is there, `count` times (tcp(7))."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = (socket.TCP_KEEPIDLE, idle_s), (socket.TCP_KEEPINTVL, interval_s), (socket.TCP_KEEPCNT, count)
        for option, value in options:
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def abort(self) -> None:
        """From another thread: whatever is waited for, and all that follows, fails."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Without waiting

    def put(self, content: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send a frame, or as much of it as the kernel takes now; `flush` sends the rest.

        Raises ValueError if it is longer than the other end accepts.
        """
        if len(payload) > self._longest_payload:
            raise ValueError(f"a payload of {len(payload)} bytes is longer than {self._longest_payload}")
        self._unsent.append(memoryview(self._head(content, len(payload)) + payload))
        self.flush()

    def put_last(self, content: Mapping[str, Any], payload: bytes = b"") -> None:
        """As `put`, in place of all frames that are not begun: the connection is about to be closed."""
        while len(self._unsent) > int(self._begun):
            self._unsent.pop()
        self.put(content, payload)

    def flush(self) -> bool:
        """Send more of what was put; whether nothing is left. What the other end said before it ended is received."""
        while self._unsent and self.ended is None:
            first = self._unsent[0]
            try:
                sent = self._socket.send(first)
            except (BlockingIOError, InterruptedError):
                self._begun = self._begun or is_encrypted(self._socket)  # TLS has made a record of its beginning
                if sum(map(len, self._unsent)) > self._most_unsent:
                    self.ended = "reads nothing"
                break
            except OSError as error:
                self._read()
                self._end(error)
                break
            self._begun = sent < len(first)
            if self._begun:
                self._unsent[0] = first[sent:]
            else:
                self._unsent.popleft()
        return not self._unsent

    def receive(self) -> list[Frame]:
        """The frames that have arrived completely. One that is none, or too long, ends the connection."""
        self._read()
        found: list[Frame] = []
        while len(self._received) >= _HEAD.size:
            size, num_bytes = _HEAD.unpack_from(self._received)
            if size > self._longest or num_bytes > self._longest_payload:
                self._refuse(f"sends a message of {size + num_bytes} bytes")
                break
            stop = _HEAD.size + size
            if len(self._received) < stop + num_bytes:
                break
            content = _decoded(self._received[_HEAD.size : stop])
            if content is None:
                self._refuse("sends what is no message")
                break
            found.append(Frame(content, bytes(memoryview(self._received)[stop : stop + num_bytes])))
            del self._received[: stop + num_bytes]
        return found

    # Waiting

    def drain(self) -> None:
        """Wait until all that was put is sent. Raises PeerError."""
        while not self.flush():
            if self.ended is not None:
                raise PeerError(self.ended)
            self._wait(select.POLLOUT, "took")

    def next_object(self) -> dict[str, Any]:
        """The next object. Its payload is for `receive_into`, and has to be taken before the next one.

        Raises PeerError.
        """
        if self._payload_left:
            raise PeerError(f"sends {self._payload_left} bytes that nobody has asked for")
        self._fill(_HEAD.size)
        size, self._payload_left = _HEAD.unpack(self._received)
        if size > self._longest:
            raise PeerError(f"sends a message of {size} bytes")
        self._received.clear()
        self._fill(size)
        content = _decoded(self._received)
        self._received.clear()
        if content is None:
            raise PeerError("sends what is no message")
        return content

    @property
    def payload_left(self) -> int:
        """Bytes that follow the object which `next_object` has returned, and that nobody has taken."""
        return self._payload_left

    def receive_into(self, view: memoryview, until: float | None = None) -> None:
        """Fill `view` with the next bytes of the payload, copied once, by the kernel. Raises PeerError.

        `until`: when it has to be over, of time.monotonic(); None: what `deadline_for` says of these bytes.
        """
        if len(view) > self._payload_left:
            raise PeerError(f"sends {self._payload_left} bytes more, and {len(view)} are needed")
        self._payload_left -= len(view)
        self._receive_into(view, self.deadline_for(len(view)) if until is None else until)

    def send_file(
        self,
        content: Mapping[str, Any],
        fd: int,
        parts: Sequence[tuple[int, int]],
        before: Callable[[int], int] | None = None,
    ) -> None:
        """Send an object whose payload is bytes [start, stop) of a file, for each of `parts`.

        Without TLS nothing is copied but by the kernel (sendfile(2)). `before` is asked how many of the bytes that are
        left of a part may go now, and again when these are sent; it may wait. Raises PeerError.
        """
        self._unsent.append(memoryview(self._head(content, sum(stop - start for start, stop in parts))))
        self.drain()
        send = self._send_encrypted if is_encrypted(self._socket) else self._send_by_kernel
        for start, stop in parts:
            for position, count in _granted(start, stop, before):
                send(fd, position, count)

    def send_payload(
        self, content: Mapping[str, Any], payload: bytes, before: Callable[[int], int] | None = None
    ) -> None:
        """Send an object with a payload, which may be longer than `longest_payload`. `before` as of `send_file`.

        Raises PeerError.
        """
        self._unsent.append(memoryview(self._head(content, len(payload))))
        view = memoryview(payload)
        for position, count in _granted(0, len(view), before):
            self._unsent.append(view[position : position + count])
            self.drain()
        self.drain()

    def _send_by_kernel(self, fd: int, position: int, count: int) -> None:
        stop = position + count
        while position < stop:
            try:
                sent = os.sendfile(self._socket.fileno(), fd, position, stop - position)
            except (BlockingIOError, InterruptedError):
                self._wait(select.POLLOUT, "took")
                continue
            except OSError as error:
                self._read()
                raise self._failed(error) from error
            if not sent:
                raise PeerError("was to get more bytes than there are")
            position += sent

    def _send_encrypted(self, fd: int, position: int, count: int) -> None:
        part = os.pread(fd, count, position)
        if len(part) < count:
            raise PeerError("was to get more bytes than there are")
        self._unsent.append(memoryview(part))
        self.drain()

    def _head(self, content: Mapping[str, Any], num_bytes: int) -> bytes:
        """The frame up to its payload of so many bytes."""
        text = json.dumps(content).encode()
        if len(text) > self._longest:
            raise ValueError(f"a message of {len(text)} bytes is longer than {self._longest}")
        return _HEAD.pack(len(text), num_bytes) + text

    def _read(self) -> None:
        """Take what has come, but no more than the longest frame at a time."""
        room = _HEAD.size + self._longest + self._longest_payload
        while self.ended is None and room > 0:
            try:
                part = self._socket.recv(_PART)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end(error)
                return
            if not part:
                self.ended = "has ended"
            self._received += part
            room -= len(part)
            if len(part) < _PART and not is_encrypted(self._socket):  # there is no more; TLS returns single records
                return

    def _fill(self, size: int) -> None:
        """Wait until so many bytes are in the empty buffer."""
        until = self.deadline_for(size)
        while len(self._received) < size:
            part = bytearray(min(_CHUNK, size - len(self._received)))
            self._receive_into(memoryview(part), until)
            self._received += part

    def deadline_for(self, num_bytes: int) -> float:
        """When so many bytes have to be here, unless the other end is stalled: a time of time.monotonic()."""
        return time.monotonic() + self.deadline_s + num_bytes / _SLOWEST

    def _receive_into(self, view: memoryview, until: float) -> None:
        position = 0
        while position < len(view):
            try:
                got = self._socket.recv_into(view[position : position + _CHUNK])
            except (BlockingIOError, InterruptedError):
                if time.monotonic() > until:  # and all that has come is taken: this end may itself have been stopped
                    raise PeerError(
                        f"is stalled: it sent {position} of {len(view)} bytes in the time for all of them"
                    ) from None
                self._wait(select.POLLIN, "said")
                continue
            except OSError as error:
                raise self._failed(error) from error
            if not got:
                raise PeerError(f"has ended the connection {len(view) - position} bytes too early")
            position += got

    def _wait(self, event: int, does: str) -> None:
        """Until the socket can be read or written. `does`: what the other end does then."""
        poll = select.poll()
        poll.register(self._socket, event)
        if not poll.poll(None if self.deadline_s == math.inf else self.deadline_s * 1000):
            raise PeerError(f"is stalled: it {does} nothing for {self.deadline_s:g} s")

    def _refuse(self, why: str) -> None:
        """Nothing that follows can be understood."""
        self.ended = why
        self._received.clear()

    def _end(self, error: OSError) -> None:
        gone = isinstance(error, (BrokenPipeError, ConnectionResetError))
        self.ended = self.ended or ("has ended" if gone else f"cannot be reached: {error.strerror or error}")

    def _failed(self, error: OSError) -> PeerError:
        self._end(error)
        return PeerError(self.ended)


def _granted(start: int, stop: int, before: Callable[[int], int] | None) -> Iterator[tuple[int, int]]:
    """(position, bytes) of each piece of the bytes [start, stop), once `before` has let it go."""
    position = granted = start
    while position < stop:
        if position == granted:
            granted += stop - position if before is None else before(stop - position)
        count = min(_CHUNK, granted - position)
        yield position, count
        position += count


def _decoded(text: bytearray) -> dict[str, Any] | None:
    """The JSON object; None if it is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
