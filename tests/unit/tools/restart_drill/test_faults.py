"""Faults that are no signals to kill: exceptions within a process, damaged checkpoints, a disk that is full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.store import commit
from megatron.checkpointing.store.manifest import Manifest
from megatron.startup.injected_faults import DEVICE_ERROR_SIGNAL, EXCEPTION_SIGNAL
from tests.dist.storage import small_disk
from tools.restart_drill.checkpoints import Checkpoints, flip_bit, truncate
from tools.restart_drill.full_disk import GIB, check_disk, full_disk
from tools.restart_drill.launch import DrillError

ROOT = Path(__file__).resolve().parents[4]

WAITING = """
import sys, time
from megatron.startup.injected_faults import allow_injected_faults
if sys.argv[1] == "allowed":
    allow_injected_faults()
if sys.argv[2] == "with torch":
    import torch
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "torch", "error"),
    [
        (EXCEPTION_SIGNAL, "", "megatron.startup.injected_faults.InjectedFault: an injected exception"),
        (DEVICE_ERROR_SIGNAL, "", "megatron.startup.injected_faults.InjectedFault: an injected device error, before"),
        pytest.param(
            *(DEVICE_ERROR_SIGNAL, "with torch", "torch.AcceleratorError: an injected device error"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_signal_raises_in_the_main_thread(signum: int, torch: str, error: str) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    code, errors = after_signal(["allowed", torch], signum, environment)
    assert code == 1 and errors.splitlines()[-1].startswith(error), errors


def test_without_the_flag_nothing_is_installed() -> None:
    code, _ = after_signal(["no", ""], EXCEPTION_SIGNAL, dict(os.environ))
    assert code == -EXCEPTION_SIGNAL


SAMPLING = """
import sys, time
from megatron.startup.injected_faults import allow_injected_faults
from restart_trace.probes import forgiving
allow_injected_faults()
def probe():
    print("ready", flush=True)
    sys.stdin.read()
    return {}
forgiving(probe, "samples")()
time.sleep(600)
"""


def test_an_error_comes_after_what_the_trace_does_which_would_keep_it() -> None:
    code, errors = after_signal([], EXCEPTION_SIGNAL, dict(os.environ), SAMPLING)
    assert "the trace lacks" not in errors
    assert code == 1 and errors.splitlines()[-1].endswith(
        "InjectedFault: an injected exception (--allow-injected-faults)"
    )


def after_signal(argv: list[str], signum: int, environment: dict[str, str], program: str = WAITING) -> tuple[int, str]:
    """(exit code, stderr) of a process that gets a signal once it is ready; its stdin ends afterwards."""
    command = [sys.executable, "-c", program, *argv]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signum)
        try:
            _, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    return process.returncode, errors


# ---------------------------------------------------------------- checkpoints


def checkpoint(save: Path, step: int) -> Path:
    """A whole checkpoint of two files."""
    temporary = save / f".incomplete_{step}"
    temporary.mkdir(parents=True)
    files = {}
    for name, content in (("small.pt", b"s" * 10), ("large.pt", bytes(300) + b"l" * 100)):
        (temporary / name).write_bytes(content)
        files[name] = SavedFile(name, len(content), "")
    manifest = Manifest(
        tag=f"global_step{step}", step=step, engine="torch", layout={"tp": 1, "pp": 1, "dp": 1}, model={}, files=files,
        sequence=commit.next_sequence(save),
    )  # fmt: skip
    commit.write_manifest(temporary, manifest, False)
    commit.publish(save, temporary, manifest, False)
    return save / manifest.tag


@pytest.mark.parametrize("fault", ["truncate", "bitflip"])
def test_the_largest_file_of_the_newest_checkpoint_is_damaged(fault: str, tmp_path: Path) -> None:
    newest = [checkpoint(tmp_path, step) for step in (5, 10)][-1]
    before = (newest / "large.pt").read_bytes()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest_step() == 10
    assert checkpoints.damage(fault) == newest / "large.pt"
    after = (newest / "large.pt").read_bytes()
    assert (
        after == before[:200] if fault == "truncate" else sum(a != b for a, b in zip(after, before, strict=True)) == 1
    )
    assert checkpoints.newest_step() == 5

    with pytest.raises(DrillError, match="holds 1 complete checkpoints after the fault, and the drill needs 2"):
        checkpoints.damage(fault)
    checkpoint(tmp_path, 10)  # saved again
    assert checkpoints.newest_step() == 10


def test_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DrillError, match="holds 0 complete checkpoints"):
        Checkpoints(tmp_path).newest_step()


def test_a_bit_of_data_is_flipped_and_not_of_padding(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100) + b"\1")
    flip_bit(path)
    assert path.read_bytes() == bytes(100) + b"\x11"
    path.write_bytes(b"\1" + bytes(99))
    with pytest.raises(DrillError, match="second half is all zeros"):
        flip_bit(path)
    truncate(path)
    assert path.stat().st_size == 50


# ---------------------------------------------------------------- full disk


def test_a_disk_is_full_and_free_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8 << 20) as mounted:
        if not mounted:
            pytest.skip("no file system may be mounted here: run as root, with CAP_SYS_ADMIN")
        disk = tmp_path / "disk"
        (disk / "old").write_bytes(bytes(1 << 20))
        check_disk(disk, tmp_path, GIB)
        with pytest.raises(RuntimeError, match="in between"), full_disk(disk) as fill:
            assert_full(disk)
            (disk / "old").unlink()
            (disk / "room").write_bytes(bytes(1 << 19))
            fill()
            assert_full(disk)
            raise RuntimeError("in between")
        assert sorted(path.name for path in disk.iterdir()) == ["more", "room"]
        (disk / "more").write_bytes(bytes(4 << 20))

        with pytest.raises(DrillError, match="--fault disk-full: .* more than the limit of 0.00195 GiB"):
            check_disk(disk, tmp_path, GIB // 512)


def assert_full(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left on device"):
        (disk / "more").write_bytes(bytes(1 << 13))


def test_the_disk_of_the_trace_is_not_filled(tmp_path: Path) -> None:
    with pytest.raises(DrillError, match="is on the same file system as .*; give --checkpoints DIR on a small one"):
        check_disk(tmp_path, tmp_path, 1 << 60)
