"""Uploads an object while its content is being made, without a file in between."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.fileio.objects.bucket import Bucket, SentPart, Uploaded
from megatron.fileio.objects.errors import ObjectStoreError
from megatron.fileio.objects.parts import streamed_part_bytes
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation


@dataclass
class _Collected:
    """A part that comes in several stretches. `left`: bytes that have yet to come."""

    memory: bytearray
    left: int


class ObjectUpload:
    """An object of at most `num_bytes`, whose bytes come in blocks, in any order and from any thread.

    The first part holds what is before `data_start` and the block after it, so that what is before, a header that is
    known last, need not be long enough for a part of its own. The others are one block each, or several where blocks
    are small. A block that is a part is sent from where it lies; others are collected in memory. `key` is written by
    nobody else. After `close` without `cut_off` no upload is left. `op` is told of the upload.
    """

    def __init__(
        self, bucket: Bucket, key: str, num_bytes: int, data_start: int, block_bytes: int, op: Operation | None = None
    ) -> None:
        self.result: Uploaded | None = None  # once all is there
        self.num_bytes = num_bytes
        self._op = op
        self._begun_ns = now_ns()
        self._error: str | None = None
        self._bucket = bucket
        self._key = key
        self._part_bytes = streamed_part_bytes(num_bytes, block_bytes)
        self._first_stop = min(data_start + self._part_bytes, num_bytes)
        self._lock = threading.Lock()
        self._collected: dict[int, _Collected] = {}
        self._sent: list[SentPart] = []
        self._given_up = threading.Event()
        self._upload: str | None = None
        if self._first_stop < num_bytes:
            with self._told():
                self._upload = bucket.begin_upload(key)

    def write(self, buffer: memoryview, length: int, position: int) -> None:
        """Take the first `length` bytes of `buffer`, which belong at `position`; sends the parts that they complete.

        Raises ObjectStoreError naming object and part; then nothing is tried again for those that are under way.
        """
        taken = 0
        while taken < length:
            number, start, stop = self._part_at(position + taken)
            content = buffer[taken : min(length, stop - position)]
            if len(content) < stop - start:
                collected = self._collect(number, content, position + taken - start, stop - start)
            else:
                collected = content
            if collected is not None:
                with self._told():
                    self._send(number, start, collected)
            taken += len(content)

    def cut_off(self, size: int) -> None:
        """All is written, `size` bytes: make it an object."""
        with self._told():
            self._send_last(size)
            if self._upload is not None:
                self.result = self._bucket.finish_upload(self._key, self._upload, self._sent, size)
            if self.result is None:
                raise ObjectStoreError(f"{self._bucket.uri(self._key)}: its bytes from 0 on were never sent")
        self._record(size)

    def sync(self) -> None:
        """The store has it once it has answered."""
        return None

    def close(self) -> None:
        if self.result is None and self._upload is not None:
            self._bucket.abort_quietly(self._key, self._upload)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """After an error within it nothing is tried again, and the trace has the upload with the first of them."""
        try:
            yield
        except BaseException as exc:
            self._given_up.set()
            with self._lock:
                first, self._error = self._error is None, self._error or f"{type(exc).__name__}: {exc}"
            if first:
                self._record(None)
            raise

    def _record(self, num_bytes: int | None) -> None:
        if self._op is not None:
            self._op.add(
                "flush", "upload", self._begun_ns, now_ns(), file=self._key.rpartition("/")[2], num_bytes=num_bytes,
                blocking=False, error=self._error,
            )  # fmt: skip

    def _part_at(self, position: int) -> tuple[int, int, int]:
        """(number from 1, first byte, byte after the last) of the part in which a byte lies."""
        if position < self._first_stop:
            return 1, 0, self._first_stop
        index, _ = divmod(position - self._first_stop, self._part_bytes)
        start = self._first_stop + index * self._part_bytes
        return index + 2, start, min(start + self._part_bytes, self.num_bytes)

    def _collect(self, number: int, content: memoryview, at: int, part_bytes: int) -> memoryview | None:
        """The part's bytes, if those are the last that it lacked."""
        with self._lock:
            part = self._collected.get(number)
            if part is None:
                part = self._collected[number] = _Collected(bytearray(part_bytes), part_bytes)
        memoryview(part.memory)[at : at + len(content)] = content
        with self._lock:
            part.left -= len(content)
            if part.left:
                return None
            del self._collected[number]
        return memoryview(part.memory)

    def _send_last(self, size: int) -> None:
        """Send the part in which the object ends before `num_bytes`."""
        for number, part in list(self._collected.items()):
            start = 0 if number == 1 else self._first_stop + (number - 2) * self._part_bytes
            if len(part.memory) - part.left == size - start:
                self._send(number, start, memoryview(part.memory)[: size - start])

    def _send(self, number: int, start: int, content: memoryview) -> None:
        if self._upload is None:
            self.result = self._bucket.upload(self._key, content)
            return
        sent = self._bucket.send_part(self._key, self._upload, number, start, content, self._given_up)
        with self._lock:
            self._sent.append(sent)
