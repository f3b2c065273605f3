"""Processes are found by a variable, whatever they are at."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tools.common.environments import has_variable


@pytest.mark.slow
def test_a_process_that_runs_one_program_after_the_other_has_its_variables(tmp_path: Path) -> None:
    """One look in fifteen finds no environment."""
    again = tmp_path / "again.sh"
    again.write_text('exec /bin/sh "$0"\n')
    with subprocess.Popen(["/bin/sh", str(again)], env=os.environ | {"OF_A_TEST": "this"}) as process:
        try:
            assert all(has_variable(process.pid, "OF_A_TEST", "this") for _ in range(2000))
            assert not has_variable(process.pid, "OF_A_TEST", "another")
        finally:
            process.kill()


def test_what_has_no_environment_has_no_variable() -> None:
    with subprocess.Popen(["/bin/sleep", "600"], env={}) as process:
        try:
            assert not has_variable(process.pid, "OF_A_TEST", "")
        finally:
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not has_variable(process.pid, "OF_A_TEST", ""), "a process that has ended"
    assert not has_variable(process.pid, "OF_A_TEST", "")
