"""Ranks that agree through a store, which may outlive their job."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest
import torch.distributed as dist

from megatron.adapters.store_agreement import StoreAgreement

STORES: Any = dist  # whose stores are not annotated as its own
FORK = multiprocessing.get_context("fork")


def join(port: int, rank: int) -> None:
    """Be a rank of a job of two, as torchrun starts it: the store is the agent's."""
    store = STORES.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def agree_twice(port: int, rank: int, answers: Any) -> None:
    join(port, rank)
    agreement = StoreAgreement(60)
    answers.put([agreement.agree(number, (number, rank), lambda given: given) for number in range(2)])


def be_killed_in_an_agreement(port: int, rank: int, answers: Any) -> None:
    join(port, rank)
    agreement = StoreAgreement(0)
    if rank == 1:
        with pytest.raises(TimeoutError, match="another rank did not answer within 0 s"):
            agreement.agree(0, "of the attempt before", lambda given: given)
    answers.put(None)


def agree_after_a_restart(port: int, rank: int, answers: Any) -> None:
    join(port, rank)
    agreement = StoreAgreement(60)
    if rank == 1:
        time.sleep(0.5)  # in which the other rank sees what the attempt before has left, if it looks there
    answers.put(agreement.agree(0, rank, lambda given: given))


def on_both_ranks(work: Any, port: int) -> list[Any]:
    answers = FORK.Queue()
    ranks = [FORK.Process(target=work, args=(port, rank, answers)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found = [answers.get(timeout=300) for _ in ranks]
    for rank in ranks:
        rank.join()
    return found


def agreements_in(store: Any) -> list[str]:
    return [key for key in store.list_keys() if "megatron.adapters" in key]


def test_all_ranks_have_one_answer_and_leave_nothing_in_the_store() -> None:
    store = STORES.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    expected = [[(number, 0), (number, 1)] for number in range(2)]
    assert on_both_ranks(agree_twice, store.port) == [expected, expected]
    assert agreements_in(store) == []


def test_keys_of_the_attempt_before_are_not_answers() -> None:
    store = STORES.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    on_both_ranks(be_killed_in_an_agreement, store.port)
    kept = agreements_in(store)
    assert kept
    for key in set(store.list_keys()) - set(kept):
        store.delete_key(key)  # gloo's own, by which the ranks might look for processes that are gone
    assert on_both_ranks(agree_after_a_restart, store.port) == [[0, 1], [0, 1]]
