"""The replay end to end: real engines, real processes, files of some MiB on a real directory.

Its command runs within this process, and the process of its ranks is forked (tests/dist/forked_writers.py); in
`test_nothing_is_left_after_a_termination` both are interpreters, as users start them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.fileio.objects.bucket import open_bucket
from megatron.fileio.objects.s3 import Bucket
from tests.dist.forked_writers import forked_replays
from tests.dist.harness import ROOT, Zygote, records, wait_for
from tests.object_storage import BUCKET, FaultProxy, environment_of, serving
from tools.ckpt_analysis.cli import main as analysis
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.report import analyse
from tools.ckpt_replay.cli import main as run_replay
from tools.ckpt_replay.plan import STORAGE_KINDS
from tools.common.machine import filesystem_of

MIB = 1 << 20
WITHOUT_DATASTATES = ["--engine datastates"] if importlib.util.find_spec("datastates") is None else []
OPTIONS = ["--steps-between", "0", "--no-cold"]
COMMAND = [sys.executable, "-m", "tools.ckpt_replay", *OPTIONS]
SMALL = ["--small-tensors", "16", "--small-tensor-bytes", "64KiB"]
MEASURES = ("blocked_s", "durable_s", "load_warm_s", "load_warm_again_s", "peak_rss_bytes")
PLUGINS = '''
import io, threading, time
import torch
from megatron.checkpointing.engines.base import CheckpointEngine, PendingSave, SavedFile

class Faulty(CheckpointEngine):
    """Cannot write on the second rank."""
    name = "faulty"

    def save(self, files, directory, op):
        if self.options.rank == 1:
            raise OSError(28, "No space left on device", str(directory))
        return []

def content_of(file):
    buffer = io.BytesIO()
    torch.save(file.state, buffer)
    return buffer.getvalue()

class TornSave(PendingSave):
    def __init__(self, files, directory):
        self.files, self.directory, self.released = files, directory, threading.Event()
        self.before = [content_of(file) for file in files]

    def release_state(self):
        self.released.set()

    def wait(self):  # reads the state when it is no longer its own
        self.released.wait()
        while self.before == [content_of(file) for file in self.files]:
            time.sleep(0.01)
        found = []
        for file in self.files:
            torch.save(file.state, self.directory / file.name)
            found.append(SavedFile(file.name, (self.directory / file.name).stat().st_size, "none"))
        return found

class Flaky(CheckpointEngine):
    """Saves only what readers load, and the last of two readers cannot."""
    name = "flaky"

    def _save_file(self, file, directory, op):
        if "_earlier" not in str(directory):
            raise OSError(28, "No space left on device", str(directory))
        torch.save(file.state, directory / file.name)
        return SavedFile(file.name, (directory / file.name).stat().st_size, "none")

    def _load_file(self, path, expected, op):
        mine = path.with_name("loaded_before")
        if mine.exists():
            raise OSError(5, "Input/output error", str(path))
        mine.touch()
        return torch.load(path, weights_only=False)

class Patchy(CheckpointEngine):
    """Cannot save to the first of several directories."""
    name = "patchy"

    def _save_file(self, file, directory, op):
        if "save_0" in str(directory):
            raise OSError(28, "No space left on device", str(directory))
        torch.save(file.state, directory / file.name)
        return SavedFile(file.name, (directory / file.name).stat().st_size, "none")

    def _load_file(self, path, expected, op):
        return torch.load(path, weights_only=False)

class Torn(CheckpointEngine):
    """Writes what the next step left."""
    name = "torn"
    asynchronous = True

    def begin_save(self, files, directory, op):
        return TornSave(files, directory)

    def _load_file(self, path, expected, op):
        return torch.load(path, weights_only=False)
'''


@dataclass(frozen=True)
class Replay:
    """Runs the command for one test. Called: the exit code; then what it printed on stdout and on stderr."""

    _capture: pytest.CaptureFixture[str]

    def __call__(self, argv: list[str]) -> tuple[int, str, str]:
        self._capture.readouterr()
        open_bucket.cache_clear()  # each test has a server of its own
        code, printed = run_replay(argv), self._capture.readouterr()
        return code, printed.out, printed.err

    def figures(self, argv: list[str], directory: Path) -> dict[str, Any]:
        code, told, errors = self([*OPTIONS, *argv, "--format", "json", "--dir", str(directory)])
        assert code == 0, errors
        return json.loads(told)

    def stored(self, argv: list[str]) -> dict[str, Any]:
        """The report of a replay in object storage, which leaves nothing there."""
        with serving() as server:
            return self.stored_at(server.environment(), argv)

    def stored_at(self, store: dict[str, str], argv: list[str]) -> dict[str, Any]:
        """As `stored`, where the environment `store` leads to."""
        with environment_of(store):
            code, told, errors = self([*argv, "--format", "json"])
            assert code == 0, errors
            assert list(Bucket(BUCKET).list("")) == [], "something was left"
        return json.loads(told)


@pytest.fixture
def replay(zygote: Zygote, own_environment: None, capsys: pytest.CaptureFixture[str]) -> Iterator[Replay]:
    with forked_replays(zygote.forks):
        yield Replay(capsys)


@pytest.fixture
def with_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here and in what is started, the engines of PLUGINS are installed."""
    site = tmp_path / "site"
    (site / "plugins-1.dist-info").mkdir(parents=True)
    (site / "plugin_engines.py").write_text(PLUGINS)
    (site / "plugins-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1\n")
    (site / "plugins-1.dist-info" / "entry_points.txt").write_text(
        "[megatron.checkpoint_engines]\nfaulty = plugin_engines:Faulty\ntorn = plugin_engines:Torn\n"
        "flaky = plugin_engines:Flaky\npatchy = plugin_engines:Patchy\n"
    )
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))


