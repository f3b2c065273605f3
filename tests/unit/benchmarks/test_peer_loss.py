"""What the benchmark of peers' memory makes of its samples, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.launchers import peer_loss

SAMPLES = {"peer": [5.0, 4.0, 6.0], "cached": [4.0, 4.0, 4.0], "slow": [9.0, 9.0, 9.0]}
LOADS = {"peer": [0.5, 0.5, 0.4], "cached": [0.2, 0.2, 0.2], "slow": [1.6, 1.4, 1.5]}


def told(samples: dict[str, list[float]], loads: dict[str, list[float]]) -> str:
    downloads = {name: [0.75 * one for one in values] for name, values in loads.items()}
    facts = {"loads": loads, "downloads": downloads, "link_mbit": 1000, "bytes_a_rank": 60_000_000}
    setting: Any = type("Setting", (), facts)
    return peer_loss.render({"machine": {"load_average_1_min": 0.5}} | peer_loss.analyse(samples, setting))


def test_ratios_are_of_medians_and_compared_with_the_targets() -> None:
    text = told(SAMPLES, LOADS)
    assert "60 MB a rank, links limited to 1000 Mbit/s; load of the machine before: 0.5" in text
    assert "to the next step, peer / cached: 1.25; target: below 1.3: met" in text
    assert "load, slow / peer: 3.0; target: at least 3: met" in text
    assert "the slowest copy of peer took 0.375, 0.375, 0.300 s from its peer" in text
    text = told(SAMPLES | {"peer": [5.2]}, LOADS | {"peer": [0.6]})
    assert "peer / cached: 1.30; target: below 1.3: MISSED" in text
    assert "slow / peer: 2.5; target: at least 3: MISSED" in text
    assert "target" not in told({"peer": [5.0]}, {"peer": [0.5]})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "HOSTFILE is not set: run it by `python -m tests.cluster run`"),
        (["--engine", "lazy"], "--engine lazy: only memory has copies on peers"),
        (["--link-mbit", "0"], "--link-mbit 0: must be at least 1"),
    ],
)
def test_a_wrong_command_line_is_refused(
    argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HOSTFILE", raising=False)
    with pytest.raises(SystemExit) as stopped:
        peer_loss.main(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
