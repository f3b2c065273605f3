"""Shapes of lines: lines of one shape have the same fields with the same widths, and differ in digits and texts only.

A trace has many lines and few shapes, so one line of each shape is parsed as JSON, and the others as columns of bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from restart_trace.schema import RECORD_FIELDS, type_of

MARGIN = 8  # bytes before each line in its row, so that the eight bytes before any place can be read
_PAIR = re.compile(
    rb'(?P<before>[{,])"(?P<key>[a-z_]+)":'
    rb'(?:(?P<number>-?[0-9.eE+-]+)|"(?P<text>[^"\\\x00-\x1f]*)"|(?P<word>true|false)|(?P<object>\{[^{}]*\}))'
)
_DIGITS = re.compile(rb"0|[1-9][0-9]{0,18}")
_ANY_BYTE = 255
_ZEROS = 0x3030303030303030  # eight digits 0
_LAST = [((1 << 64) - 1) ^ ((1 << 8 * (8 - count)) - 1) for count in range(9)]  # the last `count` bytes of a word
_MIX = 0x9E3779B97F4A7C15  # odd: 2^64 over the golden ratio
_SLOT_BITS = 14

Rows = np.ndarray  # of bytes: lines of one length, each behind MARGIN bytes and followed by others up to whole words


@dataclass(frozen=True)
class Slot:
    """Where the values of a field stand in the rows of a shape."""

    start: int
    stop: int

    def words(self, rows: Rows) -> list[np.ndarray]:
        """The bytes in words of eight, the last eight first; 0 before the first byte."""
        words = []
        for stop in range(self.stop, self.start, -8):
            place = np.ndarray(len(rows), "<u8", rows, offset=stop - 8, strides=rows.strides[:1])
            count = min(8, stop - self.start)
            words.append(place.copy() if count == 8 else place & _LAST[count])
        return words

    def integers(self, rows: Rows) -> np.ndarray:
        """The numbers whose digits stand here, 19 at most.

        Eight digits are decoded at once by three multiplications: pairs of digits, of pairs and of fours.
        """
        numbers = np.zeros(len(rows), np.uint64)
        for place, word in enumerate(self.words(rows)):
            count = min(8, self.stop - self.start - 8 * place)
            some = word ^ (_ZEROS & _LAST[count])
            some = (some * (10 << 8 | 1)) >> 8
            some = ((some & 0x00FF00FF00FF00FF) * (100 << 16 | 1)) >> 16
            some = ((some & 0x0000FFFF0000FFFF) * (10_000 << 32 | 1)) >> 32
            numbers += some * 10 ** (8 * place)
        return numbers

    def texts(self, rows: Rows) -> list[str]:
        """Raises UnicodeDecodeError."""
        lines = np.full((len(rows), self.stop - self.start + 1), ord("\n"), np.uint8)
        lines[:, :-1] = rows[:, self.start : self.stop]
        return lines.tobytes().decode().split("\n")[:-1]

    def distinct(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """(place of each row's text among the different ones, a row of each of these).

        They are told apart in a hash table: of those that meet in a slot one stays, and those of another text meet
        again in the next round, in other slots.
        """
        words = self.words(rows)
        hashes = words[0] * _MIX
        for word in words[1:]:
            hashes = (hashes ^ (hashes >> 32) ^ word) * _MIX
        first = np.arange(len(rows))  # of each text the row that stands for it
        left = first.copy()
        table = np.empty(1 << _SLOT_BITS, np.int64)
        while len(left):
            slots = (hashes[left] >> (64 - _SLOT_BITS)).view(np.int64)
            table[slots] = left
            chosen = table[slots]
            first[left] = chosen
            left = left[np.logical_or.reduce([word[left] != word[chosen] for word in words])]
            hashes = (hashes ^ (hashes >> 32)) * _MIX if len(left) else hashes
        chosen = np.flatnonzero(first == np.arange(len(rows)))
        place = np.empty(len(rows), np.int64)
        place[chosen] = np.arange(len(chosen))
        return place[first], chosen


@dataclass(frozen=True)
class Shape:
    """What lines of one shape have in common: the `record` of one of them, and the slots of what differs.

    A byte of a row may differ from `base` (exclusive or) by at most `limit`: 0 in what is common, 9 in a digit.
    """

    record: dict[str, Any]
    slots: dict[str, Slot]
    base: np.ndarray
    limit: np.ndarray
    texts: tuple[Slot, ...]

    @classmethod
    def of_one(cls, record: dict[str, Any]) -> Shape:
        """The shape of nothing but `record`."""
        return cls(record, {}, np.empty(0, np.uint8), np.empty(0, np.uint8), ())

    def matches(self, rows: Rows) -> np.ndarray:
        """Which rows have this shape; the first has it."""
        if not len(self.base):
            return np.arange(len(rows)) == 0
        differs: np.ndarray = (rows ^ self.base) > self.limit
        for slot in self.texts:
            text = rows[:, slot.start : slot.stop]
            differs[:, slot.start : slot.stop] = (text == ord('"')) | (text == ord("\\")) | (text < ord(" "))
        if not differs.any():  # as mostly, and this is fast
            return np.ones(len(rows), np.bool_)
        return np.logical_not(np.logical_or.reduce(differs, axis=1))


def shape_of(line: bytes, record: dict[str, Any], width: int) -> Shape | None:
    """The shape of a line that holds `record`, in rows of `width` bytes; None if it is not as the recorder writes it.

    Numbers, objects and the texts that have a digit differ from line to line; of the last every byte may.
    """
    base, limit = np.zeros(width, np.uint8), np.full(width, _ANY_BYTE, np.uint8)
    base[MARGIN : MARGIN + len(line)] = np.frombuffer(line, np.uint8)
    limit[MARGIN : MARGIN + len(line)] = 0
    fields = RECORD_FIELDS[type_of(record)]
    slots: dict[str, Slot] = {}
    texts = []
    end = 0
    for pair in _PAIR.finditer(line):
        if pair.start() != end or pair["before"] != (b"," if end else b"{"):
            return None
        end = pair.end()
        name, kind = pair["key"].decode(), str(pair.lastgroup)
        start, stop = pair.span(kind)
        slot = Slot(MARGIN + start, MARGIN + stop)
        if fields[name].json_type == "int":
            if not _DIGITS.fullmatch(pair[kind]):
                return None
            base[slot.start : slot.stop], limit[slot.start : slot.stop] = ord("0"), 9
        elif kind in ("number", "object") or (kind == "text" and re.search(rb"[0-9]", pair[kind])):
            base[slot.start : slot.stop], limit[slot.start : slot.stop] = 0, _ANY_BYTE
            texts += [slot] if kind == "text" else []
        else:
            continue
        slots[name] = slot
    return None if line[end:] != b"}" else Shape(record, slots, base, limit, tuple(texts))
