"""The benchmark of TLS: it measures both variants as often as it is asked to, and leaves no variables."""

from __future__ import annotations

import os

import pytest

from benchmarks.tls.__main__ import main
from megatron.net.secret import VARIABLE
from megatron.net.tls import FLAGS
from tests.unit.trace_helpers import SECRET


@pytest.mark.slow
def test_both_variants_are_measured_in_turn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    assert main(["--bytes", "20MiB", "--rounds", "2"]) == 0
    title, _, *rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert title[0] == "20 MiB, 2 rounds" and [row[0] for row in rows] == ["without TLS", "with TLS"]
    assert all(len(row[3].split()) == 2 and all(float(value) > 0 for value in row[3].split()) for row in rows)
    assert not [variable for variable in FLAGS.values() if variable in os.environ]
