"""A proxy in front of an S3 server that injects faults: drops, delays, errors, and altered answers."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_LONGEST_S = 120.0  # limit of a delay, and of waiting for an answer of the server
FIRST_BYTE_S = 1.0  # delay of the first byte of an answer
MOST_REQUESTS = 5  # a second; the proxy answers SlowDown to more


@dataclass
class Request:
    """A request that passes through the proxy."""

    method: str
    path: str  # with the query
    count: int  # number of this request, from 1
    headers: dict[str, str]


Fault = Callable[[Request], str | None]
# The request is not answered, or refused:
UNANSWERED = ("drop", "delay", "500", "503", "403", "expired", "unknown-key", "region")
# The request is passed on without its conditions, or its answer is dropped, truncated or altered:
FALSIFIED = ("unconditional", "answer", "truncate", "etag", "corrupt")
# The store is slow, but answers in the end:
SLOW = ("first-byte", "rate-limit")
FAULTS = (*UNANSWERED, *FALSIFIED, *SLOW)
_CODES = {
    "500": (500, "InternalError"), "503": (503, "SlowDown"), "403": (403, "AccessDenied"),
    "expired": (400, "ExpiredToken"), "unknown-key": (403, "InvalidAccessKeyId"), "region": (301, "PermanentRedirect"),
}  # fmt: skip
BUCKET_REGION = "eu-west-3"  # the region in the answer that the bucket is in another one


@dataclass
class FaultProxy:
    """Passes requests on to the server at the URL `upstream`, with the fault that `fault` returns for each, or None.

    Headers are passed on unchanged, so that signatures stay valid for servers that read the host name from the request.
    """

    upstream: str
    fault: Fault = lambda request: None
    seen: list[Request] = field(default_factory=list)
    port: int = 0
    delayed: threading.Event = field(default_factory=threading.Event)  # ends the delays
    _begun: deque[float] = field(default_factory=deque)  # when the last MOST_REQUESTS were passed on
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultProxy]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def log_message(self, format: str, *args: Any) -> None:
                return None

            def _pass_on(self) -> None:
                proxy.pass_on(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
            listening.daemon_threads = True
            self.port = listening.server_address[1]
            thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
            thread.start()
            try:
                yield self
            finally:
                self.delayed.set()
                listening.shutdown()
                thread.join()

    def end_delays(self) -> None:
        """End the delays of current requests; later requests are delayed again."""
        ended, self.delayed = self.delayed, threading.Event()
        ended.set()

    def pass_on(self, client: BaseHTTPRequestHandler) -> None:
        body = client.rfile.read(int(client.headers.get("Content-Length") or 0))
        with self._lock:
            request = Request(client.command, client.path, len(self.seen) + 1, dict(client.headers.items()))
            self.seen.append(request)
        fault = self.fault(request)
        if fault == "rate-limit":
            fault = "503" if self._too_many() else None
        if fault == "first-byte":
            self.delayed.wait(FIRST_BYTE_S)
        if fault == "delay":
            self.delayed.wait(_LONGEST_S)
        if fault in ("drop", "delay"):
            client.close_connection = True
            return
        if fault in _CODES:
            status, code = _CODES[fault]
            headers = {"x-amz-bucket-region": BUCKET_REGION} if fault == "region" else {}
            _answer(client, status, headers, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())
            return
        unconditional = ("if-match", "if-none-match") if fault == "unconditional" else ()
        kept = {name: value for name, value in client.headers.items() if name.lower() not in unconditional}
        status, headers, content = self._ask(client.command, client.path, body, kept)
        if fault == "answer":
            client.close_connection = True
            return
        if fault == "etag":
            headers = {name: '"' + "0" * 32 + '"' if name.lower() == "etag" else v for name, v in headers.items()}
        if fault == "corrupt" and content:
            content = bytes([content[0] ^ 1]) + content[1:]
        _answer(client, status, headers, content, cut=fault == "truncate")

    def _too_many(self) -> bool:
        with self._lock:
            now = time.monotonic()
            while self._begun and now - self._begun[0] > 1.0:
                self._begun.popleft()
            if len(self._begun) >= MOST_REQUESTS:
                return True
            self._begun.append(now)
            return False

    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of the server's answer."""
        parts = urlsplit(self.upstream)
        connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        with contextlib.closing(connect(parts.hostname or "", parts.port, timeout=_LONGEST_S)) as upstream:
            upstream.request(method, path, body, headers)
            answer = upstream.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()


def _answer(
    client: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes, cut: bool = False
) -> None:
    client.send_response(status)
    length = headers.get("Content-Length", str(len(content)))
    for name, value in headers.items():
        if name.lower() not in ("content-length", "connection", "transfer-encoding", "server", "date"):
            client.send_header(name, value)
    client.send_header("Content-Length", length if client.command == "HEAD" else str(len(content)))
    client.end_headers()
    if client.command != "HEAD":
        client.wfile.write(content[: len(content) // 2] if cut else content)
    if cut:
        client.close_connection = True
