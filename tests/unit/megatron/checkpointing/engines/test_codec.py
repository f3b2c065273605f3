"""Splitting a state into JSON and tensors, and joining them: nothing is lost, and nothing runs."""

from __future__ import annotations

import argparse
import collections
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpointing.engines import unpickling
from megatron.checkpointing.engines.codec import CLASSES, SkeletonError, join, split
from tests.unit.megatron.checkpointing.engines.nests import Point, identical, nest, random_tensor

GOLDEN = sorted((Path(__file__).resolve().parents[4] / "golden/upstream_run/global_step5").glob("*.pt"))


def round_trip(state: Any) -> Any:
    skeleton, tensors = split(state)
    return join(json.loads(json.dumps(skeleton, allow_nan=False)), tensors)


def test_everything_comes_back_with_its_type_order_and_bits() -> None:
    state = nest()
    assert identical(round_trip(state), state)


def test_the_comparison_used_here_tells_states_apart() -> None:
    state = nest()
    assert not identical({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not identical([1], (1,))
    assert not identical(1, True)
    assert not identical(0.0, -0.0)
    assert not identical(torch.zeros(1), -torch.zeros(1))
    state["points"][0].y[0][0] = 7
    assert not identical(state, nest())


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_files_of_upstream_come_back(path: Path) -> None:
    with unpickling.known_classes():
        state = torch.load(path, weights_only=True)
    skeleton, tensors = split(state)
    assert tensors
    assert identical(join(json.loads(json.dumps(skeleton)), tensors), state)


def test_objects_of_deepspeed_come_back() -> None:
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    arguments = {"init_scale": 2**16, "scale_window": 500, "min_scale": 1, "delayed_shift": 2}
    scaler: Any = CreateLossScaler(torch.half, 1.0, True, arguments | {"consecutive_hysteresis": False})
    scaler.cur_iter = 17
    state = {
        "dynamic": scaler,
        "static": CreateLossScaler(torch.bfloat16, 1.0, False, None),
        "stage": ZeroStageEnum.weights,
        "where": fragment_address(numel=5, start=2),
        "model_type": unpickling.ModelType.retro_encoder,
    }
    found = round_trip(state)
    assert identical(found, state)
    assert isinstance(found["dynamic"], DynamicLossScaler)
    assert found["dynamic"].loss_scale == 2**16 and found["stage"] is ZeroStageEnum.weights


def test_every_class_that_may_be_unpickled_has_its_place() -> None:
    before = torch.serialization.get_safe_globals()
    with unpickling.known_classes():
        allowed = [entry for entry in torch.serialization.get_safe_globals() if entry not in before]
    named = {entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}" for entry in allowed}
    # What is written out as it stands, by tags of its own, and what NumPy's pickles are made of.
    plain = {"argparse.Namespace", "collections.OrderedDict", "torch.Size"}
    plain |= {name for name in named if name.startswith(("numpy", "builtins.", "_codecs."))}
    # Of universal checkpoints alone, whose files no engine writes.
    plain.add("deepspeed.checkpoint.universal_checkpoint.SubparamShape")
    assert named - plain == set(CLASSES)


def test_tensors_are_handed_out_as_they_are_and_once_each() -> None:
    shared, other = torch.ones(3), torch.ones(3)
    state = {"a": shared, "b": [other, shared], 0: other, "0": torch.zeros(1), "c": {}}
    _, tensors = split(state)
    assert list(tensors) == ["a", "b/0", "0"]
    assert tensors["a"] is shared and tensors["b/0"] is other
    found = round_trip(state)
    assert found["a"] is found["b"][1] and found["a"] is not found["b"][0]


def test_different_paths_that_read_alike_have_different_names() -> None:
    state = {0: torch.zeros(1), "0": torch.ones(1), "a/b": torch.zeros(2), "a": {"b": torch.ones(2)}}
    assert len(split(state)[1]) == 4
    assert identical(round_trip(state), state)


def test_meta_tensors_are_split_without_being_touched() -> None:
    tensor = torch.empty(1 << 40, device="meta", dtype=torch.bfloat16)
    skeleton, tensors = split({"big": tensor, "again": tensor})
    assert tensors == {"big": tensor} and json.dumps(skeleton)


def test_the_skeleton_does_not_change_with_the_state() -> None:
    state = nest()
    state["values"]["live"] = {"array": np.arange(4), "bytes": bytearray(b"ab"), "list": [1]}
    before = copy.deepcopy(state)
    skeleton, tensors = split(state)
    live = state["values"]["live"]
    live["array"][:] = 9
    live["bytes"][:] = b"xx"
    live["list"].append(2)
    state["values"]["namespace"].lr = 2
    assert identical(join(skeleton, tensors), before)


def test_attributes_of_a_module_state_are_kept() -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    state["extra"] = torch.zeros(1)
    assert round_trip(state)._metadata == state._metadata  # type: ignore[attr-defined]


def test_a_parameter_comes_back_as_its_tensor() -> None:
    found = round_trip([torch.nn.Parameter(torch.ones(2))])
    assert found[0].tolist() == [1, 1]


def test_joined_arrays_can_be_written_to() -> None:
    found = round_trip(np.arange(3))
    found[0] = 5
    assert found.tolist() == [5, 1, 2]


class Plain:
    pass


class CountingDict(dict):  # type: ignore[type-arg]
    pass


def _local_namedtuple() -> Any:
    class Local(NamedTuple):
        x: int

    return Local(1)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Plain(), "Plain"),
        ({1, 2}, "builtins.set"),
        (CountingDict(a=1), "CountingDict"),
        (collections.defaultdict(list), "defaultdict"),
        (print, "builtin_function_or_method"),
        (int, "builtins.type"),
        (np.array([object()]), "numpy.ndarray"),
        (torch.ones(2).to_sparse(), "torch.Tensor"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "torch.Tensor"),
        ({torch.ones(1): 1}, "torch.Tensor"),
        (_local_namedtuple(), "Local"),
        (np.ma.masked_array([1]), "MaskedArray"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_place_is_refused_by_path_and_type(value: Any, named: str) -> None:
    with pytest.raises(SkeletonError, match=rf"^a/1: cannot save .*{named}: .+; \w+"):
        split({"a": [0, value]})


def test_a_state_that_holds_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(SkeletonError, match="holds itself"):
        split(state)


def test_a_class_that_is_not_on_the_list_is_neither_imported_nor_made(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "poison.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    for skeleton in (
        {"class": "poison.Thing", "state": {"dict": {}}},
        {"class": "os.system", "state": "true"},
        {"namedtuple": "poison.Thing", "fields": ["x"], "values": [1]},
        {"namedtuple": "argparse.Namespace", "fields": [], "values": []},
        {"namedtuple": "os.system", "fields": [], "values": []},
    ):
        with pytest.raises(SkeletonError, match=r"poison\.Thing|os\.system|argparse\.Namespace"):
            join(skeleton, {})
    assert "poison" not in sys.modules


def test_a_namedtuple_whose_fields_changed_is_refused() -> None:
    skeleton, _ = split(Point(1, 2))
    skeleton["fields"] = ["x", "z"]
    with pytest.raises(SkeletonError, match="Point"):
        join(skeleton, {})


@pytest.mark.parametrize(
    "skeleton",
    [
        {}, {"unknown": 1}, {"tensor": "gone"}, {"tensor": 5}, {"tensor": []}, {"tuple": 5}, {"dict": []},
        {"items": [[1]]}, {"items": [[[1], 2]]}, {"OrderedDict": [[{"dict": {}}, 1]]}, {"float": "zz"}, {"float": "00"},
        {"int": "x"}, {"int": 5}, {"complex": [1]}, {"bytes": "*"}, {"str": "AA=="}, {"dtype": "float1"},
        {"dtype": "load"}, {"Size": ["a"]}, {"device": "nowhere"}, {"Namespace": [[1, 2, 3]]},
        {"ndarray": "|O", "shape": [1], "order": "C", "data": "data"},
        {"ndarray": "<f8", "shape": [2], "order": "C", "data": "data"},
        {"ndarray": "<f8", "shape": [-1], "order": "C", "data": "data"},
        {"ndarray": "<f8", "shape": [1]},
        {"scalar": "<f8", "data": "AA=="}, {"scalar": "|O", "data": "AAAAAAAAAAA="},
        {"class": "deepspeed.runtime.zero.config.ZeroStageEnum", "state": 9},
        {"class": "deepspeed.utils.tensor_fragment.fragment_address", "state": 9},
        {"class": []},
        {"namedtuple": 5, "fields": [], "values": []},
        {"namedtuple": f"{Point.__module__}.Point", "fields": ["x", "y"], "values": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_damaged_skeletons_are_named_errors(skeleton: Any) -> None:
    with pytest.raises(SkeletonError):
        join([skeleton], {"data": torch.zeros(8, dtype=torch.uint8)})


def test_a_bottomless_skeleton_is_a_named_error() -> None:
    skeleton: Any = 1
    for _ in range(5000):
        skeleton = [skeleton]
    with pytest.raises(SkeletonError, match="too deeply"):
        join(skeleton, {})


_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.binary(max_size=8),
    st.text(st.characters(codec=None), max_size=8),
    st.builds(random_tensor, st.sampled_from([torch.bfloat16, torch.int64]), st.integers(0, 5), seed=st.integers(0, 9)),
)  # fmt: skip
_keys = st.one_of(st.text(max_size=4), st.integers(-3, 3), st.tuples(st.integers(0, 2), st.text(max_size=2)))
_nests = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(_keys, inner, max_size=4),
        st.dictionaries(_keys, inner, max_size=4).map(collections.OrderedDict),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(lambda d: _namespace(d)),
        st.builds(Point, inner, inner),
    ),
    max_leaves=12,
)


def _namespace(attributes: dict[str, Any]) -> argparse.Namespace:
    result = argparse.Namespace()
    vars(result).update(attributes)
    return result


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(_nests)
def test_any_nest_comes_back(state: Any) -> None:
    assert identical(round_trip(state), state)


def test_splitting_is_fast() -> None:
    many = {f"p{i}": torch.zeros(3) for i in range(2000)}
    large = {"rows": [{"x": i, "y": float(i)} for i in range(1250)], "ints": {i: str(i) for i in range(2500)}}
    for state in (many, large):
        best = min(_seconds(state) for _ in range(5))
        assert best < 0.1, best  # 5 ms; 10 ms is what engines count on


def _seconds(state: Any) -> float:
    start = time.thread_time()
    split(state)
    return time.thread_time() - start
