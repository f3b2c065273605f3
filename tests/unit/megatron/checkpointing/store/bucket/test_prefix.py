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

from megatron.checkpointing.engines.errors import CheckpointMismatchError
from megatron.checkpointing.preflight.compatibility import check_newest
from megatron.checkpointing.preflight.first_start import FirstStart
from megatron.checkpointing.preflight.repeated_errors import RepeatedErrorError, StepErrors, checkpoint_before, recorded
from megatron.checkpointing.store.bucket.generations import ObjectOwnership, claim
from megatron.checkpointing.store.manifest import StoredObject
from megatron.config import CheckpointConfig, Config, ConfigError, TraceConfig
from megatron.config.uris import ObjectUri, parse_uri
from megatron.fileio.objects.errors import ObjectStoreError
from megatron.fileio.objects.s3 import Bucket
from megatron.startup.preflight import check_not_lost, check_object_storage
from restart_trace.cycles import claim_cycle
from restart_trace.schema import RANK_FILE_PATTERN
from tests.object_storage import BUCKET
from tests.unit.megatron.checkpointing.preflight.test_compatibility import HERE, VOCAB, candidate, config
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
from megatron.checkpointing.preflight.first_start import FirstStart
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


def put_checkpoint(prefix: str, training: dict[str, Any], step: int = 5, sequence: int = 1) -> None:
    """A checkpoint below the prefix, of a run with these settings besides."""
    saved = candidate(config()).manifest
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
