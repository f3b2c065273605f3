"""Engine `datastates` through both public interfaces of its library, whose place stand-ins take.

What it does with the real library cannot be seen without a CUDA device; see datastates_stand_ins.py for what these
stand-ins are held to, and test_datastates_format.py for the files.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing.engines.base import CheckpointEngine, EngineOptions, FileState, SavedCheckpoint, SavedFile
from megatron.checkpointing.engines.datastates import engine as datastates_engine
from megatron.checkpointing.engines.datastates import library as datastates_library
from megatron.checkpointing.engines.datastates.engine import ROW_BYTES, row_sum, row_sums
from megatron.checkpointing.engines.errors import CheckpointDamagedError, EngineUnavailableError
from megatron.checkpointing.engines.registry import create_engine
from megatron.config import ConfigError
from megatron.fileio.device_waits import DeviceStalledError
from restart_trace.recorder import Recorder, untraced_operation
from restart_trace.sink import JsonlSink
from tests.dist.storage import small_disk
from tests.unit.megatron.checkpointing.engines.datastates_stand_ins import INSTALL, Behaviour
from tests.unit.megatron.checkpointing.engines.nests import DTYPES, identical, random_tensor
from tests.unit.trace_helpers import PROCESS, read

MAIN, LATER = "datastates.llm.Checkpointing", "datastates.CheckpointEngine"
GIB = 1 << 30
NAMES = ["layer_01-model_00-model_states.pt", "mp_rank_00_model_states.pt"]


@dataclasses.dataclass
class Library:
    """An interface that is there, and how it behaves."""

    api: str
    behaviour: Behaviour

    def engine(self, **options: Any) -> CheckpointEngine:
        return create_engine("datastates", EngineOptions(**{"fsync": False, "host_cache_bytes": GIB // 4} | options))


@pytest.fixture(params=[MAIN, LATER])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    return installed(request.param, monkeypatch)


@pytest.fixture
def main_library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return installed(MAIN, monkeypatch)


def installed(api: str, monkeypatch: pytest.MonkeyPatch) -> Library:
    behaviour = Behaviour()
    INSTALL[api](monkeypatch, behaviour)
    monkeypatch.setattr(datastates_engine, "TIMEOUT_S", 300.0)  # the library's threads may seldom get to run
    monkeypatch.setattr(datastates_engine, "TIMEOUT_S_PER_GIB", 0.0)
    return Library(api, behaviour)


def file_states() -> list[FileState]:
    layer = OrderedDict((f"{i}.weight", random_tensor(torch.bfloat16, 701, 3 + i, seed=i)) for i in range(3))
    common = {
        "odd": random_tensor(torch.bfloat16, 7), "empty": torch.empty(0, 3), 5: torch.tensor(5.0),
        "large": random_tensor(torch.float32, 3 * ROW_BYTES // 8 + 1), "zero": torch.zeros(1000), "none": None,
    }  # fmt: skip
    return [FileState(NAMES[0], layer), FileState(NAMES[1], common)]


def load(engine: CheckpointEngine, directory: Path, saved: list[SavedFile]) -> dict[str, Any]:
    return engine.load(NAMES, SavedCheckpoint(directory, {file.name: file for file in saved}), untraced_operation())


def test_save_and_load(tmp_path: Path, library: Library) -> None:
    engine, files = library.engine(rank=3), file_states()
    engine.check_can_save()
    saved = engine.save(files, tmp_path, untraced_operation())
    assert [file.name for file in saved] == NAMES == sorted(path.name for path in tmp_path.iterdir())
    assert [file.num_bytes for file in saved] == [(tmp_path / name).stat().st_size for name in NAMES]
    assert identical(load(engine, tmp_path, saved), {file.name: file.state for file in files})
    engine.close()


def test_library_is_called_as_it_is_documented(tmp_path: Path, library: Library) -> None:
    engine = library.engine(rank=3)
    assert library.behaviour.calls == []
    pending = engine.begin_save(file_states(), tmp_path, untraced_operation())
    begun = [("init", {"host_cache_size": 0.25}, 3), *[("save", name) for name in NAMES]]
    assert library.behaviour.calls == begun
    copies = ("wait",) if library.api == MAIN else ("wait", False)
    pending.release_state()
    pending.release_state()
    assert library.behaviour.calls == [*begun, copies]
    pending.wait()
    last = [("save", ".datastates_last"), copies] if library.api == MAIN else [("wait", True)]
    assert library.behaviour.calls == [*begun, copies, *last]
    engine.save(file_states(), directory(tmp_path, "next"), untraced_operation())
    engine.close()
    called = [call[0] for call in library.behaviour.calls]
    assert called.count("init") == 1
    assert called.count("shutdown") == (library.api == LATER)


def directory(parent: Path, name: str) -> Path:
    made = parent / name
    made.mkdir()
    return made


def test_options_of_the_later_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a --deepspeed_config stanza reach it; branch main would drop them, and is refused."""
    options = (("engine_type", "simple_engine"), ("profile_engine", True))
    later = installed(LATER, monkeypatch)
    engine = later.engine(library=options)
    engine.check_can_save()
    engine.save(file_states(), tmp_path, untraced_operation())
    assert later.behaviour.calls[0] == ("init", {"host_cache_size": 0.25, **dict(options)}, 0)
    monkeypatch.undo()
    main = installed(MAIN, monkeypatch)
    with pytest.raises(EngineUnavailableError, match="datastates_ckpt.engine_type is of the branch of DataStates that"):
        main.engine(library=options).check_can_save()


