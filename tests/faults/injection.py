"""Runs a function in a forked process and makes one of its system calls fail, as the kernel would have it fail.

The process is traced (ptrace(2)), and a seccomp filter stops it at the calls of tests.faults.system_calls alone. So
every call is seen, of every thread and child, also those that the C library makes within itself, which a library that
is preloaded does not see. At the chosen call the tracer changes registers: the call is left out and returns an error,
transfers half of its bytes, or is carried out and returns an error nevertheless (a close on NFS); or the process is
killed. Needs Linux on x86-64 and the right to trace one's own children, which containers have by default.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import platform
import signal
import struct
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tests.alarm import alarm
from tests.faults.system_calls import (
    ANY,
    CALLS,
    IN_MEMORY,
    KILL,
    LASTING,
    NEED_SPACE,
    NETWORK,
    OPERATIONS,
    Place,
    SystemCall,
    error_of,
    operation_of,
)

HANGS_S = 300  # a process that has not ended by then never will
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.restype = ctypes.c_long
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
# linux/ptrace.h
_CONT, _GETREGS, _SETREGS, _SYSCALL, _SEIZE = 7, 12, 13, 24, 0x4206
_SYSGOOD, _FORK, _VFORK, _CLONE, _EXEC, _SECCOMP, _EXITKILL = 1, 2, 4, 8, 0x10, 0x80, 0x100000
_EVENT_EXEC, _EVENT_SECCOMP = 4, 7
_ALL_CHILDREN = 0x40000000  # __WALL of waitpid(2)
# linux/seccomp.h, linux/filter.h
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_TRACE, _ALLOW = 0x7FF00000, 0x7FFF0000
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# Of user_regs_struct (sys/user.h): the result, the number of the call, its arguments.
_RESULT, _NUMBER, _ARGUMENTS = 10, 15, (14, 13, 12, 7, 9, 8)
_AT_CWD = -100
_SECTOR = 512


@dataclass(frozen=True)
class Fault:
    """The `number`-th call (from 1) of an `operation` has an `effect`; see tests.faults.system_calls."""

    operation: str
    number: int
    effect: str

    def __str__(self) -> str:
        return f"{self.effect} at {self.operation} {self.number}"


@dataclass
class Traced:
    """What became of a process. `result`: of the function, or None; `raised`: its exception, as text."""

    result: Any = None
    raised: str | None = None
    hangs: bool = False
    calls: list[str] = field(default_factory=list)  # the operation of each, in their order
    hit: str | None = None  # the first call that the fault was injected into
    status: int = 0  # of the process, as subprocess has it


def faults_at(calls: Sequence[str]) -> list[list[Fault]]:
    """Of each of these `calls`, which are those of a run without a fault: all that can happen to it."""
    found, numbers = [], Counter[str]()
    for number, operation in enumerate(calls, start=1):
        numbers[operation] += 1
        found.append([Fault(operation, numbers[operation], effect) for effect in OPERATIONS[operation]])
        lasting = () if operation in IN_MEMORY | NETWORK else LASTING if operation in NEED_SPACE else LASTING[:1]
        found[-1] += [Fault(ANY, number, effect) for effect in (KILL, *lasting)]
    return found


class TracingForbiddenError(RuntimeError):
    """This machine does not let a process trace its children."""


def run_traced(
    function: Callable[[], Any], is_watched: Callable[[str], bool], fault: Fault | None, *, sockets: bool = False
) -> Traced:
    """Run `function` in a forked process with the fault.

    `is_watched`: whether calls on a path count; with `sockets` those on sockets count, too. Returns when the process
    and all that it has started have ended. Raises TracingForbiddenError.
    """
    if platform.machine() != "x86_64":
        raise TracingForbiddenError(f"faults are injected on x86-64 alone, and this is {platform.machine()}")
    reading, writing = os.pipe()
    may_begin, begin = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(begin)
        _be_traced(function, may_begin, writing)
    os.setpgid(pid, pid)  # by which the tracer waits for what it starts, and for no other child of this process
    os.close(writing)
    os.close(may_begin)
    tracer = _Tracer(pid, is_watched, fault, sockets)
    try:
        tracer.attach()
        os.write(begin, b"b")
        os.close(begin)
        with _deadline(tracer):
            tracer.follow()
        with os.fdopen(reading, "rb", closefd=False) as pipe:
            content = pipe.read()
    finally:
        os.close(reading)
    found = tracer.found
    if content:
        found.result, found.raised = pickle.loads(content)
    return found


def in_a_small_process(function: Callable[..., None], *arguments: object) -> None:
    """Call a function of a module in a new process: `run_traced` is slow where all tests have left their imports."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(function, *arguments).result()


