"""What engine `memory` cannot have is one message on one host, before a run trains; that there is one host alone, a
warning."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.dist.harness import HANGS_S, ROOT
from tests.dist.test_launch import LAUNCHER, environment
from tests.dist.test_restart_drill import TRAINING


def launch(directory: Path, dataset: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    save = str(directory / "save")
    command = [
        *LAUNCHER, "--max-restarts", "2", str(ROOT / "pretrain_gpt.py"), *dataset, *TRAINING, "--train-iters", "1",
        "--save", save, "--load", save, "--checkpoint-engine", "memory", *flags,
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=directory, env=environment(directory), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=HANGS_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "2"], "error: --replicas 2: more copies than hosts (1)"),
        (["--failure-domain", "racks"], "error: --failure-domain racks: does not name "),
        pytest.param(
            ["--failure-domain", "none"],
            "error: --failure-domain none: cannot be read: No such file or directory",
            marks=pytest.mark.nightly(minutes=1),
        ),
        pytest.param(
            ["--failure-domain", "list"],
            "error: --failure-domain list: line 1 is not HOST DOMAIN",
            marks=pytest.mark.nightly(minutes=1),
        ),
    ],
)
def test_what_cannot_be_is_one_message_however_many_restarts_there_may_be(
    tmp_path: Path, dataset: list[str], flags: list[str], message: str
) -> None:
    (tmp_path / "racks").write_text("another_host rack0\n")
    (tmp_path / "list").write_text("another_host\n")
    done = launch(tmp_path, dataset, *flags)
    assert done.returncode == 2, done.stdout[-3000:]
    assert done.stdout.count(message) == 1 and "Traceback" not in done.stdout, done.stdout[-3000:]
    assert "iteration        1/" not in done.stdout


def test_one_host_keeps_its_saves_alone_and_says_so(tmp_path: Path, dataset: list[str]) -> None:
    done = launch(tmp_path, dataset)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("this is one host, so its saves are in memory of their own host alone") == 1
