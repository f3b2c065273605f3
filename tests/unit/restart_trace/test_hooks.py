"""Hooks by themselves: they change nothing of what they are around, import nothing, and see imports as they come."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from restart_trace.clock import now_ns
from restart_trace.hooks import guard
from restart_trace.hooks.clients import hook_accelerate, hook_torchtitan
from restart_trace.hooks.coordinates import coordinates_in_groups, coordinates_in_mesh, coordinates_of
from restart_trace.hooks.deepspeed_engine import DeepSpeedHooks
from restart_trace.hooks.guard import Call, put, wrap
from restart_trace.hooks.running import Running
from restart_trace.hooks.session import Session, program_of
from restart_trace.hooks.timeline import Piece, Timeline
from restart_trace.reading import read_records
from restart_trace.recorder import Recorder, untraced_operation
from restart_trace.run import main
from restart_trace.sink import JsonlSink
from tests.unit.restart_trace.programs import ROOT, python
from tests.unit.trace_helpers import PROCESS

# ---------------------------------------------------------------- around a function


class Target:
    """A class with functions to hook."""

    def double(self, x: int = 2) -> int:
        if x < 0:
            raise ValueError("negative")
        return 2 * x

    @classmethod
    def name(cls) -> str:
        return cls.__name__


def fresh() -> Any:
    return type("Target", (), dict(vars(Target)))


def test_a_hook_sees_the_call_and_changes_nothing() -> None:
    seen: list[Any] = []

    @contextmanager
    def around(call: Call) -> Iterator[None]:
        seen.append(call.arguments()["x"])
        yield
        seen.append(call.result)

    target = fresh()
    wrap(target, "double", around)
    wrap(target, "double", around)  # a second time: nothing
    assert target().double() == 4 and target().double(x=5) == 10
    assert seen == [2, 4, 5, 10]
    with pytest.raises(ValueError, match="negative"):
        target().double(-1)
    assert seen == [2, 4, 5, 10, -1]
    put(hooks=False)
    assert target().double(3) == 6 and len(seen) == 5
    put(hooks=True)


def test_a_class_method_can_be_hooked() -> None:
    @contextmanager
    def around(call: Call) -> Iterator[None]:
        yield

    target = fresh()
    wrap(target, "name", around)
    assert target.name() == "Target" and target().name() == "Target"


def test_a_static_method_can_be_hooked() -> None:
    seen: list[Any] = []

    @contextmanager
    def around(call: Call) -> Iterator[None]:
        seen.append(call.args)
        yield

    target: Any = type("Target", (), {"save": staticmethod(lambda path: path)})
    wrap(target, "save", around)
    assert (target.save("a"), target().save("b"), seen) == ("a", "b", [("a",), ("b",)])


def test_a_call_that_does_not_fit_fails_as_without_the_hook(caplog: pytest.LogCaptureFixture) -> None:
    """It is the program's error, which it may expect: the hook stays on, and says nothing."""
    seen: list[int] = []

    @contextmanager
    def around(call: Call) -> Iterator[None]:
        seen.append(call.arguments()["x"])
        yield

    target = fresh()
    wrap(target, "double", around)
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        target().double(y=1)
    assert target().double(3) == 6
    assert seen == [3] and caplog.records == []


