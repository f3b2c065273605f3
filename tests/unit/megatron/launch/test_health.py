"""The health check of a host: memory and a disk as they are, GPUs by a stand-in of the driver's tool."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.launch import health
from megatron.launch.health import RepeatedCheck, what_is_wrong
from tests.unit.megatron.launch.test_launch import until
from tests.unit.stalls import jump_after


def with_tool(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A directory of devices with a GPU, and a program in the place of nvidia-smi."""
    tool = directory / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")
    (directory / "nvidia0").touch()
    return directory


def test_a_host_is_fit_and_nothing_is_left_behind(tmp_path: Path) -> None:
    assert what_is_wrong(str(tmp_path), devices=tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert what_is_wrong(str(missing)) == f"{missing} cannot be written to: No such file or directory"
    assert what_is_wrong("/proc") is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "wrong"),
    [
        ("echo 0, 0; echo 1, 0", None),
        ("echo 0, [N/A]", None),
        ("echo 0, 0; echo 1, 2", "GPU 1 has 2 uncorrected memory errors"),
        ("echo Unable to determine the device handle; exit 6", "nvidia-smi ended with 6: Unable to determine"),
    ],
)
def test_gpus_by_the_tool_of_the_driver(
    script: str, wrong: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = with_tool(tmp_path, monkeypatch, script)
    found = what_is_wrong(str(tmp_path), devices)
    assert found is None if wrong is None else found is not None and found.startswith(wrong)


def test_the_tool_is_not_asked_where_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = with_tool(tmp_path, monkeypatch, "exit 9")
    (devices / "nvidia0").unlink()
    assert what_is_wrong(str(tmp_path), devices) is None


@pytest.mark.parametrize(
    ("look", "limit_s", "wrong"),
    [
        (lambda: None, 60.0, None),
        (lambda: "its disk is full", 60.0, "its disk is full"),
        (lambda: time.sleep(300), 0.1, "its memory, disk and GPUs could not be tried within 0.1 s"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 60.0, "its check ended without a result"),
    ],
)
def test_a_check_in_a_process_of_its_own(
    look: Callable[[], str | None], limit_s: float, wrong: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_CHECK_S", limit_s)
    check = RepeatedCheck(0.0, look)
    for _ in range(2):
        check.begin(lambda: None)
        found = [check.result()]
        while found[-1] is None and not check.due:
            found.append(check.result())
        assert found[-1] == wrong

        def over() -> bool:
            check.result()  # told again if the killed process takes longer to end than a check may
            return check.due

        until(over, "the end of its process, if it was killed")
        assert check.result() is None


def test_a_check_that_is_put_off_does_not_begin() -> None:
    check = RepeatedCheck(1000.0, lambda: None)
    assert not check.due
    assert check.next_at > time.monotonic() + 900


def test_a_check_has_time_to_end_after_the_host_stood_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process stood still, too."""
    goes_on = tmp_path / "goes_on"

    def look() -> None:
        while not goes_on.exists():
            time.sleep(0.01)

    monkeypatch.setattr(health, "_CHECK_S", 600.0)
    check = RepeatedCheck(1e6, look)
    check.begin(lambda: None)
    jump_after(monkeypatch, 0)
    assert check.result() is None
    goes_on.touch()
    while check.next_at < 1e6:  # until the next one is due
        assert check.result() is None
        time.sleep(0.01)
