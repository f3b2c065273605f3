"""Google Cloud Storage's own dialect of the S3 protocol, for the client that speaks Amazon's.

Google takes requests that are signed as Amazon's, but passes over If-None-Match and If-Match of writes then, and
refuses its own conditions beside headers of Amazon's. So requests are signed as its own (GOOG4-HMAC-SHA256, with HMAC
keys), and a write is conditional on the generation of the object that it replaces, 0 if there is to be none.

Sources: https://docs.cloud.google.com/storage/docs/authentication/signatures, /authentication/canonical-requests,
/request-preconditions, /xml-api/reference-headers. It has been run against a stand-in alone, never against Google.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

SETTING = "MEGATRON_OBJECT_STORE"
NO_GENERATION = "1"  # they are microseconds since 1970
_HOST = "googleapis.com"
_ALGORITHM = "GOOG4-HMAC-SHA256"
_SIGNED = ("content-md5", "content-type", "host")  # and all that begin with x-goog-


def speaks_google(endpoint: str | None) -> bool:
    """Whether the store at `endpoint` is Google's: by its name, or because SETTING says so. Raises ValueError."""
    setting = os.environ.get(SETTING) or None
    if setting not in (None, "google", "s3"):
        raise ValueError(f"{SETTING}={setting}: give google or s3, or leave it out")
    host = urlsplit(endpoint or "").hostname or ""
    return setting == "google" or (setting is None and (host == _HOST or host.endswith(f".{_HOST}")))


def speak_google(client: Any, credentials: Callable[[], tuple[str, str]]) -> None:
    """Let botocore's `client`, which does not sign, send Google's requests. `credentials`: access key and secret."""

    def translate(request: Any, **_: Any) -> None:
        headers = translated(request.method, request.headers, request.body)
        sign(request.method, request.url, headers, *credentials(), datetime.now(timezone.utc))
        for name in list(request.headers):
            del request.headers[name]
        for name, value in headers.items():
            request.headers[name] = value

    client.meta.events.register("before-send.s3", translate)
    client.meta.events.register("before-parameter-build.s3.CompleteMultipartUpload", _without_checksums)


def generation_in(answer: Mapping[str, Any]) -> str:
    """The generation of the object that an answer tells of."""
    return answer["ResponseMetadata"]["HTTPHeaders"]["x-goog-generation"]


def translated(method: str, headers: Mapping[str, Any], body: Any) -> dict[str, str]:
    """The headers of a request as Google has them, without its signature.

    It takes no CRC-32, so bodies have an MD5. Reads are unconditional: what comes is compared with the CRC-32 that it
    was saved with.
    """
    found = {name.lower(): _text(value) for name, value in headers.items()}
    kept = {name: value for name, value in found.items() if not name.startswith(("x-amz-", "amz-sdk-", "if-"))}
    if method == "PUT" and "if-none-match" in found:
        kept["x-goog-if-generation-match"] = "0"
    elif method == "PUT" and "if-match" in found:
        kept["x-goog-if-generation-match"] = found["if-match"]
    if body:
        content = body if isinstance(body, (bytes, bytearray, memoryview)) else _content_of(body)
        kept["content-md5"] = base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
    return kept


def sign(method: str, url: str, headers: dict[str, str], key: str, secret: str, now: datetime) -> None:
    """Add date and signature to the headers of a request, whose body is not signed. `now` in UTC."""
    parts = urlsplit(url)
    stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    headers |= {"host": parts.netloc, "x-goog-date": stamp, "x-goog-content-sha256": "UNSIGNED-PAYLOAD"}
    signed = sorted(name for name in headers if name in _SIGNED or name.startswith("x-goog-"))
    query = sorted(word if "=" in word else f"{word}=" for word in parts.query.split("&") if word)
    canonical = [method, parts.path or "/", "&".join(query)]
    canonical += [f"{name}:{' '.join(headers[name].split())}" for name in signed]
    canonical += ["", ";".join(signed), "UNSIGNED-PAYLOAD"]
    scope = f"{day}/auto/storage/goog4_request"
    digest = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    derived = f"GOOG4{secret}".encode()
    for word in scope.split("/"):
        derived = hmac.new(derived, word.encode(), hashlib.sha256).digest()
    signature = hmac.new(derived, "\n".join((_ALGORITHM, stamp, scope, digest)).encode(), hashlib.sha256).hexdigest()
    headers["authorization"] = (
        f"{_ALGORITHM} Credential={key}/{scope}, SignedHeaders={';'.join(signed)}, Signature={signature}"
    )


def _without_checksums(params: dict[str, Any], **_: Any) -> None:
    """Remove the checksums of the parts when an upload is finished: Google compares their ETags."""
    parts = params.get("MultipartUpload", {}).get("Parts", ())
    kept = [{"PartNumber": part["PartNumber"], "ETag": part["ETag"]} for part in parts]
    params["MultipartUpload"] = {"Parts": kept}


def _content_of(body: Any) -> bytes:
    """The content of a body that is a file object, whose position stays the same."""
    at = body.tell()
    content = body.read()
    body.seek(at)
    return content


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
