"""What the URL of an OpenTelemetry collector looks like, and which packages send spans to it."""

from __future__ import annotations

import re

# Module of OpenTelemetry's SDK -> the package that has it; both are the extra otlp.
PACKAGES = {
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
}
INSTALL = f"pip install {' '.join(PACKAGES.values())}"


def url_refusal(endpoint: str) -> str:
    """Why this is no URL of a collector, with the fix; "" if it is one. Spans go to a path below it."""
    if re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", endpoint):
        return ""
    return "is no URL of a collector: write it as http://HOST:4318"
