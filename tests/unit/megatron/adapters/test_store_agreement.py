"""Ranks that agree through a store, which may outlive their job."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.adapters.store_agreement import StoreAgreement
from tests.dist.harness import Zygote

pytestmark = pytest.mark.slow  # each starts ranks

STORES: Any = dist  # whose stores are not annotated as its own


def join(directory: Path) -> int:
    """Be a rank of a job of two, as torchrun starts it: the store is the agent's. Returns which."""
    store = STORES.TCPStore("127.0.0.1", int((directory / "port").read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    return dist.get_rank()


def answer(directory: Path, rank: int, given: Any) -> None:
    (directory / f"answer_{rank}").write_text(json.dumps(given))


def agree_twice(directory: Path) -> None:
    rank = join(directory)
    agreement = StoreAgreement(60)
    answer(directory, rank, [agreement.agree(number, (number, rank), lambda given: given) for number in range(2)])


def be_killed_in_an_agreement(directory: Path) -> None:
    rank = join(directory)
    agreement = StoreAgreement(0)
    if rank == 1:
        with pytest.raises(TimeoutError, match="another rank did not answer within 0 s"):
            agreement.agree(0, "of the attempt before", lambda given: given)


def agree_after_a_restart(directory: Path) -> None:
    rank = join(directory)
    agreement = StoreAgreement(60)
    if rank == 1:
        time.sleep(0.5)  # in which the other rank sees what the attempt before has left, if it looks there
    answer(directory, rank, agreement.agree(0, rank, lambda given: given))


@pytest.fixture
def on_both_ranks(zygote: Zygote, tmp_path: Path) -> Callable[[Callable[[Path], None], Any], list[Any]]:
    """Have two ranks do something with a store; returns their answers, if they give any."""

    def do(work: Callable[[Path], None], store: Any) -> list[Any]:
        (tmp_path / "port").write_text(str(store.port))
        zygote.call(work, tmp_path, tmp_path, ranks=2)
        return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("answer_*"))]

    return do


def agreements_in(store: Any) -> list[str]:
    return [key for key in store.list_keys() if "megatron.adapters" in key]


def test_all_ranks_have_one_answer_and_leave_nothing_in_the_store(on_both_ranks: Any) -> None:
    store = STORES.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    expected = [[[number, 0], [number, 1]] for number in range(2)]
    assert on_both_ranks(agree_twice, store) == [expected, expected]
    assert agreements_in(store) == []


def test_keys_of_the_attempt_before_are_not_answers(on_both_ranks: Any) -> None:
    store = STORES.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    on_both_ranks(be_killed_in_an_agreement, store)
    kept = agreements_in(store)
    assert kept
    for key in set(store.list_keys()) - set(kept):
        store.delete_key(key)  # gloo's own, by which the ranks might look for processes that are gone
    assert on_both_ranks(agree_after_a_restart, store) == [[0, 1], [0, 1]]
