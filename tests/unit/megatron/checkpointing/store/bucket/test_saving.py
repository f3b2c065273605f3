"""Saves to a real S3 server, without DeepSpeed: what is committed, found, pruned, refused and left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from megatron.checkpointing.engines.base import FileState
from megatron.checkpointing.engines.errors import (
    CheckpointDamagedError,
    CheckpointSaveError,
    SaveDirectoryInUseError,
    SaveDirectorySupersededError,
)
from megatron.checkpointing.engines.registry import engines_of_object_storage
from megatron.checkpointing.store.bucket.checkpoints import StoredCheckpoints, drop_listings
from megatron.checkpointing.store.bucket.generations import ObjectOwnership, claim
from megatron.checkpointing.store.bucket.saving import ObjectDirectory
from megatron.checkpointing.store.manifest import Manifest
from megatron.config import ConfigError
from megatron.config.uris import ObjectUri
from megatron.fileio.objects.errors import ObjectStoreError
from megatron.fileio.objects.s3 import Bucket
from restart_trace.recorder import Operation
from tests.faults.injection import Fault, run_traced
from tests.object_storage import BUCKET, FaultProxy, ImpatientBucket, Request, Server, environment_of, listings
from tests.object_storage import Fault as StoreFault
from tests.object_storage_kills import load, run, states, writer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("here")]  # an S3 server is started


@pytest.fixture
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> StoredCheckpoints:
    name = "".join(c if c.isalnum() else "_" for c in request.node.name)
    return StoredCheckpoints(ObjectUri(BUCKET, f"saves/{name}"), Bucket(BUCKET, threads=2), tmp_path / "node")


def claimed(stored: StoredCheckpoints, keep_last: int | None = None) -> tuple[ObjectDirectory, ObjectOwnership]:
    held = claim(stored.bucket, stored.uri, take_over=True)
    return ObjectDirectory(stored, 0, held, keep_last), held


def keys(stored: StoredCheckpoints) -> list[str]:
    prefix = stored.uri.key("")
    found = [info.key.removeprefix(prefix) for info in stored.bucket.list(prefix)]
    return [key for key in found if not key.startswith(".generations/")]


@pytest.mark.parametrize("operation", ["mkdir", "create", "lock", "stat"])
def test_a_node_directory_that_cannot_be_made_is_named(stored: StoredCheckpoints, operation: str) -> None:
    def begin() -> str:
        with pytest.raises(ConfigError) as raised:
            ObjectDirectory(stored, 1, None, None)
        return str(raised.value)

    traced = run_traced(begin, lambda path: path.startswith(str(stored.root)), Fault(operation, 1, "EIO"))
    assert traced.raised is None and traced.hit is not None, traced
    assert f"--storage-cache {stored.root}: cannot be used: [Errno 5]" in traced.result


@pytest.mark.parametrize("engine", engines_of_object_storage())
def test_what_is_saved_is_loaded(stored: StoredCheckpoints, engine: str) -> None:
    directory, held = claimed(stored)
    saves = writer(engine, held.generation)
    for step in (1, 2):
        saves.save(directory, step, lambda step=step: states(step))
        if saves.engine.asynchronous:
            saves.background.release_state()
            saves.background.drain()
    found, problems = stored.discover(None)
    assert problems == [] and [(c.tag, c.manifest and c.manifest.sequence) for c in found] == [
        ("global_step2", 2),
        ("global_step1", 1),
    ]
    assert stored.read_latest() == "global_step2/g1_2"
    loaded = load(stored, found[0], engine)
    assert all(torch.equal(tensor, torch.full_like(tensor, 2.0)) for tensor in loaded.values())
    assert [c.tag for c in stored.discover("global_step1")[0]] == ["global_step1"]
    directory.close()
    held.release()
    saves.engine.close()
    assert list(stored.root.iterdir()) == []


def test_old_ones_and_those_saved_again_are_removed(
    stored: StoredCheckpoints, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stored.bucket.put(stored.uri.key("global_step1/notes.txt"), b"somebody else's")
    stored.bucket.put(stored.uri.key("readme"), b"somebody else's")
    directory, held = claimed(stored, keep_last=2)
    saves = writer("torch", held.generation)
    for step in (1, 2, 3, 2):
        saves.save(directory, step, lambda: states(1))
    assert sorted({key.rpartition("/")[0] for key in keys(stored)}) == [
        "", "global_step1", "global_step2/g1_4", "global_step3/g1_3",
    ]  # fmt: skip
    assert "readme" in keys(stored) and "global_step1/notes.txt" in keys(stored)
    removed = [message for message in caplog.messages if message.startswith("removed ")]
    assert removed == [f"removed {stored.uri}/{name}" for name in ("global_step1/g1_1", "global_step2/g1_2")]
    # The last committed comes first; 3 is of a course that was given up.
    assert [c.tag for c in stored.discover(None)[0]] == ["global_step2", "global_step3"]
    directory.close()
    held.release()


def test_a_checkpoint_copied_from_another_run_is_left_alone(
    stored: StoredCheckpoints, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    other = StoredCheckpoints(ObjectUri(BUCKET, f"{stored.uri.prefix}_other"), stored.bucket, stored.root)
    for place, steps, keep_last in ((other, (4,), None), (stored, (5, 6), 1)):
        directory, held = claimed(place, keep_last)
        saves = writer("torch", held.generation)
        for step in steps:
            saves.save(directory, step, lambda: [FileState("small.pt", {"w": torch.ones(8)})])
            if place is other:
                for info in other.bucket.list(other.uri.key("global_step4/")):
                    copied = stored.uri.key(info.key.removeprefix(other.uri.key("")))
                    stored.bucket.put(copied, stored.bucket.get(info.key, 1 << 24)[0])
        directory.close()
        held.release()
    assert {key.rpartition("/")[0] for key in keys(stored)} == {"", "global_step4/g1_1", "global_step6/g1_2"}
    told = f"left alone: {stored.uri}/global_step4/g1_1 (saved by another run)"
    assert [message for message in caplog.messages if message.startswith("left alone")] == [told]


@pytest.mark.parametrize("harm", ["altered manifest", "other tag", "replaced file", "short file", "missing file"])
def test_damage_is_told_and_the_one_before_is_found(stored: StoredCheckpoints, harm: str) -> None:
    directory, held = claimed(stored)
    saves = writer("torch", held.generation)
    for step in (1, 2):
        saves.save(directory, step, lambda: states(1))
    manifest, file = (stored.uri.key(f"global_step2/g1_2/{name}") for name in ("manifest.json", "small.pt"))
    content, _ = stored.bucket.get(manifest, 1 << 20)
    if harm == "altered manifest":
        stored.bucket.put(manifest, content.replace(b'"step": 2', b'"step": 3'))
    elif harm == "other tag":
        stored.bucket.put(manifest, stored.bucket.get(stored.uri.key("global_step1/g1_1/manifest.json"), 1 << 20)[0])
    elif harm == "missing file":
        stored.bucket.delete([file])
    else:
        size = stored.bucket.head(file).num_bytes
        stored.bucket.put(file, bytes(size if harm == "replaced file" else size - 1))
    found, problems = stored.discover(None)
    assert [c.tag for c in found] == ["global_step1"]
    assert len(problems) == 1 and problems[0].startswith(f"{stored.uri}/global_step2/g1_2/: "), problems
    directory.close()
    held.release()


def test_a_manifest_of_this_program_is_as_before_where_there_are_no_objects() -> None:
    manifest = Manifest("global_step1", 1, "torch", {"tp": 1, "pp": 1, "dp": 1}, {}, {})
    assert "objects" not in json.loads(manifest.to_json())


def test_bytes_that_change_on_the_way_are_read_again_and_then_refused(
    server: Server, stored: StoredCheckpoints
) -> None:
    directory, held = claimed(stored)
    writer("torch", held.generation).save(directory, 1, lambda: states(1))
    (candidate,), _ = stored.discover(None)
    broken: list[Request] = []

    def fault(request: Request) -> str | None:
        if request.method == "GET" and request.path.endswith("small.pt") and len(broken) < times:
            broken.append(request)
            return "corrupt"
        return None

    with FaultProxy(server, fault).running() as proxy, environment_of(proxy.environment()):
        through = StoredCheckpoints(stored.uri, Bucket(BUCKET), stored.root)
        times = 1
        load(through, candidate)
        assert len(broken) == 1
        times = 100
        with pytest.raises(CheckpointDamagedError, match="small.pt: does not have the checksum"):
            load(through, candidate)
    directory.close()
    held.release()


def test_a_manifest_that_changes_on_the_way_is_read_again(server: Server, stored: StoredCheckpoints) -> None:
    """Else a bit that tips on the way would cost the work since the checkpoint before."""
    directory, held = claimed(stored)
    for step in (1, 2):
        writer("torch", held.generation).save(directory, step, lambda: states(1))
    seen: list[Request] = []

    def fault(request: Request) -> str | None:
        if request.method == "GET" and request.path.endswith("global_step2/g1_1/manifest.json"):
            seen.append(request)
            return "corrupt" if len(seen) <= times else None
        return None

    with FaultProxy(server, fault).running() as proxy, environment_of(proxy.environment()):
        through = StoredCheckpoints(stored.uri, Bucket(BUCKET), stored.root)
        times = 1
        assert [c.tag for c in through.discover(None)[0]] == ["global_step2", "global_step1"]
        times = 100
        found, problems = through.discover(None)
    assert [c.tag for c in found] == ["global_step1"] and "manifest.json cannot be used" in problems[0]
    directory.close()
    held.release()


@contextlib.contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """Within it, this process can write none: EFBIG."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.mark.parametrize("block_bytes", [8 << 20, 1 << 20])
def test_lazy_needs_no_room_on_the_node(stored: StoredCheckpoints, block_bytes: int) -> None:
    directory, held = claimed(stored)
    saves = writer("lazy", held.generation, io_block_bytes=block_bytes)
    with no_file_longer_than(4096):
        saves.save(directory, 1, lambda: states(1))
        saves.background.drain()
        (candidate,), _ = stored.discover(None)
        loaded = load(stored, candidate, "lazy")
    assert all(torch.equal(tensor, torch.full_like(tensor, 1.0)) for tensor in loaded.values())
    directory.close()
    held.release()


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("nth", [1, 2])
def test_ranges_that_change_on_the_way_are_read_again_and_then_refused(
    server: Server, stored: StoredCheckpoints, nth: int, checksum: bool
) -> None:
    """The first request is for the header. Without checksums of its own, those of the whole object verify a file."""
    directory, held = claimed(stored)
    saves = writer("lazy", held.generation, checksum=checksum)
    saves.save(directory, 1, lambda: states(1))
    saves.background.drain()
    (candidate,), _ = stored.discover(None)
    asked: list[Request] = []

    def fault(request: Request) -> str | None:
        if request.method != "GET" or not request.path.endswith(".safetensors"):
            return None
        asked.append(request)
        return "corrupt" if nth <= len(asked) < nth + times else None

    with FaultProxy(server, fault).running() as proxy, environment_of(proxy.environment()):
        through = StoredCheckpoints(stored.uri, Bucket(BUCKET), stored.root)
        times = 1
        loaded = load(through, candidate, "lazy")
        assert all(torch.equal(tensor, torch.full_like(tensor, 1.0)) for tensor in loaded.values())
        assert len(asked) > nth
        asked.clear()
        times = 100
        with pytest.raises(CheckpointDamagedError, match="safetensors: does not have the checksum"):
            load(through, candidate, "lazy")
    directory.close()
    held.release()


