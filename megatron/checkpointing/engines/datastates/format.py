"""The file format of DataStates-LLM, read with neither its package nor CUDA.

Its branches (https://github.com/DataStates/datastates-llm) write three layouts. All begin with an unsigned 64-bit
little-endian number, and in all the state is pickled with every tensor replaced by the string "TENSOR|" + key, where
the key is the path to it joined by "|". The pickle is called `datastates_metadata` in the JSON.

packed    `datastates.llm.Checkpointing` (datastates/llm/checkpointing.py of branch main)
          number: length of the JSON. Then the JSON, key -> dtype, shape, data_offsets (from the end of the JSON); the
          tensors without gaps; the pickle.
aligned   `datastates.CheckpointEngine`, engine_type simple_engine (llm/datastates/engines/engine_simple.py)
          number: length of the JSON, which begins at 4096. key -> dtype, shape, offsets (from the next multiple of
          4096 after the JSON); each tensor and the pickle begin at such a multiple. The end that is given for the
          pickle is not exact: it is the last thing in the file.
trailing  `datastates.CheckpointEngine`, its default (src/state_io_engine_impl.cpp, src/state_provider/)
          number: where the JSON begins; it is the last thing in the file, padded with zeros to a multiple of 4096.
          "TENSOR|" + key -> dtype, shape (as text: "torch.Size([2, 3])"), offsets (from the beginning of the file).
          engine_type state_aggregated_engine writes the same, with "|" and the name that a state was saved under after
          each key (llm/datastates/engines/engine_state_aggregated.py). This engine saves one state with it.

Tensors are raw and row-major.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.errors import CheckpointDamagedError

SKELETON = "datastates_metadata"
TENSOR_PREFIX = "TENSOR|"
ALIGNMENT = 4096
_NUMBER = struct.Struct("<Q")
_MAX_HEADER = 1 << 30


@dataclass(frozen=True)
class Region:
    """Bytes `start` to `stop` of the file."""

    start: int
    stop: int


@dataclass(frozen=True)
class TensorRegion(Region):
    """Where a tensor lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """What the JSON of a file says, with all offsets counted from the beginning of the file.

    `num_bytes` is what the file must have at least. `skeleton` ends with the file where its end is not known.
    """

    layout: str
    tensors: dict[str, TensorRegion]
    skeleton: Region
    num_bytes: int

    def in_order(self) -> list[tuple[str, TensorRegion]]:
        """The tensors as they lie in the file."""
        return sorted(self.tensors.items(), key=lambda item: item[1].start)


def read_header(path: Path) -> Header:
    """Raises CheckpointDamagedError, with how many bytes are missing where that is known, if there is no header."""
    try:
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, 2)
            return _parse(path, file, size)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointDamagedError(f"{path}: file is missing") from None


def verify_complete(path: Path) -> Header:
    """The header of a file that is there, begins or ends with a header, and is complete to its last offset.

    Raises CheckpointDamagedError naming the file and how many bytes are missing.
    """
    header = read_header(path)
    size = path.stat().st_size
    if size < header.num_bytes:
        raise _short(path, size, header.num_bytes, "")
    return header


def read_regions(reader: RawIOBase, header: Header, path: Path) -> tuple[dict[str, torch.Tensor], bytes]:
    """(tensors by key, pickle), read in the order they have in the file.

    Raises CheckpointDamagedError if the file ends before them.
    """
    tensors: dict[str, torch.Tensor] = {}
    for key, region in header.in_order():
        data = torch.empty(region.stop - region.start, dtype=torch.uint8)
        reader.seek(region.start)
        _fill(reader, memoryview(data.numpy().data), path, key)
        tensors[key] = data.view(region.dtype).reshape(region.shape)
    reader.seek(header.skeleton.start)
    skeleton = bytearray(header.skeleton.stop - header.skeleton.start)
    _fill(reader, memoryview(skeleton), path, SKELETON)
    return tensors, bytes(skeleton)


def segments(header: Header, file_bytes: int) -> Iterator[tuple[str | None, Region]]:
    """Cut the whole file, in order, into its tensors and (key None) what lies between them."""
    position = 0
    for key, region in header.in_order():
        if region.start > position:
            yield None, Region(position, region.start)
        yield key, region
        position = region.stop
    if file_bytes > position:
        yield None, Region(position, file_bytes)


def _fill(reader: RawIOBase, view: memoryview, path: Path, what: str) -> None:
    done = 0
    while done < len(view):
        count = reader.readinto(view[done:])
        if not count:
            raise CheckpointDamagedError(f"{path}: ends within {what}: {len(view) - done} bytes are missing")
        done += count


