"""Small host-side agreements between all ranks: one Python object each, over a tree of hosts, never over the device.

One ControlPlane is for one thread: agreements of two threads on one tree would mix.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.net.secret import launch_secret
from megatron.parallel.connecting import connect_all_ranks, own_address
from megatron.parallel.tree import AgreementLostError, Tree
from restart_trace.under_way import RANKS, UnderWay

_AGREEMENT = "agreement of all ranks"


class ControlPlane:
    """Gather and broadcast of small objects; `tree`: over all ranks, None if there is one.

    Whatever waits for other ranks raises AgreementLostError if a rank is gone, and AgreementTimeoutError if one has
    waited longer than the tree allows; no agreement can be made afterwards.
    """

    def __init__(self, rank: int, world_size: int, tree: Tree | None = None) -> None:
        if tree is None and world_size > 1:
            raise ValueError(f"{world_size} ranks need a tree to agree")
        self.rank = rank
        self.world_size = world_size
        self._tree = tree

    @property
    def given_up(self) -> bool:
        """Whether no agreement can be made any more."""
        return self._tree is not None and self._tree.closed

    def gather(self, item: Any) -> list[Any] | None:
        """Items of all ranks, by rank, on rank 0; None elsewhere."""
        if self._tree is None:
            return [item]
        with _agreement(self._tree):
            found = self._tree.up(_pickled(item))
            return None if found is None else [pickle.loads(content) for _, content in found]

    def broadcast(self, item: Any) -> Any:
        """Rank 0's item, on every rank."""
        if self._tree is None:
            return item
        with _agreement(self._tree):
            found = self._tree.down(_pickled(item) if self.rank == 0 else b"")
            return item if self.rank == 0 else pickle.loads(found)

    def scatter(self, items: Sequence[Any] | None) -> Any:
        """Of rank 0's `items`, by rank, the one for this rank: it is told of no other."""
        if self._tree is None:
            assert items is not None
            return items[0]
        with _agreement(self._tree):
            return pickle.loads(self._tree.scatter(None if items is None else [_pickled(item) for item in items]))

    def agree(self, error: str | None) -> list[tuple[int, str]]:
        """Exchange success or failure: every rank gets [(rank, error)] of those that failed."""
        if self._tree is None:
            return [] if error is None else [(self.rank, error)]
        with _agreement(self._tree):
            failed = self._tree.up(None if error is None else error.encode())
            return self.broadcast(failed and [(rank, content.decode()) for rank, content in failed])

    def give_up(self, why: str = "could not agree with the others") -> None:
        """Close the connections, so that ranks that wait for this one fail at once, and all hear why."""
        if self._tree is not None:
            self._tree.give_up(why)

    def close(self) -> None:
        """Close the connections after the last agreement."""
        if self._tree is not None:
            self._tree.close()


def control_planes(store: Any, rank: int, world_size: int, number: int, timeout_s: float) -> list[ControlPlane]:
    """As many as are asked for, each for a thread of its own; collective: the ranks meet at `store`.

    The environment says how other ranks reach this one, as in `own_address`, and has the secret of the launch, if it
    has one; both raise ValueError if they cannot be used. Raises AgreementLostError as `connect_all_ranks`.
    """
    if world_size == 1:
        return [ControlPlane(rank, world_size) for _ in range(number)]
    address = own_address(os.environ, os.environ["MASTER_ADDR"])
    secret = (launch_secret() or "").encode()
    trees = connect_all_ranks(store, rank, world_size, os.uname().nodename, address, number, timeout_s, secret)
    return [ControlPlane(rank, world_size, tree) for tree in trees]


@contextmanager
def _agreement(tree: Tree) -> Iterator[None]:
    """The body is an agreement over `tree`: if it cannot be made, for whatever reason, no other rank waits for it."""
    with UnderWay(RANKS, _AGREEMENT):
        try:
            yield
        except AgreementLostError:
            raise
        except BaseException as error:
            tree.give_up(f"left an agreement: {type(error).__name__}: {error}")
            raise


def _pickled(item: Any) -> bytes:
    return pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
