"""The rendezvous of a restart in place.

torchrun's agent keeps one store through all its restarts (TORCHELASTIC_USE_AGENT_STORE), and torch reads the keys of
its process groups from it. Restarted ranks would find the addresses of dead ranks and try to connect to them, so each
attempt has keys of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

_SCHEME = "restarted-env"


def init_method() -> str | None:
    """The init_method for torch.distributed: None, which means env://, unless this is a restart in place."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    from torch.distributed.rendezvous import register_rendezvous_handler

    register_rendezvous_handler(_SCHEME, _rendezvous)
    return f"{_SCHEME}://"


def _rendezvous(url: str, timeout: timedelta, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    """As env://, with the number of the restart before every key of the store."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  it is documented
    from torch.distributed.rendezvous import rendezvous

    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    for store, rank, world_size in rendezvous("env://", timeout=timeout, **kwargs):
        yield PrefixStore(f"restart_{attempt}", store), rank, world_size
