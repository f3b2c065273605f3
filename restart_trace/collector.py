"""What the URL of an OpenTelemetry collector looks like, and which protocol and packages send spans to it."""

from __future__ import annotations

import os
import re

# Module of OpenTelemetry's SDK -> the package that has it; both are the extra otlp.
PACKAGES = {
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
}
INSTALL = f"pip install {' '.join(PACKAGES.values())}"


# Of OpenTelemetry: which protocol spans are sent by. The first that is set counts.
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"


def endpoint_refusal(endpoint: str) -> str:
    """Why spans cannot be sent to this URL, with the fix; "" if they can. They go to a path below it, over HTTP."""
    if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", endpoint):
        return "is no URL of a collector: write it as http://HOST:4318"
    variable = next((name for name in _PROTOCOL_VARIABLES if os.environ.get(name)), None)
    protocol = os.environ[variable].strip() if variable else _PROTOCOL
    if protocol == _PROTOCOL:
        return ""
    return (
        f"{variable}={protocol}: spans are sent by {_PROTOCOL} alone: set it to that, and give the port of HTTP, 4318"
    )
