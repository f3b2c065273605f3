"""What is below a prefix before a run begins: somebody else's objects, and no checkpoint."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.engines.errors import CheckpointMismatchError, SaveDirectoryInUseError
from megatron.checkpointing.preflight.compatibility import check_newest
from megatron.checkpointing.preflight.first_start import FirstStart, first_start
from megatron.checkpointing.preflight.repeated_errors import RepeatedErrorError, StepErrors, checkpoint_before, recorded
from megatron.checkpointing.store.bucket import generations
from megatron.checkpointing.store.bucket.checkpoints import StoredCheckpoints, drop_listings, open_checkpoints
from megatron.checkpointing.store.bucket.generations import ObjectOwnership, claim, ended_generation
from megatron.checkpointing.store.commit import write_manifest
from megatron.checkpointing.store.manifest import StoredObject
from megatron.config import CheckpointConfig, Config, ConfigError, DataConfig, ParallelConfig, TraceConfig
from megatron.config.uris import ObjectUri, parse_uri
from megatron.fileio.objects.errors import ObjectStoreError
from megatron.fileio.objects.s3 import Bucket
from megatron.parallel.topology import Layout
from megatron.startup.preflight import check_before_imports, check_not_lost, check_object_storage
from megatron.training.trainer import claim_save_directory
from restart_trace.cycles import claim_cycle
from restart_trace.schema import RANK_FILE_PATTERN
from tests.object_storage import BUCKET, FaultProxy, Server, environment_of
from tests.unit.megatron.checkpointing.preflight.test_compatibility import HERE, VOCAB, candidate, config
from tests.unit.megatron.startup.test_preflight import write_dataset
from tests.unit.stalls import stand_still_in_sleep
from tests.unit.trace_helpers import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("here")]  # an S3 server is started


def check(tmp_path: Path, **options: Any) -> None:
    more = {"save_interval": 5} if "save" in options else {}
    check_object_storage(CheckpointConfig(checkpoint_engine="torch", storage_cache=str(tmp_path), **more, **options))


def test_an_error_that_repeats_itself_is_known_from_the_prefix(caplog: pytest.LogCaptureFixture) -> None:
    """As in a directory: of several ranks the first counts, three starts are too many, and what gets past ends it."""
    uri = f"s3://{BUCKET}/prefix/repeated"
    options = CheckpointConfig(checkpoint_engine="torch", save=uri, save_interval=5, load=uri)
    for generation in range(1, 5):
        for rank in (1, 0):
            StepErrors(options, FirstStart(), generation, 10, rank).note(ValueError(f"bad token of rank {rank}"), 12)
    assert [(error.generation, error.rank) for error in recorded(options)] == [(2, 1), (3, 1), (4, 1)]
    with pytest.raises(RepeatedErrorError, match=f"bad token of rank 1.*{uri}/global_step10. That checkpoint"):
        checkpoint_before(options, later=False)
    StepErrors(options, FirstStart(), 5, 10, 0).passed(12)
    assert recorded(options) == [] and checkpoint_before(options, later=False) is None
    assert caplog.messages == []


CRASHES = """
import ctypes, sys
from megatron.checkpointing.preflight.first_start import FirstStart, first_start
from megatron.checkpointing.preflight.repeated_errors import StepErrors
from megatron.config import CheckpointConfig
uri, cache, generation, rank, run_id = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
options = CheckpointConfig(checkpoint_engine="torch", save=uri, save_interval=5, load=uri, storage_cache=cache)
StepErrors(options, FirstStart(), generation, 10, rank, run_id=run_id).passed(11)
ctypes.string_at(0)
"""


def claimed(uri: str) -> ObjectOwnership:
    """The hold of a start on the prefix, which ends at once."""
    parsed = parse_uri("--save", uri)
    assert isinstance(parsed, ObjectUri)
    ownership = claim(Bucket(BUCKET), parsed)
    ownership.release()
    return ownership


def crashes(node: Path, uri: str, rank: int = 1) -> None:
    """A start whose rank on `node` ends itself by SIGSEGV."""
    hold = claimed(uri)
    given = (uri, str(node), str(hold.generation), str(rank), hold.run_id)
    assert subprocess.run([sys.executable, "-c", CRASHES, *given], cwd=ROOT, check=False).returncode == -signal.SIGSEGV


def saving_to(uri: str, node: Path) -> CheckpointConfig:
    return CheckpointConfig(checkpoint_engine="torch", save=uri, save_interval=5, load=uri, storage_cache=str(node))


def test_a_crash_that_repeats_itself_is_known_from_the_prefix(tmp_path: Path) -> None:
    """A node's next start puts there what is on its disk: others know it from then on. Nothing stays on the disk."""
    uri = f"s3://{BUCKET}/prefix/crashed"
    node, other = saving_to(uri, tmp_path / "node"), saving_to(uri, tmp_path / "other")
    for generation in (1, 2, 3):
        crashes(tmp_path / "node", uri)
        assert checkpoint_before(other, later=False) is None and len(recorded(other)) == generation - 1
        if generation < 3:
            assert checkpoint_before(node, later=False) is None
    told = rf"iteration 12 .*\(rank 1: SIGSEGV in .*{uri}/global_step10. That checkpoint"
    for options in (node, other):
        with pytest.raises(RepeatedErrorError, match=told):
            checkpoint_before(options, later=False)
    hold = claimed(uri)
    passing = StepErrors(node, FirstStart(), hold.generation, 10, 0, run_id=hold.run_id)
    passing.passed(12)
    assert recorded(node) == []
    passing.close(trained=True)
    assert not list((tmp_path / "node").iterdir())


