"""Helper processes of engines, exports and replays, forked instead of begun with an interpreter each.

What they import takes two or three seconds of a processor. What such a process is given, what it does and how it ends
is as ever. They are forked either from the process that begins them, a rank of the zygote, which has imported all that
they need; or from a server without threads (`ForkServer`), where that process may not fork: pytest's has threads, and
a rank has a process group, which the helper of engine dcp-process makes for itself.

They begin as users begin them in tests/unit/megatron/checkpointing/engines/test_fastpersist_process.py and
test_dcp_process.py there, tests/unit/megatron/training/test_hf_exports.py, tests/conformance/test_engine_processes.py,
one training of test_engines_training.py, one of test_hf_exports.py, and one replay of test_ckpt_replay.py.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from megatron.processes import helper_process
from megatron.processes.parent_process import end_with_parent

FORKED_WRITERS = "FORKED_WRITERS"  # set in ranks that fork theirs
# Helpers that are forked from the process that begins them where there is no server.
FORKED = ("megatron.checkpointing.engines.fastpersist.process", "megatron.hf.export_process")
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)  # those that tests lower for a process
_LONGEST = 1 << 17  # bytes of a request: an environment, for the most part


class ForkServer:
    """Forks processes for this one, which adopts them: they are its children, as if it had begun them itself."""

    def __init__(self, connection: socket.socket) -> None:
        """`connection`: of `fork_connection`, whose other end a descendant of this process serves."""
        self._connection = connection
        self._asking = threading.Lock()

    @classmethod
    def begin(cls) -> ForkServer:
        """Fork it from this process, which has no threads yet."""
        ours, theirs = fork_connection()
        serve_forks_beside(theirs.detach())
        return cls(ours)

    def fork(self, code: str, env: Mapping[str, str], pass_fds: Sequence[int], streams: tuple[int, int]) -> int:
        """The process that runs `code`, with the open files `pass_fds`, and `streams` for stdout and stderr."""
        request = {
            "code": code,
            "env": dict(env),
            "pass_fds": [*pass_fds],
            "cwd": os.getcwd(),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "limits": [resource.getrlimit(limit) for limit in _LIMITS],
        }
        with self._asking:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], [*streams, *pass_fds])
                answer = self._connection.recv(32)
            finally:
                _adopt_orphans(False)
        assert answer, "the process that forks helpers has ended"
        return int(answer)


def fork_connection() -> tuple[socket.socket, socket.socket]:
    """A ForkServer has one end, and `serve_forks_beside` gets the other."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def serve_forks_beside(connection: int) -> None:
    """Have a process forked from this one, which has no threads yet, fork for the ForkServer at the other end.

    It ends with this process, or when that end is closed everywhere. `connection` is closed here.
    """
    parent = os.getpid()
    if os.fork() == 0:
        try:
            end_with_parent(parent)
            _serve_forks(socket.socket(fileno=connection))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(connection)


def _serve_forks(connection: socket.socket) -> None:
    while (received := socket.recv_fds(connection, _LONGEST, 64))[0]:
        message, fds = received[:2]
        connection.send(b"%d" % _fork_for_adoption(json.loads(message), fds))
        for fd in fds:
            os.close(fd)


def _fork_for_adoption(request: dict[str, Any], fds: Sequence[int]) -> int:
    """Its parent ends at once. It begins once that has been waited for: then it has the parent that it is to have."""
    told, tell = os.pipe()
    begun, begin = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            os.close(begin)
            os.read(begun, 1)
            _run(request["code"], request["env"], request["pass_fds"], (1, 2), lambda: _become(request, fds))
        os.write(tell, b"%d" % pid)
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(told, 32))
    os.write(begin, b"b")
    for fd in (told, tell, begun, begin):
        os.close(fd)
    return pid


