"""The rendezvous of all ranks: as torch's env://, but that it compares versions and says who has not come.

torchrun's agent keeps one store through all its restarts (TORCHELASTIC_USE_AGENT_STORE), and torch reads the keys of
its process groups from it. Restarted ranks would find the addresses of dead ranks and try to connect to them, so each
start has keys of its own.

No name server is asked for the names of peers, which torch's store needs for its log alone
(megatron.net.name_lookups).

Each rank tells where it runs, and the first of each host compares its versions with rank 0's. No rank goes on before
all have come and none has found a difference.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from megatron.config import ConfigError
from megatron.net.name_lookups import names_from_files, numeric_address
from megatron.processes.source import difference, what_runs
from megatron.startup import roll_call

_SCHEME = "all-ranks"
_VERSIONS, _ARRIVED, _GO = "versions", "arrived", "go"


def look_up_master() -> str | None:
    """The address of MASTER_ADDR, as `numeric_address`; asked for once in a process."""
    return _numeric(os.environ["MASTER_ADDR"])


_numeric = functools.cache(numeric_address)


@functools.cache
def init_method() -> str:
    """The init_method for torch.distributed. The process group raises ConfigError if the ranks do not fit together."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    register_rendezvous_handler(_SCHEME, _rendezvous)
    return f"{_SCHEME}://"


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Any, int, int]]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, numeric = os.environ["MASTER_ADDR"], look_up_master()
    # Until all have come, since a store that this process serves would ask for the name of each.
    with contextlib.nullcontext() if numeric is None else names_from_files():
        store = roll_call.keys_of_this_start(_open_store(numeric or address, rank, world_size, timeout))
        _check_in(store, rank, world_size)
    yield store, rank, world_size


def _open_store(address: str, rank: int, world_size: int, timeout: timedelta) -> Any:
    """The store at `address` and MASTER_PORT, served by this process if it is rank 0 and no launcher serves it."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  it is documented

    port = int(os.environ["MASTER_PORT"])
    serves = rank == 0 and not roll_call.launcher_serves_store()
    try:
        return TCPStore(address, port, world_size, serves, timeout, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        if not serves or "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"MASTER_PORT {port}: another process listens there on {os.uname().nodename}, where rank 0 runs; give "
            "another MASTER_PORT"
        ) from error


def _check_in(store: Any, rank: int, world_size: int) -> None:
    """Return when all ranks have come. Raises ConfigError, the same on all, if the versions of one are not rank 0's."""
    host = os.uname().nodename
    roll_call.register(store, rank, host)
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")  # DeepSpeed's launcher sets the latter
    several_hosts = local not in (None, str(world_size))
    if several_hosts and rank == 0:
        store.set(_VERSIONS, json.dumps([host, what_runs()]))
    elif several_hosts and os.environ.get("LOCAL_RANK") == "0":
        found = difference([json.loads(store.get(_VERSIONS)), (host, what_runs())])
        if found is not None:
            store.compare_set(_GO, "", found)
    if store.add(_ARRIVED, 1) == world_size:
        store.compare_set(_GO, "", "go")
    store.wait([_GO])
    answer = store.get(_GO).decode()
    if answer != "go":
        raise ConfigError(answer)
