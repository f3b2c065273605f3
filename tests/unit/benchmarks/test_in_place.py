"""What the benchmark of restarts in place over nodes makes of its samples, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.launchers import in_place


def told(samples: dict[str, list[float]]) -> str:
    return in_place.render({"machine": {"load_average_1_min": 0.5}} | in_place.analyse(samples, 4))


def test_the_ratio_is_of_medians_and_compared_with_the_target() -> None:
    text = told({"several-nodes": [1.5, 9.0, 1.0], "one-node": [1.0, 1.0, 1.1]})
    assert "8 ranks on 4 nodes and on one" in text and "load of the machine before: 0.5" in text
    assert "1.50s    1.00s    9.00s  (1.50, 9.00, 1.00)" in text
    assert "ratio 1.50; target: at most 1.5: met" in text
    assert "ratio 1.60; target: at most 1.5: MISSED" in told({"several-nodes": [1.6], "one-node": [1.0]})
    assert "target" not in told({"one-node": [1.0]})


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (None, "HOSTFILE is not set: run it by `python -m tests.cluster run`"),
        ("# none\nhost0 slots=2\n", "in_place: HOSTFILE names 1 hosts; give 2, 4, or another multiple of 2"),
        ("host0\nhost1\nhost2\n", "in_place: HOSTFILE names 3 hosts"),
    ],
)
def test_wrong_hosts_are_refused(
    hosts: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NODES_COMMAND", "true")
    monkeypatch.delenv("HOSTFILE", raising=False)
    if hosts is not None:
        (tmp_path / "hosts").write_text(hosts)
        monkeypatch.setenv("HOSTFILE", str(tmp_path / "hosts"))
    try:
        status = in_place.main(["--dir", str(tmp_path)])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert message in capsys.readouterr().err
