"""What a host has of memory, by made-up files of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.fileio.host_memory import available_memory, memory_limit

GIB = 1 << 30


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[Path, Path]:
    """64 GiB, 48 of them free; no cgroup."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\n")
    (proc / "self" / "cgroup").write_text("0::/\n")
    cgroups.mkdir()
    return proc, cgroups


def limit(directory: Path, names: tuple[str, str], values: tuple[str, int]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, values, strict=True):
        (directory / name).write_text(f"{value}\n")


def test_without_a_cgroup_the_host_is_the_limit(kernel: tuple[Path, Path]) -> None:
    assert memory_limit(*kernel) == (64 * GIB, "the host's memory")
    assert available_memory(*kernel) == 48 * GIB


def test_the_tightest_cgroup_counts_whichever_is_the_inner_one(kernel: tuple[Path, Path]) -> None:
    proc, cgroups = kernel
    (proc / "self" / "cgroup").write_text("0::/job_7/step_0\n")
    names = ("memory.max", "memory.current")
    limit(cgroups / "job_7" / "step_0", names, ("max", 5 * GIB))
    limit(cgroups / "job_7", names, (str(16 * GIB), 6 * GIB))
    assert memory_limit(*kernel) == (16 * GIB, f"the limit of {cgroups / 'job_7' / 'memory.max'}")
    assert available_memory(*kernel) == 10 * GIB


def test_version_1(kernel: tuple[Path, Path]) -> None:
    proc, cgroups = kernel
    (proc / "self" / "cgroup").write_text("5:cpu,memory:/slurm/job_7\n3:pids:/elsewhere\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit(cgroups / "memory" / "slurm" / "job_7", names, (str(8 * GIB), 9 * GIB))
    limit(cgroups / "memory", names, (str((1 << 63) - 4096), 20 * GIB))
    assert memory_limit(*kernel)[0] == 8 * GIB
    assert available_memory(*kernel) == 0
