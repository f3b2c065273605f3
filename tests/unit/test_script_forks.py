"""What all tests of launch scripts rely on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.alarm import alarm
from tests.unit.script_forks import run_forked, server


class LateError(Exception):
    pass


def late() -> None:
    raise LateError


@pytest.mark.slow
def test_a_command_is_not_given_the_answer_of_one_whose_test_was_ended(tmp_path: Path) -> None:
    environ = {"PATH": os.environ["PATH"]}
    run_forked(["--version"], tmp_path, environ)
    stopped = psutil.Process(server().pid)
    stopped.suspend()
    try:
        with pytest.raises(LateError), alarm(0.01, late):
            run_forked(["no-such-command"], tmp_path, environ)
    finally:
        if stopped.is_running():
            stopped.send_signal(signal.SIGCONT)
    assert run_forked(["--version"], tmp_path, environ).returncode == 0