def test_two_ranks_of_70b_with_two_engines(tmp_path: Path, replay: Replay, capsys: pytest.CaptureFixture[str]) -> None:
    target, trace = tmp_path / "target", tmp_path / "trace"
    repeats = 1  # of more: test_engines_that_fail_are_named_and_the_others_are_measured
    found = replay.figures(
        [
            "--model", "70b", "--tp", "8", "--pp", "8", "--ranks", "0-1", "--engine", "torch,lazy",
            "--repeat", str(repeats), "--cold", "--limit-bytes", "8MiB", "--steps-between", "0.2",
            "--step-seconds", "0.1", "--storage-bytes", "1MiB", "--trace-dir", str(trace),
            "--output", str(tmp_path / "out.json"),
        ],
        target,
    )  # fmt: skip
    assert found == json.loads((tmp_path / "out.json").read_text())
    assert analysis(["compare", str(tmp_path / "out.json"), "--fail-if", "durable_s>99999"]) == 0
    assert found["ranks"] == [0, 1] and " (one value each). Load of the machine before: " in found["verdict"]
    assert found["bytes_per_rank"] == pytest.approx(8 * MIB, rel=0.25)
    assert found["limited"]["full_bytes_per_rank"] > 15e9
    cold = filesystem_of(tmp_path) != "tmpfs"
    for name, engine in found["engines"].items():
        for measure in MEASURES:
            assert len(engine[measure]["samples"]) == repeats, (name, measure)
        assert (engine["load_cold_s"] is not None) == cold
        assert engine["durable_s"]["median"] > 0
        assert engine["verified"]
        assert engine["failed"] is None
    assert found["engines"]["torch"]["engine_used"] == "TorchEngine"
    assert found["engines"]["lazy"]["asynchronous"]
    for kind in STORAGE_KINDS:
        key = f"{kind}_gbps"
        assert found["storage"][key] is None or found["storage"][key] > 0
    assert found["storage"]["write_buffered_fsync_gbps"] > 0
    assert not list(target.iterdir()), "something was left"
    capsys.readouterr()
    assert analysis([str(trace), "--format", "json"]) == 0
    _check_trace(trace, json.loads(capsys.readouterr().out), repeats)


