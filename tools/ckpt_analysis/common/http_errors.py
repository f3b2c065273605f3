"""Why a request over HTTP got no answer, in a few words."""

from __future__ import annotations

import ssl
from http.client import BadStatusLine


def why_no_answer(error: BaseException) -> str:
    """What a request failed of: a name, a connection, a certificate, a protocol; with the fix, if there is one."""
    cause = _innermost(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"TLS: {cause.verify_message.rstrip('.')}; its authority's file is OTEL_EXPORTER_OTLP_CERTIFICATE"
    if isinstance(cause, ssl.SSLError):
        said = (cause.reason or "failed").lower().replace("_", " ")
        return f"TLS: {said}" + ("; does it take http:// alone?" if cause.reason == "WRONG_VERSION_NUMBER" else "")
    if isinstance(cause, BadStatusLine) and not isinstance(cause, ConnectionError):
        return "it does not speak HTTP; a port for gRPC, such as 4317, is none for HTTP, such as 4318"
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    strerror = cause.strerror if isinstance(cause, OSError) else None
    return strerror or str(cause) or type(cause).__name__


def _innermost(error: BaseException) -> BaseException:
    """The error that caused this one, by way of those that libraries have wrapped around it."""
    seen = [error]
    while True:
        wrapped = [getattr(error, "reason", None), *error.args, error.__cause__, error.__context__]
        causes = [one for one in wrapped if isinstance(one, BaseException) and one not in seen]
        if not causes:
            return error
        error = causes[0]
        seen.append(error)
