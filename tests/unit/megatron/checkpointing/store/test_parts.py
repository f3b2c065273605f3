"""How several readers divide what they read."""

from __future__ import annotations

from megatron.checkpointing.store.parts import share_of, spread


def test_items_of_sizes_are_spread_evenly() -> None:
    assert spread([1, 8, 2, 5, 4], 2) == [1, 0, 0, 1, 1]
    assert spread([3, 3], 1) == [0, 0] and spread([], 4) == []


def test_shares_of_all_are_the_items_in_order() -> None:
    assert [share_of("abcde", rank, 3) for rank in range(3)] == ["a", "bc", "de"]
    assert [share_of([], rank, 2) for rank in range(2)] == [[], []]
