"""The engines around DeepSpeed's writers: what they bring back, what they say, and what they refuse."""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing.engines.base import CheckpointEngine, EngineOptions, FileState
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointSaveError, EngineUnavailableError
from megatron.checkpointing.engines.fastpersist import snapshot as fastpersist_snapshot
from megatron.checkpointing.engines.fastpersist.snapshot import SharedMemory
from megatron.checkpointing.engines.fastpersist.writer import WRITER_EVENT
from megatron.checkpointing.engines.registry import create_engine
from restart_trace.recorder import untraced_operation
from tests.conformance.compare import differences
from tests.conformance.subjects import Saved, traced
from tests.dist import forked_writers
from tests.dist.harness import Zygote
from tests.dist.storage import fill, small_disk
from tests.unit.megatron.checkpointing.engines.fastpersist_helpers import NAME, load, save, state, without_launcher
from tests.unit.megatron.checkpointing.engines.recorded import recorded_save_and_load, time_in_no_window
from tests.unit.trace_helpers import ROOT

BOTH = ("fastpersist", "fastpersist-decoupled")
PY_FILE_WRITER = "DeepSpeed's PyFileWriter: there is no CUDA device"


@pytest.fixture(autouse=True)
def _without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)


@pytest.fixture(autouse=True)
def _writers_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """But those of programs that tests here start, and of test_fastpersist_process.py, begin as users begin them."""
    if request.node.get_closest_marker("slow") is None:  # it has no process that writes
        yield
        return
    zygote: Zygote = request.getfixturevalue("zygote")
    with forked_writers.installed(zygote.forks):
        yield


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, CheckpointEngine]]:
    made = {name: create_engine(name, EngineOptions(fsync=False)) for name in BOTH}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(params=["fastpersist", pytest.param("fastpersist-decoupled", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, engines: dict[str, CheckpointEngine]) -> CheckpointEngine:
    return engines[request.param]


# What is saved


def test_a_state_comes_back(engine: CheckpointEngine, tmp_path: Path) -> None:
    saved = save(engine, tmp_path)
    assert differences(load(engine, saved), state()) == []
    assert saved.on_disk() == {NAME: saved.files[0].num_bytes}
    anyone = torch.load(tmp_path / NAME, weights_only=False)
    assert torch.equal(anyone["part"], state()["part"])


def test_two_saves_one_after_the_other(engine: CheckpointEngine, tmp_path: Path) -> None:
    """The second one larger, then a smaller one: the memory between the processes grows, and is used again."""
    sizes = (1000, 3_000_000, 10)
    saved = [save(engine, tmp_path / str(n), content={"a": torch.full((n,), float(n))}) for n in sizes]
    for n, one in zip(sizes, saved, strict=True):
        assert torch.equal(load(engine, one)["a"], torch.full((n,), float(n)))


def test_tensors_of_one_storage_are_written_once_and_views_alone(engine: CheckpointEngine, tmp_path: Path) -> None:
    tied = torch.arange(100_000.0)
    content = {"a": tied, "b": tied, "matrix": tied.view(10, 10_000), "part": tied[5:8]}
    saved = save(engine, tmp_path, content=content)
    assert 400_000 < saved.files[0].num_bytes < 410_000
    assert differences(load(engine, saved), content) == []


def test_changes_after_release_do_not_show(engine: CheckpointEngine, tmp_path: Path) -> None:
    weight = torch.arange(2_000_000.0)
    content = {"weight": weight, "part": weight[3:5], "list": [1]}
    pending = engine.begin_save([FileState(NAME, content)], tmp_path, traced("save").op)
    pending.release_state()
    weight.fill_(-1)
    content["list"].append(2)
    saved = Saved(tmp_path, pending.wait(), traced("save"))
    expected = torch.arange(2_000_000.0)
    assert differences(load(engine, saved), {"weight": expected, "part": expected[3:5], "list": [1]}) == []


def test_a_conjugated_tensor_comes_back_as_its_values(engine: CheckpointEngine, tmp_path: Path) -> None:
    """Conjugation is a flag of a tensor, which its memory does not show."""
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    saved = save(engine, tmp_path, content={"a": numbers.conj(), "b": numbers, "c": numbers[:1].conj()})
    found = load(engine, saved)
    assert torch.equal(found["a"], numbers.conj()) and torch.equal(found["b"], numbers)
    assert torch.equal(found["c"], numbers[:1].conj())


class Unknown:
    """Not on the allow-list."""


def test_what_could_not_be_loaded_is_not_saved(engine: CheckpointEngine, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointSaveError, match=rf"^{NAME}: holds tests\.\S+\.Unknown, which is not on the allow-list"
    ):
        save(engine, tmp_path, content={"object": Unknown()})
    assert not list(tmp_path.iterdir())


# Which writer


@pytest.mark.slow
def test_the_writer_is_named_once_in_log_and_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, engines: dict[str, CheckpointEngine]
) -> None:
    for name, used in engines.items():
        with caplog.at_level(logging.INFO), contextlib.closing(type(used)(used.options)) as engine:
            saved = [save(engine, tmp_path / f"{name}{number}") for number in range(2)]
        logged = [message for message in caplog.messages if message.startswith(f"checkpoint engine {name} ")]
        assert len(logged) == 1 and PY_FILE_WRITER in logged[0]
        events = [[r for r in one.traced.records.all if r["type"] == "event"] for one in saved]
        assert [len(found) for found in events] == [1, 0]
        assert events[0][0]["phase"] == WRITER_EVENT and events[0][0]["detail"].startswith(PY_FILE_WRITER)


def test_it_is_this_class_of_deepspeed_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.io import PyFileWriter

    written: dict[str, int] = collections.Counter()
    write = PyFileWriter.write

    def counting(self: Any, buffer: Any) -> int:
        written[self.file_path()] += len(buffer)
        return write(self, buffer)

    monkeypatch.setattr(PyFileWriter, "write", counting)
    saved = save(create_engine("fastpersist", EngineOptions(fsync=False)), tmp_path)
    assert written == {str(tmp_path / NAME): saved.files[0].num_bytes}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_a_writer_that_cannot_be_had_is_an_error_if_asked_for(name: str, tmp_path: Path) -> None:
    create_engine(name, EngineOptions()).check_can_save()
    engine = create_engine(name, EngineOptions(direct_io="on"))
    with pytest.raises(EngineUnavailableError, match="--direct-io on: DeepSpeed's FastFileWriter cannot be used"):
        engine.check_can_save()
    with pytest.raises(EngineUnavailableError, match="--direct-io on"):
        save(engine, tmp_path)
    assert not list(tmp_path.iterdir())
    engine.close()


# What is recorded


def test_phases_of_a_save(engine: CheckpointEngine, tmp_path: Path) -> None:
    saved = save(engine, tmp_path, content={"a": torch.ones(300_000)})
    spans = saved.traced.records.spans()
    phases = {(r["phase"], r.get("detail")) for r in spans}
    assert phases == {("device_to_host", None), ("serialize", None), ("flush", "write")}
    assert saved.traced.records.bytes("flush", "write") == saved.files[0].num_bytes == (tmp_path / NAME).stat().st_size
    assert {r["blocking"] for r in saved.traced.records.spans("flush")} == {not engine.asynchronous}
    op = saved.traced.op
    assert (op.bytes, op.num_files, op.durable) == (saved.files[0].num_bytes, 1, False)
    # The clock is one and the same in both processes.
    now = time.monotonic_ns()
    assert all(op.start_ns <= r["start_ns"] <= r["end_ns"] <= now for r in spans)


def test_spans_leave_no_time_between_files(tmp_path: Path) -> None:
    made = create_engine("fastpersist", EngineOptions())
    for operation in recorded_save_and_load(made, tmp_path):
        assert time_in_no_window(operation.spans, operation.start_ns) == 0
    made.close()


@pytest.mark.slow
def test_fsync_is_called_if_and_only_if_it_is_asked_for(tmp_path: Path) -> None:
    """By the kernel's account, of the process that writes too."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed (apt-get install strace)")
    if subprocess.run(["strace", "-o", "/dev/null", "true"], check=False, capture_output=True).returncode:
        pytest.skip("strace may not trace processes here (ptrace is forbidden)")
    code = f"""
        import torch
        from pathlib import Path
        from megatron.checkpointing.engines.base import EngineOptions, FileState
        from megatron.checkpointing.engines.registry import create_engine
        from restart_trace.recorder import untraced_operation
        for name in {BOTH!r}:
            for fsync in (True, False):
                directory = Path({str(tmp_path)!r}, f"{{name}}_{{fsync}}")
                directory.mkdir()
                engine = create_engine(name, EngineOptions(fsync=fsync))
                engine.save([FileState("state", {{"a": torch.ones(10)}})], directory, untraced_operation())
                engine.close()
    """
    account = tmp_path / "account"
    command = ["strace", "-f", "--seccomp-bpf", "-y", "-e", "trace=fsync,fdatasync,sync,syncfs", "-o", str(account)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    code = textwrap.dedent(code)
    subprocess.run([*command, sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, timeout=300)
    calls = re.findall(r"(\w+)\(\d+<([^>]*)>", account.read_text())
    assert calls == [("fsync", str(tmp_path / f"{name}_True" / "state")) for name in BOTH]


# Damage


def test_damaged_files_are_refused_by_name(engine: CheckpointEngine, tmp_path: Path) -> None:
    saved = save(engine, tmp_path, content={"a": torch.arange(5000.0), "step": 3})
    path = tmp_path / NAME
    content = path.read_bytes()
    for position in (len(content) // 2, len(content) - 200):
        path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        with pytest.raises(CheckpointDamagedError, match=str(path)):
            load(engine, saved)
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointDamagedError, match=f"{path}: {len(content) - 1} bytes"):
        load(engine, saved)
    path.unlink()
    with pytest.raises(CheckpointDamagedError, match=f"{path}: file is missing"):
        load(engine, saved)


# Storage that refuses


@pytest.mark.parametrize("room", [0, 8_000, 200_000])
def test_full_disk(engine: CheckpointEngine, tmp_path: Path, room: int) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 2 << 20) as mounted:
        if not mounted:
            pytest.skip("no disk of our own can be mounted here (that takes root)")
        fill(disk / "ballast", room)
        with pytest.raises(OSError, match="No space left on device") as caught:
            save(engine, disk, content={"a": torch.ones(1_000_000)})
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(disk / NAME)
    again = save(engine, tmp_path / "again")
    assert differences(load(engine, again), state()) == []


@pytest.mark.slow
def test_no_permission(tmp_path: Path, zygote: Zygote) -> None:
    """In a process of its own, since rights that are given up are gone."""
    code = f"""
        import torch
        from pathlib import Path
        from megatron.checkpointing.engines.base import EngineOptions, FileState
        from megatron.checkpointing.engines.registry import create_engine
        from restart_trace.recorder import untraced_operation
        from tests.dist.storage import drop_root_rights
        drop_root_rights()
        directory = Path({str(tmp_path)!r}, "forbidden")
        directory.mkdir(mode=0o500)
        for name in {BOTH!r}:
            engine = create_engine(name, EngineOptions())
            try:
                engine.save([FileState({NAME!r}, {{"a": torch.ones(10)}})], directory, untraced_operation())
            except PermissionError as error:
                print(error.errno, error.filename)
            engine.close()
    """
    script = tmp_path / "saves.py"
    script.write_text(textwrap.dedent(code))
    environment = {forked_writers.FORKED_WRITERS: "1"}
    run = zygote.run([], 1, tmp_path / "logs", script=str(script), env=environment)
    assert run.ok, run.output[-3000:]
    assert run.output.splitlines()[-2:] == [f"{errno.EACCES} {tmp_path / 'forbidden' / NAME}"] * 2


def test_name_used_twice(engine: CheckpointEngine, tmp_path: Path) -> None:
    twice = [FileState(NAME, {"a": 1}), FileState(NAME, {"a": 2})]
    with pytest.raises(FileExistsError, match=NAME):
        engine.begin_save(twice, tmp_path, untraced_operation()).wait()


def test_too_little_memory_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before it is taken: the system would not refuse, but end processes."""
    memory = SharedMemory()
    memory.reserve(3 << 20)
    held = os.fstat(memory.fd).st_size
    with pytest.raises(OSError, match="for a snapshot of 1152921504606846976 bytes in host memory") as caught:
        memory.reserve(1 << 60)
    assert caught.value.errno == errno.ENOMEM and os.fstat(memory.fd).st_size == held
    # While others take theirs.
    monkeypatch.setattr(fastpersist_snapshot, "_STEP", 1 << 21)
    answers = iter([1 << 40, 1 << 40, 0])
    monkeypatch.setattr(fastpersist_snapshot, "available_memory", lambda: next(answers))
    with pytest.raises(OSError, match="Cannot allocate memory"):
        memory.reserve(32 << 20)
    assert os.fstat(memory.fd).st_size == held and os.fstat(memory.fd).st_blocks * 512 == held
    memory.close()
