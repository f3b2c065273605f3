"""The file format of engine `lazy`: safetensors, one file per rank, nothing pickled (docs/lazy_format.md).

Files that several ranks share: shared_format.

    8 bytes   length of the JSON, little endian
    JSON      name -> dtype, shape, data_offsets; padded with spaces so that the data begins at a multiple of 4096
    data      tensors without gaps, those of wide types first, so each is aligned to the size of its elements

(Format: https://github.com/huggingface/safetensors, "Format".) `__metadata__`, whose values must be strings in that
format, has as JSON: `states`, the state of each file name of DeepSpeed's layout without its tensors (engines.codec);
and `tensors`, the CRC-32 and placement (megatron.checkpointing.state.shard_metadata) of each tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines import codec
from megatron.checkpointing.engines.base import FileState
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.lazy.header import ALIGNMENT, LENGTH, METADATA, SUFFIX, entries_of
from megatron.fileio.checksums import crc32

FORMAT_VERSION = "1"
ALGORITHM = "safetensors-header-crc32"

_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.complex64: "C64",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
# Types without a name in safetensors are stored as bytes; `tensors` then also has their type and shape.
_OTHER_DTYPES = {"complex128": torch.complex128, "complex32": torch.complex32}
_OTHER_NAMES = {dtype: name for name, dtype in _OTHER_DTYPES.items()}


def file_name(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank_{rank:05d}{SUFFIX}"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in the file; `start` and `stop` count bytes from the beginning of the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    placement: dict[str, Any] | None = None
    crc32: str | None = None  # 8 hexadecimal digits

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Shared:
    """Bytes of a file that several ranks share, and of the part of its header that tells of one rank's tensors."""

    file_bytes: int
    header_bytes: int


@dataclass(frozen=True)
class Compressed:
    """Bytes of a compressed file, of it those that were read for its header, and of the original, by its index."""

    file_bytes: int
    header_bytes: int
    original_bytes: int


@dataclass(frozen=True)
class Contents:
    """The content of a file except the bytes of its tensors."""

    entries: dict[str, TensorEntry]  # in the order of the data
    states: dict[str, Any]  # file name of DeepSpeed's layout -> skeleton
    data_start: int  # bytes from the beginning of the file; 0: not yet computed
    shared: Shared | None = None  # of a part of a file that several ranks share
    compressed: Compressed | None = None  # if the file is: all positions are those of the original

    @property
    def data_bytes(self) -> int:
        return max((entry.stop for entry in self.entries.values()), default=0)

    @property
    def header_bytes(self) -> int:
        part = self.shared or self.compressed
        return self.data_start if part is None else part.header_bytes

    @property
    def file_bytes(self) -> int:
        return self.data_start + self.data_bytes if self.shared is None else self.shared.file_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes that the file takes."""
        return self.file_bytes if self.compressed is None else self.compressed.file_bytes

    def tensors_of(self, state_name: str) -> list[TensorEntry]:
        """Entries of one state."""
        prefix = state_name + "/"
        return [entry for name, entry in self.entries.items() if name.startswith(prefix)]


@dataclass(frozen=True)
class Captured:
    """A captured state: the content of the file to be written, and the live tensors by name."""

    contents: Contents
    tensors: dict[str, torch.Tensor]


def capture(files: Sequence[FileState], checksums: bool) -> Captured:
    """Separate the states of `files` into tensors and the rest. No tensor is copied unless it is not contiguous.

    The rest is copied, so it may change from now on. `data_start` is set by `with_data_start`. Works on meta tensors.
    Raises SkeletonError for a value that the format cannot hold.
    """
    skeletons: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    placements: dict[str, dict[str, Any]] = {}
    for file in files:
        skeletons[file.name], mine = codec.split(file.state)
        names = {id(tensor): f"{file.name}/{name}" for name, tensor in mine.items()}
        tensors |= {f"{file.name}/{name}": tensor for name, tensor in mine.items()}
        for path, placement in file.placements.items():
            placements[names[id(_at(file.state, path))]] = dict(placement)
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    entries: dict[str, TensorEntry] = {}
    position = 0
    for name in order:
        tensor = tensors[name] = tensors[name].detach().contiguous()
        stop = position + tensor.numel() * tensor.element_size()
        entries[name] = TensorEntry(
            name, tensor.dtype, tuple(tensor.shape), position, stop, placements.get(name),
            "0" * 8 if checksums else None,
        )  # fmt: skip
        position = stop
    return Captured(Contents(entries, skeletons, 0), {name: tensors[name] for name in order})


def value_widths(header_bytes: int, contents: Contents) -> list[tuple[int, int]]:
    """(bytes, bytes of a value) of consecutive ranges of the file, by which it is compressed."""
    found = [(header_bytes, 1)]
    for entry in contents.entries.values():  # those of wide types first
        width = entry.dtype.itemsize // (2 if entry.dtype.is_complex else 1)
        if width == found[-1][1]:
            found[-1] = (found[-1][0] + entry.num_bytes, width)
        elif entry.num_bytes:
            found.append((entry.num_bytes, width))
    return found


def with_data_start(contents: Contents) -> Contents:
    """Set where the data begins: the final checksums do not change the length of the header."""
    return replace(contents, data_start=len(encode(contents)))


def with_checksums(contents: Contents, crcs: Mapping[str, int]) -> Contents:
    """The same contents with the CRC-32 of every tensor."""
    entries = {name: replace(entry, crc32=f"{crcs[name]:08x}") for name, entry in contents.entries.items()}
    return replace(contents, entries=entries)


def _at(state: Any, path: Sequence[Any]) -> Any:
    for key in path:
        state = state[key]
    return state


def encode(contents: Contents) -> bytes:
    """The bytes before the data."""
    metadata = {
        "format": "pt",
        "lazy_format_version": FORMAT_VERSION,
        "states": compact_json(contents.states),
        "tensors": compact_json(descriptions(contents)),
    }
    text = compact_json({METADATA: metadata} | table(contents)).encode()
    return LENGTH.pack(_padded(len(text))) + text.ljust(_padded(len(text)))


def compact_json(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def table(contents: Contents, base: int = 0) -> dict[str, Any]:
    """The tensors as safetensors describes them, at `base` bytes after their positions in `contents`."""
    return {
        name: {
            "dtype": _DTYPE_NAMES.get(entry.dtype, "U8"),
            "shape": list(entry.shape) if entry.dtype in _DTYPE_NAMES else [entry.num_bytes],
            "data_offsets": [base + entry.start, base + entry.stop],
        }
        for name, entry in contents.entries.items()
    }


def descriptions(contents: Contents) -> dict[str, Any]:
    """What safetensors has no place for, by tensor."""
    return {name: _description(entry) for name, entry in contents.entries.items()}


def _description(entry: TensorEntry) -> dict[str, Any]:
    described: dict[str, Any] = {}
    if entry.crc32 is not None:
        described["crc32"] = entry.crc32
    if entry.placement is not None:
        described["placement"] = entry.placement
    if entry.dtype not in _DTYPE_NAMES:
        described |= {"torch_dtype": _OTHER_NAMES[entry.dtype], "shape": list(entry.shape)}
    return described


def _padded(length: int) -> int:
    """`length` of the JSON plus the padding by which the data begins at a multiple of ALIGNMENT."""
    return -(-(length + LENGTH.size) // ALIGNMENT) * ALIGNMENT - LENGTH.size


def header_checksum(header: bytes) -> str:
    """ "safetensors-header-crc32:xxxxxxxx". The header has the checksums of all tensors, so this covers every byte."""
    return f"{ALGORITHM}:{crc32(header):08x}"


def decode(header: bytes, path: Path) -> Contents:
    """Parse what `read_header` returned. Raises CheckpointDamagedError naming `path` if it is not of this format."""
    with decoding(path):
        content = entries_of(header)
        metadata = content.pop(METADATA)
        check_version(metadata["lazy_format_version"], FORMAT_VERSION, path)
        entries = parsed_table(content, json.loads(metadata["tensors"]))
        return Contents(entries, parsed_states(json.loads(metadata["states"])), len(header))


@contextmanager
def decoding(path: Path) -> Iterator[None]:
    """What the body finds wrong with the header of `path` is a CheckpointDamagedError."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise CheckpointDamagedError(
            f"{path}: its header is not one of engine lazy ({type(exc).__name__}: {exc})"
        ) from exc


