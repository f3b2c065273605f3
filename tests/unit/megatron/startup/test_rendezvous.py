"""Ranks meet apart from those of earlier starts, all of one version, and hear what keeps them from meeting."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  it is documented
from torch.distributed.rendezvous import rendezvous as meet

from megatron.config import ConfigError
from megatron.net.free_port import free_port
from megatron.startup import rendezvous
from tests.dist.harness import Zygote

pytestmark = pytest.mark.slow  # some start processes that import torch

ROOT = Path(__file__).resolve().parents[4]
# One rank, alone on its host: prints what the rendezvous raises, or "met". Rank 1 says that it has another torch. One
# variable alone says how many ranks a host has.
RANK = """
import os, sys
from datetime import timedelta
from torch.distributed.rendezvous import rendezvous as meet
from megatron.config import ConfigError
from megatron.startup import rendezvous
what_runs = rendezvous.what_runs
rendezvous.what_runs = lambda: what_runs() | ({"torch": sys.argv[2]} if os.environ["RANK"] == "1" else {})
for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
    del os.environ[name]
os.environ |= {sys.argv[1]: "1", "LOCAL_RANK": "0"}
try:
    next(meet(rendezvous.init_method(), timeout=timedelta(minutes=5)))
    print("met")
except ConfigError as error:
    print(error)
"""


def serving(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """A launcher's store, and the variables of a rank that is alone."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return agent


def test_each_start_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = serving(monkeypatch)
    stores = []
    for start in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        store, rank, world_size = next(meet(rendezvous.init_method(), timeout=timedelta(minutes=5)))
        assert (rank, world_size) == (0, 1)
        stores.append(store)
    stores[1].set("address", "of a rank that is gone")
    assert [store.check(["address"]) for store in stores] == [False, True, False]
    assert not agent.check(["address"])


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        serving(monkeypatch)
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
        with pytest.raises(ConfigError, match=r"MASTER_PORT \d+: another process listens there on .*; give another"):
            next(meet(rendezvous.init_method(), timeout=timedelta(minutes=5)))


@pytest.mark.parametrize("local_size", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])  # the latter by DeepSpeed's launcher
def test_every_rank_hears_of_a_host_with_another_torch(local_size: str, tmp_path: Path, zygote: Zygote) -> None:
    """Two hosts of a rank each; the second one says that it has torch 2.0.0, which cannot be installed here, too."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    run = zygote.run([local_size, "2.0.0"], 2, tmp_path, script=str(script))
    said = [run.log(rank).splitlines()[-1] for rank in range(2)]
    assert said[0] == said[1] and "runs torch 2.0.0 (" in said[0], said


_MEET = """
import os, sys
from datetime import timedelta
from torch.distributed.rendezvous import rendezvous as meet
from megatron.launch.rendezvous_store import STORE_VARIABLES, RendezvousStore
from megatron.startup import rendezvous
of_rank_0 = next(meet(rendezvous.init_method(), timeout=timedelta(minutes=5)))
served = RendezvousStore("127.0.0.1", 0).serve()
os.environ.update(STORE_VARIABLES, MASTER_PORT=str(served.port))
next(meet(rendezvous.init_method(), timeout=timedelta(minutes=5)))
served.close()
print(sys.argv[1], served.port)
"""


def test_no_name_server_is_asked(tmp_path: Path) -> None:
    """By the system calls of client and server, rank 0 or the launcher: port 53 is that of name servers, and there is
    always one to ask."""
    calls = tmp_path / "calls"
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    of_rank_0 = str(free_port())
    environment |= {"MASTER_PORT": of_rank_0}
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    command = ["strace", "-f", "-q", "-e", "trace=connect", "-o", str(calls), sys.executable, "-c", _MEET, of_rank_0]
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    found = calls.read_text()
    for port in done.stdout.split():
        assert re.search(rf"htons\({port}\).*127\.0\.0\.1", found), "the connection to the store"
    assert "htons(53)" not in found