AGGREGATED = (("engine_type", "state_aggregated_engine"),)


def test_one_file_for_all_states_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = installed(LATER, monkeypatch)
    engine, files = later.engine(rank=3, library=AGGREGATED), file_states()
    name = "rank-3-aggregated-datastates.ckpt"
    for step in ("first", "second"):
        saved = engine.save(files, directory(tmp_path, step), untraced_operation())
        assert [(file.name, file.states) for file in saved] == [(name, tuple(NAMES))]
        assert [path.name for path in (tmp_path / step).iterdir()] == [name]
        assert identical(load(engine, tmp_path / step, saved), {file.name: file.state for file in files})
    assert [call for call in later.behaviour.calls if call[0] in ("save", "commit")] == [
        ("save", name), ("commit", "first"), ("save", name), ("commit", "second"),
    ]  # fmt: skip
    monkeypatch.undo()
    reader = create_engine("datastates", EngineOptions())  # neither library nor device, nor the option
    assert identical(load(reader, tmp_path / "first", saved), {file.name: file.state for file in files})


def test_an_aggregated_file_that_is_altered_or_lacks_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = installed(LATER, monkeypatch)
    engine = later.engine(library=AGGREGATED)
    (saved,) = engine.save(file_states(), tmp_path, untraced_operation())
    path = tmp_path / saved.name
    content = path.read_bytes()
    path.write_bytes(content[:5000] + bytes([content[5000] ^ 4]) + content[5001:])
    with pytest.raises(CheckpointDamagedError, match=f"{saved.name}.*does not have the checksum"):
        load(engine, tmp_path, [saved])
    path.write_bytes(content)
    foreign = dataclasses.replace(saved, states=(*saved.states, "layer_99.pt"))
    with pytest.raises(CheckpointDamagedError, match=f"{saved.name}: does not hold layer_99.pt"):
        engine.load(["layer_99.pt"], SavedCheckpoint(tmp_path, {foreign.name: foreign}), untraced_operation())
    later.behaviour.cut = {saved.name: 5000}
    with monkeypatch.context() as patience, pytest.raises(CheckpointDamagedError, match="bytes are missing|no header"):
        pending = later.engine(library=AGGREGATED).begin_save(
            file_states(), directory(tmp_path, "cut"), untraced_operation()
        )
        pending.release_state()
        later.behaviour.settle()
        patience.setattr(datastates_engine, "TIMEOUT_S", 0.0)
        pending.wait()


def test_what_the_later_library_keeps_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = installed(LATER, monkeypatch).engine()
    engine.save(file_states(), tmp_path, untraced_operation())
    assert engine._library._library.sm == {}  # type: ignore[attr-defined]


def test_state_may_change_once_it_is_released(tmp_path: Path, library: Library) -> None:
    """Although the library reads tensors of the host as late as it comes to them."""
    library.behaviour.delay_s = 0.05
    engine, files = library.engine(), file_states()
    expected = {file.name: dict(file.state) for file in file_states()}
    files[1].state["list"] = expected[NAMES[1]]["list"] = [1, 2]
    expected[NAMES[1]]["list"] = [1, 2]
    pending = engine.begin_save(files, tmp_path, untraced_operation())
    files[1].state["list"].append(3)
    pending.release_state()
    for file in files:
        for value in file.state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        file.state.clear()
    saved = pending.wait()
    states = load(engine, tmp_path, saved)
    assert identical(dict(states[NAMES[0]]), expected[NAMES[0]])
    assert identical(states[NAMES[1]], expected[NAMES[1]])


