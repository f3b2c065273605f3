"""Other processes, refused rights, full disks, and what an engine leaves behind."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance.compare import differences
from tests.conformance.scripts import own_process
from tests.conformance.subjects import Subject, file_states, sizes, traced
from tests.dist.harness import ROOT, Zygote
from tests.dist.storage import fill, small_disk

NAME = own_process.NAME
SCRIPT = str(Path(own_process.__file__))
MIB = 1 << 20


def in_own_process(zygote: Zygote, action: str, subject: Subject, directory: Path) -> Any:
    run = zygote.run([action, subject.name, str(directory)], 1, directory.parent / "logs", script=SCRIPT)
    assert run.ok, run.output[-6000:]
    return json.loads(run.output.strip().splitlines()[-1])


def test_another_process_reads_it(subject: Subject, zygote: Zygote, directory: Path) -> None:
    saved = subject.save({NAME: own_process.example_state()}, directory)
    (directory / "manifest.json").write_text(json.dumps([asdict(file) for file in saved.files]))
    assert in_own_process(zygote, "load", subject, directory) == []


def test_permission_denied(subject: Subject, zygote: Zygote, directory: Path) -> None:
    found = in_own_process(zygote, "refused", subject, directory)
    for what in ("save", "load"):
        assert what in found, f"{what} did not fail"
        assert "ermission denied" in found[what]["text"], found[what]
    assert "OSError" in found["save"]["kinds"]
    assert {"OSError", "CheckpointDamagedError"} & set(found["load"]["kinds"])
    assert (found["left"], found["again"]) == ({}, [])


def test_nothing_is_left_running(subject: Subject, zygote: Zygote, directory: Path) -> None:
    found = in_own_process(zygote, "leftovers", subject, directory)
    assert found["alive"] == []
    (files, threads), last = found["counts"][0], found["counts"][-1]
    assert last[0] <= files, f"open files from round to round: {found['counts']}"
    assert last[1] <= threads, f"native threads from round to round: {found['counts']}"


@pytest.mark.parametrize("room", [0, 300_000])
def test_full_disk(subject: Subject, tmp_path: Path, room: int) -> None:
    """By name; then nobody writes there any more, and the next save, elsewhere, is whole."""
    state = {"weight": torch.arange(2.0 * MIB), "step": 1}
    with small_disk(tmp_path / "disk", 4 * MIB) as mounted:
        if not mounted:
            pytest.skip("no disk of our own can be mounted here: run as root, with CAP_SYS_ADMIN")
        fill(tmp_path / "disk" / "ballast", room)
        try:
            where = tmp_path / "disk" / "checkpoint"
            where.mkdir()
        except OSError:  # a page of a tmpfs may be needed for it
            where = tmp_path / "disk"
        with pytest.raises(Exception) as caught:
            subject.save({NAME: state}, where)
        assert isinstance(caught.value, OSError), repr(caught.value)
        assert caught.value.errno == errno.ENOSPC and os.strerror(errno.ENOSPC) in str(caught.value)
        left = sizes(tmp_path / "disk")
        time.sleep(0.1)
        assert sizes(tmp_path / "disk") == left
    saved = subject.save({NAME: state}, tmp_path / "elsewhere")
    assert differences(subject.load([NAME], saved)[NAME], state) == []


def test_no_directory_there(subject: Subject, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in its place")
    with pytest.raises(OSError):
        pending = subject.engine().begin_save(
            file_states({NAME: own_process.example_state()}), tmp_path / "file", traced("save").op
        )
        pending.release_state()
        pending.wait()
    assert (tmp_path / "file").read_bytes() == b"in its place"


def test_a_process_ends_though_nobody_closed_its_engines(tmp_path: Path) -> None:
    """After an error training ends without a close: no thread and no helper may keep the process from ending.

    One process with every engine: whatever hangs is named by the stacks that are dumped.
    """
    code = f"""
        import faulthandler, sys, torch
        from pathlib import Path
        sys.path.insert(0, {str(ROOT)!r})
        from tests.conformance.subjects import Subject, engines_under_test

        if __name__ == "__main__":
            faulthandler.dump_traceback_later(240, exit=True)
            subjects = [Subject(name) for name in engines_under_test()]
            for subject in subjects:
                subject.save({{"a": {{"weight": torch.ones(1000)}}}}, Path({str(tmp_path)!r}) / subject.name)
            print("saved", flush=True)
    """
    (tmp_path / "main.py").write_text(textwrap.dedent(code))
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "main.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    said = result.stdout + result.stderr
    assert (result.returncode, result.stdout.splitlines()[-1:]) == (0, ["saved"]), said