def test_saves_in_memory_are_loaded_from_a_slot_and_from_a_copy(tmp_path: Path, replay: Replay) -> None:
    target, trace = tmp_path / "target", tmp_path / "trace"
    flags = ["--ranks", "0-1", "--repeat", "2", "--no-storage", "--trace-dir", str(trace)]
    found = replay.figures([*SMALL, *flags, "--engine", "memory,memory-peer"], target)
    for name, engine in found["engines"].items():
        assert (engine["engine_used"], engine["verified"], engine["failed"]) == ("MemoryEngine", True, None), name
        assert [len(engine[measure]["samples"]) for measure in ("in_memory_s", "load_warm_s")] == [2, 2]
        assert engine["durable_s"] is engine["load_cold_s"] is None, "nothing of it is on storage"
    loads = [r for cycle in range(8) for r in records(trace, cycle, 1) if r["type"] == "operation_end"]
    tiers = [r["tier"] for r in loads if r["operation"] == "load"]
    assert sorted(tiers) == ["local_memory"] * 4 + ["peer"] * 4
    assert not list(target.iterdir()), "something was left"


@pytest.mark.parametrize(
    ("flags", "files"),
    [pytest.param([], 1, marks=pytest.mark.nightly(minutes=1)), (["--checkpoint-files-per-node", "3"], 3)],
    ids=str,
)
def test_files_that_ranks_share_beside_files_of_each_rank(
    tmp_path: Path, replay: Replay, flags: list[str], files: int
) -> None:
    target = tmp_path / "target"
    argv = [*SMALL, "--ranks", "0-3", "--repeat", "1", "--no-storage", "--engine", "lazy,lazy-shared", "--keep", *flags]
    found = replay.figures(argv, target)["engines"]
    for name, engine in found.items():
        assert (engine["engine_used"], engine["verified"], engine["failed"]) == ("LazyEngine", True, None), name
    written = {name: len(list(target.glob(f"*/{name}/global_step*/*.safetensors"))) for name in found}
    assert written == {"lazy": 4, "lazy-shared": files}


def test_compressed_files_beside_others(tmp_path: Path, replay: Replay) -> None:
    """Of the same state, which is like that of a trained model."""
    argv = [*SMALL, "--ranks", "0-1", "--repeat", "1", "--no-storage", "--engine", "lazy,lazy-zstd", "--keep"]
    found = replay.figures(argv, tmp_path / "target")["engines"]
    for name, engine in found.items():
        assert (engine["engine_used"], engine["verified"], engine["failed"]) == ("LazyEngine", True, None), name
    written = {
        name: sum(path.stat().st_size for path in (tmp_path / "target").glob(f"*/{name}/global_step*/rank_*"))
        for name in found
    }
    assert 0.5 * written["lazy"] < written["lazy-zstd"] < 0.9 * written["lazy"]


