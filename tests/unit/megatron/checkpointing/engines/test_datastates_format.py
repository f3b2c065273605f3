"""Files of DataStates, in each layout, are read without its package; damage is named, and no pickle is run."""

from __future__ import annotations

import argparse
import json
import pickle
import random
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.checkpointing.engines.base import CheckpointEngine, EngineOptions, SavedCheckpoint
from megatron.checkpointing.engines.datastates.format import read_header, verify_complete
from megatron.checkpointing.engines.datastates.state import key_of, put_together, take_apart
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.registry import create_engine
from restart_trace.recorder import untraced_operation
from tests.unit.megatron.checkpointing.engines.datastates_files import WRITERS, flatten, write
from tests.unit.megatron.checkpointing.engines.nests import DTYPES, identical, nest, random_tensor

NAME = "mp_rank_00_model_states.pt"
layouts = pytest.mark.parametrize("layout", list(WRITERS))


def engine(**options: Any) -> CheckpointEngine:
    return create_engine("datastates", EngineOptions(**options))


def load(directory: Path) -> Any:
    return engine().load([NAME], SavedCheckpoint(directory), untraced_operation())[NAME]


def foreign_state() -> dict[str, Any]:
    """A state as upstream gives it to the library."""
    return {
        "module": {f"layer.{i}.weight": random_tensor(torch.bfloat16, 700, 3 + i, seed=i) for i in range(3)},
        "odd": random_tensor(torch.bfloat16, 7),
        "scalar": torch.tensor(5.0),
        "transposed": random_tensor(torch.float32, 6, 4).t(),
        "optimizer": {"state": {0: {"exp_avg": random_tensor(torch.float32, 5000)}, 1: {"step": 3}}},
        "groups": [{"params": [0, 1]}, random_tensor(torch.int64, 2)],
        **{str(dtype): random_tensor(dtype, 3, 5) for dtype in DTYPES},
        "args": argparse.Namespace(lr=1e-3, betas=(0.9, 0.95)),
        "scaler": DynamicLossScaler(8.0, 2, 1.0, 1, False),
        "stage": ZeroStageEnum.optimizer_states,
        "rng": [{"np": np.arange(6, dtype=np.uint32), "name": "MT19937"}, np.float64(0.5)],
        "values": [None, True, 1 << 70, "text", b"bytes", {1, 2}, 2j, torch.Size([2]), torch.bfloat16],
    }  # fmt: skip


@layouts
def test_state_of_upstream_is_read(tmp_path: Path, layout: str) -> None:
    state = foreign_state()
    write(tmp_path / NAME, layout, state)
    assert verify_complete(tmp_path / NAME).layout == layout
    assert identical(load(tmp_path), state)


@layouts
def test_tensors_that_the_library_did_not_see(tmp_path: Path, layout: str) -> None:
    """It leaves tuples and objects to pickle, with the tensors in them."""
    state = {"pair": (torch.arange(5.0), 1), "args": argparse.Namespace(t=torch.ones(2, dtype=torch.bfloat16))}
    write(tmp_path / NAME, layout, state)
    assert identical(load(tmp_path), state)


@layouts
def test_state_without_tensors(tmp_path: Path, layout: str) -> None:
    write(tmp_path / NAME, layout, {"a": [1, {"b": "TENSOR|absent"}]})
    assert load(tmp_path) == {"a": [1, {"b": "TENSOR|absent"}]}


@layouts
@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.6, 0.9, 0.999])
def test_short_file_is_named_with_what_is_missing(tmp_path: Path, layout: str, part: float) -> None:
    content = write(tmp_path / NAME, layout, foreign_state())
    content = content.rstrip(b"\0") if layout == "trailing" else content  # its padding is of no matter
    (tmp_path / NAME).write_bytes(content[: int(len(content) * part)])
    with pytest.raises(CheckpointDamagedError, match=NAME) as caught:
        load(tmp_path)
    if layout == "packed" and part > 0.0:
        missing = len(content) - int(len(content) * part)
        if part > 0.3:
            assert f"{missing} bytes are missing" in str(caught.value)
    if part == 0.0:
        assert "0 bytes, too few for a DataStates file" in str(caught.value)


@layouts
def test_the_last_byte_counts(tmp_path: Path, layout: str) -> None:
    """verify_complete tells one byte too few from a whole file; where the end is not recorded, the pickle does."""
    content = write(tmp_path / NAME, layout, foreign_state())
    verify_complete(tmp_path / NAME)
    data_only = content.rstrip(b"\0") if layout == "trailing" else content
    (tmp_path / NAME).write_bytes(data_only[:-1])
    if layout == "packed":
        with pytest.raises(CheckpointDamagedError, match="1 bytes are missing"):
            verify_complete(tmp_path / NAME)
    with pytest.raises(CheckpointDamagedError, match=NAME):
        load(tmp_path)


