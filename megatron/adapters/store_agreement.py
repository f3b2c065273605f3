"""Agreement of all ranks on a save, in the background, through the store of torch.distributed.

No collective agrees: training's own would be in its way, and a script may destroy its process groups before the last
save has ended. The store outlives them, since this module keeps it. It may also outlive the job: torchrun's rendezvous
keeps it over restarts, with the keys of the attempt before. So each agreement has a name that was never used.
"""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_LONGEST_PAUSE_S = 0.1


class StoreAgreement:
    """Made by all ranks together, after `init_process_group`. `timeout_s`: how long a rank waits for others.

    No request waits in the store, where it would hold up training's.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._kept = _get_default_store()  # on rank 0 it may be the server
        clone = getattr(self._kept, "clone", None)  # of newer versions of torch
        self._store: Any = self._kept if clone is None else clone()
        self._timeout_s = timeout_s
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0)
        self._prefix = f"megatron.adapters/{name[0]}"

    def agree(self, number: int, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """What `decide` makes, on rank 0, of what all ranks give; on each rank. `decide` must not raise.

        `number`: that of the agreement, the same on all ranks. Raises TimeoutError if a rank does not answer.
        """
        key = f"{self._prefix}/{number}"
        self._store.set(f"{key}/{self.rank}", pickle.dumps(mine))
        if self.rank == 0:
            given = [pickle.loads(self._get(f"{key}/{rank}")) for rank in range(self.world_size)]
            answer = decide(given)
            self._store.set(f"{key}/answer", pickle.dumps(answer))
            for rank in range(1, self.world_size):  # the store may end with this process
                self._get(f"{key}/{rank}/heard")
            self._forget(key)
            return answer
        answer = pickle.loads(self._get(f"{key}/answer"))
        self._store.set(f"{key}/{self.rank}/heard", b"")
        return answer

    def _forget(self, key: str) -> None:
        """Take the keys of an agreement of which all ranks have heard out of the store."""
        heard = [f"{rank}/heard" for rank in range(1, self.world_size)]
        for name in ("answer", *map(str, range(self.world_size)), *heard):
            self._store.delete_key(f"{key}/{name}")

    def _get(self, key: str) -> bytes:
        deadline, pause = time.monotonic() + self._timeout_s, 0.001
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"another rank did not answer within {self._timeout_s:g} s ({key})")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return bytes(self._store.get(key))
