"""Names of engines, the guards they share, the engine that writes nothing, and the classes that may be unpickled."""

from __future__ import annotations

import argparse
import collections
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpointing.engines import registry
from megatron.checkpointing.engines.base import CheckpointEngine, EngineOptions, FileState, SavedCheckpoint, SavedFile
from megatron.checkpointing.engines.errors import (
    CheckpointDamagedError,
    CheckpointError,
    EngineUnavailableError,
    UnknownEngineError,
)
from megatron.checkpointing.engines.registry import check_engine_name, create_engine, engine_names
from megatron.checkpointing.engines.unpickling import known_classes
from megatron.config import ConfigError
from restart_trace.recorder import Operation, untraced_operation
from tools.ckpt_plan import engines as planned

ROOT = Path(__file__).resolve().parents[5]


# Names


@pytest.mark.parametrize("name", registry.builtin_engines())
def test_engine_is_the_class_of_its_name(name: str) -> None:
    engine = create_engine(name, EngineOptions(fsync=False, verify_checksums=False))
    try:
        assert engine.name == name and engine.options == EngineOptions(False, False)
        assert type(engine).__name__ == registry.builtin_engines()[name].class_name
    finally:
        engine.close()


def test_the_documentation_says_what_goes_with_each_engine() -> None:
    """The first table of docs/engines.md, to which the other pages refer."""
    table = (ROOT / "docs" / "engines.md").read_text().partition("\n| engine |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
    documented = {name.strip("`"): cells for name, _, _, *cells in rows}
    expected = {}
    for name, entry in registry.builtin_engines().items():
        has = (entry.redistributable, not entry.not_stored, name in planned.ENGINES)
        expected[name] = ["yes" if it else "no" for it in has]
    assert documented == expected


def test_unknown_engine_lists_those_there_are() -> None:
    for refuse in (check_engine_name, lambda name: create_engine(name, EngineOptions())):
        with pytest.raises(UnknownEngineError) as caught:
            refuse("fast")
        assert str(caught.value).startswith("--checkpoint-engine fast: no such engine; there are: torch (")
        assert all(name in str(caught.value) for name in engine_names())


@pytest.mark.parametrize("name", registry.builtin_engines())
def test_engine_saves_to_object_storage_or_has_its_reason(name: str) -> None:
    """That those without a reason do is tested in store/bucket/test_saving.py."""
    check_engine_name(name)
    if name in (there := registry.engines_of_object_storage()):
        check_engine_name(name, in_object_storage=True)
        return
    with pytest.raises(ConfigError) as caught:
        check_engine_name(name, in_object_storage=True)
    why = f"{registry.builtin_engines()[name].not_stored}; use {', '.join(there[:-1])} or {there[-1]}"
    assert str(caught.value) == f"--checkpoint-engine {name}: does not save to object storage: {why}"


def test_engine_whose_package_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a fallback to another engine."""
    entry = registry.EngineEntry("package_that_is_not_there.engine", "Engine", "for this test")
    monkeypatch.setitem(registry.ENGINES, "absent", entry)
    with pytest.raises(EngineUnavailableError) as caught:
        create_engine("absent", EngineOptions())
    assert "package package_that_is_not_there is not installed" in str(caught.value)
    assert f"use one of: {', '.join(registry.builtin_engines())}" in str(caught.value)


def test_package_that_an_engine_requires_is_missed_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is the name, at start-up, with the command that installs the package."""
    entry = registry.EngineEntry("module.never.imported", "Engine", "for this test", ("not_there",), "pip install it")
    monkeypatch.setitem(registry.ENGINES, "absent", entry)
    for refuse in (check_engine_name, lambda name: create_engine(name, EngineOptions())):
        with pytest.raises(EngineUnavailableError) as caught:
            refuse("absent")
        assert str(caught.value).startswith(
            "--checkpoint-engine absent: package not_there is not installed; install it (pip install it), or use "
            f"another engine: {', '.join(registry.builtin_engines())}"
        )


@pytest.mark.parametrize("name", registry.builtin_engines())
def test_what_loads_onto_another_layout_is_known_without_an_import(name: str) -> None:
    assert registry.is_redistributable(name) == registry.engine_class(name).redistributable
    assert registry.is_redistributable("of-another-package") is None


def test_checking_a_name_imports_no_engine() -> None:
    code = (
        "import sys; from megatron.checkpointing.engines import registry\n"
        "for name in registry.builtin_engines(): registry.check_engine_name(name)\n"
        "engines = 'megatron.checkpointing.engines.'\n"
        "loaded = [name.removeprefix(engines) for name in sys.modules if name.startswith(engines)]\n"
        "assert sorted(loaded) == ['entries', 'errors', 'registry'], loaded\n"
        "assert not {'torch', 'deepspeed', 'torchsnapshot'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


# The guards


class LengthEngine(CheckpointEngine):
    """Writes as many bytes as the state says."""

    name = "length"

    def _save_file(self, file: FileState, directory: Path, op: Operation) -> SavedFile:
        (directory / file.name).write_bytes(bytes(file.state))
        return SavedFile(file.name, file.state, "length:0")

    def _load_file(self, path: Path, expected: SavedFile | None, op: Operation) -> Any:
        return path.stat().st_size


def test_save_accounts_for_all_files(tmp_path: Path) -> None:
    op = untraced_operation()
    saved = LengthEngine(EngineOptions()).save([FileState("b", 20), FileState("a", 3)], tmp_path, op)
    assert [file.name for file in saved] == ["b", "a"]
    assert (op.bytes, op.num_files, op.durable) == (23, 2, True)
    LengthEngine(EngineOptions(fsync=False)).save([], tmp_path, op)
    assert (op.bytes, op.num_files, op.durable) == (0, 0, False)


def test_load_adds_up_over_candidates(tmp_path: Path) -> None:
    """A damaged checkpoint that was read before the one that is loaded was read all the same."""
    op = untraced_operation()
    engine = LengthEngine(EngineOptions())
    saved = {
        file.name: file for file in engine.save([FileState("a", 3), FileState("b", 4)], tmp_path, untraced_operation())
    }
    assert engine.load(["a"], SavedCheckpoint(tmp_path, saved), op) == {"a": 3}
    assert engine.load(["b", "a"], SavedCheckpoint(tmp_path), op) == {"b": 4, "a": 3}
    assert (op.bytes, op.num_files) == (10, 3)


def test_load_names_what_is_missing_or_short(tmp_path: Path) -> None:
    engine = LengthEngine(EngineOptions())
    (tmp_path / "a").write_bytes(b"12")
    with pytest.raises(CheckpointDamagedError, match=f"{tmp_path}/b: file is missing"):
        engine.load(["a", "b"], SavedCheckpoint(tmp_path), untraced_operation())
    with pytest.raises(CheckpointDamagedError, match=f"{tmp_path}/a: 2 bytes, but 3 were saved"):
        engine.load(["a"], SavedCheckpoint(tmp_path, {"a": SavedFile("a", 3, "")}), untraced_operation())


def test_engine_none_keeps_nothing_and_loads_nothing(tmp_path: Path) -> None:
    engine, op = create_engine("none", EngineOptions()), untraced_operation()
    assert not engine.writes_files
    assert engine.save([FileState("a", torch.ones(3))], tmp_path, op) == []
    assert list(tmp_path.iterdir()) == [] and (op.bytes, op.num_files, op.durable) == (0, 0, False)
    (tmp_path / "a").write_bytes(b"1")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/a: --checkpoint-engine none cannot load"):
        engine.load(["a"], SavedCheckpoint(tmp_path), untraced_operation())


# The allow-list


def load(path: Path) -> Any:
    with known_classes():
        return torch.load(path, weights_only=True)


def test_classes_of_checkpoints_are_known(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    scaler = DynamicLossScaler(2.0**16, 1000, 1.0, 2, False)
    state = {
        "args": argparse.Namespace(lr=1e-3),
        "np_rng_state": np.random.RandomState(1).get_state(),
        "loss_scaler": scaler,
        "stage": ZeroStageEnum(1),
        "mapping": collections.OrderedDict(a=fragment_address(numel=3, start=7)),
        "size": torch.Size([2, 3]),
    }
    torch.save(state, tmp_path / "state")
    loaded = load(tmp_path / "state")
    assert loaded["args"] == state["args"] and loaded["stage"] is state["stage"] and loaded["size"] == state["size"]
    assert vars(loaded["loss_scaler"]) == vars(scaler)
    assert loaded["mapping"]["a"] == fragment_address(numel=3, start=7)
    name, keys, *rest = loaded["np_rng_state"]
    assert name == "MT19937" and np.array_equal(keys, state["np_rng_state"][1])  # type: ignore[index]
    assert tuple(rest) == state["np_rng_state"][2:]  # type: ignore[index]


class Harmful:
    """Unpickling it would run a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
        import os

        return os.system, (f"touch {self.path}",)


def test_anything_else_is_not_unpickled(tmp_path: Path) -> None:
    import pickle

    torch.save({"x": Harmful(tmp_path / "ran")}, tmp_path / "state")
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path / "state")
    assert not (tmp_path / "ran").exists()


def test_nothing_stays_allowed_outside(tmp_path: Path) -> None:
    import pickle

    torch.save(argparse.Namespace(a=1), tmp_path / "state")
    assert load(tmp_path / "state").a == 1
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "state", weights_only=True)
