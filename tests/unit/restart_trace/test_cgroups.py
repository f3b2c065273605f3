"""Quotas of processor time, by made-up files of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from restart_trace.cgroups import cpu_limit


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[Path, Path]:
    """/proc and the mount of the control groups."""
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    mount.mkdir()
    return proc, mount


def write(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(f"{text}\n")


def test_version_2_and_the_tightest_quota_counts(kernel: tuple[Path, Path]) -> None:
    proc, mount = kernel
    write(proc / "self", cgroup="0::/pod/container")
    write(mount / "pod" / "container", cpu__max="max 100000")
    assert cpu_limit(*kernel) is None
    write(mount / "pod", cpu__max="150000 100000")
    write(mount, cpu__max="400000 100000")
    assert cpu_limit(*kernel) == 1.5


def test_version_1(kernel: tuple[Path, Path]) -> None:
    proc, mount = kernel
    write(proc / "self", cgroup="5:memory:/a\n4:cpu,cpuacct:/slurm/job_7")
    write(mount / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cpu_limit(*kernel) is None
    write(mount / "cpu" / "slurm" / "job_7", cpu__cfs_quota_us="25000", cpu__cfs_period_us="100000")
    assert cpu_limit(*kernel) == 0.25


def test_without_control_groups(kernel: tuple[Path, Path]) -> None:
    assert cpu_limit(*kernel) is None