LIBRARIES = {
    "torch_checkpointing": "TorchCheckpointing", "dcp-collective": "CollectiveDcp", "dcp-safetensors": "SafetensorsDcp",
}  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("torch_checkpointing") is None, reason="package is not installed")
@pytest.mark.parametrize(
    "library",
    [
        # The suite has its saves and loads beside readers, below.
        pytest.param(name, marks=pytest.mark.nightly(minutes=1) if name == "dcp-collective" else ())
        for name in LIBRARIES
    ],
)
@pytest.mark.parametrize(
    ("durability", "options"),
    [
        ("fsync", ["--dp", "2", "--ranks", "0-1"]),
        # The suite asks the engines for saves without fsync, in tests/conformance.
        pytest.param("none", ["--dp", "1", "--no-cold"], marks=pytest.mark.nightly(minutes=1)),
    ],
)
def test_libraries_that_save_in_the_background(
    tmp_path: Path, replay: Replay, durability: str, options: list[str], library: str
) -> None:
    """What they load is what was saved; a save counts to the end of an fsync."""
    argv = [
        "--model", "tiny", "--tp", "1", "--pp", "1", *options, "--engine", library,
        "--repeat", "1", "--steps-between", "1", "--step-work", "idle", "--no-storage", "--format", "json",
        "--checkpoint-durability", durability, "--trace-dir", str(tmp_path / "trace"), "--dir", str(tmp_path / "out"),
    ]  # fmt: skip
    (tmp_path / "out").mkdir()
    code, told, errors = replay(argv)
    assert code == 0, errors
    assert not list((tmp_path / "out").iterdir()), "something was left"
    found = json.loads(told)["engines"][library]
    assert found["verified"] and found["asynchronous"] and found["engine_used"] == LIBRARIES[library]
    assert found["blocked_s"]["median"] < found["durable_s"]["median"]
    assert (found["load_cold_s"] is None) == ("--no-cold" in options) and found["load_warm_s"]
    spans = [record for record in records(tmp_path / "trace") if record["type"] == "span"]
    flushes = {span.get("detail") for span in spans if span["phase"] == "flush"}
    assert flushes == ({"write", "fsync"} if durability == "fsync" else {"write"})
    assert {span["bytes"] for span in spans if span.get("detail") == "write"} == set(found["written_bytes"])
    assert all(span["start_ns"] <= span["end_ns"] for span in spans)
    saves = analyse(load_trace(tmp_path / "trace")).report.saves
    assert {save.durable for save in saves} == {durability == "fsync"}
    assert {save.durable_s is not None for save in saves} == {durability == "fsync"}
    # The steps that are simulated meanwhile, on the main thread, are no part of the save.
    assert {span.get("thread") for span in spans if span.get("blocking") is False} == {"commit"}


needs_connector = pytest.mark.skipif(
    importlib.util.find_spec("s3torchconnector") is None, reason="s3torchconnector is not installed"
)


@needs_connector
def test_object_storage_beside_the_s3_connector(tmp_path: Path, replay: Replay) -> None:
    """Each rank an equal part; what every engine, ours and the connector, loads is what was saved."""
    argv = [
        "--model", "tiny", "--sharding", "full", "--dp", "4", "--ranks", "0-1", "--engine", "lazy,dcp,s3torchconnector",
        "--repeat", "1", "--steps-between", "0", "--storage-cache", str(tmp_path / "node"),
        "--trace-dir", str(tmp_path / "trace"), "--dir", f"s3://{BUCKET}/replay",
    ]  # fmt: skip
    found = replay.stored(argv)
    assert found["sharding"] == "full" and len(set(found["bytes_of_ranks"])) == 1
    for name, engine in found["engines"].items():
        assert engine["verified"], name
        assert engine["load_cold_s"] is not None and engine["load_warm_s"] is None
        for operation in engine["operations"].values():
            assert operation["throughput_MiBps"]["median"] > 0 and operation["processing_s"]["median"] > 0
            assert operation["coordination_s"]["median"] < operation["duration_s"]["median"]
            counted = name != "s3torchconnector"
            assert (operation["requests"] is not None) == counted
            assert operation["success_ratio"] == (1 if counted else None)
    # A file and a manifest for each of two ranks: what ckpt-plan says, the listings and the look at `latest`.
    assert found["engines"]["lazy"]["operations"]["save"]["requests"] >= 4
    spans = [record for record in records(tmp_path / "trace") if record["type"] == "span"]
    assert {"upload", "download"} <= {span.get("detail") for span in spans}
    for save in analyse(load_trace(tmp_path / "trace")).report.saves:
        assert save.durable and save.durable_s, save.engine
    assert not list((tmp_path / "node").glob("*")), "something was left"


