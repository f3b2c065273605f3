"""Finds the ranks that a job waits for: one whose wait timed out asks all others, through the store, what they do.

While all is well, each rank only adds one line to the store, in the rendezvous. A rank whose
wait has passed its deadline calls the roll. Ranks that have been busy with one thing for long listen: each blocks in
one request until the roll is called, and answers. One rank reads the answers, a request each for ranks' places and
answers however many ranks there are, and judges; the others read what it found.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from megatron.processes.patience import looks

SETTLED_S = 1.0  # no further rank has answered for so long: the others do not
CONNECT_S = 1.2
LEAVE_S = 0.5
WAITS, WORKS, STUCK = "waits", "works", "stuck"  # for other ranks; at its own work; in that, for longer than it may
_POLL_S = 0.02
_SHOWN = 8
_PLACES, _CALLED, _ANSWERS, _COUNT, _JUDGES, _VERDICT, _LEAVING, _ALL_LEAVE = (
    "places", "called", "answers", "answered", "judges", "verdict", "leaving", "all leave",
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What one rank is at, for so many seconds; `state` is one of the three above."""

    rank: int
    host: str
    doing: str
    seconds: float
    state: str


def keys_of_this_start(store: Any) -> Any:
    """`store` with keys of their own for each start of the ranks: a launcher's store may live through restarts."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  it is documented

    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RUN_ID', '')}_{start}", store)


def connect() -> Any:
    """A connection of our own to the rendezvous store: another thread may be blocked in the process group's.

    Raises RuntimeError if the store does not answer within CONNECT_S. A store whose process is stopped takes the
    connection, and answers nothing: callers must not rely on coming back.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  it is documented

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return keys_of_this_start(TCPStore(address, port, timeout=timedelta(seconds=CONNECT_S), wait_for_workers=False))


def launcher_serves_store() -> bool:
    """Whether the store is the launcher's, as under torchrun and megatron.launch; else rank 0 serves it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def register(store: Any, rank: int, host: str) -> None:
    """Tell where this rank runs. `store`: of keys_of_this_start, as below."""
    store.append(_PLACES, f"{rank} {host}\n")


def wait_for_call(store: Any, at_most: timedelta) -> None:
    """Return when a rank has called the roll; RuntimeError if the store is gone, or nobody has within `at_most`."""
    store.wait([_CALLED], at_most)


def call(store: Any, answer: Answer, world_size: int) -> str:
    """Call the roll, or answer if another rank has called it; what is found: which ranks the job waits for.

    Takes SETTLED_S if a rank does not answer. Raises RuntimeError if the store is gone.
    """
    store.set(_CALLED, str(answer.rank))
    store.append(_ANSWERS, json.dumps(asdict(answer)) + "\n")
    store.add(_COUNT, 1)
    if store.add(_JUDGES, 1) == 1:
        found = _judge(store, world_size)
        store.set(_VERDICT, found)
    else:
        try:
            store.wait([_VERDICT], timedelta(seconds=3 * SETTLED_S))
            found = store.get(_VERDICT).decode()
        except RuntimeError:  # the rank that was to judge has ended
            found = _judge(store, world_size)
    return found


def leave(store: Any) -> None:
    """For a rank that has told what was found, and is to end: wait a moment until all that have answered are so far.

    With the first that ends, its launcher ends the others, and the process that serves the store may be one of them.
    """
    with contextlib.suppress(RuntimeError):  # one was ended all the same, or the store is gone
        if store.add(_LEAVING, 1) >= store.add(_COUNT, 0):
            store.set(_ALL_LEAVE, "")
        store.wait([_ALL_LEAVE], timedelta(seconds=LEAVE_S))


def _judge(store: Any, world_size: int) -> str:
    answered, before = 0, -1
    while answered != before and answered < world_size:
        before = answered
        for _ in looks(SETTLED_S, _POLL_S):
            answered = store.add(_COUNT, 0)
            if answered != before:
                break
    lines = store.get(_ANSWERS).decode().splitlines() if answered else []
    places = store.get(_PLACES).decode().splitlines() if store.check([_PLACES]) else []
    return judge(
        world_size,
        {int(rank): host for rank, _, host in (line.partition(" ") for line in places)},
        [Answer(**json.loads(line)) for line in lines],
    )


def judge(world_size: int, hosts: Mapping[int, str], answers: Iterable[Answer]) -> str:
    """Which of `world_size` ranks the others wait for, by their answers; `hosts`: where those run that have come."""
    heard = {answer.rank: answer for answer in answers}
    never_came = [rank for rank in range(world_size) if rank not in hosts and rank not in heard]
    silent = [rank for rank in hosts if rank not in heard]
    found = [
        f"{_ranks(ranks)} on {host} {'does' if len(ranks) == 1 else 'do'} not answer: stopped or ended, or the host is "
        "down or cut off"
        for host, ranks in _by_host(silent, hosts.__getitem__)
    ]
    if never_came:
        found.append(f"{_ranks(never_came)} never came to the rendezvous")
    stuck = [answer for answer in heard.values() if answer.state == STUCK]
    found += [_at_work(answer) for answer in stuck[:_SHOWN]]
    if not found:
        working = sorted((a for a in heard.values() if a.state == WORKS), key=lambda a: -a.seconds)
        found = [_at_work(answer) for answer in working[:_SHOWN]]
    if found:
        return "; ".join(found)
    last = min(heard.values(), key=lambda answer: answer.seconds)
    return (
        f"all ranks answer, and each waits for others; the last to begin was rank {last.rank} on {last.host}, in "
        f"{last.doing} for {last.seconds:.1f} s"
    )


def _at_work(answer: Answer) -> str:
    return f"rank {answer.rank} on {answer.host} has been in {answer.doing} for {answer.seconds:.1f} s"


def _by_host(ranks: Iterable[int], host_of: Callable[[int], str]) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(host_of(rank), []).append(rank)
    return list(found.items())


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f", ... {ranks[-1]}" if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
