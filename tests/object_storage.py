"""A real S3 server for tests (tests.s3_server, a process of its own), and a proxy in front of it that does it harm.

    python -m tests.object_storage COMMAND ...

runs a command in an environment in which clients find such a server, with an empty bucket `checkpoints`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.session
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from megatron.fileio.objects.s3 import Bucket, SentPart
from tools.restart_drill import storage_proxy
from tools.restart_drill.storage_proxy import Fault, Request

__all__ = [
    "BUCKET", "Fault", "FaultProxy", "GoogleProxy", "ImpatientBucket", "Request", "Server", "Session",
    "environment_of", "listings", "serving",
]  # fmt: skip

BUCKET = "checkpoints"
_STARTS_S = 120.0  # on a busy machine
_ROOT = Path(__file__).resolve().parents[1]


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
    def allowing(self, actions: list[str]) -> Iterator[dict[str, str]]:
        """Within it, the server lets its clients do only what their policies say; a client that may do `actions`."""
        with environment_of(self.environment()):
            iam = botocore.session.get_session().create_client("iam", region_name="us-east-1")
        user = f"user-{time.monotonic_ns()}"
        statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.create_user(UserName=user)
        iam.put_user_policy(UserName=user, PolicyName="allowed", PolicyDocument=policy)
        key = iam.create_access_key(UserName=user)["AccessKey"]
        own = {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
        self._authorize_after("0")
        try:
            yield self.environment() | own
        finally:
            self._authorize_after("inf")

    def _authorize_after(self, requests: str) -> None:
        where = f"{self.url}/moto-api/reset-auth"
        text = {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(where, requests.encode(), text, method="POST")).read()


class ImpatientBucket(Bucket):
    """Waits `wait_s` for part `number` of each upload, and as long as any bucket for everything else.

    So the deadline passes for the request that a proxy lets fail, and for no other where the machine is slow.
    """

    def __init__(self, number: int, wait_s: float) -> None:
        super().__init__(BUCKET)
        self._impatient_of = number
        self._wait_s = wait_s

    def send_part(
        self, key: str, upload: str, number: int, start: int, content: Any, given_up: threading.Event
    ) -> SentPart:
        bucket = self.with_deadline(self._wait_s) if number == self._impatient_of else self
        return Bucket.send_part(bucket, key, upload, number, start, content, given_up)


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Run the server with an empty bucket."""
    # The port is ours from here on: one that was only free could be another server's by the time that this one listens.
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        server = Server(listening.getsockname()[1])
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.s3_server", str(listening.fileno())],
            cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[listening.fileno()],
        )  # fmt: skip
    try:  # this waits until it serves; if it ends before, the connection is reset
        made = urllib.request.Request(f"{server.url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(made, timeout=_STARTS_S).read()
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


@dataclass
class Session:
    """Temporary credentials in a file at `path`, as a program beside the job renews them."""

    path: Path
    number: int = 0

    def renew(self) -> None:
        self.number += 1
        key = f"[default]\naws_access_key_id = ASIASESSION{self.number}\naws_secret_access_key = secret\n"
        self.path.with_suffix(".new").write_text(f"{key}aws_session_token = token-{self.number}\n")
        self.path.with_suffix(".new").rename(self.path)

    def environment(self, proxy: FaultProxy) -> dict[str, str]:
        variables = {
            "AWS_ACCESS_KEY_ID": "",
            "AWS_SECRET_ACCESS_KEY": "",
            "AWS_SHARED_CREDENTIALS_FILE": str(self.path),
        }
        return proxy.environment() | variables

    def is_expired(self, request: Request, last: int) -> bool:
        """Whether the request has credentials of before number `last`."""
        return int(request.headers["X-Amz-Security-Token"].removeprefix("token-")) < last


class GoogleProxy(FaultProxy):
    """Makes a store of Google's of the server, as far as the client sees it.

    Requests in Google's dialect are checked: signature, MD5 and the generation that a write replaces. In Amazon's the
    conditions of writes are passed over, and headers of both are refused together, as people have seen Google do.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.generations: dict[str, int] = {}
        self._next = 1_700_000_000_000_000
        self._writing = threading.Lock()

    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        given = {name.lower(): value for name, value in headers.items()}
        ours = given.get("authorization", "").startswith("GOOG4-HMAC-SHA256 ")
        if ours and any(name.startswith("x-amz-") for name in given):
            return _refused(400, "ExcessHeaderValues")
        if ours and not self._is_signed(method, path, given):
            return _refused(403, "SignatureDoesNotMatch")
        md5 = base64.b64encode(hashlib.md5(body).digest()).decode()
        if ours and body and given.get("content-md5") != md5:
            return _refused(400, "BadDigest")
        if ours and b"ChecksumCRC32" in body[:4096]:
            return _refused(400, "MalformedXML")
        kept = {name: value for name, value in given.items() if name not in ("if-match", "if-none-match")}
        kept["authorization"] = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"
        if method == "GET" or not ours:
            kept = {name: value for name, value in kept.items() if not name.startswith("x-goog-")}
        with self._writing:
            return self._conditionally(method, path, body, kept)

    def _conditionally(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        key, _, query = path.partition("?")
        wanted = headers.pop("x-goog-if-generation-match", None)
        if wanted is not None and int(wanted) != self.generations.get(key, 0):
            return _refused(412, "PreconditionFailed")
        status, answered, content = super()._ask(method, path, body, headers)
        if status == 200 and (method == "PUT" and not query or method == "POST" and "uploadId" in query):
            self._next += 1
            self.generations[key] = self._next
        if method == "POST" and query == "delete":
            for name in re.findall("<Key>(.*?)</Key>", body.decode()):
                self.generations.pop(f"{key}/{name}", None)
        if key in self.generations:
            answered["x-goog-generation"] = str(self.generations[key])
        return status, answered, content

    def _is_signed(self, method: str, path: str, headers: dict[str, str]) -> bool:
        """By botocore's canonical request, which is the same in both dialects."""
        told = dict(re.findall(r"(\w+)=([^,]+)", headers["authorization"]))
        day, place, service, end = told["Credential"].split("/")[1:]
        assert (place, service, end) == ("auto", "storage", "goog4_request")
        signed = {name: headers[name] for name in told["SignedHeaders"].split(";")}
        assert {name for name in headers if name.startswith("x-goog-")} < signed.keys() and "host" in signed
        secret = self.environment()["AWS_SECRET_ACCESS_KEY"]
        signer = S3SigV4Auth(Credentials("a", secret), service, place)
        request = AWSRequest(method, f"{self.url}{path}", signed)
        canonical = signer.canonical_request(request).rpartition("\n")[0] + "\nUNSIGNED-PAYLOAD"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        text = "\n".join(("GOOG4-HMAC-SHA256", signed["x-goog-date"], f"{day}/{place}/{service}/{end}", digest))
        key = f"GOOG4{secret}".encode()
        for word in (day, place, service, end):
            key = hmac.digest(key, word.encode(), "sha256")
        return hmac.digest(key, text.encode(), "sha256").hex() == told["Signature"]


def _refused(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {}, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()


def listings(requests: list[Request]) -> list[str]:
    """The prefix that each LIST of keys names."""
    found = [re.search(r"[?&]list-type=2.*[?&]prefix=([^&]*)", request.path) for request in requests]
    return [urllib.parse.unquote(match[1]) for match in found if match is not None]


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


def main(command: list[str]) -> int:
    if not command:
        print("python -m tests.object_storage COMMAND ...: give a command", file=sys.stderr)
        return 2
    with serving() as server:
        return subprocess.run(command, env=os.environ | server.environment()).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
