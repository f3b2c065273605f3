"""The health check of a host: memory and a disk as they are, GPUs by a stand-in of the driver's tool."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.launch.health import what_is_wrong


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