def _be_traced(function: Callable[[], Any], may_begin: int, told: int) -> NoReturn:
    """In the forked process."""
    result, raised = None, None
    try:
        if os.read(may_begin, 1):
            _stop_at_calls()
            result = function()
    except BaseException as error:
        raised = "".join(traceback.format_exception(error))[-4000:]
    finally:
        with contextlib.suppress(BaseException):
            content = pickle.dumps((result, raised))
            assert len(content) < 1 << 16, "a result that does not fit into a pipe"
            os.write(told, content)
        os._exit(0)


def _stop_at_calls() -> None:
    """Install the filter in this process: all that it starts has it, too."""
    program = [(_LOAD, 0, 0, 0)]
    numbers = sorted(CALLS)
    for place, number in enumerate(numbers):
        program.append((_IF_EQUAL, len(numbers) - place, 0, number))
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _TRACE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    for arguments in ((_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.addressof(header), 0, 0)):
        if _LIBC.prctl(arguments[0], *map(ctypes.c_ulong, arguments[1:])):
            raise TracingForbiddenError(f"prctl {arguments[0]}: {os.strerror(ctypes.get_errno())}")


@contextlib.contextmanager
def _deadline(tracer: _Tracer) -> Iterator[None]:
    def kill() -> None:
        tracer.found.hangs = True
        tracer.kill_all()

    with alarm(HANGS_S, kill):
        yield


