"""Ranks agree again and again; one of them comes to harm on the way. No torch but the store of the rendezvous.

HOSTS: the host of each rank, as the tree is to take it. VICTIM: the rank that comes to harm in agreement HARM_AT, by
HARM: "kill", "stop" (signals of those names), "error" (what it tells cannot be pickled), "late" (it waits for the file
of LATE_UNTIL). WITHIN: the signal comes while the victim waits within the agreement, else instead of it; rank LAST
joins that agreement only when it has come. With FORKED a child of the victim outlives it. Prints a line for each
agreement, and one for the error that ended them.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed.rendezvous import rendezvous

from megatron.parallel.connecting import connect_all_ranks
from megatron.parallel.control_plane import ControlPlane
from megatron.parallel.tree import AgreementLostError
from megatron.startup.rendezvous import init_method
from restart_trace.under_way import entries

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HOSTS, VICTIM, HARM_AT = os.environ["HOSTS"].split(), int(os.environ["VICTIM"]), int(os.environ["HARM_AT"])
HARM, WITHIN = os.environ["HARM"], os.environ.get("WITHIN")
LAST = int(os.environ.get("LAST", "-1"))
PIDS = Path(os.environ["PIDS"])
TIMEOUT_S = float(os.environ["TIMEOUT_S"])
AGREEMENTS = 6
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or read
        return ""


def harm_within() -> None:
    """On a thread of the victim: once it waits."""
    while not any("agreement" in entry.text for entry in entries().values()):
        time.sleep(0.001)
    time.sleep(0.05)
    os.kill(os.getpid(), SIGNALS[HARM])


def item_of(number: int) -> Any:
    """What this rank tells in agreement `number`; here it comes to harm, or waits for that of the victim."""
    if number != HARM_AT:
        return RANK
    if RANK == LAST:
        victim = int((PIDS / str(VICTIM)).read_text())
        while state_of(victim) not in ("T", "Z", ""):
            time.sleep(0.01)
    if RANK != VICTIM:
        return RANK
    if HARM == "error":
        return threading.Lock()
    if WITHIN:
        threading.Thread(target=harm_within, daemon=True).start()
    else:
        os.kill(os.getpid(), SIGNALS[HARM])
    return RANK


def fork_child() -> None:
    """One that sleeps longer than the test takes."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    (PIDS / "child").write_text(str(pid))


def main() -> int:
    (PIDS / str(RANK)).write_text(str(os.getpid()))
    store, *_ = next(rendezvous(init_method(), timeout=datetime.timedelta(minutes=5)))
    trees = connect_all_ranks(store, RANK, WORLD_SIZE, HOSTS[RANK], "127.0.0.1", 1, TIMEOUT_S)
    control = ControlPlane(RANK, WORLD_SIZE, trees[0])
    if RANK == VICTIM and os.environ.get("FORKED"):
        fork_child()
    for number in range(AGREEMENTS):
        try:
            gathered = control.gather(item_of(number))
            told = control.broadcast(gathered)
        except AgreementLostError as error:
            print(json.dumps({"at": number, "error": type(error).__name__, "text": str(error)}), flush=True)
            return 3
        assert told == list(range(WORLD_SIZE)), told
        print(json.dumps({"at": number}), flush=True)
    return 0


sys.exit(main())
