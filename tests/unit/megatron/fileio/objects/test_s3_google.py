"""Google's dialect against a stand-in that keeps to what its documents, and people who have tried it, say of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron.checkpointing.engines.errors import SaveDirectoryInUseError
from megatron.checkpointing.store.bucket.checkpoints import StoredCheckpoints
from megatron.checkpointing.store.bucket.generations import claim
from megatron.checkpointing.store.bucket.saving import ObjectDirectory
from megatron.config.uris import ObjectUri
from megatron.fileio.objects.errors import ObjectStoreError
from megatron.fileio.objects.s3 import Bucket
from megatron.fileio.objects.s3_google import SETTING, speaks_google
from tests.object_storage import BUCKET, GoogleProxy, Server, environment_of, serving
from tests.object_storage_kills import load, states, writer

pytestmark = pytest.mark.slow  # an S3 server is started


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


@pytest.fixture
def store(server: Server) -> Iterator[GoogleProxy]:
    with GoogleProxy(server).running() as proxy, environment_of(proxy.environment() | {SETTING: "google"}):
        assert isinstance(proxy, GoogleProxy)
        yield proxy


@pytest.mark.usefixtures("store")
def test_writes_are_conditional_on_generations() -> None:
    bucket = Bucket(BUCKET)
    first = bucket.create("g/one", b"first")
    assert first and first.isdigit() and bucket.get("g/one", 10) == (b"first", first)
    assert bucket.create("g/one", b"second") is None and bucket.create("g/one", b"first") == first
    second = bucket.replace("g/one", b"second", first)
    assert second and bucket.replace("g/one", b"third", first) is None
    assert bucket.replace("g/one", b"third", bucket.no_version) is None
    assert bucket.replace("g/none", b"x", first) is None
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: bucket.create("g/raced", str(i).encode()), range(8)))
    assert sum(version is not None for version in made) == 1
    keys = [info.key for info in bucket.list("g/")]
    assert keys == ["g/one", "g/raced"]
    bucket.delete(keys)
    assert bucket.create("g/one", b"again") is not None


def test_checkpoints_are_saved_and_found(store: GoogleProxy, tmp_path: Path) -> None:
    stored = StoredCheckpoints(ObjectUri(BUCKET, "g/saves"), Bucket(BUCKET, threads=2), tmp_path / "node")
    held = claim(stored.bucket, stored.uri)
    with pytest.raises(SaveDirectoryInUseError):
        claim(stored.bucket, stored.uri)
    directory, saves = ObjectDirectory(stored, 0, held, 1), writer("torch", held.generation)
    for step in (1, 2):
        saves.save(directory, step, lambda step=step: states(step))
    (candidate,), problems = stored.discover(None)
    assert problems == [] and stored.read_latest() == "global_step2/g1_2"
    assert all(torch.equal(tensor, torch.full_like(tensor, 2.0)) for tensor in load(stored, candidate).values())
    assert any("uploadId" in request.path for request in store.seen)
    key, upload = (
        "g/saves/global_step3/g1_3/a",
        stored.bucket._call(
            "beginning an upload to", "g/saves", "create_multipart_upload", Key="g/saves/global_step3/g1_3/a"
        )["UploadId"],
    )
    assert stored.bucket.unfinished_uploads("g/saves/") == [(key, upload)]
    stored.bucket.abort_upload(key, upload)
    assert stored.bucket.unfinished_uploads("g/saves/") == []
    directory.close()
    held.release()
    claim(stored.bucket, stored.uri).release()


@pytest.mark.usefixtures("store")
def test_in_amazons_dialect_the_store_is_refused() -> None:
    refused = pytest.raises(ObjectStoreError, match="does not keep to If-None-Match and If-Match")
    with environment_of({SETTING: "s3"}), refused:
        claim(Bucket(BUCKET), ObjectUri(BUCKET, "g/claimed"))


@pytest.mark.usefixtures("store")
def test_a_wrong_secret_is_told() -> None:
    wrong = environment_of({"AWS_SECRET_ACCESS_KEY": "another"})
    with wrong, pytest.raises(ObjectStoreError, match="correct AWS_SECRET_ACCESS_KEY"):
        Bucket(BUCKET).check_reachable("g/")


@pytest.mark.usefixtures("store")
def test_without_credentials_nothing_is_asked() -> None:
    none = environment_of({"AWS_ACCESS_KEY_ID": ""})
    with none, pytest.raises(ObjectStoreError, match="no usable credentials"):
        Bucket(BUCKET).check_reachable("g/")


@pytest.mark.parametrize(
    ("endpoint", "setting", "expected"),
    [
        ("https://storage.googleapis.com", "", True),
        ("https://storage-mine.p.googleapis.com:443", "", True),
        ("https://storage.googleapis.com", "s3", False),
        ("https://notgoogleapis.com", "", False),
        ("http://10.0.0.1:9000", "", False),
        ("http://10.0.0.1:9000", "google", True),
        (None, "", False),
    ],
)
def test_the_dialect_is_that_of_the_endpoint(endpoint: str | None, setting: str, expected: bool) -> None:
    with environment_of({SETTING: setting}):
        assert speaks_google(endpoint) is expected


def test_an_unknown_dialect_is_refused(server: Server) -> None:
    wrong = environment_of(server.environment() | {SETTING: "azure"})
    with wrong, pytest.raises(ObjectStoreError, match=f"{SETTING}=azure: give google or s3"):
        Bucket(BUCKET)
