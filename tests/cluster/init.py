"""The first process of a PID namespace: with it, the kernel kills every other process of the namespace.

Runs by itself, without the rest of the project: `python -I -S init.py`. It prints its process id as seen from outside,
mounts a /proc of its own namespace, and ends when its standard input does: with the process that holds the cluster.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def main() -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans are adopted by this process: have the kernel reap them
    outside = os.readlink("/proc/self")  # the mounted /proc is still that of the namespace outside
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(0), None) != 0:
        print(f"cannot mount /proc: {os.strerror(ctypes.get_errno())}", flush=True)
        return 1
    print(outside, flush=True)
    while os.read(sys.stdin.fileno(), 4096):
        continue
    return 0


if __name__ == "__main__":
    sys.exit(main())
