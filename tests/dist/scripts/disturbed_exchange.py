"""pretrain_gpt.py whose replicas' exchange of weights is disturbed on the rank `$DISTURBED`, when it comes to it.

`$DISTURBANCE`: "flip" flips a bit of what that rank has received; "kill" is SIGKILL in the place of its part.
"""

from __future__ import annotations

import os
import runpy
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.state import replicas

ROOT = Path(__file__).resolve().parents[3]
EXCHANGE = replicas.broadcast_within_replicas


def disturbed(engine: Any, place: Any, tensors: Iterable[tuple[torch.Tensor, int, range]]) -> None:
    if os.environ["DISTURBANCE"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    exchanged = list(tensors)
    EXCHANGE(engine, place, exchanged)
    received = next(tensor for tensor, reader, _ in exchanged if reader != place.at.dp)
    received.view(-1).view(torch.uint8)[0] ^= 1


if os.environ["RANK"] == os.environ["DISTURBED"]:
    replicas.broadcast_within_replicas = disturbed

runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