def _short(path: Path, size: int, expected: int, where: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"{path}: {size} bytes, but its header tells of {expected}{where}: {expected - size} bytes are missing"
    )


def _parse(path: Path, file: RawIOBase, size: int) -> Header:
    """Find out which layout it is by where there is a JSON object."""
    if size < _NUMBER.size:
        raise CheckpointDamagedError(f"{path}: {size} bytes, too few for a DataStates file")
    (number,) = _NUMBER.unpack(_read(file, 0, _NUMBER.size))
    for layout, begin, length in (
        ("packed", _NUMBER.size, number),
        ("aligned", ALIGNMENT, number),
        ("trailing", number, max(0, size - number)),
    ):
        if length > _MAX_HEADER or begin >= size or _read(file, begin, 1) != b"{":
            continue
        found = _read(file, begin, length)
        content = _json_of(found.rstrip(b"\0"))
        if content is not None and layout == "trailing":
            content = _without_name(content)
        if content is not None and SKELETON in content:
            try:
                return _header(layout, content, begin + length, size)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as exc:
                raise CheckpointDamagedError(
                    f"{path}: its header is not one of DataStates ({type(exc).__name__}: {exc})"
                ) from exc
        if len(found) < length:
            raise _short(path, size, begin + length, " in its header alone")
    if ALIGNMENT <= number < 1 << 62 and number >= size:
        raise _short(path, size, number, " before its header")
    raise CheckpointDamagedError(f"{path}: not a DataStates file: it has no header, or one that was not written whole")


def _read(file: Any, begin: int, length: int) -> bytes:
    file.seek(begin)
    parts = iter(lambda: file.read(begin + length - file.tell()), b"")
    return b"".join(parts)


def _json_of(text: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # UnicodeDecodeError is one; nested too deeply
        return None
    return content if isinstance(content, dict) else None


def _without_name(content: dict[str, Any]) -> dict[str, Any]:
    """The header of an aggregated file of one state, without the name that stands after each of its keys."""
    names = [key.removeprefix(f"{SKELETON}|") for key in content if key.startswith(f"{SKELETON}|")]
    if len(names) != 1:
        return content
    return {key.removesuffix(f"|{names[0]}"): item for key, item in content.items()}


def _header(layout: str, content: dict[str, Any], header_end: int, size: int) -> Header:
    """Raises ValueError, KeyError, TypeError or AttributeError if the content is not as the format has it."""
    name = "data_offsets" if layout == "packed" else "offsets"
    base = {"packed": header_end, "aligned": -(-header_end // ALIGNMENT) * ALIGNMENT, "trailing": 0}[layout]
    tensors: dict[str, TensorRegion] = {}
    for key, item in content.items():
        if key == SKELETON:
            continue
        start, stop = (base + _offset(offset) for offset in item[name])
        region = TensorRegion(start, stop, _dtype(item["dtype"]), _shape(item["shape"]))
        if stop - start != region.dtype.itemsize * math.prod(region.shape):
            raise ValueError(f"{key}: {stop - start} bytes for {region.dtype} {list(region.shape)}")
        tensors[key.removeprefix(TENSOR_PREFIX) if layout == "trailing" else key] = region
    start, stop = (base + _offset(offset) for offset in content[SKELETON][name])
    if layout == "aligned":
        stop = max(start + 1, size)
    last = max([stop, *(region.stop for region in tensors.values())])
    header = Header(layout, tensors, Region(start, stop), header_end if layout == "trailing" else last)
    _check_no_overlap(header, _NUMBER.size if layout == "trailing" else base)
    if layout == "trailing" and last > header_end:
        raise ValueError(f"data up to byte {last} of a file of {header_end}")
    return header


def _check_no_overlap(header: Header, position: int) -> None:
    for key, region in [*header.in_order(), (SKELETON, header.skeleton)]:
        if region.start < position or region.stop < region.start:
            raise ValueError(f"{key} begins at byte {region.start}, and what is before it ends at {position}")
        position = region.stop


def _offset(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"offset {ascii(value)[:80]}")
    return value


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {text!r}")
    return found


def _shape(value: Any) -> tuple[int, ...]:
    """A list, or the text that str(tensor.shape) gives."""
    if isinstance(value, str):
        if not re.fullmatch(r"(torch\.Size)?\(?\[?[\d, ]*\]?\)?", value):
            raise ValueError(f"shape {value!r}")
        value = [int(item) for item in re.findall(r"\d+", value)]
    if type(value) is not list or any(type(item) is not int or item < 0 for item in value):
        raise ValueError(f"shape {ascii(value)[:80]}")
    return tuple(value)
