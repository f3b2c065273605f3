"""A collector of OpenTelemetry spans on loopback: OTLP over HTTP, read by OpenTelemetry's own protobuf classes."""

from __future__ import annotations

import base64
import gzip
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.otlp import OFFSET_NS, plain_attributes

_IDS = ("traceId", "spanId", "parentSpanId")


class SpanCollector:
    """What a collector has got so far: one TracesData in OTLP/JSON for each request."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.refuses = False
        self.refused: dict[str, int] = {}  # name of a span -> status of the requests that hold one
        self.headers: list[dict[str, str]] = []
        self.answers_after_s = 0.0
        self.endpoint = ""

    def take(self, body: bytes) -> int:
        """Keep a request. Returns the status of the answer."""
        from google.protobuf import json_format
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = json_format.MessageToDict(ExportTraceServiceRequest.FromString(body))
        for _, span in spans_with_resource(found):
            if span["name"] in self.refused:
                return self.refused[span["name"]]
        self.requests.append(change_ids(found, lambda text: base64.b64decode(text).hex()))
        return 200

    def write(self, path: Path) -> Path:
        """Write all as the file exporter of a collector does."""
        path.write_text("".join(json.dumps(request) + "\n" for request in self.requests))
        return path

    def wait_for(self, name: str, number: int = 1) -> list[dict[str, Any]]:
        """The spans of this name, once there are so many."""
        while len(found := [span for span in self.spans() if span["name"] == name]) < number:
            time.sleep(0.05)
        return found

    def spans(self) -> list[dict[str, Any]]:
        return [span for request in self.requests for _, span in spans_with_resource(request)]


def spans_with_resource(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(resource, span) of all spans of a TracesData."""
    for entry in data["resourceSpans"]:
        for scope in entry["scopeSpans"]:
            for span in scope["spans"]:
                yield entry["resource"], span


def change_ids(value: Any, change: Any) -> Any:
    """The value with each id of a trace or span changed: OTLP/JSON has ids in hex, protobuf's JSON in base64."""
    if isinstance(value, list):
        return [change_ids(item, change) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: change(item) if key in _IDS else change_ids(item, change) for key, item in value.items()}


def by_id(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Span id -> its resource and span, with times on the monotonic clock of the process; no span is there twice."""
    found: dict[str, Any] = {}
    for request in requests:
        for resource, span in spans_with_resource(request):
            held = plain_attributes(resource["attributes"])
            offset_ns = held.pop(OFFSET_NS, 0)
            own = plain_attributes(span.get("attributes", []))
            events = [
                (int(event["timeUnixNano"]) - offset_ns, event["name"], plain_attributes(event["attributes"]))
                for event in span.get("events", [])
            ]
            times = [int(span[name]) - offset_ns for name in ("startTimeUnixNano", "endTimeUnixNano")]
            if "parentSpanId" not in span:
                times = []  # a cycle has no clock of its own
            status = {
                key: value for key, value in span.get("status", {}).items() if value not in (2, "STATUS_CODE_ERROR")
            }
            ids = [span["traceId"], span.get("parentSpanId")]
            assert span["spanId"] not in found
            found[span["spanId"]] = [held, ids, span["name"], times, own, events, status]
    return found


def exported(trace: Path, path: Path) -> dict[str, Any]:
    """`by_id` of what `ckpt-analysis export` writes of the trace to `path`."""
    assert main(["export", str(trace), "-o", str(path), "--format", "otlp", "--quiet", "--no-cache"]) == 0
    return by_id([json.loads(line) for line in path.read_text().splitlines()])


@contextmanager
def span_collector(certificate: Path | None = None) -> Iterator[SpanCollector]:
    """Start a collector at a free port of loopback; its `endpoint` is what --otlp takes.

    `certificate`: a file with one and its key; then the collector speaks TLS.
    """
    collector = SpanCollector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            status = 503 if collector.refuses else 404
            if self.path == "/v1/traces" and not collector.refuses:
                collector.headers.append(dict(self.headers))
                status = collector.take(body)
                time.sleep(collector.answers_after_s)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        collector.endpoint = f"https://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