def test_a_program_whose_logging_fails_goes_on() -> None:
    @contextmanager
    def around(call: Call) -> Iterator[None]:
        raise KeyError("planted")
        yield

    class Broken(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise OSError("no more logs")

    target, broken = fresh(), Broken()
    wrap(target, "double", around)
    guard.logger.addFilter(broken)
    try:
        assert target().double(3) == 6
    finally:
        guard.logger.removeFilter(broken)


@pytest.mark.parametrize("where", ["before", "after", "on error"])
def test_a_hook_that_raises_is_switched_off_and_said_once(where: str, caplog: pytest.LogCaptureFixture) -> None:
    entered: list[int] = []

    @contextmanager
    def around(call: Call) -> Iterator[None]:
        entered.append(1)
        if where == "before":
            call.args = ()
            raise KeyError("planted")
        try:
            yield
        except ValueError:
            raise KeyError("planted") from None
        if where == "after":
            raise KeyError("planted")

    target = fresh()
    wrap(target, "double", around)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            if where == "on error":
                with pytest.raises(ValueError, match="negative"):
                    target().double(-1)
            assert target().double(4) == 8
    assert len(entered) == 1
    (record,) = caplog.records
    assert "Target.double is switched off" in record.getMessage() and "planted" in record.getMessage()


def test_what_is_no_exception_passes_through() -> None:
    """A signal handler may raise KeyboardInterrupt or SystemExit anywhere."""

    @contextmanager
    def around(call: Call) -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    target = fresh()
    wrap(target, "double", around)
    with pytest.raises(KeyboardInterrupt):
        target().double()


# ---------------------------------------------------------------- phases of a thread


def test_a_phase_within_a_phase_is_taken_out_of_it(tmp_path: Path) -> None:
    recorder = Recorder(JsonlSink(tmp_path / "rank_00000_cycle_000.jsonl"), PROCESS)
    timeline = Timeline(recorder.begin("save"))
    between = Piece("library_call")
    with timeline.within(between), timeline.phase("collect"):
        with timeline.phase("collect"):  # a part of the same: no piece of its own
            pass
        with timeline.phase("barrier"):
            pass
        with pytest.raises(OSError), timeline.phase("flush", "write", file="a") as piece:
            piece.bytes = 3
            raise OSError("full")
        timeline.change(between, "commit", "publish")
    timeline.operation.end()
    recorder.close()
    spans = [r for r in read_records(tmp_path / "rank_00000_cycle_000.jsonl") if r["type"] == "span"]
    assert [span["phase"] for span in spans] == [
        "library_call", "collect", "barrier", "collect", "flush", "collect", "commit",
    ]  # fmt: skip
    assert all(a["end_ns"] == b["start_ns"] for a, b in zip(spans, spans[1:], strict=False))
    assert (spans[4]["bytes"], spans[4]["error"]) == (3, "OSError: full")


def test_deepspeeds_files_are_named_below_their_tag_and_others_by_themselves() -> None:
    running = Running(untraced_operation(), "save")
    assert running.name_of("/runs/a/global_step5/zero/x.pt") == "x.pt"
    with running.within_deepspeed("/runs/a"):
        names = [running.name_of(f"/runs/a/{name}") for name in ("global_step5/zero/x.pt", "latest")]
    assert names == ["zero/x.pt", "latest"]


# ---------------------------------------------------------------- where a rank stands


def test_until_more_is_known_all_ranks_are_data_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESTART_TRACE_HOOKS_PID", str(os.getpid()))  # which it would leave in the environment
    Session(tmp_path, now_ns()).open(3, 8)
    process = next(iter(read_records(tmp_path / "rank_00003_cycle_000.jsonl")))
    place = {key: process[key] for key in ("tp", "pp", "dp", "layout", "world_size")}
    assert place == {"tp": 0, "pp": 0, "dp": 3, "layout": {"tp": 1, "pp": 1, "dp": 8}, "world_size": 8}


def test_coordinates_are_those_of_the_grid_or_the_mpu() -> None:
    def source(**axes: tuple[int, int]) -> Any:
        functions = {f"get_{name}_rank": (lambda at=at: at) for name, (at, _) in axes.items()}
        functions |= {f"get_{name}_world_size": (lambda size=size: size) for name, (_, size) in axes.items()}
        return SimpleNamespace(**functions)

    grid = source(pipe_parallel=(1, 2), data_parallel=(3, 4), model_parallel=(0, 2))
    assert coordinates_of(SimpleNamespace(grid=grid, mpu=None), None) == {
        "tp": 0, "pp": 1, "dp": 3, "layout": {"tp": 2, "pp": 2, "dp": 4},
    }  # fmt: skip
    mpu = source(tensor_model_parallel=(1, 2), context_parallel=(2, 4), data_parallel=(0, 1))
    assert coordinates_of(SimpleNamespace(mpu=mpu), None) == {
        "tp": 1, "pp": 0, "dp": 0, "cp": 2, "layout": {"tp": 2, "pp": 1, "dp": 1, "cp": 4},
    }  # fmt: skip
    assert coordinates_of(SimpleNamespace(mpu=None), None) is None


def test_coordinates_are_those_of_experts_sequences_and_device_meshes() -> None:
    """As DeepSpeed has them: its MoE groups, its mpu for sequence parallelism, its mesh of data and sequences."""
    groups = SimpleNamespace(
        _get_max_expert_size_name=lambda: "ep_size_2",
        _get_expert_parallel_rank={"ep_size_2": 1}.get,
        _get_expert_parallel_world_size={"ep_size_2": 2}.get,
        _get_sequence_data_parallel_rank=lambda: 3,
        _get_sequence_data_parallel_world_size=lambda: 4,
    )
    experts = SimpleNamespace(mpu=None, has_moe_layers=True)
    assert coordinates_of(experts, groups) == {
        "tp": 0, "pp": 0, "dp": 3, "ep": 1, "layout": {"tp": 1, "pp": 1, "dp": 4, "ep": 2},
    }  # fmt: skip
    rank, size = lambda: 1, lambda: 2
    mpu = SimpleNamespace(
        get_sequence_parallel_rank=rank, get_sequence_parallel_world_size=size,
        get_model_parallel_rank=rank, get_model_parallel_world_size=size,
    )  # fmt: skip
    sequences = {"tp": 0, "pp": 0, "dp": 1, "cp": 1, "layout": {"tp": 1, "pp": 1, "dp": 2, "cp": 2}}
    assert coordinates_of(SimpleNamespace(mpu=mpu), groups) == sequences
    mesh = SimpleNamespace(
        mesh_dim_names=("data_parallel", "sequence_parallel"),
        get_local_rank=(1, 1).__getitem__,
        size=(2, 2).__getitem__,
    )
    assert coordinates_of(SimpleNamespace(mpu=None, mesh_device=mesh), groups) == sequences


def mesh_of(place: dict[str, tuple[int, int]], whole: Any = None) -> Any:
    """A stand-in for a DeviceMesh, which takes process groups: its dimensions with the rank's place and their sizes."""
    places = list(place.values())
    mesh = SimpleNamespace(
        mesh_dim_names=tuple(place),
        ndim=len(place),
        get_local_rank=lambda dimension: places[dimension][0],
        size=lambda dimension: places[dimension][1],
    )
    mesh._get_root_mesh = lambda: whole or mesh
    return mesh


def test_coordinates_are_told_only_where_they_are_known_of_every_rank() -> None:
    """tests/dist/test_hooks.py has them from torch's own meshes and groups."""
    whole = mesh_of({"pp": (1, 2), "dp_replicate": (0, 2), "dp_shard": (3, 4), "tp": (1, 2)})
    part = mesh_of({"dp_replicate": (0, 2), "dp_shard": (3, 4)}, whole)
    assert coordinates_in_mesh(part, None, 0, 32) == {
        "tp": 1, "pp": 1, "dp": 0, "fsdp": 3, "layout": {"tp": 2, "pp": 2, "dp": 2, "fsdp": 4},
    }  # fmt: skip
    assert coordinates_in_mesh(part, None, 0, 64) is None  # another axis, which has no name that is known
    named = SimpleNamespace(shard_names=("dp_shard",), replicate_names=("dp_replicate",))
    assert coordinates_in_mesh(whole, named, 0, 32) == coordinates_in_mesh(part, None, 0, 32)
    for several in ((("dp_shard", "tp"), ()), ((), ("dp_replicate",)), (("dp_shard",), ("pp", "dp_replicate"))):
        assert (
            coordinates_in_mesh(whole, SimpleNamespace(shard_names=several[0], replicate_names=several[1]), 0, 32)
            is None
        )
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    assert coordinates_in_groups("FULL_SHARD", group, None, 4) is None
    assert coordinates_in_groups("FULL_SHARD", group, None, 2) == {
        "tp": 0, "pp": 0, "dp": 0, "fsdp": 1, "layout": {"tp": 1, "pp": 1, "dp": 1, "fsdp": 2},
    }  # fmt: skip


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Of one rank, open; its trace is in tmp_path / "trace"."""
    monkeypatch.setenv("RESTART_TRACE_HOOKS_PID", str(os.getpid()))  # which it would leave in the environment
    opened = Session(tmp_path / "trace", now_ns())
    opened.open(0, 1)
    return opened


def test_a_trainers_load_is_none_of_the_programs_own(tmp_path: Path, session: Session) -> None:
    """A program may read data by torch.load, or a model, long before its trainer resumes, or looks whether it shall."""
    with session.file_call("load", "torch.load", "/data.pt"):
        pass
    for directory in (None, "/run/checkpoint-4", None):  # nothing to resume from; a resume in two parts
        with session.load_part(directory, "transformers"):
            pass
    session.end_idle()
    trace = list(read_records(tmp_path / "trace" / "rank_00000_cycle_000.jsonl"))
    begun = {r["op"]: r.get("inferred", False) for r in trace if r["type"] == "operation_begin" and r["op"]}
    tags = {r["op"]: r["tag"] for r in trace if r["type"] == "operation_label"}
    assert [(tags[op], inferred) for op, inferred in begun.items()] == [("data.pt", True), ("checkpoint-4", False)]
    calls = [tags[r["op"]] for r in trace if r.get("phase") == "library_call"]
    assert calls and set(calls) == {"checkpoint-4"}


def test_directories_are_told_once_and_those_beside_them_not(tmp_path: Path, session: Session) -> None:
    session.record_runtime({"engine_used": "First", "parameters": 3})
    for directory in ("/proc/a/checkpoint-1", "/proc/a/checkpoint-1", "/proc/a/checkpoint-2", "/proc/b/checkpoint-3"):
        session.record_directory("save", directory, "First")
    trace = read_records(tmp_path / "trace" / "rank_00000_cycle_000.jsonl")
    found = [record for record in trace if record["type"] == "runtime"]
    assert [r.get("save_dir") for r in found] == [None, "/proc/a/checkpoint-1", "/proc/b/checkpoint-3"]
    assert {r["parameters"] for r in found} == {3} and "type proc" in found[-1]["save_mount"]


def test_a_file_that_one_rank_saves_besides_names_no_other_engine(tmp_path: Path, session: Session) -> None:
    """Neither do weights alone. Otherwise the ranks would seem to disagree on the engine."""

    class Accelerator:
        def save_model(self, save_directory: str) -> None: ...

    library: Any = SimpleNamespace(Accelerator=Accelerator)
    hook_accelerate(session, library)
    Accelerator().save_model("/proc/1/a/weights")
    with session.file_call("save", "torch.save", "/proc/1/a/metrics.pt"):
        pass
    session.end_idle()
    session.record_directory("save", "/proc/2/c/checkpoint-1", "Library")
    Accelerator().save_model("/proc/3/d/weights")
    with session.file_call("save", "torch.save", "/proc/4/e/metrics.pt"):
        pass
    trace = list(read_records(tmp_path / "trace" / "rank_00000_cycle_000.jsonl"))
    engines = [record.get("engine_used") for record in trace if record["type"] == "runtime"]
    assert engines == [None, "torch.save", "Library", "Library", "Library"]
    saved_by = [record["engine"] for record in trace if record["type"] == "operation_label"]
    assert saved_by == ["accelerate", "torch.save", "accelerate", "torch.save"]
    begun = [record for record in trace if record["type"] == "operation_begin" and record["operation"] == "save"]
    assert [record.get("weights_only", False) for record in begun] == [True, False, True, False]


def test_torchtitans_saves_in_the_background_are_left_to_dcps_hooks(tmp_path: Path, session: Session) -> None:
    class CheckpointManager:
        def dcp_save(self, checkpoint_id: str, async_mode: Any) -> None: ...

        def dcp_load(self, checkpoint_id: str) -> None: ...

    library: Any = SimpleNamespace(CheckpointManager=CheckpointManager)
    hook_torchtitan(session, library)
    manager = CheckpointManager()
    manager.dcp_save("/proc/1/step-2", SimpleNamespace(value="async"))
    manager.dcp_save("/proc/1/step-4", SimpleNamespace(value="disabled"))
    manager.dcp_load("/proc/1/step-4")
    trace = list(read_records(tmp_path / "trace" / "rank_00000_cycle_000.jsonl"))
    begun = {r["op"]: r["operation"] for r in trace if r["type"] == "operation_begin" and r["operation"] != "startup"}
    labels = [(begun[r["op"]], r["tag"]) for r in trace if r["type"] == "operation_label"]
    assert labels == [("save", "step-4"), ("load", "step-4")] and len(begun) == 2


def test_a_decoupled_save_that_is_committed_within_another_operation_ends(tmp_path: Path, session: Session) -> None:
    """As where a trainer's own save, which is traced, makes the step that commits the save before."""
    hooks = DeepSpeedHooks(session)

    class Engine:
        global_steps = 1
        checkpoint_engine = SimpleNamespace(is_decoupled=lambda: True)

        def save_checkpoint(self, save_dir: str, tag: str) -> None: ...

        def commit(self) -> None: ...

    wrap(Engine, "save_checkpoint", hooks.save)
    wrap(Engine, "commit", hooks.commit_decoupled)
    Engine().save_checkpoint("/proc/a", "first")
    other = session.begin("save")
    assert other is not None
    with session.until_end(other):
        Engine().commit()
        assert session.running() is other
    trace = list(read_records(tmp_path / "trace" / "rank_00000_cycle_000.jsonl"))
    (first,) = {r["op"] for r in trace if r["type"] == "operation_label" and r.get("tag") == "first"}
    assert [r["outcome"] for r in trace if r["type"] == "operation_end" and r["op"] == first] == ["ok"]
    assert [(r["phase"], r["blocking"]) for r in trace if r["type"] == "span" and r["op"] == first][-1] == (
        "commit", False,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "opaque"), [("TorchCheckpointEngine", False), ("FastCheckpointEngine", True)])
