"""What a rank reads: its stage's micro-batches, and where the loader leaves them."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from megatron.checkpointing.state.collect import Progress
from megatron.config import Config, ConfigError
from megatron.config.arguments import config_from_args, parse_args
from megatron.parallel.control_plane import ControlPlane
from megatron.parallel.topology import Layout
from megatron.startup.initialize import Runtime
from megatron.startup.preflight import Vocabulary
from megatron.training.data import (
    BatchRequest,
    DataIterators,
    agreed_vocabulary,
    batch_request,
    build_data_iterators,
    run_on_rank_0,
)
from tests.unit.megatron.parallel.test_tree import on_all, trees

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 2 --data-path x --tokenizer-type NullTokenizer --vocab-size 99 --no-query-key-layer-scaling"
)
CPU = torch.device("cpu")


class Constant:
    def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]:
        return {"text": np.full(5, i, dtype=np.int64)}


class Numbered:
    def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]:
        return {"text": np.full(33, i, dtype=np.int64)}


def config_of(flags: str = "") -> Config:
    return config_from_args(parse_args(f"{FLAGS} {flags}".split(), {}), {})


def runtime(device: torch.device = CPU, stage: int = 0, stages: int = 1) -> Runtime:
    layout, nothing = Layout(tp=1, pp=stages, dp=1), None
    plane: Any = ControlPlane(0, 1)
    return Runtime(layout, layout.coordinates(stage), stage, device, "gloo", nothing, plane, plane)  # pyright: ignore[reportArgumentType]


def iterators(of: Runtime, flags: str) -> DataIterators:
    return build_data_iterators(lambda _: (Constant(), None, None), config_of(flags), of, Progress())


@pytest.mark.parametrize(("device", "pinned"), [(CPU, 0), (torch.device("cuda", 0), 1)])
def test_batches_for_a_device_are_pinned(monkeypatch: pytest.MonkeyPatch, device: torch.device, pinned: int) -> None:
    """A stand-in pins, since this machine need not have a device; tests/gpu/test_data.py pins really."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: seen.append(tensor) or tensor)
    data = iterators(runtime(device), "--num-workers 0")
    assert data.train is not None and next(data.train)["text"].tolist() == [[0] * 5]
    assert len(seen) == pinned


def test_stages_in_between_read_nothing() -> None:
    assert [iterators(runtime(stage=stage, stages=3), "").train is None for stage in range(3)] == [False, True, False]


def test_a_stage_asks_for_what_it_uses() -> None:
    rotary = "--use-rotary-position-embeddings"
    assert batch_request(config_of(rotary), runtime(), 7) == BatchRequest(CPU, True, True, False, None)
    assert batch_request(config_of("--eod-mask-loss"), runtime(stages=2), 7) == BatchRequest(CPU, True, False, True, 7)
    assert batch_request(config_of(), runtime(stage=1, stages=2), 7) == BatchRequest(CPU, False, True, True, None)


def test_ranks_that_share_sequences_read_the_same_samples() -> None:
    """Of four ranks with the same weights two pairs, each pair a sample; the ranks of a pair take a part each."""
    layout = Layout(tp=1, pp=1, dp=4)
    plane: Any = ControlPlane(0, 1)
    read, parts = [], []
    for rank in range(4):
        env = {"WORLD_SIZE": "4", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        config = config_from_args(parse_args(f"{FLAGS} --ds-sequence-parallel-size 2".split(), env), env)
        of: Any = Runtime(layout, layout.coordinates(rank), rank, CPU, "gloo", None, plane, plane)  # pyright: ignore[reportArgumentType]
        data = build_data_iterators(lambda _: (Numbered(), None, None), config, of, Progress())
        assert data.train is not None
        read.append([next(data.train)["text"][0, 0].item() for _ in range(2)])
        request = batch_request(config, of, None)
        parts.append((request.part, request.parts))
    assert read == [[0, 2], [0, 2], [1, 3], [1, 3]]
    assert parts == [(0, 2), (1, 2), (0, 2), (1, 2)]


@pytest.mark.slow
def test_ranks_wait_for_an_index_longer_than_for_one_another() -> None:
    """Ranks are threads here; the deadline of their agreements passes while rank 0 works."""
    deadline_s = 5.0
    with trees(["a", "a", "b"], timeout_s=deadline_s) as found:
        built = threading.Event()
        planes = [ControlPlane(rank, len(found), tree) for rank, tree in enumerate(found)]

        def work() -> None:
            threading.Event().wait(1.2 * deadline_s)
            built.set()

        def wait(rank: int, _: Any) -> Any:
            return run_on_rank_0(planes[rank], 0.2, work), built.is_set(), planes[rank].agree(None)

        assert on_all(found, wait) == [(None, True, [])] * 3


def test_what_the_building_of_an_index_raises_is_for_rank_0_to_tell() -> None:
    with trees(["a", "b"]) as found:
        planes = [ControlPlane(rank, len(found), tree) for rank, tree in enumerate(found)]
        results = on_all(found, lambda rank, _: run_on_rank_0(planes[rank], 60.0, lambda: open("/no/such").close()))
        assert isinstance(results[0], FileNotFoundError) and results[1] is None


def test_all_hosts_take_the_padding_that_rank_0_has_seen_in_the_checkpoint() -> None:
    with trees(["a", "a", "b"]) as found:
        planes = [ControlPlane(rank, len(found), tree) for rank, tree in enumerate(found)]
        own = [Vocabulary(99, padded, 98) for padded in (256, 128, 128)]
        results = on_all(found, lambda rank, _: agreed_vocabulary(config_of(), own[rank], planes[rank]))
        assert results == [own[0]] * 3


@pytest.mark.parametrize("differs", [Vocabulary(120, 128, 98), Vocabulary(99, 128, 0)], ids=["size", "end"])
def test_a_host_whose_tokenizer_is_another_one_is_named(differs: Vocabulary) -> None:
    """Rank 0's would hide it: each host tokenizes and masks with its own."""
    with trees(["a", "a", "b"]) as found:
        planes = [ControlPlane(rank, len(found), tree) for rank, tree in enumerate(found)]
        own = [Vocabulary(99, 128, 98), Vocabulary(99, 128, 98), differs]

        def told(rank: int, _: Any) -> str:
            with pytest.raises(ConfigError) as raised:
                agreed_vocabulary(config_of(), own[rank], planes[rank])
            return str(raised.value)

        host = os.uname().nodename
        expected = (
            f"--tokenizer-type NullTokenizer: on rank 2, {host}, it has {differs.size} tokens and {differs.eod} ends a "
            "document, on rank 0 it has 99 tokens and 98 ends a document; give every host the same files and flags"
        )
        assert on_all(found, told) == [expected] * 3
