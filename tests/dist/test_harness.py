"""What all tests with ranks rely on."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.alarm import alarm
from tests.dist.forked_writers import ForkedInterpreter
from tests.dist.harness import HANGS_S, Zygote, end_all, processes_with, runs, wait_for
from tests.dist.hold import faults

pytestmark = pytest.mark.slow  # starts a rank


class LateError(Exception):
    pass


def late() -> None:
    raise LateError


def test_a_run_that_is_over_before_anybody_reads_of_it_is_seen(zygote: Zygote, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    request = {"argv": [], "env": {}, "nproc": 1, "log_dir": str(tmp_path), "script": str(script)}
    zygote._ask(request)
    deadline = time.monotonic() + HANGS_S
    while _waiting_bytes(zygote) < len('{"pids": [4194304]}\n{"exit_codes": [0]}\n') - len("419430"):
        assert time.monotonic() < deadline, "the run never ended"
        time.sleep(0.01)
    assert list(zygote._answer(HANGS_S)) == ["pids"]
    assert zygote._answer(HANGS_S) == {"exit_codes": [0]}


def test_a_run_whose_test_is_ended_leaves_the_next_one_alone(zygote: Zygote, tmp_path: Path) -> None:
    """As by the time limit of a test."""
    script = tmp_path / "train.py"
    script.write_text("import signal, sys; sys.argv[1:] or signal.pause()")

    def end_soon(_: list[int]) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    with pytest.raises(LateError), alarm(HANGS_S, late):
        zygote.run([], 2, tmp_path, script=str(script), during=end_soon)
    assert zygote.run(["end"], 1, tmp_path, script=str(script)).exit_codes == [0]


def test_the_number_of_a_rank_that_has_ended_is_no_others(zygote: Zygote, tmp_path: Path) -> None:
    """While the others run, and a test may harm all of them."""
    script, go_on = tmp_path / "train.py", tmp_path / "go_on"
    os.mkfifo(go_on)
    script.write_text(f"import os, sys; os.environ['RANK'] == '0' and sys.exit(3); open({str(go_on)!r}).read()")

    def look(pids: list[int]) -> None:
        wait_for(lambda: not runs(pids[0]), "the end of rank 0")
        try:
            assert psutil.pid_exists(pids[0])
        finally:
            go_on.write_text("")

    assert zygote.run([], 2, tmp_path, script=str(script), during=look).exit_codes == [3, 0]


def test_a_process_that_is_ended_still_has_its_exit_code(tmp_path: Path) -> None:
    code = "import signal; print('ready', flush=True); signal.pause()"
    environment = os.environ | {"OF_A_TEST": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        end_all(lambda: processes_with("OF_A_TEST", str(tmp_path)))
    assert process.returncode == -signal.SIGKILL


def test_a_line_of_which_a_part_is_written_is_no_fault_yet(tmp_path: Path) -> None:
    """The kernel shows parts of a write: up to where a page ends, here after an object within the record."""
    fault = json.dumps({"phase": "injected", "cycle": 1})
    (tmp_path / "supervisor_000.jsonl").write_text(f'{fault}\n{{"environment":{{}}')
    assert (faults(tmp_path, 0), faults(tmp_path, 1)) == (0, 1)


def test_two_threads_may_ask_for_the_end_of_a_forked_helper(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    helper = ForkedInterpreter(command, zygote.forks, stdin=subprocess.DEVNULL, env=os.environ)
    waitpid, met, found = os.waitpid, threading.Barrier(2), list[int | None]()

    def in_one_moment(pid: int, options: int) -> tuple[int, int]:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.wait(0.1)  # the other is there as well, if it may
        return waitpid(pid, options)

    helper.kill()
    wait_for(lambda: not runs(helper.pid), "the end of the helper")
    monkeypatch.setattr(os, "waitpid", in_one_moment)
    threads = [threading.Thread(target=lambda: found.append(helper.poll())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [-signal.SIGKILL] * 2


def _waiting_bytes(zygote: Zygote) -> int:
    """Bytes of answers that were not read yet."""
    assert zygote.process.stdout is not None
    count = array.array("i", [0])
    fcntl.ioctl(zygote.process.stdout, termios.FIONREAD, count)
    return count[0]
