"""Files of safetensors as Hugging Face lays them out: one, or shards with an index; read and written by tensor.

A file is the length of its header in 8 bytes, the header in JSON, and the tensors without gaps. Since all shapes are
known in advance, a file is written from its beginning to its end, and no more than one tensor is in memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.lazy.header import LENGTH, METADATA, entries_of, read_header
from megatron.fileio.files import sync_file, with_name
from megatron.hf.errors import ConversionError
from restart_trace.regular import NotRegularFileError, check_regular

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in TYPES.items()}
_ALIGNMENT = 8  # of the data, as the library writes it


@dataclass(frozen=True)
class TensorInfo:
    """A tensor to be written, or that was found; `start`: its first byte in the file at `path`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path = Path()
    start: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ShardWriter:
    """Writes tensors, in the order in which they were announced, into files of at most some bytes each.

    A tensor that is larger has a file of its own. Use as a context: its end completes the files.
    """

    def __init__(self, directory: Path, tensors: Iterable[TensorInfo], max_bytes: int) -> None:
        self.num_bytes = 0
        self._directory = directory
        self._shards: list[list[TensorInfo]] = []
        room = 0
        for tensor in tensors:
            if tensor.num_bytes > room or not self._shards:
                self._shards.append([])
                room = max_bytes
            self._shards[-1].append(tensor)
            room -= tensor.num_bytes
            self.num_bytes += tensor.num_bytes
        self._left = [(number, tensor) for number, shard in enumerate(self._shards) for tensor in shard]
        self._left.reverse()
        self._open: tuple[int, IO[bytes]] | None = None

    @property
    def num_files(self) -> int:
        return len(self._shards)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor. Raises OSError, or ValueError if another was announced."""
        number, wanted = self._left.pop()
        if (name, tensor.dtype, tuple(tensor.shape)) != (wanted.name, wanted.dtype, wanted.shape):
            raise ValueError(f"{name}, {tensor.dtype} {tuple(tensor.shape)}: {wanted} was announced")
        if self._open is None or self._open[0] != number:
            self._close()
            self._open = number, (self._directory / self._file_name(number)).open("xb")
            self._open[1].write(_header(self._shards[number]))
        try:
            self._open[1].write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        except OSError as exc:
            raise with_name(exc, self._open[1].name) from exc

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            if self._open is not None:
                with contextlib.suppress(OSError):  # what is not written yet cannot be
                    self._open[1].close()
            return
        self._close()
        if self._left:
            raise ValueError(f"{self._left[-1][1].name} was announced, and not written")
        if self.num_files > 1:
            shards = enumerate(self._shards)
            places = {tensor.name: self._file_name(number) for number, shard in shards for tensor in shard}
            write_json(self._directory / INDEX, {"metadata": {"total_size": self.num_bytes}, "weight_map": places})

    def _file_name(self, number: int) -> str:
        return SINGLE if self.num_files == 1 else f"model-{number + 1:05d}-of-{self.num_files:05d}.safetensors"

    def _close(self) -> None:
        if self._open is not None:
            with self._open[1] as file:
                self._open = None
                file.flush()
                sync_file(file.fileno())


def _header(tensors: Iterable[TensorInfo]) -> bytes:
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return LENGTH.pack(len(text)) + text


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a durable JSON file as Hugging Face's libraries do. Raises OSError."""
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        sync_file(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ConversionError naming the file if it is missing or holds something else."""
    try:
        check_regular(path, path.stat())
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{path}: missing; --load takes the directory of a Hugging Face model") from None
    except (ValueError, RecursionError) as exc:
        raise ConversionError(f"{path}: not a JSON file ({exc}); copy it again") from exc
    if not isinstance(content, dict):
        raise ConversionError(f"{path}: holds a {type(content).__name__}, not an object; copy it again")
    return content


def find_tensors(directory: Path, unwanted: re.Pattern[str]) -> dict[str, TensorInfo]:
    """The tensors of a model directory, by name, without those whose name is `unwanted`. Reads headers alone.

    Raises ConversionError naming the file that is missing, damaged, or of a type of numbers that is not here.
    """
    if (directory / INDEX).exists():
        wanted = read_json(directory / INDEX).get("weight_map")
        if not isinstance(wanted, dict) or not all(type(file) is str for file in wanted.values()):
            raise ConversionError(f"{directory / INDEX}: has no weight_map of file names; copy it again")
        wanted = {name: file for name, file in wanted.items() if not unwanted.fullmatch(name)}
    elif (directory / SINGLE).exists():
        wanted = None
    else:
        raise ConversionError(
            f"{directory}: has neither {SINGLE} nor {INDEX}; save the model with transformers' save_pretrained, which "
            "writes safetensors, and import that"
        )
    files = {SINGLE} if wanted is None else set(wanted.values())
    if wrong := [name for name in files if Path(name).name != name]:
        raise ConversionError(f"{directory / INDEX}: names {wrong[0]!r}, which is no file beside it; copy it again")
    found: dict[str, TensorInfo] = {}
    for name in sorted(files):
        found |= _tensors_in(directory / name, unwanted)
    if wanted is not None and (missing := [name for name, file in wanted.items() if _file_of(found, name) != file]):
        raise ConversionError(f"{directory / INDEX}: {missing[0]} is not in {wanted[missing[0]]}; copy both again")
    return found


def _file_of(found: Mapping[str, TensorInfo], name: str) -> str | None:
    return found[name].path.name if name in found else None


def _tensors_in(path: Path, unwanted: re.Pattern[str]) -> dict[str, TensorInfo]:
    try:
        check_regular(path, path.stat())
        header = read_header(path)
        size = path.stat().st_size
        entries = entries_of(header)
        entries.pop(METADATA, None)
        return {
            name: _tensor(name, entry, path, len(header), size)
            for name, entry in entries.items()
            if not unwanted.fullmatch(name)
        }
    except FileNotFoundError:
        raise ConversionError(f"{path}: missing, and {INDEX} names it; copy it again") from None
    except (CheckpointDamagedError, NotRegularFileError) as exc:
        raise ConversionError(f"{exc}; copy it again") from exc
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        if isinstance(exc, ConversionError):
            raise
        raise ConversionError(f"{path}: not a safetensors file ({type(exc).__name__}: {exc}); copy it again") from exc


def _tensor(name: str, entry: Mapping[str, Any], path: Path, data_start: int, file_size: int) -> TensorInfo:
    if entry["dtype"] not in TYPES:
        raise ConversionError(
            f"{path}: {name} is of type {entry['dtype']}, and only {', '.join(TYPES)} can be imported; convert it"
        )
    shape = tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    tensor = TensorInfo(name, TYPES[entry["dtype"]], shape, path, data_start + start)
    if any(type(size) is not int or size < 0 for size in shape) or not 0 <= start <= stop:
        raise ValueError(f"{name} has the shape {shape} and the offsets {start}, {stop}")
    if stop - start != tensor.num_bytes:
        raise ValueError(f"{name} has {stop - start} bytes, and its shape {tensor.num_bytes}")
    if data_start + stop > file_size:
        raise ConversionError(f"{path}: ends within {name}, at byte {file_size}; copy it again")
    return tensor


def read_tensor(tensor: TensorInfo) -> torch.Tensor:
    """The elements of a tensor of `find_tensors`. Raises OSError, or ConversionError if the file ends before."""
    content = torch.empty(tensor.num_bytes, dtype=torch.uint8)
    view, done = content.numpy().data, 0
    with tensor.path.open("rb", buffering=0) as file:
        while done < tensor.num_bytes:
            count = os.preadv(file.fileno(), [view[done:]], tensor.start + done)
            if not count:
                raise ConversionError(f"{tensor.path}: ends within {tensor.name}; copy it again")
            done += count
    return content.view(tensor.dtype).reshape(tensor.shape)