@pytest.mark.parametrize("first", ["this node's", "another node's"])
def test_a_crash_before_the_prefix_was_emptied_is_of_another_run(tmp_path: Path, first: str) -> None:
    """Even if both runs are in the same generation, and whichever node starts first in the empty prefix."""
    uri = f"s3://{BUCKET}/prefix/emptied_{first[0]}"
    node = saving_to(uri, tmp_path / "node")
    crashes(tmp_path / "node", uri)
    bucket = Bucket(BUCKET)
    bucket.delete([info.key for info in bucket.list(f"prefix/emptied_{first[0]}/")])
    if first == "another node's":
        claimed(uri)
    for known in range(2):
        assert checkpoint_before(node, later=False) is None and len(recorded(node)) == known
        crashes(tmp_path / "node", uri)
    assert checkpoint_before(node, later=False) is None and len(recorded(node)) == 2


def test_crashes_of_a_run_that_does_not_come_back_are_removed_when_they_are_old(tmp_path: Path) -> None:
    """By the start of any run on the node, and nothing else there."""
    uri, node = f"s3://{BUCKET}/prefix/comes_back", tmp_path / "node"
    for run_id in ("old", "new"):
        StepErrors(saving_to(uri, node), FirstStart(), 1, 10, 0, run_id=run_id).close()
    of_new, of_old = sorted(node.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    others = [node / "crashes", node / "crashes_of_mine", tmp_path / "elsewhere", of_new]
    for path in others[:3]:
        path.mkdir()
        (path / "crash_00000001").touch()
    (node / "crashes_0123456789abcdef").symlink_to(tmp_path / "elsewhere")
    for path in (of_old, *others[:3]):
        for each in (path / "crash_00000001", path):
            os.utime(each, (0, time.time() - 31 * 24 * 3600))
    check(node, load=f"s3://{BUCKET}/prefix/another_run")
    assert not of_old.exists() and all((path / "crash_00000001").is_file() for path in others)


def test_going_back_in_a_prefix_is_done_once(tmp_path: Path) -> None:
    uri = f"s3://{BUCKET}/prefix/back"
    options = CheckpointConfig(
        checkpoint_engine="torch", save=uri, save_interval=5, load=uri, storage_cache=str(tmp_path),
        on_repeated_error="back",
    )  # fmt: skip
    for sequence, step in enumerate((5, 10), start=1):
        put_checkpoint("prefix/back", {}, step=step, sequence=sequence)
    for generation in (1, 2, 3):
        StepErrors(options, FirstStart(), generation, 10, 0).note(ValueError("bad token"), 12)
    assert checkpoint_before(options, later=True) == "global_step5"
    again = StepErrors(options, FirstStart(), 4, 5, 0, back_to="global_step5")
    assert checkpoint_before(options, later=True) == "global_step5"  # stopped before it has saved anything
    put_checkpoint("prefix/back", {}, step=8, sequence=3)
    assert checkpoint_before(options, later=True) is None  # it goes on from that one
    again.note(ValueError("bad token"), 12)
    with pytest.raises(RepeatedErrorError, match="As going back has not helped, the data of iteration 12 or"):
        checkpoint_before(options, later=True)


@pytest.mark.parametrize("content", [b"global_step5", b"release", b"global_step5/mine", b"x" * 600])
def test_a_latest_of_somebody_else_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    uri = f"s3://{BUCKET}/prefix/latest_{len(content)}"
    Bucket(BUCKET).put(f"prefix/latest_{len(content)}/latest", content)
    with pytest.raises(ObjectStoreError, match=f"{uri}/latest .*give another prefix, or remove it"):
        check(tmp_path, save=uri)


def test_objects_of_others_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    uri = f"s3://{BUCKET}/prefix/shared"
    for key in ("data/corpus.bin", "notes", ".generations/00000001", "global_step5/g1_1/a.pt"):
        Bucket(BUCKET).put(f"prefix/shared/{key}", b"x")
    with caplog.at_level(logging.WARNING):
        check(tmp_path, save=uri)
    assert [record.getMessage() for record in caplog.records] == [
        f"--save {uri}: 2 objects there are not this program's, such as {uri}/data/corpus.bin; they are left alone, "
        "but a prefix is meant to be one run's own: give another"
    ]


def test_a_prefix_without_a_checkpoint_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    uri = f"s3://{BUCKET}/prefix/nothing"
    with caplog.at_level(logging.WARNING):
        check(tmp_path, save=uri, load=uri)  # a first launch
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check(tmp_path, load=uri)
    assert "no checkpoint there (correct the prefix): training starts from iteration 0" in caplog.text
    with pytest.raises(ConfigError, match=f"--load {uri}: no checkpoint there; correct the prefix, or drop --exit-on"):
        check(tmp_path, load=uri, exit_on_missing_checkpoint=True)
    key = "prefix/nothing/global_step5/mp_rank_00_model_states.pt"
    Bucket(BUCKET).put(key, b"x")
    told = f"such as s3://{BUCKET}/{key}; copy upstream's checkpoint to a directory"
    with pytest.raises(ConfigError, match=told):
        check(tmp_path, load=uri, exit_on_missing_checkpoint=True)


def test_one_checkpoint_is_given_as_the_prefix(tmp_path: Path) -> None:
    run = f"s3://{BUCKET}/prefix/run"
    Bucket(BUCKET).put("prefix/run/global_step5/g1_1/manifest.json", b"{}")
    with pytest.raises(
        ConfigError, match=f"{run}/global_step5: is one checkpoint itself: give --load {run} --load-tag global_step5"
    ):
        check(tmp_path, load=f"{run}/global_step5")


def test_weights_are_asked_of_a_prefix_without_any(tmp_path: Path) -> None:
    uri = f"s3://{BUCKET}/prefix/no_weights"
    with pytest.raises(ConfigError, match=f"--finetune takes the weights of --load {uri}, where no checkpoint is"):
        check(tmp_path, load=uri, finetune=True)


def test_all_checkpoints_of_a_prefix_are_gone(tmp_path: Path) -> None:
    """The trace, which is in a directory, tells what was saved there."""
    uri = f"s3://{BUCKET}/prefix/gone"
    _, cycle = claim_cycle(tmp_path, "launch", 0)
    saved = [
        {"type": "runtime", "save_dir": uri},
        {"type": "operation_begin", "op": 1, "operation": "save", "start_ns": 1, "tag": "global_step5"},
        {"type": "span", "op": 1, "phase": "commit", "detail": "publish", "start_ns": 1, "end_ns": 2},
        {"type": "operation_end", "op": 1, "end_ns": 2, "outcome": "ok"},
    ]
    file = tmp_path / RANK_FILE_PATTERN.format(rank=0, cycle=cycle)
    file.write_text("".join(json.dumps(record) + "\n" for record in saved))
    trace = TraceConfig(restart_trace_dir=str(tmp_path))
    options = {"save": uri, "load": uri, "save_interval": 5, "checkpoint_engine": "torch"}

    def start(**more: Any) -> Config:
        return dataclasses.replace(config(), checkpoint=CheckpointConfig(**options, **more), trace=trace)

    told = f"--save {uri}: holds no checkpoint, and this run has saved global_step5 there"
    with pytest.raises(ConfigError, match=told):
        check_not_lost(start())
    check_not_lost(start(allow_start_over=True))
    put_checkpoint("prefix/gone", {})
    check_not_lost(start())


def put_checkpoint(
    prefix: str, training: dict[str, Any], step: int = 5, sequence: int = 1, layout: Layout = HERE
) -> None:
    """A checkpoint below the prefix, of a run with these settings besides."""
    saved = candidate(config(), layout).manifest
    assert saved is not None
    saved = dataclasses.replace(saved, tag=f"global_step{step}", step=step, sequence=sequence)
    bucket, place = Bucket(BUCKET), f"{prefix}/{saved.tag}/g1_{sequence}"
    objects = {name: StoredObject(bucket.put(f"{place}/{name}", b"x"), "none") for name in saved.files}
    manifest = dataclasses.replace(saved, training=saved.training | training, objects=objects)
    bucket.put(f"{place}/manifest.json", manifest.to_json().encode())


@pytest.mark.parametrize(
    ("training", "train_iters", "told"),
    [
        ({"no_save_rng": True}, 9, "holds no random state, and dropout would repeat its masks"),
        ({"no_save_optim": True}, 9, "holds no optimizer state"),
        ({"optimizer": "sgd"}, 9, "was saved with --optimizer sgd"),
        ({"lr_decay_style": "cosine"}, 9, "learning-rate schedule: lr_decay_style is cosine"),
        ({}, 3, "--train-iters 3: .* is of iteration 5, so nothing would be trained"),
    ],
)
def test_what_the_manifest_in_a_bucket_refuses(
    tmp_path: Path, training: dict[str, Any], train_iters: int, told: str
) -> None:
    """As in a directory, before torch is imported."""
    name = f"refused_{'_'.join(training) or train_iters}"
    put_checkpoint(f"prefix/{name}", training)
    load = CheckpointConfig(load=f"s3://{BUCKET}/prefix/{name}", checkpoint_engine="torch", storage_cache=str(tmp_path))
    mine = dataclasses.replace(config({"train_iters": train_iters}, {"lr_decay_iters": 9}), checkpoint=load)
    with pytest.raises(CheckpointMismatchError, match=told):
        check_newest(mine, HERE, VOCAB)


HOSTS = 512
MANY = Layout(tp=2, pp=1, dp=4 * HOSTS)


def start_of(host: int, uri: str, tmp_path: Path, deadline_s: float) -> Config:
    """What the first rank of a host is started with; the hosts have 8 ranks each.

    `deadline_s`: no other test's, as a client is kept in the process, with its endpoint.
    """
    stored = CheckpointConfig(
        checkpoint_engine="torch", save=uri, save_interval=5, load=uri, storage_cache=str(tmp_path / "node"),
        storage_deadline=deadline_s,
    )  # fmt: skip
    data = DataConfig(
        data_path=(write_dataset(tmp_path / "corpus"),), data_cache_path=str(tmp_path / "cache"),
        tokenizer_type="NullTokenizer", vocab_size=500,
    )  # fmt: skip
    parallel = ParallelConfig(rank=8 * host, world_size=MANY.world_size, tensor_model_parallel_size=MANY.tp)
    return dataclasses.replace(
        config({"global_batch_size": MANY.dp}), checkpoint=stored, parallel=parallel, data=data,
        trace=TraceConfig(restart_trace=False),
    )  # fmt: skip


def test_of_many_hosts_only_the_first_lists(tmp_path: Path, server: Server) -> None:
    """Of a launch on 512 hosts: the first, the second, one in the middle and the last are started here.

    The others ask for one small object, which shows whether the store answers them, and claim nothing.
    """
    put_checkpoint("prefix/many_hosts", {"lr_decay_steps": 9 * MANY.dp}, layout=MANY)
    requests = []
    with FaultProxy(server).running() as proxy, environment_of(proxy.environment()):
        for host in (0, 1, HOSTS // 2, HOSTS - 1):
            before = len(proxy.seen)
            start = start_of(host, f"s3://{BUCKET}/prefix/many_hosts", tmp_path, 119)
            check_before_imports(start)
            ownership = claim_save_directory(start)
            assert (ownership is None) == (host != 0)
            if ownership is not None:
                ownership.release()
            requests.append([f"{each.method} {each.path}" for each in proxy.seen[before:]])
    drop_listings()
    lists = [sum("list-type=2" in request for request in of_host) for of_host in requests]
    assert lists[0] == 5 and not any(lists[1:])
    assert sum("prefix=prefix%2Fmany_hosts%2F&" in request for request in requests[0]) == 1
    assert all(of_host == [f"GET /{BUCKET}/prefix/many_hosts/latest"] for of_host in requests[1:])


@pytest.mark.parametrize("ended", [True, False], ids=["had ended", "may still run"])
def test_what_another_launch_commits_after_the_listing_is_found(tmp_path: Path, ended: bool) -> None:
    """A launch lists before its claim. Until then the owner before it may commit, unless it had ended."""
    name = f"prefix/between_{ended}"
    stored = open_checkpoints("--save", f"s3://{BUCKET}/{name}", saving_to(f"s3://{BUCKET}/{name}", tmp_path))
    owner = claim(stored.bucket, stored.uri)
    put_checkpoint(name, {}, step=5)
    if ended:
        owner.release()
    after = ended_generation(stored.bucket, stored.uri)
    assert after == (1 if ended else None)
    stored.list_once(after)
    put_checkpoint(name, {}, step=8, sequence=2)
    mine = claim(stored.bucket, stored.uri, take_over=True)
    stored.claimed(mine.generation)
    assert [found.step for found in stored.discover(None)[0]] == ([5] if ended else [8, 5])
    drop_listings()
    assert [found.step for found in stored.discover(None)[0]] == [8, 5]
    for hold in (owner, mine):
        hold.release()


def test_a_latest_that_was_not_listed_makes_a_start_list_again(tmp_path: Path) -> None:
    """Of a --load where another job saves."""
    uri = f"s3://{BUCKET}/prefix/newer"
    stored = open_checkpoints("--load", uri, saving_to(uri, tmp_path))
    put_checkpoint("prefix/newer", {}, step=5)
    stored.list_once()
    put_checkpoint("prefix/newer", {}, step=8, sequence=2)
    stored.bucket.put("prefix/newer/latest", b"global_step8/g1_2")
    assert [found.step for found in stored.discover(None)[0]] == [8, 5]
    drop_listings()


def test_a_latest_whose_checkpoint_is_gone_makes_a_start_list_once_more(tmp_path: Path, server: Server) -> None:
    """However often it asks what is there, and whichever launch claims the prefix meanwhile."""
    uri, gone = f"s3://{BUCKET}/prefix/gone", b"global_step8/g1_2"
    put_checkpoint("prefix/gone", {}, step=5)
    Bucket(BUCKET).put("prefix/gone/latest", gone)
    with FaultProxy(server).running() as proxy, environment_of(proxy.environment()):
        stored = StoredCheckpoints(ObjectUri(BUCKET, "prefix/gone"), Bucket(BUCKET), tmp_path)

        def lists_of_all() -> int:
            return sum("list-type=2" in each.path and "prefix=prefix%2Fgone%2F&" in each.path for each in proxy.seen)

        stored.list_once(0)
        told = [f"{uri}/latest names {gone.decode()}, which is not there"]
        for _ in range(3):
            found, problems = stored.discover(None)
            assert [each.step for each in found] == [5] and problems == told and lists_of_all() == 2
        stored.claimed(1)
        assert stored.discover(None)[1] == told and lists_of_all() == 2
        stored.claimed(3)
        assert stored.discover(None)[1] == told and lists_of_all() == 3
        assert sum("manifest.json" in each.path for each in proxy.seen) == 1
        stored.bucket.put("prefix/gone/latest", b"global_step9/g1_3")
        put_checkpoint("prefix/gone", {}, step=9, sequence=3)
        assert [each.step for each in stored.discover(None)[0]] == [9, 5] and lists_of_all() == 4
        drop_listings()


@pytest.mark.parametrize("host", [0, 1], ids=["rank 0", "another host"])
def test_a_crash_that_is_old_is_published_before_it_is_removed(tmp_path: Path, host: int) -> None:
    """If its own run starts again on that host, be it after a month."""
    uri = f"s3://{BUCKET}/prefix/old_crash_{host}"
    put_checkpoint(f"prefix/old_crash_{host}", {"lr_decay_steps": 9 * MANY.dp}, layout=MANY)
    crashes(tmp_path / "node", uri)
    for path in (*(tmp_path / "node").glob("*/*"), *(tmp_path / "node").iterdir()):
        os.utime(path, (0, time.time() - 31 * 24 * 3600))
    start = start_of(host, uri, tmp_path, 118)
    check_before_imports(start)
    drop_listings()
    assert len(recorded(start.checkpoint)) == 1


@pytest.mark.parametrize("host", [0, 1], ids=["rank 0", "another host"])
def test_a_later_start_does_not_need_the_bucket_of_the_first(tmp_path: Path, host: int) -> None:
    """With --save in a directory: the bucket of --load may be gone, and the flags of both starts are the same."""
    save, uri = tmp_path / "run", f"s3://{BUCKET}-that-is-gone/pretrained"
    start = start_of(host, uri, tmp_path, 118)
    start = dataclasses.replace(start, checkpoint=dataclasses.replace(start.checkpoint, save=str(save)))
    with pytest.raises(ConfigError, match=f"{uri}.*: there is no bucket"):
        check_before_imports(start)
    saved = candidate(config(), MANY).manifest
    assert saved is not None
    begun = first_start(start.checkpoint)
    training = saved.training | {"lr_decay_steps": 9 * MANY.dp}
    saved = dataclasses.replace(saved, training=training, loaded_from=begun.loaded_from, first_start=begun.flags)
    (save / saved.tag).mkdir(parents=True)
    write_manifest(save / saved.tag, saved, fsync=False)
    assert check_before_imports(start).later_start


def test_a_heartbeat_counts_that_comes_after_the_new_launch_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host was stopped for longer than it looks: it must not take the prefix from a launch that lives."""
    uri = parse_uri("--save", f"s3://{BUCKET}/prefix/stood_still")
    assert isinstance(uri, ObjectUri)
    there = claim(Bucket(BUCKET), uri)
    seen = generations._newest(Bucket(BUCKET), uri)
    there.release()
    assert seen is not None
    seen = dataclasses.replace(seen, owner=dataclasses.replace(seen.owner, host="elsewhere"))
    beats: list[int] = []
    monkeypatch.setattr(
        generations, "_newest", lambda *_: dataclasses.replace(seen, version=f"version {len(beats) > 1}")
    )
    stand_still_in_sleep(monkeypatch, 0, beats.append)
    with pytest.raises(SaveDirectoryInUseError, match="host elsewhere"):
        claim(Bucket(BUCKET), uri)
