"""What is below a prefix before a run begins: somebody else's objects, and no checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from megatron.config import CheckpointConfig, ConfigError
from megatron.fileio.object_store import Bucket
from megatron.fileio.store_errors import ObjectStoreError
from megatron.startup.preflight import check_object_storage
from tests.object_storage import BUCKET

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("here")]  # an S3 server is started


def check(tmp_path: Path, **options: Any) -> None:
    more = {"save_interval": 5} if "save" in options else {}
    check_object_storage(CheckpointConfig(checkpoint_engine="torch", storage_cache=str(tmp_path), **more, **options))


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
