"""The index of GPT samples in its cache, built by one of several processes and safe from damage."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_cache import IndexCache, IndexCacheError
from megatron.data.indexed_dataset import IndexedDatasetError, MMapIndexedDataset
from tests.unit.megatron.data.dataset_helpers import CORPUS, build, dataset_of, in_memory, sha256


@pytest.fixture(autouse=True)
def _recorded_data_stay_as_they_are() -> Iterator[None]:
    yield
    assert not (Path(CORPUS).parent / "index-cache").exists()


def cache_files(directory: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in directory.iterdir()}


def test_the_cache_is_written_once_and_then_read(tmp_path: Path) -> None:
    first, *_ = build(data_cache_path=str(tmp_path))
    before = cache_files(tmp_path)
    suffixes = sorted(name.split("_", 1)[-1].split(".", 1)[-1] for name in before)
    assert suffixes == ["dsc", "npy", "npy", "npy"]
    assert len({name[:32] for name in before}) == 1  # upstream's naming: one MD5 for the four files
    second, *_ = build(data_cache_path=str(tmp_path))
    third, *_ = build(data_cache_path=str(tmp_path), is_builder=False)
    assert cache_files(tmp_path) == before
    assert all(np.array_equal(first[i]["text"], other[i]["text"]) for other in (second, third) for i in range(80))


def test_the_cache_is_beside_the_data_by_default_and_looked_for_there(tmp_path: Path) -> None:
    prefix = dataset_of(tmp_path, [50] * 9)
    build(data_path=[prefix])
    assert len(list((tmp_path / "index-cache").iterdir())) == 4
    build(data_path=[prefix], data_cache_path=str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["doc_idx", "sample_idx", "shuffle_idx"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "remove", "header"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, name: str, damage: str) -> None:
    expected = [sample["text"].tolist() for sample in build(data_cache_path=str(tmp_path))[0]]
    (path,) = tmp_path.glob(f"*_{name}.npy")
    content = path.read_bytes()
    flipped = bytes([content[-300] ^ 1])
    damaged = {
        "truncate": content[:-8],
        "flip": content[:-300] + flipped + content[-299:],
        "empty": b"",
        "remove": None,
        "header": b"\x00" * 20 + content[20:],
    }[damage]
    # A new file, as a torn write leaves it: the old one stays mapped.
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    assert [sample["text"].tolist() for sample in build(data_cache_path=str(tmp_path))[0]] == expected
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe garbage"])
def test_an_entry_without_its_description_is_built_again(tmp_path: Path, content: bytes | None) -> None:
    build(data_cache_path=str(tmp_path))
    (path,) = tmp_path.glob("*.dsc")
    written = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    build(data_cache_path=str(tmp_path))
    assert path.read_bytes() == written


def test_a_rebuilt_dataset_does_not_get_the_old_index(tmp_path: Path) -> None:
    prefix = dataset_of(tmp_path, [100, 10, 60])
    build(data_path=[prefix], train_valid_test_num_samples=(4, 0, 0), seq_length=10)
    prefix = dataset_of(tmp_path, [10, 100, 60])  # as many documents and tokens, another order
    dataset, *_ = build(data_path=[prefix], train_valid_test_num_samples=(4, 0, 0), seq_length=10)
    fresh = GPTDataset("train", MMapIndexedDataset(prefix), (0, 3), 4, 10, 1234)
    assert [s["text"].tolist() for s in dataset] == [s["text"].tolist() for s in fresh]


def test_a_damaged_entry_in_the_first_directory_is_not_read(tmp_path: Path) -> None:
    prefix = dataset_of(tmp_path, [70] * 40)
    expected = [sample["text"].tolist() for sample in build(data_path=[prefix])[0]]
    (path,) = (tmp_path / "index-cache").glob("*_shuffle_idx.npy")
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-40] + bytes(4) + content[-36:])
    other = str(tmp_path / "other")
    for is_builder in (True, False):
        dataset, *_ = build(data_path=[prefix], data_cache_path=other, is_builder=is_builder)
        assert [sample["text"].tolist() for sample in dataset] == expected


def test_an_unwritable_cache_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IndexCacheError, match=r"file/cache.*--data-cache-path"):
        build(data_cache_path=str(tmp_path / "file" / "cache"))


def test_a_missing_index_is_named_after_waiting(tmp_path: Path) -> None:
    with pytest.raises(IndexCacheError, match=rf"{tmp_path}.*--data-cache-path"):
        IndexCache((tmp_path,)).load("description", {}, wait_s=0.0)


def test_an_index_that_does_not_fit_the_data_is_not_read_as_samples(tmp_path: Path) -> None:
    dataset = in_memory(tmp_path, [50] * 4, 10, 8)
    arrays = dataset.block(0)
    arrays["sample_idx"][1:] += np.array([0, 3])
    with pytest.raises(IndexedDatasetError, match="index of the train dataset is damaged"):
        [dataset[i] for i in range(len(dataset))]


def test_workers_map_the_index_themselves(tmp_path: Path) -> None:
    dataset, *_ = build(data_cache_path=str(tmp_path))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 3000
    copy = pickle.loads(pickled)
    assert np.array_equal(copy[5]["text"], dataset[5]["text"])


# --- several processes ---


def _rank(rank: int, barrier: Any, failures: Any, results: Any, arguments: dict[str, Any]) -> None:
    calls = []

    def agree(error: Exception | None) -> None:
        calls.append(error)
        if error is not None:
            with failures.get_lock():
                failures.value += 1
        barrier.wait(300)
        if failures.value:
            raise RuntimeError("a rank failed")

    try:
        train, *_ = build(is_builder=rank == 0, agree=agree, **arguments)
        outcome = sha256(np.stack([train[i]["text"] for i in range(80)]))
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    results.put((rank, len(calls), outcome))


def run_ranks(count: int, arguments: dict[str, Any]) -> list[tuple[int, int, str]]:
    context = multiprocessing.get_context("fork")
    barrier, failures, results = context.Barrier(count), context.Value("i", 0), context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, barrier, failures, results, arguments)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    outcomes = sorted(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(300)
    return outcomes


def test_one_process_builds_and_all_read_the_same(tmp_path: Path) -> None:
    outcomes = run_ranks(4, {"data_cache_path": str(tmp_path)})
    alone_too, *_ = build(data_cache_path=str(tmp_path / "alone"))
    expected = sha256(np.stack([alone_too[i]["text"] for i in range(80)]))
    assert [(rank, calls) for rank, calls, _ in outcomes] == [(rank, 1) for rank in range(4)]
    assert {outcome for _, _, outcome in outcomes} == {expected}


def test_a_failure_of_the_builder_ends_all_processes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcomes = run_ranks(3, {"data_cache_path": str(tmp_path / "file" / "cache")})
    assert outcomes == [(rank, 1, "RuntimeError: a rank failed") for rank in range(3)]


def test_an_agreement_that_lets_an_error_pass_does_not_hide_it(tmp_path: Path) -> None:
    seen: list[Exception | None] = []
    with pytest.raises(IndexedDatasetError, match="no such file"):
        build(data_path=[str(tmp_path / "missing")], agree=seen.append)
    assert len(seen) == 1


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    precious, cache = tmp_path / "precious", tmp_path / "cache"
    cache.mkdir()
    precious.write_text("mine")
    build(data_cache_path=str(cache))
    for name in cache_files(cache):
        (cache / name).unlink()
        (cache / f"{name}.tmp-{os.uname().nodename}-{os.getpid()}").symlink_to(precious)
    build(data_cache_path=str(cache))
    assert precious.read_text() == "mine" and len(cache_files(cache)) == 4
