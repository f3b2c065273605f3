"""Stand-ins of the DataStates library, for what it promises and for how it fails.

The package cannot be had in tests: it is on no index, is built with CUDA and copies from a CUDA device. These classes
have its two public interfaces, write its real file format from a thread of their own, late, and have the faults of
its sources: nothing is reported, `wait` returns before files are there, sys.exit in a thread, and files that are
created and truncated by both sides.
"""

from __future__ import annotations

import importlib.machinery
import json
import pickle
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.dist.harness import wait_for
from tests.unit.megatron.checkpointing.engines.datastates_files import flatten, raw, trailing


@dataclass
class Behaviour:
    """What the library will do, and what was asked of it."""

    delay_s: float = 0.0  # before each write of the writer thread
    header_last: bool = False  # the file is opened for the header when the writer has written its tensors
    lost: tuple[str, ...] = ()  # files whose save ends in sys.exit(-1) in a thread
    cut: dict[str, int] = field(default_factory=dict)  # file -> bytes that are missing at its end
    dies_at: int | None = None  # the writer thread ends before this write
    exits: tuple[str, ...] = ()  # methods that end in sys.exit(-1)
    device: threading.Event | None = None  # `wait` waits for copies until it is set
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    writers: list[_Writer] = field(default_factory=list)

    def settle(self) -> None:
        """Return when the writer threads have done all that they were given, or have died."""
        for writer in self.writers:
            wait_for(lambda writer=writer: writer.is_idle, "the end of the library's writing")

    def called(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] in self.exits:
            sys.exit(-1)
        if call[0] == "wait" and self.device is not None:
            self.device.wait(300)


class _Writer:
    """One thread that does what is queued, in order."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.queue: queue.Queue[Any] = queue.Queue()
        self._behaviour = behaviour
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        behaviour.writers.append(self)

    @property
    def is_idle(self) -> bool:
        return not self.queue.unfinished_tasks or not self._thread.is_alive()

    def _run(self) -> None:
        for count in range(1 << 30):
            task = self.queue.get()
            time.sleep(self._behaviour.delay_s)
            if count == self._behaviour.dies_at:
                return
            task()
            self.queue.task_done()


def install_checkpointing(monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour) -> None:
    """`datastates.llm.Checkpointing` of branch main."""

    class Checkpointing:
        def __init__(self, runtime_config: dict[str, Any], rank: int) -> None:
            behaviour.called("init", runtime_config, rank)
            self.executor = ThreadPoolExecutor(max_workers=4)
            self._writer = _Writer(behaviour)

        def save(self, state_dict: dict[str, Any], path: str) -> bool:
            behaviour.called("save", Path(path).name)
            self.executor.submit(self._save_background, state_dict, path)
            return True

        def wait(self) -> None:
            behaviour.called("wait")

        def _save_background(self, state: dict[str, Any], path: str) -> None:
            name = Path(path).name
            if name in behaviour.lost:
                sys.exit(-1)
            skeleton, tensors = flatten(state)
            pickled = pickle.dumps(skeleton)
            header: dict[str, Any] = {}
            position = 0
            for key, tensor in tensors.items():
                if not tensor.numel():
                    sys.exit(-1)
                stop = position + tensor.nbytes
                header[key] = {
                    "dtype": str(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [position, stop],
                }  # fmt: skip
                position = stop
            header["datastates_metadata"] = {"data_offsets": [position, position + len(pickled)]}
            text = json.dumps(header).encode()
            base = 8 + len(text)
            for key, tensor in tensors.items():
                at = base + header[key]["data_offsets"][0]
                self._writer.queue.put(lambda at=at, tensor=tensor: _write_in_place(path, at, tensor))
            if behaviour.header_last:
                self._writer.queue.join()
            with open(path, "wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.seek(base + position)
                file.write(pickled)
            if name in behaviour.cut:
                missing = behaviour.cut[name]
                self._writer.queue.put(lambda: _cut(path, missing))

    package, module = _module("datastates"), _module("datastates.llm")
    module.Checkpointing = Checkpointing  # type: ignore[attr-defined]
    package.llm = module  # type: ignore[attr-defined]
    _install(monkeypatch, package, module)


def install_checkpoint_engine(monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour) -> None:
    """`datastates.CheckpointEngine` of the later branch."""

    class CheckpointEngine:
        def __init__(self, runtime_config: dict[str, Any], rank: int) -> None:
            behaviour.called("init", runtime_config, rank)
            self.sm: dict[int, dict[str, Any]] = {}
            self._writer = _Writer(behaviour)
            self._rank = rank
            self._aggregated = runtime_config.get("engine_type") == "state_aggregated_engine"

        def save(self, state_dict: dict[str, Any], path: str) -> bool:
            behaviour.called("save", Path(path).name)
            self.sm[len(self.sm)] = {path: state_dict}
            name = Path(path).name
            if self._aggregated:  # nothing is written before `commit`
                return True
            if name not in behaviour.lost:
                self._writer.queue.put(lambda: _write_trailing(path, state_dict, behaviour.cut.get(name, 0)))
            return True

        def wait(self, persist: bool = False) -> None:
            behaviour.called("wait", persist)

        def commit(self, tag: str) -> bool:
            """Of what was saved, the aggregated engine writes the last alone, unless DeepSpeed calls it."""
            behaviour.called("commit", tag)
            ((path, state),) = self.sm[len(self.sm) - 1].items()
            target = Path(path).with_name(f"rank-{self._rank}-aggregated-datastates.ckpt")
            missing = behaviour.cut.get(target.name, 0)
            self._writer.queue.put(lambda: _write_trailing(str(target), state, missing, Path(path).name))
            return True

        def shutdown(self) -> None:
            behaviour.called("shutdown")

    package = _module("datastates")
    package.CheckpointEngine = CheckpointEngine  # type: ignore[attr-defined]
    _install(monkeypatch, package)


INSTALL = {
    "datastates.llm.Checkpointing": install_checkpointing,
    "datastates.CheckpointEngine": install_checkpoint_engine,
}


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    return module


def _install(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # The adapter puts an `open` of its own into the library's module; it is gone after the test.
    monkeypatch.setitem(globals(), "open", open)


def _write_in_place(path: str, at: int, tensor: torch.Tensor) -> None:
    """As the writer thread of branch main: it creates a file that is not there, and reads the tensor only now."""
    if not Path(path).exists():
        Path(path).write_bytes(b"")
    with Path(path).open("r+b") as file:
        file.seek(at)
        file.write(raw(tensor))


def _write_trailing(path: str, state: dict[str, Any], missing: int, name: str = "") -> None:
    content = trailing(state, name)
    with Path(path).open("r+b") as file:
        file.write(content[: len(content) - missing])


def _cut(path: str, missing: int) -> None:
    with Path(path).open("r+b") as file:
        file.truncate(Path(path).stat().st_size - missing)
