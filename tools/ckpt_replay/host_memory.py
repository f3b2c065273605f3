"""Saves in host memory: the slots that the replay's processes inherit, and the process that holds copies of them.

The process that forks the ranks has the role of a launcher's agent: it holds their slots, so that a load finds the
saves of a process that has ended. Copies go over the loopback to a second process, in place of another host.
"""

from __future__ import annotations

import os

from megatron.net.secret import VARIABLE as SECRET_VARIABLE
from megatron.net.secret import make_secret
from megatron.peers.client import VARIABLE as OWN
from megatron.peers.client import Peer
from megatron.peers.memory_slots import VARIABLE as SLOTS
from megatron.peers.memory_slots import hold_slots
from megatron.peers.process import CopyProcess
from restart_trace.cycles import LAUNCH_ID_VARIABLE

_HOLDER = "CKPT_REPLAY_HOLDER"  # ADDRESS:PORT of the process that holds copies
_LOOPBACK = "127.0.0.1"


class HeldMemory:
    """In the single-threaded process that forks the ranks: their slots, and both processes that hold copies.

    Everything ends with this process. `environment`: the variables by which a forked rank finds them.
    """

    def __init__(self, ranks: int) -> None:
        os.environ[LAUNCH_ID_VARIABLE] = f"ckpt_replay_{os.getpid()}"
        make_secret()
        self._holder = CopyProcess(_LOOPBACK)  # started before the slots exist, so that it inherits none of them
        self._holder.start(lambda: None)
        reached_at = os.environ[OWN]
        hold_slots(ranks)
        self._own = CopyProcess(_LOOPBACK)
        self._own.start(self._holder.close_in_child)
        known = (SLOTS, OWN, LAUNCH_ID_VARIABLE, SECRET_VARIABLE)
        self.environment = {name: os.environ[name] for name in known} | {_HOLDER: reached_at}


def holder() -> Peer:
    """In a rank: the process that holds copies in place of another host."""
    address, _, port = os.environ[_HOLDER].rpartition(":")
    return Peer("the holder of copies", address, int(port))