@needs_connector
def test_what_several_processes_hold_is_saved_once_and_loaded_by_each(tmp_path: Path, replay: Replay) -> None:
    """As by FSDP's hybrid sharding, two groups of two ranks: DCP has all four write, ours two."""
    argv = [
        "--model", "tiny", "--sharding", "full", "--dp", "2", "--ranks", "0-1", "--copies", "2", "--repeat", "1",
        "--engine", "lazy,s3torchconnector", "--steps-between", "0", "--storage-cache", str(tmp_path / "node"),
        "--trace-dir", str(tmp_path / "trace"), "--dir", f"s3://{BUCKET}/copies",
    ]  # fmt: skip
    found = replay.stored(argv)
    assert found["ranks"] == [0, 1, 0, 1] and len(set(found["bytes_of_ranks"])) == 1
    once = 2 * found["bytes_per_rank"]
    for name, engine in found["engines"].items():
        assert engine["verified"], name
        written = engine["written_bytes"]
        assert once <= sum(written) < 1.1 * once, name
        of_copies = sum(written[2:])  # lazy: headers alone
        assert of_copies > once / 4 if name == "s3torchconnector" else of_copies < once / 100, (name, written)
        for operation, num_bytes in (("save", once), ("load", 2 * once)):
            figures = engine["operations"][operation]
            (throughput,), (took,) = figures["throughput_MiBps"]["samples"], figures["duration_s"]["samples"]
            assert throughput * took * 2**20 == pytest.approx(num_bytes)
    places = {(r["rank"], r["dp"], r["layout"]["dp"]) for r in records(tmp_path / "trace") if r["type"] == "process"}
    assert places == {(rank, rank, 4) for rank in range(4)}


@needs_connector
def test_the_connectors_client_takes_parts_and_a_throughput_target(replay: Replay) -> None:
    """A tensor of 12 MiB goes to the store in three parts of at most 5 MiB; without the flag in two."""
    argv = [
        "--small-tensors", "1", "--small-tensor-bytes", "12MiB", "--engine", "s3torchconnector", "--repeat", "1",
        "--warmup-saves", "0", "--steps-between", "0", "--no-verdict", "--dir", f"s3://{BUCKET}/parts",
    ]  # fmt: skip
    asked = ["--io-block-size", "5", "--throughput-target-gbps", "300", "--io-threads", "2"]
    for flags, client, parts in (
        ([], {"threads": 8, "part_bytes": 8 * MIB, "throughput_target_gbps": 10.0}, {"1", "2"}),
        (asked, {"threads": 2, "part_bytes": 5 * MIB, "throughput_target_gbps": 300.0}, {"1", "2", "3"}),
    ):
        with serving() as server, FaultProxy(server).running() as proxy:
            found = replay.stored_at(proxy.environment(), [*argv, *flags])
        assert found["engines"]["s3torchconnector"]["client"] == client
        assert found["options"]["throughput_target_gbps"] == (300 if flags else None)
        assert found["engines"]["s3torchconnector"]["verified"]
        numbers = [re.search(r"[?&]partNumber=(\d+)", request.path) for request in proxy.seen]
        assert {number[1] for number in numbers if number is not None} == parts


def _check_trace(trace: Path, report: dict[str, Any], repeats: int) -> None:
    """The records are those of training, and the analysis takes them as such."""
    found = records(trace)
    processes = [record for record in found if record["type"] == "process"]
    assert {record["engine_asked"] for record in processes} == {"torch", "lazy"}
    assert {(record["rank"], record["tp"], record["pp"]) for record in processes} == {(0, 0, 0), (1, 1, 0)}
    assert all(record["layout"] == {"tp": 8, "pp": 8, "dp": 1} for record in processes)
    assert [problem for problem in report["problems"] if problem["severity"] == "error"] == []
    saves, loads = report["saves"], report["loads"]
    assert len(saves) == 2 * 2 * repeats  # a save that is not counted before each that is
    assert {save["engine"] for save in saves} == {"TorchEngine", "LazyEngine"}
    assert all(save["outcome"] == "ok" and save["ranks"] == 2 and save["durable_s"] > 0 for save in saves)
    assert len(loads) == 2 * 3 * repeats  # cold, warm, warm again
    assert all(load["outcome"] == "ok" for load in loads)