def check_version(found: Any, known: str, path: Path) -> None:
    """Compare the version of the format. Raises CheckpointDamagedError if it is not `known`."""
    if found != known:
        raise CheckpointDamagedError(f"{path}: format version {found}; only {known} is known")


def parsed_states(states: Any) -> dict[str, Any]:
    """Raises TypeError if `states` is not an object."""
    if not isinstance(states, dict):
        raise TypeError("its states are not an object")
    return states


def parsed_table(content: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """The entries that `table` and `descriptions` wrote. Raises ValueError, KeyError, TypeError or AttributeError."""
    entries = {name: _entry(name, item, described[name]) for name, item in content.items()}
    _check_order(entries)
    return entries


def _entry(name: str, item: dict[str, Any], described: dict[str, Any]) -> TensorEntry:
    """Raises ValueError, KeyError, TypeError or AttributeError if the entry is not valid."""
    start, stop = item["data_offsets"]
    dtype, shape = _DTYPES[item["dtype"]], item["shape"]
    if "torch_dtype" in described:
        dtype, shape = _OTHER_DTYPES[described["torch_dtype"]], described["shape"]
    if type(shape) is not list or any(type(size) is not int or size < 0 for size in [*shape, start, stop]):
        raise ValueError(f"{ascii(name)}: shape {ascii(shape)[:80]} at {ascii([start, stop])[:80]}")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{ascii(name)}: {stop - start} bytes for {dtype} {str(shape)[:80]}")
    placement, crc32 = described.get("placement"), described.get("crc32")
    if crc32 is not None and not (type(crc32) is str and re.fullmatch("[0-9a-f]{8}", crc32)):
        raise ValueError(f"{ascii(name)}: checksum {ascii(crc32)[:80]}")
    if type(placement) not in (dict, type(None)):
        raise ValueError(f"{ascii(name)}: placement {ascii(placement)[:80]}")
    return TensorEntry(name, dtype, tuple(shape), start, stop, placement, crc32)


def _check_order(entries: Mapping[str, TensorEntry]) -> None:
    """Raises ValueError if the tensors are not consecutive without gaps."""
    position = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != position:
            raise ValueError(
                f"{ascii(entry.name)} begins at byte {entry.start}, but the tensor before it ends at {position}"
            )
        position = entry.stop


def planned_size(files: Sequence[FileState], rank: int, checksums: bool = True) -> tuple[str, int]:
    """(name, bytes) of the file that a rank writes for `files`, whose tensors may be on the meta device."""
    return file_name(rank), with_data_start(capture(files, checksums).contents).file_bytes