def test_wait_of_the_library_that_returns_too_early(tmp_path: Path, library: Library) -> None:
    library.behaviour.delay_s = 0.04
    engine, files = library.engine(), file_states()
    begun = time.monotonic()
    saved = engine.save(files, tmp_path, untraced_operation())
    assert time.monotonic() - begun > 0.08
    assert identical(load(engine, tmp_path, saved), {file.name: file.state for file in files})


def test_wait_on_another_thread(tmp_path: Path, library: Library) -> None:
    engine, files, saved = library.engine(), file_states(), []
    pending = engine.begin_save(files, tmp_path, untraced_operation())
    thread = threading.Thread(target=lambda: saved.extend(pending.wait()))
    thread.start()
    pending.release_state()
    thread.join(300)
    assert [file.name for file in saved] == NAMES


def failure(library: Library, at: Path, *, told: bool = True) -> str:
    """The message of a save. Where only time tells that nothing more will come, it is over once nothing will.

    `told`: the library of branch main gets as far as its last file, by which the engine knows the end.
    """
    with pytest.MonkeyPatch.context() as patience, pytest.raises((CheckpointDamagedError, OSError)) as caught:
        pending = library.engine().begin_save(file_states(), at, untraced_operation())
        pending.release_state()
        library.behaviour.settle()
        if library.api == LATER or not told:
            patience.setattr(datastates_engine, "TIMEOUT_S", 0.0)
        pending.wait()
    return str(caught.value)


def test_lost_file(tmp_path: Path, library: Library) -> None:
    """Its thread ended in sys.exit, which nobody sees; or nothing happened at all."""
    library.behaviour.lost = (NAMES[1],)
    found = failure(library, tmp_path)
    if library.api == MAIN:
        assert found.startswith("DataStates lost 1 of 2 files in its thread (sys.exit(-1))")
    else:
        assert found.startswith(f"{tmp_path / NAMES[1]}: 0 bytes, too few for a DataStates file")
        assert "given up after 0 s" in found


def test_short_file(tmp_path: Path, library: Library) -> None:
    library.behaviour.cut = {NAMES[0]: 5000}
    found = failure(library, tmp_path)
    assert found.startswith(str(tmp_path / NAMES[0]))
    if library.api == MAIN:
        assert "5000 bytes are missing; DataStates says that all is written" in found
    else:
        assert "bytes are missing" in found or "has no header" in found


def test_thread_that_dies(tmp_path: Path, main_library: Library) -> None:
    """The file has its full length, and a tensor in it was never written."""
    main_library.behaviour.dies_at = 5
    found = failure(main_library, tmp_path, told=False)
    assert "is not what was saved, from byte" in found and NAMES[1] in found and "given up after" in found


def test_copies_that_do_not_end_fail_the_save_within_its_deadline(library: Library, tmp_path: Path) -> None:
    library.behaviour.device = threading.Event()
    pending = library.engine(device_timeout_s=0.1, rank=2).begin_save(file_states(), tmp_path, untraced_operation())
    pending.release_state()
    with pytest.raises(DeviceStalledError, match=f"rank 2, phase device_to_host: the copies for {NAMES[0]}"):
        pending.wait()
    library.behaviour.device.set()


@pytest.mark.parametrize("method", ["save", "wait"])
def test_library_that_exits_the_process(tmp_path: Path, library: Library, method: str) -> None:
    """It calls sys.exit(-1) on the thread of its caller, here training's."""
    library.behaviour.exits = (method,)
    assert "DataStates failed while" in failure(library, tmp_path)