def test_files_in_memory_are_never_said_to_be_cold(replay: Replay) -> None:
    memory = Path("/dev/shm")
    if filesystem_of(memory) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    target = memory / f"ckpt_replay_test_{os.getpid()}"
    try:
        argv = [*OPTIONS, *SMALL, "--engine", "torch", "--repeat", "1", "--cold", "--no-storage"]
        code, told, errors = replay([*argv, "--dir", str(target)])
        assert code == 0, errors
        assert "torch: no load_cold_s: the page cache could not be made cold: it was warm" in told
        row = next(line for line in told.splitlines() if line.startswith("  torch "))
        assert " - " in row
        assert "load, cold files: not measured" in told
    finally:
        if target.exists():
            target.rmdir()  # fails if the replay left anything


@pytest.mark.usefixtures("with_plugins")
def test_engines_that_fail_are_named_and_the_others_are_measured(tmp_path: Path, replay: Replay) -> None:
    """One cannot write on the second rank; a checkpoint of the other is torn, and is found out."""
    argv = [*SMALL, "--engine", "faulty,torn,torch", "--ranks", "0-1", "--repeat", "2", "--no-storage"]
    argv += ["--output", str(tmp_path / "out.json"), "--dir", str(tmp_path / "target")]
    code, told, _ = replay([*OPTIONS, *argv])
    assert code == 1
    assert "FAILED: faulty" in told and "FAILED: torn" in told
    assert "was saved as" in " ".join(told.split())
    assert told.startswith("Fewer than two engines were measured: there is nothing to compare.\n")
    assert told.rpartition("\n\n")[2].startswith("Answer for 16 small tensors on ")
    engines = json.loads((tmp_path / "out.json").read_text())["engines"]
    assert "No space left on device" in engines["faulty"]["failed"] and "was saved as" in engines["torn"]["failed"]
    assert engines["faulty"]["durable_s"] is None
    assert engines["faulty"]["attempts"] == {"save": {"done": 0, "failed": 1}}
    assert engines["torn"]["attempts"] == {"save": {"done": 1, "failed": 0}, "load_warm": {"done": 0, "failed": 1}}
    assert not engines["faulty"]["verified"] and not engines["torn"]["verified"]
    assert [len(engines["torch"][measure]["samples"]) for measure in MEASURES] == [2] * len(MEASURES)
    assert not list((tmp_path / "target").iterdir())


@pytest.mark.parametrize(
    "operations",
    # With failures: test_of_all_saves_those_that_failed_are_not_loaded.
    ["save", pytest.param("saves_then_loads", marks=pytest.mark.nightly(minutes=1))],
)
def test_readers_load_an_earlier_checkpoint_beside_saves(tmp_path: Path, replay: Replay, operations: str) -> None:
    argv = [*SMALL, "--engine", "lazy,dcp-collective", "--ranks", "0-1", "--repeat", "2", "--readers", "2"]
    argv += ["--no-storage", "--operations", operations, "--warmup-saves", "0"]
    found = replay.figures(argv, tmp_path / "target")
    assert found["readers"] == 2
    for name, engine in found["engines"].items():
        assert engine["failed"] is None, name
        assert engine["attempts"]["save"] == {"done": 2, "failed": 0}
        assert engine["attempts"]["load_beside"] == {"done": 4, "failed": 0}  # of two readers beside two saves
        beside = engine["operations"]["load_beside"]
        assert len(beside["duration_s"]["samples"]) >= 4 and beside["throughput_MiBps"]["median"] > 0
        assert beside["requests"] is None and beside["coordination_s"]["min"] >= 0
        assert len(engine["durable_s"]["samples"]) == 2
    assert not list((tmp_path / "target").iterdir())