def test_a_store_that_ends_amid_a_load_is_no_damage(server: Server, stored: StoredCheckpoints) -> None:
    """Else an older checkpoint would be loaded."""
    directory, held = claimed(stored)
    saves = writer("lazy", held.generation)
    saves.save(directory, 1, lambda: states(1))
    saves.background.drain()
    (candidate,), _ = stored.discover(None)

    def fault(request: Request) -> str | None:
        return "503" if request.method == "GET" else None

    refused = pytest.raises(ObjectStoreError, match=r"rank_00000.safetensors: reading bytes .* within 4 s")
    with FaultProxy(server, fault).running() as proxy, environment_of(proxy.environment()), refused:
        load(StoredCheckpoints(stored.uri, Bucket(BUCKET, deadline_s=1), stored.root), candidate, "lazy")
    directory.close()
    held.release()


def saved_through(proxy: FaultProxy, stored: StoredCheckpoints, held: ObjectOwnership, steps: list[int]) -> list[int]:
    """How many requests went through the proxy for each of these saves, which one launch makes."""
    through = StoredCheckpoints(stored.uri, Bucket(BUCKET), stored.root)
    saving, saves = ObjectDirectory(through, 0, held, None), writer("lazy", held.generation)
    counts = []
    for step in steps:
        before = len(proxy.seen)
        saves.save(saving, step, lambda step=step: states(step))
        saves.background.drain()
        assert [save.error for save in saves.background.finished()] == [None]
        counts.append(len(proxy.seen) - before)
    saving.close()
    saves.engine.close()
    return counts