class _Tracer:
    """Follows one process and its children to their end."""

    def __init__(self, pid: int, is_watched: Callable[[str], bool], fault: Fault | None, sockets: bool) -> None:
        self.found = Traced()
        self._pid = pid
        self._is_watched = is_watched
        self._fault = fault
        self._sockets = sockets
        self._threads = {pid}
        self._counts: Counter[str] = Counter()  # of calls, by operation
        self._late: dict[int, int] = {}  # thread -> error that its present call is to return
        self._memories: dict[int, int] = {}  # thread -> descriptor of its memory
        self._registers = (ctypes.c_ulonglong * 27)()

    def attach(self) -> None:
        options = _SYSGOOD | _FORK | _VFORK | _CLONE | _EXEC | _SECCOMP | _EXITKILL
        if _LIBC.ptrace(_SEIZE, self._pid, None, options):
            error = os.strerror(ctypes.get_errno())
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            raise TracingForbiddenError(
                f"ptrace: {error}: this machine does not let a process trace its children; in a container, give it "
                "the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE)"
            )

    def kill_all(self) -> None:
        for thread in list(self._threads):
            with contextlib.suppress(ProcessLookupError):
                os.kill(thread, signal.SIGKILL)

    def follow(self) -> None:
        while True:
            try:
                thread, status = os.waitpid(-self._pid, _ALL_CHILDREN)
            except ChildProcessError:
                for left in list(self._memories):  # of threads that another one's exec has ended
                    self._forget_memory(left)
                return
            if not os.WIFSTOPPED(status):
                self._threads.discard(thread)
                self._forget_memory(thread)
                if thread == self._pid:
                    self.found.status = os.waitstatus_to_exitcode(status)
                continue
            self._threads.add(thread)
            self._go_on(thread, os.WSTOPSIG(status), status >> 16)

    def _go_on(self, thread: int, number: int, event: int) -> None:
        request, delivered = _CONT, 0
        if event == _EVENT_SECCOMP:
            request = self._at_call(thread)
        elif number == signal.SIGTRAP | 0x80:  # the end of a call
            error = self._late.pop(thread, None)
            if error is not None:
                self._set(thread, {_RESULT: -error})
        elif event == _EVENT_EXEC:
            self._forget_memory(thread)
        elif not event:
            delivered = number
        _LIBC.ptrace(request, thread, None, delivered)  # fails where the thread was killed meanwhile

    def _at_call(self, thread: int) -> int:
        """Count the call that a thread is about to make, and inject the fault. How the thread is to go on."""
        if self.found.hit is not None and self._fault is not None and self._fault.effect not in LASTING:
            return _CONT  # all that was to happen has
        if _LIBC.ptrace(_GETREGS, thread, None, ctypes.addressof(self._registers)):
            return _CONT
        number, arguments = self._registers[_NUMBER], [self._registers[place] for place in _ARGUMENTS]
        call = CALLS[number]
        path = self._path(thread, call, arguments)
        if path is None:
            return _CONT
        operation = operation_of(call, arguments, path)
        self.found.calls.append(operation)
        self._counts[operation] += 1
        if self._fault is None or not self._is_due(operation):
            return _CONT
        self.found.hit = self.found.hit or f"{call.name} {path}"
        return self._inject(thread, call, arguments)

    def _is_due(self, operation: str) -> bool:
        fault = self._fault
        assert fault is not None
        if fault.effect in LASTING:
            number = len(self.found.calls)
            needs = operation in NEED_SPACE or (fault.effect == LASTING[0] and operation not in IN_MEMORY)
            return needs and number >= fault.number
        count = len(self.found.calls) if fault.operation == ANY else self._counts[operation]
        return fault.operation in (operation, ANY) and count == fault.number

    def _inject(self, thread: int, call: SystemCall, arguments: list[int]) -> int:
        assert self._fault is not None
        effect = self._fault.effect
        if effect == KILL:
            os.kill(self._pid, signal.SIGKILL)
            return _CONT
        if effect == "short":
            self._shorten(thread, call, arguments)
            return _CONT
        if effect.startswith("late") or call.name == "close":  # a descriptor is closed, whatever close says
            self._late[thread] = error_of(effect)
            return _SYSCALL
        self._set(thread, {_NUMBER: -1, _RESULT: -error_of(effect)})
        return _CONT

    def _shorten(self, thread: int, call: SystemCall, arguments: list[int]) -> None:
        if call.length is None:
            return
        if not call.is_vectored:
            half = self._half(thread, arguments[0], arguments[call.length])
            self._set(thread, {_ARGUMENTS[call.length]: half})
            return
        memory, at = self._memory(thread), arguments[1] + 8  # the first vector alone, and half of it
        length = struct.unpack("Q", os.pread(memory, 8, at))[0]
        os.pwrite(memory, struct.pack("Q", self._half(thread, arguments[0], length)), at)
        self._set(thread, {_ARGUMENTS[call.length]: 1})

    def _half(self, thread: int, fd: int, count: int) -> int:
        """Half of `count` bytes; with O_DIRECT whole sectors."""
        try:
            with open(f"/proc/{thread}/fdinfo/{fd}") as info:
                flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags:"))
        except OSError:
            return count
        if flags & os.O_DIRECT:
            return count // 2 // _SECTOR * _SECTOR or count
        return max(count // 2, 1) if count else 0

    def _set(self, thread: int, registers: dict[int, int]) -> None:
        """Set registers of a thread that has stopped."""
        if _LIBC.ptrace(_GETREGS, thread, None, ctypes.addressof(self._registers)):
            return
        for place, value in registers.items():
            self._registers[place] = value & 0xFFFFFFFFFFFFFFFF
        _LIBC.ptrace(_SETREGS, thread, None, ctypes.addressof(self._registers))

    def _path(self, thread: int, call: SystemCall, arguments: list[int]) -> str | None:
        """The path that a call is about, if it is watched."""
        try:
            for path in self._paths(thread, call, arguments):
                if path.startswith("socket:"):
                    transfers = call.operation in NETWORK or call.operation in ("read", "write")
                    return path if self._sockets and transfers else None
                if call.operation not in NETWORK and self._is_watched(path):
                    return path
        except OSError:  # no such descriptor, or the thread is gone
            return None
        return None

    def _paths(self, thread: int, call: SystemCall, arguments: list[int]) -> list[str]:
        place = call.place
        if place is Place.DESCRIPTOR:
            return [_descriptor(thread, arguments[0])]
        if place is Place.MAPPED:
            return [_descriptor(thread, arguments[4])]
        if place is Place.AT:
            return [_below(thread, arguments[0], self._text(thread, arguments[1]))]
        if place is Place.PATH:
            return [_below(thread, _AT_CWD, self._text(thread, arguments[0]))]
        if place is Place.PATHS:
            return [_below(thread, _AT_CWD, self._text(thread, address)) for address in arguments[:2]]
        return [_below(thread, arguments[i], self._text(thread, arguments[i + 1])) for i in (0, 2)]

    def _text(self, thread: int, address: int) -> str:
        """The string at an address of the thread; "" for none."""
        memory, content = self._memory(thread), b""
        while address and b"\0" not in content and len(content) < 4096:
            at = address + len(content)
            part = os.pread(memory, min(256, 4096 - at % 4096), at)  # not into the next page, which may not be there
            if not part:
                raise ProcessLookupError(f"thread {thread} has no memory any more")
            content += part
        return os.fsdecode(content.partition(b"\0")[0])

    def _memory(self, thread: int) -> int:
        if thread not in self._memories:
            self._memories[thread] = os.open(f"/proc/{thread}/mem", os.O_RDWR)
        return self._memories[thread]

    def _forget_memory(self, thread: int) -> None:
        """It is another's from now on, or nobody's."""
        memory = self._memories.pop(thread, None)
        if memory is not None:
            os.close(memory)


def _descriptor(thread: int, fd: int) -> str:
    return os.readlink(f"/proc/{thread}/fd/{ctypes.c_int(fd).value}")


def _below(thread: int, fd: int, path: str) -> str:
    if path.startswith("/"):
        return path
    fd = ctypes.c_int(fd).value
    directory = os.readlink(f"/proc/{thread}/cwd") if fd == _AT_CWD else _descriptor(thread, fd)
    return f"{directory}/{path}" if path else directory
