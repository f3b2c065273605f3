"""What a refused pickle leaves behind: nothing. Pickles made by hand, opcode by opcode, for every unpickler."""

from __future__ import annotations

import argparse
import collections
import enum
import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch._utils import _rebuild_tensor_v2
from torch.distributed.checkpoint import filesystem, metadata

from megatron.checkpointing.engines.datastates.state import put_together
from megatron.checkpointing.engines.dcp.storage import parse_metadata
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.torch_files import read_state, read_values
from megatron.checkpointing.engines.unpickling import ModelType
from restart_trace.recorder import untraced_operation

PATH = Path("file")


def text(value: str) -> bytes:
    encoded = value.encode()
    return pickle.BINUNICODE + len(encoded).to_bytes(4, "little") + encoded


def found(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def built(target: bytes, *, slots: bool) -> bytes:
    """`target` with an attribute `patched`; by setattr with `slots`, as an entry of its __dict__ without."""
    state = pickle.EMPTY_DICT + text("patched") + pickle.NEWTRUE + pickle.SETITEM
    if slots:
        state = pickle.NONE + state + pickle.TUPLE2
    return pickle.PROTO + b"\x02" + target + state + pickle.BUILD + pickle.STOP


def called(function: bytes, number: int) -> bytes:
    return function + pickle.BININT1 + bytes([number]) + pickle.TUPLE1 + pickle.REDUCE


def torch_file(pickled: bytes, path: Path) -> None:
    """A file of torch.save whose pickle is replaced."""
    whole = io.BytesIO()
    torch.save({"w": torch.ones(3)}, whole)
    records = zipfile.ZipFile(whole)
    writer = torch._C.PyTorchFileWriter(str(path))
    for name in records.namelist():
        inner = name.partition("/")[2]
        if inner == "data.pkl" or inner.startswith("data/"):
            content = pickled if inner == "data.pkl" else records.read(name)
            writer.write_record(inner, content, len(content))
    writer.write_end_of_file()


def by_datastates(pickled: bytes, directory: Path) -> Any:
    return put_together(pickled, {}, PATH)


def within_datastates(pickled: bytes, directory: Path) -> Any:
    outer = pickle.dumps({"tensors": [], "megatron_state": pickled})
    return put_together(outer, {}, PATH)


def by_dcp(pickled: bytes, directory: Path) -> Any:
    return parse_metadata(PATH, pickled)


def by_torch(pickled: bytes, directory: Path) -> Any:
    torch_file(pickled, directory / "file")
    return read_state(directory / "file", None, False, untraced_operation())


def by_torch_without_tensors(pickled: bytes, directory: Path) -> Any:
    torch_file(pickled, directory / "other")
    return read_values(directory / "other", None, False, untraced_operation())


Reader = Callable[[bytes, Path], Any]
FREE = [by_datastates, within_datastates, by_torch, by_torch_without_tensors]  # states: any class of the allow-list

PATCHED: list[tuple[str, bytes, Any, list[Reader]]] = [
    ("Namespace", found("argparse", "Namespace"), argparse.Namespace, FREE),
    ("LossScaler", found("deepspeed.runtime.fp16.loss_scaler", "LossScaler"), LossScaler, FREE),
    ("Metadata", found("torch.distributed.checkpoint.metadata", "Metadata"), metadata.Metadata, [by_dcp]),
    ("info", found("torch.distributed.checkpoint.filesystem", "_StorageInfo"), filesystem._StorageInfo, [by_dcp]),
    ("function", found("torch._utils", "_rebuild_tensor_v2"), _rebuild_tensor_v2, FREE),
    ("layout", found("torch.serialization", "_get_layout"), torch.serialization._get_layout, [by_dcp]),
    ("member", called(found("megatron.core.enums", "ModelType"), 1), ModelType.encoder_or_decoder, FREE),
    ("stage", called(found("deepspeed.runtime.zero.config", "ZeroStageEnum"), 1), ZeroStageEnum(1), FREE),
]  # fmt: skip


@pytest.mark.parametrize("slots", [True, False], ids=["setattr", "dict"])
@pytest.mark.parametrize(
    ("pickled", "target", "reader"),
    [
        pytest.param(pickled, target, reader, id=f"{name}-{reader.__name__}")
        for name, pickled, target, readers in PATCHED
        for reader in readers
    ],
)
def test_nothing_is_altered_but_what_a_pickle_makes(
    tmp_path: Path, pickled: bytes, target: Any, reader: Reader, slots: bool
) -> None:
    """BUILD sets attributes of whatever lies on the stack: what is there before and after the load is refused."""
    try:
        with pytest.raises(CheckpointDamagedError):
            reader(built(pickled, slots=slots), tmp_path)
        assert not hasattr(target, "patched")
    finally:
        if hasattr(target, "patched"):
            del target.patched


def test_the_pickles_made_by_hand_are_sound(tmp_path: Path) -> None:
    """By the unpickler of the standard library they do alter the class: they are not refused for something else."""

    class Example:
        pass

    globals()["Example"] = Example
    Example.__module__, Example.__qualname__ = __name__, "Example"
    pickle.loads(built(found(__name__, "Example"), slots=True))
    assert hasattr(Example, "patched")
    made = built(called(found("argparse", "Namespace"), 1).replace(b"K\x01\x85", b")"), slots=False)
    for reader in FREE:
        assert reader(made, tmp_path) == argparse.Namespace(patched=True)


@pytest.mark.parametrize("reader", [by_datastates, by_torch])
def test_members_of_enumerations_are_read_as_they_are(tmp_path: Path, reader: Reader) -> None:
    for pickled, member in ((PATCHED[-2][1], ModelType(1)), (PATCHED[-1][1], ZeroStageEnum(1))):
        read = reader(pickle.PROTO + b"\x02" + pickled + pickle.STOP, tmp_path)
        assert read is member and isinstance(read, enum.Enum)


def test_what_pickle_builds_by_itself_is_built() -> None:
    """Objects, NumPy's arrays and types, and attributes of an OrderedDict."""
    ordered = collections.OrderedDict(a=1)
    vars(ordered)["_metadata"] = {"version": 1}
    state = {"args": argparse.Namespace(a=[1]), "array": np.arange(3), "scaler": LossScaler(2), "ordered": ordered}
    read = put_together(pickle.dumps(state, pickle.HIGHEST_PROTOCOL), {}, PATH)
    assert read["args"] == state["args"] and read["array"].tolist() == [0, 1, 2]
    assert vars(read["scaler"]) == vars(state["scaler"]) and vars(read["ordered"]) == vars(ordered)