def test_the_part_with_the_header_waits_for_no_other(server: Server, stored: StoredCheckpoints) -> None:
    directory, held = claimed(stored)
    sent, late = threading.Event(), list[str]()

    def fault(request: Request) -> None:
        if "partNumber=1" in request.path:
            sent.set()
        elif "partNumber=" in request.path and not sent.wait(100):
            late.append(request.path)

    with FaultProxy(server, fault).running() as proxy, environment_of(proxy.environment()):
        saved_through(proxy, stored, held, [1])
    assert sent.is_set() and not late
    assert [c.tag for c in stored.discover(None)[0]] == ["global_step1"]
    directory.close()
    held.release()


def test_a_save_asks_no_more_where_many_checkpoints_are(server: Server, stored: StoredCheckpoints) -> None:
    directory, held = claimed(stored)
    with FaultProxy(server).running() as proxy, environment_of(proxy.environment()):
        first, *later = saved_through(proxy, stored, held, [1, 2, 3, 4])
        # begin, two parts, finish; a listing, manifest and `latest`
        assert later == [7, 7, 7] and first > 7
        assert sum("global_step4/g1_4/manifest.json" in request.path for request in proxy.seen) == 1
        saved_through(proxy, stored, held, [3])
    assert sorted(c.uri.partition("global_")[2] for c in stored.discover(None)[0]) == [
        "step1/g1_1/", "step2/g1_2/", "step3/g1_1/", "step4/g1_4/",
    ]  # fmt: skip
    directory.close()
    held.release()


