"""Command line: `python -m benchmarks.tls`. Exit status: 0 measured, 2 could not run.

A process sends a file in memory to another one, as `memory-copies` sends a copy of a save (megatron.peers.wire), over
the loopback: without TLS, and with it, in turn. The receiver verifies the checksum of each extent, as it does there.
Certificates are made by the `openssl` command.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.fileio.checksums import crc32
from megatron.net import handshake
from megatron.net.acceptor import Acceptor
from megatron.net.secret import make_secret, required_secret
from megatron.net.tls import FLAGS
from megatron.peers.wire import Channel, connect
from restart_trace.clock import now_ns
from tools.common.cli import COULD_NOT_RUN, OK, make_parser, parse_bytes, require_at_least
from tools.common.tables import markdown_table

_EPILOG = """\
examples:
  %(prog)s --bytes 1GiB --rounds 9

exit status: 0 measured, 2 could not run
"""
_LOOPBACK = "127.0.0.1"
_EXTENT = 16 << 20
_DEADLINE_S = 300.0
_PLAIN, _TLS = "without TLS", "with TLS"


def _record_of(content: bytes) -> dict[str, Any]:
    """As much of a record as says how to verify the file."""
    parts = [content[at : at + _EXTENT] for at in range(0, len(content), _EXTENT)]
    return {"file": {"num_bytes": len(content), "extents": [(len(part), f"{crc32(part):08x}") for part in parts]}}


def _make_files(directory: Path) -> dict[str, str]:
    """A certificate that is its own CA, by variable."""
    words = (
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=node",
        "-days", "2", "-keyout", "node.key", "-out", "node.pem",
    )  # fmt: skip
    subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True, timeout=60)
    paths = (directory / "node.pem", directory / "node.key", directory / "node.pem")
    return {variable: str(path) for variable, path in zip(FLAGS.values(), paths, strict=True)}


@contextlib.contextmanager
def _variables(of: dict[str, str]) -> Iterator[None]:
    """Those of TLS, of this process and of those that it forks; no others of TLS."""
    before = {variable: os.environ.pop(variable) for variable in FLAGS.values() if variable in os.environ}
    os.environ.update(of)
    try:
        yield
    finally:
        for variable in of:
            del os.environ[variable]
        os.environ.update(before)


@contextlib.contextmanager
def _receiver(record: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Where a forked process takes one file, verifies it and says so."""
    listening = socket.create_server((_LOOPBACK, 0))
    pid = os.fork()
    if pid == 0:
        try:
            acceptor = Acceptor([listening], required_secret(), handshake.COPIES)
            until = time.monotonic() + _DEADLINE_S
            found = acceptor.accepted()
            while not found and time.monotonic() < until:
                acceptor.wait(1.0)
                found = acceptor.accepted()
            view = memoryview(bytearray(record["file"]["num_bytes"]))
            with Channel(found[0][0], _DEADLINE_S) as channel:
                channel.tell(go=True)
                channel.hear()
                channel.receive_file(view, record)
                channel.tell(done=True)
            os._exit(0)
        finally:
            os._exit(1)
    try:
        yield listening.getsockname()
    finally:
        listening.close()
        os.waitpid(pid, 0)


def _sample(fd: int, record: dict[str, Any]) -> float:
    """Seconds from the first byte that is sent to the receiver's word that all is verified. Raises PeerError."""
    with _receiver(record) as (host, port), connect(host, port, _DEADLINE_S) as channel:
        channel.hear()
        start = now_ns()
        channel.send_file({}, fd, [(0, record["file"]["num_bytes"])])
        channel.hear()
        return (now_ns() - start) / 1e9


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = make_parser("python -m benchmarks.tls", "Time copies of a save with and without TLS.", _EPILOG)
    parser.add_argument("--bytes", type=parse_bytes, default=1 << 29, metavar="SIZE", help="(default: 512MiB)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="(default: 9)")
    arguments = parser.parse_args(argv)
    require_at_least(parser, arguments, 1, "rounds", "bytes")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    make_secret()
    content = secrets.token_bytes(arguments.bytes)
    record = _record_of(content)
    fd = os.memfd_create("tls_benchmark")
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    del content
    seconds: dict[str, list[float]] = {_PLAIN: [], _TLS: []}
    try:
        with tempfile.TemporaryDirectory(prefix="tls_") as directory:
            files = _make_files(Path(directory))
            for number in range(arguments.rounds):
                for name in (_PLAIN, _TLS) if number % 2 == 0 else (_TLS, _PLAIN):
                    with _variables(files if name == _TLS else {}):
                        seconds[name].append(_sample(fd, record))
    except (OSError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    rows = [
        [name, f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]",
         f"{arguments.bytes / statistics.median(values) / 1e9:.2f}", " ".join(f"{value:.3f}" for value in values)]
        for name, values in seconds.items()
    ]  # fmt: skip
    title = f"{arguments.bytes / 2**20:.0f} MiB, {arguments.rounds} rounds"
    print("\n".join(markdown_table([title, "s, median [least, most]", "GB/s", "all, s"], rows)))
    return OK


if __name__ == "__main__":
    sys.exit(main())
