"""A rank that waits in vain is ended, and says for what; real processes that really hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
HEAD = """
import os, signal, threading, time
from megatron.config.arguments import config_from_args, parse_args
from megatron.fileio.files import write_some
from megatron.startup.watch import Watch
from restart_trace.under_way import OWN_WORK, RANKS, READING, STORAGE, UnderWay
flags = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --train-iters 2 "
    "--lr 1e-3 --data-path /d --tokenizer-type NullTokenizer --vocab-size 8 --load /l "
)
def watched(more):
    return Watch(config_from_args(parse_args((flags + more).split()), {})).start()
"""
# Nobody reads from the pipe: the kernel lets nobody return who writes more than it holds.
HANGING_WRITE = """
watched("--distributed-timeout-minutes 0.01")
reading, writing = os.pipe()
with UnderWay(OWN_WORK, "save global_step2 flush write"):
    while True:
        write_some(writing, bytes(1 << 20))
"""
HANGING_THREAD = """
watched("--distributed-timeout-minutes 0.01")
reading, writing = os.pipe()
thread = threading.Thread(target=lambda: [write_some(writing, bytes(1 << 20)) for _ in range(9)])
thread.start()
thread.join()
"""
WAITING = """
watched("--distributed-timeout-minutes 0.01")
with UnderWay(RANKS, "training step", "7"):
    threading.Event().wait()
"""
READING = """
watched("--distributed-timeout-minutes 10 --load-timeout 0.5")
with UnderWay(READING, "the reading of /l/global_step2"):
    while True:
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("hangs", "said"),
    [
        (HANGING_WRITE, r"write to pipe:\[\d+\] has not returned for \S+ s .*the storage does not answer"),
        (HANGING_THREAD, r"write to pipe:\[\d+\] has not returned for \S+ s .*the storage does not answer"),
        (WAITING, r"training step 7 waited \S+ s for other ranks \(--distributed-timeout-minutes 0\.01\)"),
        (READING, r"the reading of /l/global_step2 has taken \S+ s, longer than --load-timeout 0\.5"),
    ],
    ids=["write", "write-of-a-thread", "ranks", "load"],
)
def test_what_hangs_is_ended_with_one_line(hangs: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + hangs], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.match(rf"error on rank 0, {os.uname().nodename}: {said}", line), line


# More than the limit in all, but never at one line for so long; and what has no limit of its own.
AT_WORK = """
watch = watched("--distributed-timeout-minutes 0.01")
end = time.monotonic() + 2.5
with UnderWay(RANKS, "training step", "7"), UnderWay(OWN_WORK, "collect"):
    while time.monotonic() < end:
        time.sleep(0.001)
        time.sleep(0.001)
        sum(range(1000))
with UnderWay(OWN_WORK, "save flush"):
    threading.Event().wait(2.5)
watch.close()
print("done")
"""


@pytest.mark.slow
def test_a_rank_at_work_is_left_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + AT_WORK], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# Stopped for longer than the limit, and a moment later the call returns. The parent lets it go on.
STOPPED = """
watch = watched("--distributed-timeout-minutes 0.05 --load-timeout 3")
with UnderWay(STORAGE, "write to", "/c/file"), UnderWay(READING, "the reading of /l/global_step2"):
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)
watch.close()
print("done")
"""


@pytest.mark.slow
def test_storage_has_time_to_answer_after_the_machine_stood_still() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HEAD + STOPPED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        time.sleep(4)  # the stop itself, longer than the limits
        process.send_signal(signal.SIGCONT)
        said, error = process.communicate()
    assert (process.returncode, said) == (0, "done\n"), error