@pytest.mark.parametrize("keep_last", [None, 1])
def test_the_first_save_of_a_launch_lists_the_prefix_once(
    server: Server, stored: StoredCheckpoints, keep_last: int | None
) -> None:
    """And finds by that what to remove: checkpoints of earlier launches, and those that were saved again."""
    directory, held = claimed(stored)
    saves = writer("torch", held.generation)
    for step in (1, 2, 3):
        saves.save(directory, step, lambda: states(1))
    directory.close()
    held.release()
    directory, held = claimed(stored)
    with FaultProxy(server).running() as proxy, environment_of(proxy.environment()):
        through = StoredCheckpoints(stored.uri, Bucket(BUCKET), stored.root)
        saving, saves = ObjectDirectory(through, 0, held, keep_last), writer("torch", held.generation)
        started = len(proxy.seen)
        saves.save(saving, 3, lambda: states(2))
    prefix = stored.uri.key("")
    assert Counter(listings(proxy.seen[started:])) == {prefix: 1, f"{prefix}global_step3/": 1}
    kept = ["step3/g2_1/"] if keep_last else ["step1/g1_1/", "step2/g1_2/", "step3/g2_1/"]
    assert sorted(c.uri.partition("global_")[2] for c in stored.discover(None)[0]) == kept
    saving.close()
    directory.close()
    held.release()


