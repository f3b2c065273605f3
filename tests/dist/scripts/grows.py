"""pretrain_gpt.py as a rank that returns twice, and has grown by 300 MiB in between: the second time it ends.

Only if the training has noted its steps is the first return a measure of the second, before which a step is noted here.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
from pathlib import Path

from megatron.processes import in_process_restart

signal.signal(in_process_restart.REPORT_SIGNAL, signal.SIG_IGN)
launcher, mine = socket.socketpair(type=socket.SOCK_SEQPACKET)
restarts = in_process_restart.InProcessRestarts(mine, os.getpid(), 1.0)
with contextlib.suppress(SystemExit):  # at its end
    runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
kept = bytearray()
for _ in range(2):
    in_process_restart.send_start(launcher, os.environ)
    restarts.wait_for_start()
    kept += bytearray(b"x") * (300 << 20)
    in_process_restart.note_step()