@pytest.mark.usefixtures("with_plugins")
def test_failed_saves_and_readers_are_counted(tmp_path: Path, replay: Replay) -> None:
    argv = [*SMALL, "--engine", "flaky,torch", "--repeat", "2", "--readers", "2", "--no-storage", "--warmup-saves", "0"]
    argv += ["--output", str(tmp_path / "out.json"), "--dir", str(tmp_path / "target")]
    code, told, _ = replay([*OPTIONS, *argv])
    assert code == 1
    assert "FAILED: flaky" in told and "flaky: of 2 saves 2 failed" in told
    engines = json.loads((tmp_path / "out.json").read_text())["engines"]
    assert engines["flaky"]["attempts"]["save"] == {"done": 0, "failed": 2}
    readers = engines["flaky"]["attempts"]["load_beside"]
    assert readers["done"] + readers["failed"] == 4 and readers["failed"] >= 2  # the second time
    assert engines["torch"]["attempts"]["load_beside"] == {"done": 4, "failed": 0}
    assert engines["torch"]["verified"] and not engines["flaky"]["verified"]


@pytest.mark.usefixtures("with_plugins")
def test_of_all_saves_those_that_failed_are_not_loaded(tmp_path: Path, replay: Replay) -> None:
    argv = [*SMALL, "--engine", "patchy", "--repeat", "2", "--readers", "1", "--operations", "saves_then_loads"]
    argv += ["--no-storage", "--warmup-saves", "0", "--output", str(tmp_path / "out.json")]
    assert replay([*OPTIONS, *argv, "--dir", str(tmp_path / "target")])[0] == 1
    found = json.loads((tmp_path / "out.json").read_text())["engines"]["patchy"]
    assert found["attempts"]["save"] == {"done": 1, "failed": 1}
    assert found["attempts"]["load_warm"] == {"done": 1, "failed": 0}
    assert "No space left on device" in found["failed"]


def test_readers_wait_for_the_save_that_is_measured(tmp_path: Path, replay: Replay) -> None:
    """The processes of the trace are, in this order or another, a save's and a reader's."""
    trace = tmp_path / "trace"
    argv = [*SMALL, "--engine", "lazy", "--ranks", "0", "--repeat", "1", "--readers", "1", "--operations", "save"]
    found = replay.figures([*argv, "--no-storage", "--trace-dir", str(trace)], tmp_path / "target")
    (beside,) = found["samples"]["engines"]["lazy"]["load_beside"]
    begun = sorted((r["start_ns"], r["operation"]) for r in records(trace) if r["type"] == "operation_begin")
    order = [operation for _, operation in begun if operation in ("save", "load")]
    assert order[:3] == ["load", "save", "load"] or order[:3] == ["load", "save", "save"], "a load before, a warm-up"
    assert order.count("save") == 2 and order.count("load") == 1 + len(beside[0]["loads"]) >= 2
    assert found["engines"]["lazy"]["operations"]["save"]["processing_s"] is None


def test_readers_in_object_storage(tmp_path: Path, replay: Replay) -> None:
    argv = [
        *SMALL, "--engine", "lazy,lazy-zstd", "--ranks", "0-1", "--repeat", "1", "--readers", "1",
        "--steps-between", "0", "--operations", "save", "--storage-cache", str(tmp_path / "node"),
        "--dir", f"s3://{BUCKET}/beside",
    ]  # fmt: skip
    for engine in replay.stored(argv)["engines"].values():
        assert engine["failed"] is None and engine["operations"]["save"]["processing_s"] is None
        beside = engine["operations"]["load_beside"]
        assert beside["requests"] >= 2 and beside["requests_per_s"] > 0 and beside["success_ratio"] == 1