def test_only_what_a_commit_of_torchs_engine_does_is_known(
    name: str, opaque: bool, tmp_path: Path, session: Session
) -> None:
    seen: list[bool] = []

    def commit(*_: Any) -> None:
        running = session.running()
        assert running is not None
        seen.append(running.opaque)

    class Engine:
        global_steps = 1
        checkpoint_engine: Any = type(name, (), {"is_decoupled": lambda _: False, "commit": commit})()

        def save_checkpoint(self, save_dir: str, tag: str) -> None:
            self.checkpoint_engine.commit(tag)
            commit()

    wrap(Engine, "save_checkpoint", DeepSpeedHooks(session).save)
    Engine().save_checkpoint("/proc/a", "first")
    assert seen == [opaque, False]


# ---------------------------------------------------------------- in a program


def test_a_process_without_a_hooked_library_imports_next_to_nothing_for_them(tmp_path: Path) -> None:
    """Every Python process of a job installs them."""
    code = """
        import sys
        before = set(sys.modules)
        import restart_trace.hooks
        restart_trace.hooks.install("trace")
        print(*sorted(set(sys.modules) - before - {"__future__", "atexit"}))
    """
    done = python(code, tmp_path, RANK="0", WORLD_SIZE="1")
    assert (done.returncode, done.stderr) == (0, "")
    hooks = [f"restart_trace.hooks{part}" for part in ("", ".imports", ".install", ".variables")]
    assert done.stdout.split() == ["restart_trace", *hooks]
    assert not (tmp_path / "trace").exists()  # it imported no torch: it is no rank of a training


