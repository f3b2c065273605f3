"""A run whose saves in memory do not fit a limit of its cgroup ends with one message, before the kernel kills it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.conftest import dataset as dataset  # noqa: PLC0414  a fixture
from tests.dist.harness import HANGS_S, ROOT
from tests.dist.test_launch import LAUNCHER, environment
from tests.dist.test_restart_drill import TRAINING

LIMIT = 2 << 30
GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup (version 1) with LIMIT."""
    made = GROUPS / f"memory_limit_{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"{made}: cannot be made: {error.strerror}: needs root and memory cgroups of version 1")
    (made / "memory.limit_in_bytes").write_text(str(LIMIT))
    yield made
    while made.exists():
        try:
            made.rmdir()
        except OSError:  # what ended is still being cleared up
            time.sleep(0.1)


@pytest.mark.slow
def test_saves_that_do_not_fit_are_refused(group: Path, tmp_path: Path, dataset: list[str]) -> None:
    save = str(tmp_path / "save")
    large = ["--hidden-size", "1024", "--ffn-hidden-size", "8192", "--num-layers", "3"]  # 1.2 GiB a slot
    command = [
        *LAUNCHER[:2], "--nproc-per-node", "1", "--max-restarts", "2", str(ROOT / "pretrain_gpt.py"), *dataset,
        *TRAINING, *large, "--save", save, "--load", save, "--checkpoint-engine", "memory", "--train-iters", "1",
    ]  # fmt: skip
    inside = ["sh", "-c", f'echo $$ >{group}/tasks && exec "$@"', "sh", *command]
    done = subprocess.run(
        inside, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout[-3000:]
    assert done.stdout.count("error: --checkpoint-engine memory: ") == 1 and "SIGKILL" not in done.stdout
    assert "GiB are free (of the host, or of a limit of its cgroups); run fewer ranks on a host, or use" in done.stdout
    assert "iteration        1/" not in done.stdout