@pytest.mark.nightly(minutes=1)
def test_all_engines_that_can_run_here_and_why_the_others_do_not(tmp_path: Path, replay: Replay) -> None:
    argv = ["--small-tensors", "2", "--repeat", "1", "--warmup-saves", "0", "--no-storage"]
    found = replay.figures(argv, tmp_path)
    assert {"torch", "lazy"} <= set(found["engines"])
    assert "writes no files" in found["left_out"]["none"]
    assert "none" not in found["engines"]


@pytest.mark.parametrize(
    ("argv", "messages"),
    [
        (["--engine", "none,datastates,torch"], ["engine none writes no files", *WITHOUT_DATASTATES]),
        (["--engine", "torch", "--model", "71b"], ["--model 71b: no such preset"]),
        (["--engine", "torch", "--small-tensor-bytes", "900TiB", "--small-tensors", "1"], ["GB free"]),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_written(
    tmp_path: Path, replay: Replay, argv: list[str], messages: list[str]
) -> None:
    what = [] if "--model" in argv or "--small-tensors" in argv else SMALL
    code, _, told = replay([*OPTIONS, *what, *argv, "--dir", str(tmp_path)])
    assert (code, [message for message in messages if message not in told]) == (2, [])
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_after_a_termination(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, *SMALL, "--engine", "torch", "--repeat", "1000", "--dir", str(tmp_path)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for(lambda: bool(list(tmp_path.glob("*/torch/global_step*"))), "the first checkpoint")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly(minutes=1)
def test_under_torchrun_each_process_is_a_rank(tmp_path: Path) -> None:
    argv = [*SMALL, "--engine", "torch", "--repeat", "1", "--no-storage", "--format", "json", "--dir", str(tmp_path)]
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "tools.ckpt_replay", *argv,
        ],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["ranks"] == [0, 1]
    assert len(found["samples"]["engines"]["torch"]["save"][0]) == 2
    assert not list(tmp_path.iterdir())


def test_all_saves_that_are_kept_need_room_before_the_first(tmp_path: Path, replay: Replay) -> None:
    """Of a million gigabytes, for which no machine that runs this has room."""
    argv = [*SMALL, "--engine", "torch", "--repeat", str(10**9), "--operations", "saves_then_loads", "--no-storage"]
    code, _, told = replay([*argv, "--dir", str(tmp_path)])
    assert code == 2 and f", {10**9} checkpoints); give another, or --limit-bytes" in told
    assert not list(tmp_path.iterdir())


def test_all_saves_are_kept_until_all_are_loaded(tmp_path: Path, replay: Replay) -> None:
    target, trace = tmp_path / "target", tmp_path / "trace"
    target.mkdir()
    argv = [*SMALL, "--engine", "torch,lazy", "--repeat", "2", "--operations", "saves_then_loads", "--no-storage"]
    found = replay.figures([*argv, "--warmup-saves", "0", "--cold", "--trace-dir", str(trace), "--keep"], target)
    assert found["operations"] == "saves_then_loads"
    for name in ("torch", "lazy"):
        engine = found["engines"][name]
        assert engine["verified"] and engine["failed"] is None
        assert [len(engine[key]["samples"]) for key in ("durable_s", "load_warm_s")] == [2, 2]
    begun = sorted(
        (record["start_ns"], record["operation"])
        for record in records(trace)
        if record["type"] == "operation_begin" and record["operation"] in ("save", "load")
    )
    saves = [operation for _, operation in begun]
    per_engine = saves.count("load") // 2
    assert saves == [*["save"] * 2, *["load"] * per_engine, *["save"] * 2, *["load"] * per_engine]
    kept = sorted(path.name for path in target.glob("ckpt_replay_*/lazy/*"))
    assert kept == ["save_0", "save_1"]