def test_hooks_import_neither_torch_nor_what_only_ranks_need(tmp_path: Path) -> None:
    """Launchers import torch, too. importlib.metadata would be a quarter of what the hooks take."""
    fake_torch(tmp_path)
    code = """
        import sys
        import restart_trace.hooks
        restart_trace.hooks.install("trace")
        import torch
        print(sorted({"deepspeed", "numpy", "importlib.metadata"} & set(sys.modules)))
    """
    done = python(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


FAKE_TORCH = """
    import time
    time.sleep(0.02)
    import serialization_stand_in as serialization
    def save(): pass
    def load(): pass
"""


def fake_torch(directory: Path) -> None:
    (directory / "torch.py").write_text(textwrap.dedent(FAKE_TORCH))
    (directory / "serialization_stand_in.py").write_text("save = load = _open_zipfile_writer = len\n")


def fake_torch_distributed(directory: Path, *, is_initialized: bool) -> None:
    """A torch whose process group has two ranks, numbered by the environment as srun does."""
    fake_torch(directory)
    (directory / "torch").mkdir()
    (directory / "torch.py").rename(directory / "torch" / "__init__.py")
    (directory / "torch" / "distributed.py").write_text(
        "import os\n"
        "def init_process_group(): pass\n"
        f"def is_initialized(): return {is_initialized}\n"
        "new_group = barrier = len\n"
        "def get_rank(): return int(os.environ.get('SLURM_PROCID', 0))\n"
        "def get_world_size(): return 2\n"
    )


def test_a_rank_is_traced_from_its_import_of_torch_and_what_it_starts_is_not(tmp_path: Path) -> None:
    """The imports of the program count, each once; a child that inherits RANK leaves the trace alone."""
    fake_torch(tmp_path)
    code = """
        import os, subprocess, sys
        import restart_trace.hooks
        restart_trace.hooks.install("trace")
        loader = __import__("torch").__spec__.loader
        assert "exec_module" not in vars(loader), "the loader is as it was"
        if len(sys.argv) == 1:
            subprocess.run([sys.executable, __file__, "child"], check=True)
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
    """
    done = python(code, tmp_path, RANK="0", WORLD_SIZE="1")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == [
        "cycle_000.json", "rank_00000_cycle_000.jsonl",
    ]  # fmt: skip
    trace = list(read_records(tmp_path / "trace" / "rank_00000_cycle_000.jsonl"))
    assert trace[0]["instrument"] == "hooks"
    phases = [(r["phase"], r["duration_ns"]) for r in trace if r["type"] == "span"]
    assert [phase for phase, _ in phases] == ["process_start", "process_start", "imports"]  # the hooks' own between
    assert phases[2][1] >= 20_000_000  # what it slept


def test_what_the_hooks_take_within_an_import_is_no_import_of_the_program(tmp_path: Path) -> None:
    """Whether they act before a module is imported, or after one within it."""
    (tmp_path / "outer.py").write_text("import inner\n")
    (tmp_path / "inner.py").write_text("")
    code = """
        import sys, time
        from restart_trace.hooks.imports import ImportWatcher
        told = []
        slow = lambda *_: time.sleep(0.02)
        watcher = ImportWatcher({"inner": [slow, slow]}, {"outer"}, slow, lambda *times: told.append(times))
        sys.meta_path.insert(0, watcher)
        import outer, string
        (start_ns, own_ns, end_ns), *others = told
        assert 60_000_000 <= own_ns <= end_ns - start_ns
        assert all(own_ns == 0 for _, own_ns, _ in others), others
    """
    done = python(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_thread_that_installs_the_hooks_trains_whichever_loads_a_library_first(tmp_path: Path) -> None:
    """importlib.util.LazyLoader executes a module in the thread that first uses it."""
    fake_torch(tmp_path)
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "__init__.py").write_text("")
    (tmp_path / "safetensors" / "torch.py").write_text("loaded = True\n")
    code = """
        import importlib.util, sys, threading
        import restart_trace.hooks
        restart_trace.hooks.install("trace")
        spec = importlib.util.find_spec("safetensors.torch")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        helper = threading.Thread(target=lambda: module.loaded)
        helper.start()
        helper.join()
        import torch
        sys.exit(3)  # which is that of the process only in the thread that trains
    """
    done = python(code, tmp_path, RANK="0", WORLD_SIZE="1")
    assert (done.returncode, done.stderr) == (3, "")
    trace = list(read_records(tmp_path / "trace" / "rank_00000_cycle_000.jsonl"))
    assert trace[-1]["detail"] == "exit status 3", trace[-1]


def test_a_program_with_a_module_named_as_one_of_pythons_is_traced(tmp_path: Path) -> None:
    fake_torch(tmp_path)
    (tmp_path / "uuid.py").write_text("mine = True\n")
    code = """
        import restart_trace.hooks
        restart_trace.hooks.install("trace")
        import torch, uuid
        assert uuid.mine
    """
    done = python(code, tmp_path, RANK="0", WORLD_SIZE="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "trace" / "rank_00000_cycle_000.jsonl").exists()


def test_what_a_rank_forks_before_it_imports_torch_is_none(tmp_path: Path) -> None:
    """As a pool that prepares data does."""
    fake_torch(tmp_path)
    code = """
        import os
        import restart_trace.hooks
        restart_trace.hooks.install("trace")
        pid = os.fork()
        import torch
        if pid:
            os.waitpid(pid, 0)
    """
    assert python(code, tmp_path, RANK="0", WORLD_SIZE="1").returncode == 0
    assert [path.name for path in (tmp_path / "trace").glob("rank_*")] == ["rank_00000_cycle_000.jsonl"]


def test_sys_exit_can_be_pickled_and_a_directory_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    code = f"""
        import inspect, os, pickle, sys
        signature = inspect.signature(sys.exit)
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir("../gone")
        import restart_trace.hooks
        restart_trace.hooks.install({str(tmp_path / "trace")!r})
        assert inspect.signature(sys.exit) == signature
        pickle.loads(pickle.dumps(sys.exit))(3)
    """
    done = python(code, tmp_path)
    assert (done.returncode, done.stderr) == (3, "")


def test_a_launcher_is_no_rank_whatever_its_node_is_numbered(tmp_path: Path) -> None:
    """Kubernetes' operators give RANK and WORLD_SIZE of the nodes to torchrun, which gives each process its own."""
    fake_torch(tmp_path)
    (tmp_path / "torchrun").write_text(
        "import torch, subprocess, sys, os\n"
        "subprocess.run([sys.executable, '-c', 'import torch'], env=os.environ | {'RANK': '3'}, check=True)\n"
    )
    done = trace_command(
        "run", "--trace-dir", "here", "--", sys.executable, "-W", "ignore", "torchrun",
        cwd=tmp_path, RANK="0", WORLD_SIZE="4", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "here").glob("rank_*")] == ["rank_00003_cycle_000.jsonl"]


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python -u -m torch.distributed.run --nnodes 1 train.py", "torch.distributed.run"),
        ("python -X importtime -W ignore /venv/bin/torchrun train.py", "torchrun"),
        ("python -u train.py -m torchrun", "train.py"),
        ("python -c pass", "pass"),  # no launcher's name
        ("python", ""),
    ],
)
def test_the_program_of_a_command_line(command: str, program: str) -> None:
    assert program_of(command.split()) == program


