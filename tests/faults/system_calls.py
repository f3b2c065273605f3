"""The system calls of a process that a fault can be injected into, and how each can fail.

Numbers and registers are those of Linux on x86-64.
"""

from __future__ import annotations

import enum
import errno
import os
from dataclasses import dataclass


class Place(enum.Enum):
    """How the arguments of a call name its file."""

    DESCRIPTOR = "a descriptor first"
    PATH = "a path first"
    AT = "a directory's descriptor and a path first"
    PATHS = "two paths"
    PATHS_AT = "a directory's descriptor and a path, twice"
    MAPPED = "a descriptor, fifth"


@dataclass(frozen=True)
class SystemCall:
    """`operation`: the kind of call that it is counted as, one of OPERATIONS. `length`: the argument with the number of
    bytes (or of vectors) to transfer; None if nothing is transferred."""

    name: str
    operation: str
    place: Place
    length: int | None = None
    is_vectored: bool = False


_NO_SPACE = "ENOSPC"
# Operation -> what a call can come to besides success. "short": half of the bytes; "late": it takes effect and fails.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "open": ("EIO", "ESTALE"),
    "create": ("EIO", _NO_SPACE, "ESTALE"),
    "read": ("EIO", "ESTALE", "EINTR", "short"),
    "write": ("EIO", _NO_SPACE, "ESTALE", "EINTR", "short"),
    "sync": ("EIO", _NO_SPACE, "EINTR"),
    "close": ("late EIO", "late ENOSPC"),
    "rename": ("EIO", _NO_SPACE, "ESTALE"),
    "remove": ("EIO", "ESTALE"),
    "mkdir": ("EIO", _NO_SPACE),
    "truncate": ("EIO", _NO_SPACE),
    "stat": ("EIO", "ESTALE"),
    "list": ("EIO", "ESTALE"),
    "lock": ("EIO", "ENOLCK"),
    "map": ("ENOMEM",),
    "allocate": (_NO_SPACE,),  # of a file in memory, whose other calls cannot fail
    "in memory": (),
    "change": ("EIO", "ESTALE"),
    "connect": ("ECONNREFUSED", "ETIMEDOUT"),
    "send": ("ECONNRESET", "EPIPE", "short"),
    "receive": ("ECONNRESET", "ETIMEDOUT", "short"),
}
ANY = "any"  # in the place of an operation: all of them are counted together
KILL = "kill"  # SIGKILL instead of the call
LASTING = ("lasting EIO", "lasting ENOSPC")  # from this call on; without space only those calls fail that need some
NEED_SPACE = frozenset(("create", "write", "sync", "rename", "mkdir", "truncate"))
IN_MEMORY = frozenset(("allocate", "in memory"))  # these never fail because storage is away
MEMORY = "/memfd:"  # begins what the kernel calls a file in memory
# A connection that was lost stays lost.
NETWORK = frozenset(("connect", "send", "receive"))


def error_of(effect: str) -> int:
    """The errno of an effect."""
    return getattr(errno, effect.split()[-1])


_D, _P, _A = Place.DESCRIPTOR, Place.PATH, Place.AT
CALLS: dict[int, SystemCall] = {
    0: SystemCall("read", "read", _D, 2),
    1: SystemCall("write", "write", _D, 2),
    2: SystemCall("open", "open", _P),
    3: SystemCall("close", "close", _D),
    4: SystemCall("stat", "stat", _P),
    5: SystemCall("fstat", "stat", _D),
    6: SystemCall("lstat", "stat", _P),
    9: SystemCall("mmap", "map", Place.MAPPED),
    17: SystemCall("pread64", "read", _D, 2),
    18: SystemCall("pwrite64", "write", _D, 2),
    19: SystemCall("readv", "read", _D, 2, is_vectored=True),
    20: SystemCall("writev", "write", _D, 2, is_vectored=True),
    21: SystemCall("access", "stat", _P),
    40: SystemCall("sendfile", "write", _D, 3),
    42: SystemCall("connect", "connect", _D),
    44: SystemCall("sendto", "send", _D, 2),
    45: SystemCall("recvfrom", "receive", _D, 2),
    46: SystemCall("sendmsg", "send", _D),
    47: SystemCall("recvmsg", "receive", _D),
    73: SystemCall("flock", "lock", _D),
    74: SystemCall("fsync", "sync", _D),
    75: SystemCall("fdatasync", "sync", _D),
    76: SystemCall("truncate", "truncate", _P),
    77: SystemCall("ftruncate", "truncate", _D),
    82: SystemCall("rename", "rename", Place.PATHS),
    83: SystemCall("mkdir", "mkdir", _P),
    84: SystemCall("rmdir", "remove", _P),
    85: SystemCall("creat", "create", _P),
    86: SystemCall("link", "create", Place.PATHS),
    87: SystemCall("unlink", "remove", _P),
    89: SystemCall("readlink", "stat", _P),
    90: SystemCall("chmod", "change", _P),
    91: SystemCall("fchmod", "change", _D),
    217: SystemCall("getdents64", "list", _D),
    257: SystemCall("openat", "open", _A),
    258: SystemCall("mkdirat", "mkdir", _A),
    262: SystemCall("newfstatat", "stat", _A),
    263: SystemCall("unlinkat", "remove", _A),
    264: SystemCall("renameat", "rename", Place.PATHS_AT),
    265: SystemCall("linkat", "create", Place.PATHS_AT),
    267: SystemCall("readlinkat", "stat", _A),
    268: SystemCall("fchmodat", "change", _A),
    269: SystemCall("faccessat", "stat", _A),
    277: SystemCall("sync_file_range", "sync", _D),
    280: SystemCall("utimensat", "change", _A),
    285: SystemCall("fallocate", "truncate", _D),
    295: SystemCall("preadv", "read", _D, 2, is_vectored=True),
    296: SystemCall("pwritev", "write", _D, 2, is_vectored=True),
    316: SystemCall("renameat2", "rename", Place.PATHS_AT),
    326: SystemCall("copy_file_range", "write", _D, 4),
    327: SystemCall("preadv2", "read", _D, 2, is_vectored=True),
    328: SystemCall("pwritev2", "write", _D, 2, is_vectored=True),
    332: SystemCall("statx", "stat", _A),
    437: SystemCall("openat2", "open", _A),
    439: SystemCall("faccessat2", "stat", _A),
}
# Argument with the flags of open(2), by which a call creates a file.
_OPEN_FLAGS = {"open": 1, "openat": 2}


def operation_of(call: SystemCall, arguments: list[int], path: str) -> str:
    """What a call on `path` counts as: an open that creates is `create`, a read from a socket `receive`."""
    if path.startswith(MEMORY):
        return {"fallocate": "allocate", "mmap": "map"}.get(call.name, "in memory")
    flags = _OPEN_FLAGS.get(call.name)
    if flags is not None and arguments[flags] & os.O_CREAT:
        return "create"
    if path.startswith("socket:"):
        return {"read": "receive", "write": "send"}.get(call.operation, call.operation)
    return call.operation
