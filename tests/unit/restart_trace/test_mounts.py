"""The mount of a directory, against the kernel's own words and lists that are made up."""

from __future__ import annotations

import os
from pathlib import Path

from restart_trace.mounts import Mount, mount_among, mount_of

LINES = [
    "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
    "23 22 0:20 / /scratch rw,noatime shared:2 master:1 - lustre 10.0.0.1@tcp:/fs rw,flock",
    "24 22 0:21 / /scratch/my\\040runs ro - nfs4 me:hunter2@filer:/export rw",
    "25 23 0:22 / /scratch rw,noatime - tmpfs tmpfs rw",  # over the lustre
    "not a mount",
]


def test_the_longest_mount_that_was_made_last() -> None:
    root = Mount("ext4", "/dev/sda1", "/", "rw,relatime")
    assert mount_among(LINES, "/home/me") == root == mount_among(LINES, "/scratchy") == mount_among(LINES, "/")
    assert str(root) == "/dev/sda1 on / type ext4 (rw,relatime)"
    over = mount_among(LINES, "/scratch/run/checkpoints")
    assert over == Mount("tmpfs", "tmpfs", "/scratch", "rw,noatime")
    inner = mount_among(LINES, "/scratch/my runs/a")
    assert inner is not None and inner.point == "/scratch/my runs"
    assert "hunter2" not in str(inner) and "filer:/export" in str(inner)
    assert mount_among(LINES[1:], "/home") is None


def test_directories_of_this_machine(tmp_path: Path) -> None:
    assert mount_of("/proc") is not None and mount_of("/proc").fs_type == "proc"  # type: ignore[union-attr]
    here = mount_of(tmp_path / "not" / "yet")
    assert here is not None and os.path.ismount(here.point) and here == mount_of(tmp_path)
    (tmp_path / "link").symlink_to("/proc")
    assert mount_of(tmp_path / "link") == mount_of("/proc")
