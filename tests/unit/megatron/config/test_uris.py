"""URIs of --save and --load, and what goes with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from megatron.config import CheckpointConfig, ConfigError
from megatron.config.uris import ObjectUri, is_uri, location_of, parse_uri
from megatron.fileio.objects.bucket import CLIENTS
from megatron.fileio.objects.stores import STORES


def test_a_uri_is_a_bucket_and_a_prefix() -> None:
    uri = parse_uri("--save", "s3://my-bucket/runs/7b//")
    assert uri == ObjectUri("my-bucket", "runs/7b") and str(uri) == "s3://my-bucket/runs/7b"
    assert uri.key("latest") == "runs/7b/latest"
    assert not is_uri("/a/path") and not is_uri(None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gs://bucket/prefix", "gs:// is not supported"),
        ("s3:///prefix", "'' is no name of a bucket"),
        ("s3://bu cket/prefix", "'bu cket' is no name of a bucket"),
        ("s3://bucket", "names no prefix"),
        ("s3://bucket//", "names no prefix"),
        ("s3://bucket/a/../b", "empty, '.' or '..'"),
        ("s3://bucket/a//b", "empty, '.' or '..'"),
        ("s3://bucket/a?b", "characters to avoid"),
    ],
)
def test_what_names_no_prefix_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^--load {text.replace('?', '[?]')}: .*give s3://BUCKET/PREFIX") as refused:
        parse_uri("--load", text)
    assert why in str(refused.value)


@pytest.mark.parametrize("text", ["s3:/bucket/run", "gs:/bucket", "s3:/"])
def test_a_uri_with_one_slash_is_no_directory(text: str) -> None:
    for flag in ("save", "load"):
        with pytest.raises(
            ConfigError, match=f"^--{flag} {text}: a URI has two slashes: .* or ./{text} for a directory"
        ):
            dataclasses.replace(CheckpointConfig(save="/a", save_interval=1), **cast(Any, {flag: text}))
    assert location_of("--dir", f"./{text}") == Path(text)
    with pytest.raises(ConfigError, match=f"^--dir {text}: a URI has two slashes"):
        location_of("--dir", text)


def test_one_spelling_of_a_uri() -> None:
    options = CheckpointConfig(save="s3://bucket/run/", load="s3://bucket/run", save_interval=1)
    assert options.save == options.load and options.in_object_storage


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"load": "s3://bucket/run", "prefetch_on_start": True}, "--prefetch-on-start reads files ahead"),
        ({"load": "s3://bucket/run", "universal_checkpoint": True}, "--universal-checkpoint loads from a directory"),
    ],
)
def test_what_object_storage_does_not_have_is_refused(given: dict[str, Any], why: str) -> None:
    options = CheckpointConfig(save="s3://bucket/run", save_interval=1)
    with pytest.raises(ConfigError) as refused:
        dataclasses.replace(options, **given)
    assert why in str(refused.value)


def test_each_scheme_has_its_client() -> None:
    assert CLIENTS.keys() == STORES.keys()


@pytest.mark.parametrize("flag", [{"storage_cache": "/tmp"}, {"storage_deadline": 5.0}])
def test_flags_of_object_storage_do_nothing_without_it(flag: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does nothing without a --save or --load of s3://BUCKET/PREFIX"):
        CheckpointConfig(save="/a/path", save_interval=1, **flag)
