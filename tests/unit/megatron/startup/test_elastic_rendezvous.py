"""Ranks that torchrun restarts in place meet apart from what those before them left in the agent's store."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  it is documented
from torch.distributed.rendezvous import rendezvous

from megatron.startup import elastic_rendezvous


def test_each_attempt_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    method = elastic_rendezvous.init_method()
    assert method is not None
    stores = []
    for attempt in ("1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store, rank, world_size = next(rendezvous(method, timeout=timedelta(seconds=30)))
        assert (rank, world_size) == (0, 1)
        stores.append(store)
    stores[0].set("address", "of a rank that is gone")
    assert stores[0].check(["address"]) and not stores[1].check(["address"])


@pytest.mark.parametrize("count", [None, "0"])
def test_other_launches_meet_as_ever(count: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    if count is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    assert elastic_rendezvous.init_method() is None