def _become(request: dict[str, Any], fds: Sequence[int]) -> None:
    """In the process that the server has forked: take over what it would have inherited from the one that asked."""
    wanted = [1, 2, *request["pass_fds"]]
    above = max(*wanted, *fds) + 1
    for number, fd in enumerate(fds):  # which may be a number that another one is to have
        os.dup2(fd, above + number)
    for number, fd in enumerate(wanted):
        os.dup2(above + number, fd)
    os.chdir(request["cwd"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    for limit, values in zip(_LIMITS, request["limits"], strict=True):
        resource.setrlimit(limit, values)


def _adopt_orphans(adopts: bool) -> None:
    """Whether the kernel makes this process the parent of descendants whose parent ends, and not one further up."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(adopts))


def install(server: ForkServer | None = None) -> None:
    """For this process: the helpers that it would start are forked, without a server those of FORKED."""
    from megatron.training import hf_exports

    begin = functools.partial(_begin, server)
    for module in (helper_process, hf_exports):
        module.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": begin})  # type: ignore[assignment]


def _begin(server: ForkServer | None, command: Sequence[str], **more: Any) -> ForkedInterpreter | subprocess.Popen[Any]:
    is_forked = server is not None or any(f"from {module} import main" in command[-1] for module in FORKED)
    return ForkedInterpreter(command, server, **more) if is_forked else subprocess.Popen(command, **more)


@contextmanager
def installed(server: ForkServer) -> Iterator[None]:
    """`install` for the body."""
    from megatron.training import hf_exports

    before = helper_process.subprocess
    install(server)
    try:
        yield
    finally:
        helper_process.subprocess = hf_exports.subprocess = before


@contextmanager
def forked_replays(server: ForkServer) -> Iterator[None]:
    """In the body, a replay that this process runs (tools.ckpt_replay) has `server` fork what forks its ranks."""
    from tools.ckpt_replay import launch

    before = launch.subprocess
    launch.subprocess = SimpleNamespace(  # type: ignore[assignment]
        **vars(subprocess) | {"Popen": functools.partial(ForkedModule, server)}
    )
    try:
        yield
    finally:
        launch.subprocess = before


class ForkedInterpreter:
    """What they use of subprocess.Popen([python, "-c", CODE], stdin=DEVNULL, env=..., pass_fds=... or stdout=PIPE)."""

    returncode: int | None = None
    _reaping = threading.Lock()  # several threads ask whether their helper lives

    def __init__(
        self, command: Sequence[str], server: ForkServer | None = None, *, stdin: int, env: Mapping[str, str] | None,
        pass_fds: Sequence[int] = (), stdout: int | None = None, stderr: int | None = None,
    ) -> None:  # fmt: skip
        python, option, code = command
        assert (python, option, stdin) == (sys.executable, "-c", subprocess.DEVNULL)
        assert (stdout, stderr) in ((None, None), (subprocess.PIPE, subprocess.STDOUT))
        environment = dict(os.environ if env is None else env)
        reading, writing = (None, None) if stdout is None else os.pipe()
        self.stdout = None if reading is None else os.fdopen(reading, "rb")
        streams = (1, 2) if writing is None else (writing, writing)
        if server is not None:
            self.pid = server.fork(code, environment, pass_fds, streams)
        else:
            self.pid = os.fork()
            if self.pid == 0:
                _run(code, environment, pass_fds, streams)
        if writing is not None:
            os.close(writing)

    def poll(self) -> int | None:
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and timeout is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the checkpoint writer", timeout)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, signum: int) -> None:
        with self._reaping:  # until it is reaped, its number is no other's
            if self.returncode is None:
                os.kill(self.pid, signum)


class ForkedModule(ForkedInterpreter):
    """What tools.ckpt_replay uses of subprocess.Popen([python, "-m", MODULE], stdin=PIPE, stdout=PIPE, ...)."""

    def __init__(
        self, server: ForkServer, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], text: bool, stdin: int,
        stdout: int, stderr: IO[bytes],
    ) -> None:  # fmt: skip
        python, option, module = command
        assert (python, option, text, stdin, stdout) == (sys.executable, "-m", True, subprocess.PIPE, subprocess.PIPE)
        asked, ask = os.pipe()
        answers, answer = os.pipe()
        code = (
            f"import os, sys; os.chdir({str(cwd)!r}); os.dup2({asked}, 0); sys.stdin = open(0, closefd=False)\n"
            "sys.path[:0] = filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep))\n"
            f"sys.argv[1:] = []; from {module} import main; main()"
        )
        self.pid = server.fork(code, env, [asked], (answer, stderr.fileno()))
        os.close(asked)
        os.close(answer)
        self.stdin, self.stdout = os.fdopen(ask, "w"), os.fdopen(answers)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        code = super().wait(timeout)
        self.stdin.close()
        self.stdout.close()
        return code


def _run(
    code: str, env: Mapping[str, str], pass_fds: Sequence[int], streams: tuple[int, int],
    become: Callable[[], None] = lambda: None,
) -> NoReturn:  # fmt: skip
    """In the forked process: after `become`, all that a new interpreter would not have is given up first."""
    status = 1  # code that ends well ends the process
    try:
        become()
        os.environ.clear()
        os.environ.update(env)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if streams[0] != 1:
            os.dup2(streams[0], 1)
            os.dup2(streams[1], 2)
            logging.getLogger().handlers.clear()
        first = 3
        for fd in sorted(pass_fds):
            os.closerange(first, fd)
            first = fd + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        for directory in filter(None, env.get("PYTHONPATH", "").split(os.pathsep)):
            if (at_start := Path(directory, "sitecustomize.py")).is_file():
                runpy.run_path(str(at_start))
                break
        exec(code, {"__name__": "__main__"})
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