def test_ranks_that_a_launcher_forks_are_traced(tmp_path: Path) -> None:
    """It has imported torch for them, and is no rank itself; what a rank forks is none."""
    fake_torch_distributed(tmp_path, is_initialized=False)
    code = """
        import os, threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: fork in a process with threads
        import restart_trace.hooks
        restart_trace.hooks.install("trace")
        import torch.distributed
        from megatron.net.name_lookups import use_names_from_files
        use_names_from_files()  # a name server may take its time
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "RESTART_TRACE_LAUNCH_ID": "one"}
                torch.distributed.init_process_group()
                [thread.join() for thread in threading.enumerate() if thread.name == "name-lookup"]
                if os.fork() == 0:
                    torch.distributed.init_process_group()
                    os._exit(0)
                os.wait()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
    """
    done = python(code, tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == [
        "cycle_000.json", "rank_00000_cycle_000.jsonl", "rank_00001_cycle_000.jsonl",
    ]  # fmt: skip
    for rank in range(2):
        trace = list(read_records(tmp_path / "trace" / f"rank_0000{rank}_cycle_000.jsonl"))
        spans = {r["phase"]: r for r in trace if r["type"] == "span"}
        assert {"process_start", "rendezvous"} <= spans.keys() and ("name_lookup" in spans) == (rank == 0)
        assert rank or not spans["name_lookup"]["blocking"]


FUNCTIONS = """
    import asyncio
    class Base:
        def save(self): return "saved"
    class Trainer(Base):
        async def save_later(self): pass
"""


def test_functions_that_the_user_names(tmp_path: Path) -> None:
    """An inherited one is hooked; what cannot be hooked, or was never seen, is said."""
    fake_torch(tmp_path)
    (tmp_path / "trainer.py").write_text(textwrap.dedent(FUNCTIONS))
    code = """
        import restart_trace.hooks
        names = ["trainer:Trainer.save", "trainer:Trainer.save_later", "trainer:Trainer.no", "never.imported:save"]
        restart_trace.hooks.install("trace", saves=names)
        import torch, trainer
        print(trainer.Trainer().save())
    """
    done = python(code, tmp_path, RANK="0", WORLD_SIZE="1")
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr
    told = done.stderr.splitlines()
    assert len(told) == 3
    assert "trainer:Trainer.save_later is a generator or a coroutine" in told[0]
    assert "'Trainer' has no attribute 'no'" in told[1]
    assert "never.imported:save was not traced: no module never.imported was imported" in told[2]
    trace = read_records(tmp_path / "trace" / "rank_00000_cycle_000.jsonl")
    assert [r["operation"] for r in trace if r["type"] == "operation_end"] == ["save"]


def test_a_trace_that_cannot_be_written_stops_no_program(tmp_path: Path) -> None:
    fake_torch(tmp_path)
    (tmp_path / "trace").write_text("a file")
    code = """
        import restart_trace.hooks
        restart_trace.hooks.install("trace")
        import torch
        print("done")
    """
    done = python(code, tmp_path, RANK="0", WORLD_SIZE="1")
    assert (done.returncode, done.stdout) == (0, "done\n")
    directory = tmp_path / "trace"
    assert done.stderr == f"restart_trace: this rank is not traced: --trace-dir {directory}: Not a directory\n"


def test_a_rank_that_cannot_write_its_trace_says_so_once(tmp_path: Path) -> None:
    """Although it tries again when it joins a process group."""
    fake_torch_distributed(tmp_path, is_initialized=True)
    (tmp_path / "trace").write_text("a file")
    code = """
        import restart_trace.hooks
        restart_trace.hooks.install("trace")
        import torch.distributed
        torch.distributed.init_process_group()
        print("joined")
    """
    done = python(code, tmp_path, RANK="0", WORLD_SIZE="1")
    assert (done.returncode, done.stdout) == (0, "joined\n")
    assert len(done.stderr.splitlines()) == 1 and "this rank is not traced" in done.stderr


def test_ranks_without_rank_in_their_environment_are_one_launch(tmp_path: Path) -> None:
    """As srun starts them: each is traced, with its start and imports, once it joins the process group."""
    fake_torch_distributed(tmp_path, is_initialized=True)
    code = """
        import restart_trace.hooks
        restart_trace.hooks.install("trace")
        import torch.distributed
        torch.distributed.init_process_group()
    """
    for rank in range(2):
        done = python(code, tmp_path, SLURM_PROCID=str(rank), SLURM_JOB_ID="7", SLURM_STEP_ID="0")
        assert done.returncode == 0 and done.stderr == "", done.stderr
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == [
        "cycle_000.json", "rank_00000_cycle_000.jsonl", "rank_00001_cycle_000.jsonl",
    ]  # fmt: skip
    trace = list(read_records(tmp_path / "trace" / "rank_00001_cycle_000.jsonl"))
    assert "process_start" in {r["phase"] for r in trace if r["type"] == "span"}


# ---------------------------------------------------------------- in front of a command


def trace_command(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from restart_trace.run import main; sys.exit(main())"
    kept = {n: v for n, v in os.environ.items() if not n.startswith("RESTART_")} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env=kept | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 7", 7),
        ("exit 0", 0),
        ("kill -TERM $$", -signal.SIGTERM),
        ("kill -9 $$", -9),
        ("kill -PIPE $$", -signal.SIGPIPE),  # which Python ignores
    ],
)
def test_exit_codes_and_signals_are_the_commands(tmp_path: Path, command: str, code: int) -> None:
    assert trace_command("run", "--", "sh", "-c", command, cwd=tmp_path).returncode == code


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    done = trace_command("run", "--", "no-such-command", cwd=tmp_path)
    assert done.returncode == 127 and "no-such-command: No such file" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_command_that_does_not_start_leaves_the_directories_that_were_there(tmp_path: Path) -> None:
    script, there = tmp_path / "script", tmp_path / "there"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    there.mkdir()
    for place in ("there/a/b", "there"):
        done = trace_command("run", "--trace-dir", place, "--", str(script), cwd=tmp_path)
        assert done.returncode == 127 and not list(there.iterdir()), done.stderr
    (there / "cycle_0.json").touch()
    assert trace_command("run", "--trace-dir", "there", "--", str(tmp_path), cwd=tmp_path).returncode == 126
    assert [path.name for path in there.iterdir()] == ["cycle_0.json"]