def test_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamagedError, match=f"{NAME}: file is missing"):
        verify_complete(tmp_path / NAME)
    with pytest.raises(CheckpointDamagedError, match=f"{NAME}: file is missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"1234567", bytes(8), bytes(10000), b"\xff" * 10000, b"\x10" + bytes(7) + b"{" * 50, b"PK\x03\x04" * 5000],
)
def test_what_is_no_file_of_datastates(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match=NAME):
        read_header(tmp_path / NAME)


@layouts
def test_flips_anywhere_before_the_tensors_never_crash(tmp_path: Path, layout: str) -> None:
    """Without a checksum a flip may load as other data; anything else is an error of ours that names the file."""
    content = write(tmp_path / NAME, layout, {"w": torch.ones(3, 5), "b": [torch.zeros(2), {"step": 1}]})
    generator = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        (tmp_path / NAME).write_bytes(damaged)
        try:
            load(tmp_path)
        except CheckpointDamagedError as exc:
            assert NAME in str(exc)
            refused += 1
    assert refused > 0


def edited(content: bytes, **item: Any) -> bytes:
    """A packed file whose first tensor is described otherwise; the header keeps its length."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["w"] |= item
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


@pytest.mark.parametrize(
    "item",
    [
        {"data_offsets": [-4, 56]}, {"data_offsets": [0, 64]}, {"data_offsets": [60, 0]}, {"data_offsets": [0]},
        {"data_offsets": [1 << 60, (1 << 60) + 60]}, {"data_offsets": None}, {"dtype": "torch.nn"}, {"dtype": 5},
        {"shape": [-3, -5]}, {"shape": [1 << 40, 5]}, {"shape": "[3, x]"}, {"data_offsets": [8, 68]},
    ],
)  # fmt: skip
def test_impossible_headers(tmp_path: Path, item: dict[str, Any]) -> None:
    content = write(tmp_path / NAME, "packed", {"w": torch.ones(3, 5), "v": torch.ones(2)})
    (tmp_path / NAME).write_bytes(edited(content, **item))
    with pytest.raises(CheckpointDamagedError, match=NAME):
        verify_complete(tmp_path / NAME)


class Poison:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return subprocess.check_call, (["touch", self.command],)


@layouts
def test_poisoned_pickle_is_not_run(tmp_path: Path, layout: str) -> None:
    touched = tmp_path / "touched"
    write(tmp_path / NAME, layout, {"w": torch.ones(3), "args": Poison(str(touched))})
    with pytest.raises(CheckpointDamagedError, match=r"subprocess\.check_call, which is not on the allow-list"):
        load(tmp_path)
    assert not touched.exists()
    pickle.loads(pickle.dumps(Poison(str(touched))))
    assert touched.exists()  # it is poison


@layouts
def test_poison_within_what_we_write(tmp_path: Path, layout: str) -> None:
    """The pickle in the pickle, and torch's storages, are under the same rule."""
    touched = tmp_path / "touched"
    inner = pickle.dumps({"args": Poison(str(touched))})
    storage = tmp_path / "storage"
    torch.save(Poison(str(touched)), storage)
    poisoned = [{"tensors": [torch.ones(1)], "megatron_state": inner}, {"x": _Storage(storage.read_bytes())}]
    for state in poisoned:
        write(tmp_path / NAME, layout, state)
        with pytest.raises(CheckpointDamagedError, match=NAME):
            load(tmp_path)
        assert not touched.exists()


class _Storage:
    """Pickled as torch pickles a storage."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __reduce__(self) -> Any:
        return torch.storage._load_from_bytes, (self.content,)


def round_trip(state: Any) -> Any:
    """Through what the library is given and what it makes of it: OrderedDict, say, becomes dict."""
    apart = take_apart(state)
    skeleton, tensors = flatten(apart.for_library(apart.tensors))
    return put_together(pickle.dumps(skeleton), tensors, Path("file"))


def test_every_kind_of_state_round_trips() -> None:
    state = nest() | {"again": OrderedDict(a=1)}
    state["points"] = [tuple(point) for point in state["points"]]  # a class of the tests is on no allow-list
    for unknown in ("point", "scalars"):
        del state["values"][unknown]
    assert identical(round_trip(state), state)


def test_names_that_the_library_would_confuse() -> None:
    state = {1: torch.ones(1), "1": torch.zeros(1), "a|b": torch.ones(2), "a": {"b": torch.zeros(2)}, "": torch.ones(3)}
    state["datastates_metadata"] = torch.zeros(4)
    state["text"] = "TENSOR|1"  # type: ignore[assignment]
    assert len(flatten(state)[1]) < 6  # it does confuse them
    assert identical(round_trip(state), state)


def test_tensor_that_is_there_twice_stays_one() -> None:
    shared = torch.ones(3)
    apart = take_apart([shared, shared, torch.empty(0, 3, dtype=torch.bfloat16)])
    assert apart.tensors == [shared] and key_of(0) == "tensors|0"
    one, other, empty = round_trip([shared, shared, torch.empty(0, 3, dtype=torch.bfloat16)])
    assert one is other and empty.shape == (0, 3) and empty.dtype is torch.bfloat16


def test_sparse_tensor_is_refused() -> None:
    with pytest.raises(pickle.PicklingError, match="sparse_coo"):
        take_apart({"w": torch.eye(2).to_sparse()})


leaves = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False) | st.binary()
dense = st.builds(random_tensor, st.sampled_from(DTYPES), st.integers(0, 5), st.integers(0, 5), seed=st.integers(0, 99))
keys = st.integers() | st.text()
states = st.recursive(
    leaves | dense,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(states)
def test_any_state_round_trips(state: Any) -> None:
    assert identical(round_trip(state), state)