def crowded(partitions: int) -> StoreFault:
    """A store of so many partitions, each of which refuses what is beyond its limit: four times that comes in all.

    It counts requests, not seconds, so that the machine's speed makes no difference.
    """
    asked, lock = Counter[int](), threading.Lock()

    def fault(request: Request) -> str | None:
        number = re.search(r"/file_(\d)\.pt", request.path)
        if number is None:
            return None
        with lock:
            asked[partition := int(number[1]) % partitions] += 1
            return "503" if asked[partition] % (4 // partitions) else None

    return fault


def test_a_store_of_one_two_and_four_partitions_that_throttles(server: Server, stored: StoredCheckpoints) -> None:
    """Saves and loads are whole at each; the more there are, the fewer requests are tried again."""
    sizes = (9 << 18, 1000, 1000, 1000)  # 4 and 3 x 1 requests to save, 2 and 3 x 1 to load
    files = [FileState(f"file_{i}.pt", {"w": torch.full((size,), float(i))}) for i, size in enumerate(sizes)]
    directory, held = claimed(stored)
    retried = []
    for step, partitions in enumerate((1, 2, 4), 1):
        with FaultProxy(server, crowded(partitions)).running() as proxy, environment_of(proxy.environment()):
            bucket = Bucket(BUCKET)
            through = StoredCheckpoints(stored.uri, bucket, stored.root)
            saving = ObjectDirectory(through, 0, held, None)
            writer("torch", held.generation).save(saving, step, lambda: files)
            saving.close()
            saved = bucket.traffic.retries
            (newest, *_), problems = through.discover(None)
            loaded = load(through, newest, "torch", [file.name for file in files])
            assert problems == [] and newest.step == step
            assert all(torch.equal(loaded[file.name], file.state["w"]) for file in files)
            assert bucket.traffic.throttled == bucket.traffic.retries and bucket.traffic.requests == len(proxy.seen)
            retried.append((saved, bucket.traffic.retries - saved))
    assert retried == [(3 * 7, 3 * 5), (7, 5), (0, 0)]
    directory.close()
    held.release()


def test_what_is_committed_while_checkpoints_are_listed_is_not_told_to_be_gone(
    server: Server, stored: StoredCheckpoints
) -> None:
    directory, held = claimed(stored)
    saves = writer("torch", held.generation)
    saves.save(directory, 1, lambda: states(1))

    def fault(request: Request) -> None:
        if request.path.endswith("/latest") and stored.read_latest() == "global_step1/g1_1":
            saves.save(directory, 2, lambda: states(2))

    with FaultProxy(server, fault).running() as proxy, environment_of(proxy.environment()):
        found, problems = StoredCheckpoints(stored.uri, Bucket(BUCKET), stored.root).discover(None)
    assert [c.tag for c in found] == ["global_step1"] and problems == []
    assert [c.tag for c in stored.discover(None)[0]] == ["global_step2", "global_step1"]
    stored.bucket.put(stored.uri.key("latest"), b"global_step3/g1_3")
    assert stored.discover(None)[1] == [f"{stored.uri}/latest names global_step3/g1_3, which is not there"]
    directory.close()
    held.release()


def test_a_streamed_upload_that_fails_fails_the_save_and_leaves_the_one_before(
    server: Server, stored: StoredCheckpoints
) -> None:
    directory, held = claimed(stored)
    saves = writer("lazy", held.generation)
    saves.save(directory, 1, lambda: states(1))
    saves.background.drain()

    def fault(request: Request) -> str | None:
        return "delay" if request.method == "PUT" and "partNumber=1" in request.path else None

    with FaultProxy(server, fault).running() as proxy, environment_of(proxy.environment()):
        through = StoredCheckpoints(stored.uri, ImpatientBucket(1, wait_s=2), stored.root)
        saving, again = ObjectDirectory(through, 0, held, None), writer("lazy", held.generation)
        again.save(saving, 2, lambda: states(2))
        again.background.drain()
        (failed,) = again.background.finished()
        told = "rank 0: ObjectStoreError: s3://.*global_step2/g1_1/rank_00000.safetensors: writing part 1 .* within 2 s"
        assert failed.error is not None and re.search(told, failed.error), failed.error
        saving.close()
    assert [c.tag for c in stored.discover(None)[0]] == ["global_step1"]
    assert not [key for key in keys(stored) if key.startswith("global_step2")]
    assert stored.bucket.unfinished_uploads(stored.uri.key("")) == []
    directory.close()
    held.release()


def test_what_a_save_asked_of_a_store_that_throttles_is_counted_though_it_fails(
    server: Server, stored: StoredCheckpoints, tmp_path: Path
) -> None:
    def fault(request: Request) -> str | None:
        return "503" if request.method == "POST" else None  # that begins an upload

    with FaultProxy(server, fault).running() as proxy, environment_of(proxy.environment()):
        through = StoredCheckpoints(stored.uri, Bucket(BUCKET, deadline_s=1), stored.root)
        directory, held = claimed(stored)
        saving, op = ObjectDirectory(through, 0, held, None), Counts()
        with pytest.raises(ObjectStoreError, match="beginning an upload"):
            saving.streams("global_step1", "g1_1", cast("Operation", op)).open("file", 64 << 20, 0, 8 << 20)
        saving.clear(tmp_path / "spool")
        saving.close()
        assert op.measured["store_throttled"] == sum(request.method == "POST" for request in proxy.seen) > 0
    directory.close()
    held.release()


class Counts:
    """An operation that keeps what it is told."""

    def __init__(self) -> None:
        self.measured: dict[str, float] = {}

    def measure(self, **values: float) -> None:
        self.measured |= values

    def add(self, *args: object, **kwargs: object) -> None:
        """A span."""


@pytest.mark.parametrize("what", ["delay", "503", "403", "etag"])
def test_an_upload_that_fails_fails_the_save_and_leaves_the_one_before(
    server: Server, stored: StoredCheckpoints, what: str
) -> None:
    directory, held = claimed(stored)
    writer("torch", held.generation).save(directory, 1, lambda: states(1))

    def fault(request: Request) -> str | None:
        return what if request.method == "PUT" and "partNumber=1" in request.path else None

    with FaultProxy(server, fault).running() as proxy, environment_of(proxy.environment()):
        bucket = ImpatientBucket(1, wait_s=2 if what in ("delay", "503") else 120)
        through = StoredCheckpoints(stored.uri, bucket, stored.root)
        saving = ObjectDirectory(through, 0, held, None)
        with pytest.raises(CheckpointSaveError, match=r"rank 0: ObjectStoreError: s3://.*global_step2/g1_1/large.pt: "):
            writer("torch", held.generation).save(saving, 2, lambda: states(2))
        saving.close()
    assert [c.tag for c in stored.discover(None)[0]] == ["global_step1"]
    assert not [key for key in keys(stored) if key.startswith("global_step2")]
    assert stored.bucket.unfinished_uploads(stored.uri.key("")) == []
    directory.close()
    held.release()


def test_what_the_launch_before_commits_after_the_listing_is_not_removed(stored: StoredCheckpoints) -> None:
    """It has passed its last check of who saves there, and its manifest may be retried for long."""
    directory, held = claimed(stored)
    writer("torch", held.generation).save(directory, 1, lambda: states(1))
    manifest, _ = stored.bucket.get(stored.uri.key("global_step1/g1_1/manifest.json"), 1 << 20)
    stored.bucket.delete([stored.uri.key("global_step1/g1_1/manifest.json")])  # it is about to be written
    left = stored.uri.key("global_step2/g1_2/lost.pt")
    stored.bucket.put(left, b"never committed")
    stored.list_once()
    again = claim(stored.bucket, stored.uri, take_over=True)
    stored.claimed(again.generation)
    assert ("global_step1", "g1_1") in stored.listed()
    stored.bucket.put(stored.uri.key("global_step1/g1_1/manifest.json"), manifest)
    later = ObjectDirectory(stored, 0, again, None)
    drop_listings()
    (found,) = stored.discover(None)[0]
    assert found.tag == "global_step1" and found.manifest is not None
    there = {info.key for info in stored.bucket.list(found.key)}
    assert {f"{found.key}{name}" for name in found.manifest.files} <= there
    assert left.removeprefix(stored.uri.key("")) not in keys(stored)
    for each in (directory, later):
        each.close()
    for hold in (held, again):
        hold.release()


def test_a_second_launch_is_refused_or_takes_over(stored: StoredCheckpoints) -> None:
    directory, held = claimed(stored)
    with pytest.raises(SaveDirectoryInUseError, match="generation 1, .* saves there and is alive; .*--take-over"):
        claim(stored.bucket, stored.uri)
    again = claim(stored.bucket, stored.uri, take_over=True)
    assert again.generation == 2
    with pytest.raises(SaveDirectorySupersededError, match="generation 2"):
        writer("torch", held.generation).save(directory, 1, lambda: states(1))
    assert keys(stored) == []
    held.release()
    again.release()
    third = claim(stored.bucket, stored.uri)  # nobody is waited for
    assert third.generation == 3
    third.release()
    directory.close()


def in_a_process(work: Callable[[], object]) -> int:
    """Run `work` in a process of its own, which ends with 100 if the prefix is in use, 101 if superseded; its pid."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # OpenMP waits for threads that are not in this process
            work()
            code = 0
        except (SaveDirectoryInUseError, SaveDirectorySupersededError) as exc:
            code = 100 + isinstance(exc, SaveDirectorySupersededError)
        finally:
            os._exit(code)
    return child


def test_of_launches_that_claim_at_once_one_gets_the_prefix(stored: StoredCheckpoints) -> None:
    begin, claimed_it = os.pipe(), os.pipe()

    def launch() -> None:
        bucket = Bucket(BUCKET)
        os.read(begin[0], 1)
        claim(bucket, stored.uri)
        os.write(claimed_it[1], b"x")
        signal.pause()

    children = [in_a_process(launch) for _ in range(5)]
    try:
        os.write(begin[1], b"x" * len(children))
        assert os.read(claimed_it[0], 1) == b"x"
        while len(children) > 1:
            for child in list(children):  # and no other child of this process
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    children.remove(child)
                    assert os.waitstatus_to_exitcode(status) == 100
            time.sleep(0.01)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert len(children) == 1
    for end in (*begin, *claimed_it):
        os.close(end)


def test_a_launch_that_is_superseded_while_it_saves_overwrites_nothing(stored: StoredCheckpoints) -> None:
    reading, writing = os.pipe()

    def first_launch() -> None:
        # moto answers 500, which is worth another attempt, where its successor has aborted the upload that it is in.
        own = StoredCheckpoints(stored.uri, Bucket(BUCKET, deadline_s=30, threads=2), stored.root)
        held = claim(own.bucket, own.uri)
        directory, saves = ObjectDirectory(own, 0, held, None), writer("torch", held.generation)
        for step in range(1, 1000):
            saves.save(directory, step, lambda step=step: states(step))
            os.write(writing, b"x")

    child = in_a_process(first_launch)
    assert os.read(reading, 1) == b"x"
    directory, held = claimed(stored)
    saves = writer("torch", held.generation)
    for step in (1001, 1002, 1003, 1004):
        saves.save(directory, step, lambda step=step: states(step))
    deadline = time.monotonic() + 300
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    status = ended[1]
    assert os.waitstatus_to_exitcode(status) == 101
    found, problems = stored.discover(None)
    of_each = {generation: [c for c in found if f"/g{generation}_" in c.key] for generation in (1, 2)}
    assert problems == [] and of_each[1] and [c.step for c in of_each[2]] == [1004, 1003, 1002, 1001]
    for candidate in found:
        loaded = load(stored, candidate)
        assert all(torch.equal(tensor, torch.full_like(tensor, candidate.step)) for tensor in loaded.values())
    directory.close()
    held.release()
    os.close(reading)
    os.close(writing)


def test_a_store_that_ignores_conditions_is_refused(server: Server, stored: StoredCheckpoints) -> None:
    """As npm's s3rver does. The proxy takes the condition away."""
    proxy = FaultProxy(server, lambda request: "unconditional")
    refused = pytest.raises(ObjectStoreError, match="does not keep to If-None-Match and If-Match")
    with proxy.running(), environment_of(proxy.environment()), refused:
        claim(Bucket(BUCKET), stored.uri)
    assert list(stored.bucket.list(stored.uri.key(""))) == []


@pytest.mark.parametrize("engine", ["torch", "lazy"])
def test_sigkill_at_random_instants_of_saves(tmp_path: Path, engine: str) -> None:
    seen = run(rounds=5, seed=7, root=tmp_path, longest_s=1.2, engine=engine)
    assert seen["rounds"] == 5