def test_a_trace_directory_that_is_made_in_part_is_removed(tmp_path: Path) -> None:
    done = trace_command("run", "--trace-dir", "a/b/" + "c" * 300, "--", "true", cwd=tmp_path)
    assert done.returncode == 2 and "cannot be created: File name too long" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_command_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--trace-dir", "x"])
    assert stopped.value.code == 2 and "no command is given" in capsys.readouterr().err


def test_a_job_without_run_before_it_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["true", "train.py"])
    assert stopped.value.code == 2 and "restart-trace run -- true ..." in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--trace-dir", "x"], ["--trace-dir=x"], ["--save-function", "a:b"]])
def test_options_before_run_are_told_so(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--", "true"])
    option = words[0].partition("=")[0]
    assert stopped.value.code == 2
    assert f"{option} comes after run: restart-trace run {option} ... -- COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["option", "variable"])
def test_a_trace_directory_that_cannot_be_written_starts_no_command(tmp_path: Path, given: str) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "trace")
    words, variables = (["--trace-dir", place], {}) if given == "option" else ([], {"RESTART_TRACE_HOOKS_DIR": place})
    done = trace_command("run", *words, "--", "touch", "started", cwd=tmp_path, **variables)
    assert done.returncode == 2 and not (tmp_path / "started").exists()
    where = "" if given == "option" else " (of RESTART_TRACE_HOOKS_DIR)"
    assert f"--trace-dir {place}{where}: cannot be created: Not a directory; give a directory" in done.stderr


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("", 0, None),
        ("sys.exit()", 0, None),
        ("sys.exit(7)", 7, "exit status 7"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("os._exit(0)", 0, "not recorded"),
    ],
)
def test_a_rank_records_its_end(tmp_path: Path, end: str, status: int, error: str | None) -> None:
    """But for one that is ended: from outside, or without the interpreter's end."""
    fake_torch(tmp_path)
    (tmp_path / "train.py").write_text(f"import os, sys, torch\n{end}\n")
    done = trace_command(
        "run", "--trace-dir", "here", "--", sys.executable, "train.py", cwd=tmp_path, RANK="0", WORLD_SIZE="1"
    )
    assert done.returncode == status
    trace = list(read_records(tmp_path / "here" / "rank_00000_cycle_000.jsonl"))
    ends = [(r["operation"], r.get("detail")) for r in trace if r.get("phase") == "ended"]
    assert ends == ([] if error == "not recorded" else [("process", error)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("pass", 0, None),
        ("raise SystemExit(7)", 7, "exit status 7"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_rank_that_multiprocessing_starts_records_its_end(
    tmp_path: Path, end: str, status: int, error: str | None
) -> None:
    fake_torch(tmp_path)
    (tmp_path / "train.py").write_text(f"""
import multiprocessing, os, sys
def rank():
    os.environ |= {{"RANK": "0", "WORLD_SIZE": "1"}}
    import torch
    {end}
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=rank)
    process.start()
    process.join()
    sys.exit(process.exitcode)
""")
    done = trace_command("run", "--trace-dir", "here", "--", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == status, done.stderr
    trace = list(read_records(tmp_path / "here" / "rank_00000_cycle_000.jsonl"))
    assert [r.get("detail") for r in trace if r.get("phase") == "ended"] == [error]


def test_a_command_without_ranks_leaves_an_empty_directory(tmp_path: Path) -> None:
    """Which the analysis explains."""
    assert trace_command("run", "--trace-dir", "a/b", "--", "true", cwd=tmp_path).returncode == 0
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("export PYTHONPATH=/mine", True),
        ("PYTHONPATH=/mine python train.py", True),
        ("unset PYTHONPATH", True),
        ("export PYTHONPATH=/mine:$PYTHONPATH", False),
        ("export PYTHONPATH=/mine${PYTHONPATH:+:$PYTHONPATH}", False),
        ("# PYTHONPATH=/mine", False),
    ],
)
def test_a_script_that_takes_the_hooks_away_is_told_so(tmp_path: Path, line: str, told: bool) -> None:
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\nexit 3\n{line}\n")
    (tmp_path / "job.sh").chmod(0o755)
    for command in (["sh", "job.sh"], ["./job.sh"]):
        done = trace_command("run", "--", *command, cwd=tmp_path)
        assert done.returncode == 3
        assert (f"{command[-1]}, line 3, takes the hooks out of PYTHONPATH" in done.stderr) is told


def test_a_script_in_a_pipe_is_left_to_its_reader(tmp_path: Path) -> None:
    code = "import sys; from restart_trace.run import main; sys.exit(main())"
    command = f"{sys.executable} -c '{code}' run --trace-dir {tmp_path}/trace -- bash <(echo 'exit 3')"
    environment = {n: v for n, v in os.environ.items() if not n.startswith("RESTART_")} | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(["bash", "-c", command], env=environment, timeout=300).returncode == 3


@pytest.mark.parametrize("name", ["save", "trainer:", "trainer:Trainer.save()", "__main__:save"])
def test_a_function_must_be_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--save-function", name, "--", "true"])
    assert stopped.value.code == 2 and f"--save-function: '{name}'" in capsys.readouterr().err


def test_a_program_of_the_command_is_traced_and_keeps_its_own_sitecustomize(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('own sitecustomize')\n")
    fake_torch(tmp_path)
    program = "import torch, sys, sitecustomize\nprint(sitecustomize.__file__, sys.argv[1:])\n"
    (tmp_path / "train.py").write_text(program)
    done = trace_command(
        "run", "--trace-dir", "here", "--", sys.executable, "train.py", "--flag", "-x",
        cwd=tmp_path, RANK="0", WORLD_SIZE="1", PYTHONPATH=f"{ROOT}{os.pathsep}{own}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["own sitecustomize", f"{own}/sitecustomize.py ['--flag', '-x']"]
    assert (tmp_path / "here" / "rank_00000_cycle_000.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "directory"),
    [
        (["train.py"], "restart-trace"),
        (["--trace-dir", "here", "-m", "train"], "here"),
        (["--trace-dir", "here", "--", "train.py"], "here"),
    ],
)
def test_a_program_is_run_in_the_same_interpreter(tmp_path: Path, words: list[str], directory: str) -> None:
    """As torchrun starts it: python -u -m restart_trace.run train.py."""
    fake_torch(tmp_path)
    (tmp_path / "train.py").write_text("import torch, sys\nprint(__name__, sys.orig_argv[1], sys.argv[1:])\n")
    done = subprocess.run(
        [sys.executable, "-u", "-m", "restart_trace.run", *words, "--steps", "3"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RANK": "1", "WORLD_SIZE": "2"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "__main__ -u ['--steps', '3']\n", done.stderr
    assert (tmp_path / directory / "rank_00001_cycle_000.jsonl").exists()
