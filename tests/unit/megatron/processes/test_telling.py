"""Lines of processes that share their output: of each packet of the socket that they print to here, there is one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

import pytest

from tests.unit.trace_helpers import ROOT

PROGRAM = """
    import sys
    from megatron.config.arguments import exit_with
    from megatron.launch.supervise import say
    from megatron.processes.telling import tell
    tell("to all")
    tell("one\\ntwo", sys.stdout)
    say("of a launcher")
    exit_with(ValueError("of a rank"), 1, 0.0, every_rank_sees_it=False)
"""


@pytest.mark.slow
def test_each_line_is_one_write_also_if_output_is_unbuffered() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PROGRAM)],
            cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, stdout=theirs.fileno(), stderr=theirs.fileno(),
            timeout=300,
        )  # fmt: skip
        theirs.close()
        told = list(iter(lambda: ours.recv(1 << 16), b""))
    assert done.returncode == 2
    of_rank = f"error on rank 1, {os.uname().nodename}: of a rank\n"
    assert told == [b"to all\n", b"one\ntwo\n", b"[launch] of a launcher\n", of_rank.encode()]
