"""The three layouts of DataStates files, written from their description alone: no code of the project is used."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch

ALIGNMENT = 4096


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def flatten(state: Any, key: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """(the state with a string for each tensor, key -> tensor); only dicts and lists are gone into."""
    if isinstance(state, torch.Tensor):
        return f"TENSOR|{key}", {key: state}
    if isinstance(state, list):
        items: list[tuple[Any, Any]] = list(enumerate(state))
    elif isinstance(state, dict):
        items = list(state.items())
    else:
        return state, {}
    skeleton: dict[Any, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in items:
        skeleton[name], mine = flatten(value, f"{key}|{name}" if key else f"{name}")
        tensors |= mine
    return (list(skeleton.values()) if isinstance(state, list) else skeleton), tensors


def up(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def packed(state: Any) -> bytes:
    skeleton, tensors = flatten(state)
    pickled = pickle.dumps(skeleton, protocol=pickle.HIGHEST_PROTOCOL)
    header: dict[str, Any] = {}
    data = b""
    for key, tensor in tensors.items():
        stop = len(data) + len(raw(tensor))
        header[key] = {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [len(data), stop]}
        data += raw(tensor)
    header["datastates_metadata"] = {"data_offsets": [len(data), len(data) + len(pickled)]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data + pickled


def aligned(state: Any) -> bytes:
    skeleton, tensors = flatten(state)
    pickled = pickle.dumps(skeleton, protocol=pickle.HIGHEST_PROTOCOL)
    header: dict[str, Any] = {}
    data, stop = b"", 0
    for key, tensor in tensors.items():
        data = data.ljust(up(len(data)), b"\0")
        header[key] = {
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape),
            "offsets": [len(data), len(data) + len(raw(tensor))],
        }
        data += raw(tensor)
        stop = len(data)
    data = data.ljust(up(len(data)), b"\0")
    header["datastates_metadata"] = {"offsets": [len(data), stop + up(len(pickled))]}
    text = json.dumps(header).encode()
    first = len(text).to_bytes(8, "little").ljust(ALIGNMENT, b"\0")
    return first + text.ljust(up(len(text)), b"\0") + data + pickled


def trailing(state: Any, name: str = "") -> bytes:
    """`name`: that the aggregated engine was given for the state, and puts after each key."""
    after = f"|{name}" if name else ""
    skeleton, tensors = flatten(state)
    pickled = pickle.dumps(skeleton, protocol=pickle.HIGHEST_PROTOCOL)
    header: dict[str, Any] = {}
    data = b"\xa5" * ALIGNMENT  # what was in the cache before lies behind the number
    for key, tensor in tensors.items():
        header[f"TENSOR|{key}{after}"] = {
            "shape": str(tensor.shape),
            "dtype": str(tensor.dtype),
            "offsets": [len(data), len(data) + len(raw(tensor))],
        }
        data = (data + raw(tensor)).ljust(up(len(data) + len(raw(tensor))), b"\xa5")
    header[f"datastates_metadata{after}"] = {"offsets": [len(data), len(data) + len(pickled)]}
    data = (data + pickled).ljust(up(len(data) + len(pickled)), b"\xa5")
    text = json.dumps(dict(sorted(header.items())), separators=(",", ":")).encode()
    return len(data).to_bytes(8, "little") + data[8:] + text.ljust(up(len(text)), b"\0")


WRITERS = {"packed": packed, "aligned": aligned, "trailing": trailing}


def write(path: Path, layout: str, state: Any) -> bytes:
    content = WRITERS[layout](state)
    path.write_bytes(content)
    return content
