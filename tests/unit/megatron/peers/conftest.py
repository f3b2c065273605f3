"""What tests of copies share."""

from __future__ import annotations

import pytest

from megatron.net.secret import VARIABLE
from tests.unit.trace_helpers import SECRET


@pytest.fixture(autouse=True)
def in_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is part of a launch, as ranks and agents are."""
    monkeypatch.setenv(VARIABLE, SECRET)
