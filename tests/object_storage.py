"""A real S3 server for tests (PyPI's moto, in a process of its own), and a proxy in front of it that does it harm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.processes.free_port import free_port
from tools.restart_drill import storage_proxy
from tools.restart_drill.storage_proxy import Fault, Request

__all__ = ["BUCKET", "Fault", "FaultProxy", "Request", "Server", "environment_of", "serving"]

BUCKET = "checkpoints"
_STARTS_S = 120.0  # on a busy machine


@dataclass(frozen=True)
class Server:
    """Where it is, and the environment in which a client finds it."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, port: int | None = None) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST",
            "AWS_SECRET_ACCESS_KEY": "a-secret-that-must-not-be-told",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Run the server with an empty bucket."""
    server = Server(free_port())
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(server.port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _STARTS_S
        while True:
            assert process.poll() is None, "moto.server has ended"
            try:
                urllib.request.urlopen(urllib.request.Request(f"{server.url}/{BUCKET}", method="PUT")).read()
                break
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < deadline, "moto.server does not answer"
                time.sleep(0.05)
        yield server
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


class FaultProxy(storage_proxy.FaultProxy):
    """The proxy before a server of tests."""

    def __init__(self, server: Server, fault: Fault = lambda request: None) -> None:
        super().__init__(server.url, fault)
        self._server = server

    def environment(self) -> dict[str, str]:
        return self._server.environment(self.port)

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultProxy]:
        with super().running():
            yield self


@contextlib.contextmanager
def environment_of(environment: dict[str, str]) -> Iterator[None]:
    """Within it, this process has the environment of a client."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