def test_files_are_not_cut_off_by_their_own_header(
    tmp_path: Path, main_library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library truncates the file after its thread has begun to write; left to itself, it loses tensors so."""
    main_library.behaviour.header_last = True
    engine, files = main_library.engine(), file_states()
    saved = engine.save(files, tmp_path, untraced_operation())
    assert identical(load(engine, tmp_path, saved), {file.name: file.state for file in files})
    monkeypatch.setattr(datastates_library, "_open_in_place", open)
    assert "bytes are missing" in failure(main_library, directory(tmp_path, "left_to_itself"), told=False)


def test_flipped_bit(tmp_path: Path, library: Library) -> None:
    engine = library.engine()
    saved = engine.save(file_states(), tmp_path, untraced_operation())
    assert all(file.checksum.startswith("crc32:") for file in saved)
    path = tmp_path / NAMES[0]
    content = path.read_bytes()
    for position in (len(content) // 2, 8, len(content) - 1):
        path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        with pytest.raises(CheckpointDamagedError, match=NAMES[0]):
            load(engine, tmp_path, saved)
    path.write_bytes(content[:5000] + bytes([content[5000] ^ 4]) + content[5001:])
    with pytest.raises(CheckpointDamagedError, match="does not have the checksum"):
        load(engine, tmp_path, saved)
    load(library.engine(verify_checksums=False), tmp_path, saved)  # a tensor with another bit in it


def test_without_checksum(tmp_path: Path, library: Library) -> None:
    engine = library.engine(checksum=False)
    saved = engine.save(file_states(), tmp_path, untraced_operation())
    assert {file.checksum for file in saved} == {"none"}
    load(engine, tmp_path, saved)
    foreign = [dataclasses.replace(file, checksum="sha256:00") for file in saved]
    with pytest.raises(CheckpointDamagedError, match="'sha256:00' is not one of this engine's"):
        load(engine, tmp_path, foreign)


def test_loading_needs_neither_library_nor_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        saved = installed(MAIN, patch).engine().save(file_states(), tmp_path, untraced_operation())
    assert "datastates" not in sys.modules and not torch.cuda.is_available()
    states = load(create_engine("datastates", EngineOptions()), tmp_path, saved)
    assert identical(states, {file.name: file.state for file in file_states()})


def test_what_is_recorded(tmp_path: Path, library: Library) -> None:
    library.behaviour.delay_s = 0.02
    log = tmp_path / "log.jsonl"
    recorder = Recorder(JsonlSink(log), PROCESS)
    at = directory(tmp_path, "at")
    with recorder.operation("save") as op:
        saved = library.engine(fsync=True).save(file_states(), at, op)
        assert (op.num_files, op.durable, op.bytes) == (2, True, sum(file.num_bytes for file in saved))
    with recorder.operation("load") as op:
        load(library.engine(), at, saved)
        library.engine().load(NAMES, SavedCheckpoint(at, {file.name: file for file in saved}), op)
    spans = [record for record in read(log) if record["type"] == "span"]
    recorder.close()
    training = [(s["phase"], s.get("file")) for s in spans if s["operation"] == "save" and s["blocking"]]
    assert set(training) == {("device_to_host", None), ("verify", None), *[("serialize", name) for name in NAMES]}
    read_back = [s for s in spans if s["phase"] == "verify" and s.get("file")]
    assert {s["file"] for s in read_back} == set(NAMES) and not any(s["blocking"] for s in read_back)
    synced = [s["file"] for s in spans if s.get("detail") == "fsync"]
    assert synced == NAMES
    waited = [s for s in spans if s.get("detail") == "write"]
    assert waited and not any(s["blocking"] for s in waited)
    assert {s["detail"] for s in spans if s["operation"] == "load"} == {"read", "verify", "deserialize"}
    read_bytes = sum(s.get("bytes", 0) for s in spans if s.get("detail") == "read")
    assert 0.9 < read_bytes / sum(file.num_bytes for file in saved) <= 1.0 or library.api == LATER


def test_bare_as_its_authors_run_it(tmp_path: Path, library: Library) -> None:
    """No sums, no reading back, no checksum; files are complete when the save ends, however late they are written."""
    library.behaviour.delay_s = 0.02
    log = tmp_path / "log.jsonl"
    recorder = Recorder(JsonlSink(log), PROCESS)
    at = directory(tmp_path, "at")
    with recorder.operation("save") as op:
        saved = library.engine(verify_saved=False, checksum=False).save(file_states(), at, op)
    recorder.close()
    assert not [record for record in read(log) if record.get("phase") == "verify"]
    assert {file.checksum for file in saved} == {"none"}
    assert [file.num_bytes for file in saved] == [(at / file.name).stat().st_size for file in saved]
    load(library.engine(verify_checksums=False), at, saved)


def test_a_checksum_without_sums(tmp_path: Path, library: Library) -> None:
    saved = library.engine(verify_saved=False).save(file_states(), tmp_path, untraced_operation())
    assert all(file.checksum.startswith("crc32:") for file in saved)
    load(library.engine(), tmp_path, saved)


def test_nothing_is_synchronised_without_being_asked(tmp_path: Path, library: Library) -> None:
    log = tmp_path / "log.jsonl"
    recorder = Recorder(JsonlSink(log), PROCESS)
    with recorder.operation("save") as op:
        library.engine(fsync=False).save(file_states(), directory(tmp_path, "at"), op)
        assert op.durable is False
    recorder.close()
    assert not [record for record in read(log) if record.get("detail") == "fsync"]


def test_tensor_larger_than_the_host_cache(tmp_path: Path, library: Library) -> None:
    state = {"optimizer": {"groups": [torch.zeros(1), torch.zeros(3 << 18)]}}
    with pytest.raises(ConfigError) as caught:
        library.engine(host_cache_bytes=1 << 21).save([FileState(NAMES[0], state)], tmp_path, untraced_operation())
    assert str(caught.value) == (
        f"--host-cache-size 0.00195312 (GiB): smaller than optimizer.groups.1 of {NAMES[0]}, [786432] torch.float32 = "
        "3145728 bytes; give at least --host-cache-size 0.003"
    )
    assert library.behaviour.calls == [] and list(tmp_path.iterdir()) == []


def test_default_host_cache_holds_the_save(tmp_path: Path, library: Library) -> None:
    library.engine(host_cache_bytes=None).save(file_states(), tmp_path, untraced_operation())
    (_, config, _), *_ = library.behaviour.calls
    size = sum((tmp_path / name).stat().st_size for name in NAMES)
    assert size <= config["host_cache_size"] * GIB <= size + (4 << 20)


def test_full_storage_is_found_before_the_library_dies_of_it(tmp_path: Path, library: Library) -> None:
    at = tmp_path / "disk"
    with small_disk(at, 1 << 20) as mounted:
        if not mounted:
            pytest.skip("no disk of our own can be mounted here: run as root, with CAP_SYS_ADMIN")
        with pytest.raises(OSError, match="No space left|do not fit"):
            library.engine().save(file_states(), at, untraced_operation())
        assert list(at.iterdir()) == []


def test_file_that_is_there_already(tmp_path: Path, library: Library) -> None:
    (tmp_path / NAMES[0]).write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=NAMES[0]):
        library.engine().save(file_states(), tmp_path, untraced_operation())
    assert (tmp_path / NAMES[0]).read_bytes() == b"precious"


def test_package_is_missing() -> None:
    engine = create_engine("datastates", EngineOptions())
    with pytest.raises(EngineUnavailableError) as caught:
        engine.check_can_save()
    assert str(caught.value).startswith(
        "--checkpoint-engine datastates: package datastates is not installed; it is not on"
    )
    assert "https://github.com/DataStates/datastates-llm" in str(caught.value)


def test_device_is_missing(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineUnavailableError, match="no CUDA device here"):
        library.engine().check_can_save()


def test_package_of_neither_interface(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datastates", "datastates.llm"):
        if name in sys.modules:
            for attribute in ("CheckpointEngine", "Checkpointing"):
                monkeypatch.delattr(sys.modules[name], attribute, raising=False)
    with pytest.raises(
        EngineUnavailableError, match=r"cannot be used \(datastates.CheckpointEngine: .*Checkpointing: "
    ):
        library.engine().check_can_save()


def test_library_that_does_not_start(tmp_path: Path, library: Library) -> None:
    library.behaviour.exits = ("init",)
    with pytest.raises(EngineUnavailableError, match=r"sys.exit\(-1\).*is --host-cache-size 0.25 \(GiB\) more than"):
        library.engine().save(file_states(), tmp_path, untraced_operation())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_on_the_device_are_those_of_the_file(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, ROW_BYTES // dtype.itemsize + 3)
    data = tensor.view(torch.uint8).numpy().tobytes()
    rows = [data[start : start + ROW_BYTES] for start in range(0, len(data), ROW_BYTES)]
    assert row_sums(tensor).tolist() == [row_sum(memoryview(row), dtype) for row in rows]
