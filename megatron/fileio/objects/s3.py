"""A client of one bucket of an S3-compatible store: every request has a deadline, every byte a checksum.

botocore signs and sends the requests and finds credentials (environment, profiles, web identity, instance metadata) and
the endpoint (AWS_ENDPOINT_URL); for Google's store s3_google.py signs. This module retries with backoff and jitter
until the deadline of the request, uploads files in parts and reads ranges, both in parallel. Its errors name the object
and the fix, and leave out what the store's error says of credentials.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.fileio.checksums import RangeChecksum, by_file, combine, crc32, range_checksum
from megatron.fileio.files import DamagedFileError
from megatron.fileio.objects.errors import ObjectChangedError, ObjectMissingError, ObjectStoreError
from megatron.fileio.objects.hedging import Destination, Hedging
from megatron.fileio.objects.parts import LISTED, MIB, PART_BYTES, parts
from megatron.fileio.objects.s3_google import NO_GENERATION, SETTING, generation_in, speak_google, speaks_google
from megatron.fileio.objects.stores import STORES
from restart_trace.under_way import STORAGE, UnderWay

_STORE = STORES["s3"]
INSTALL = "pip install botocore"
_CHECK_S = 15.0
_CONNECTIONS = 64  # that are kept; there are as many as requests at once
_LAST_S = 2.0  # how long an attempt is waited for that is under way when its deadline passes
_PIECE = MIB >> 2  # bytes that are copied while they are in the processor's cache
_BACKOFF_S = (0.1, 5.0)  # the first wait is up to so long, no wait longer than so long
_PATIENCE = 4  # deadlines that a request has which the store tells to slow down, as it does where many hosts save
_THROTTLED = ("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "503", "429")
_CONFLICT = ("ConditionalRequestConflict", "OperationAborted")  # 409: try again
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken")
# Others may be accepted. A file that is read while it is written has a part of them; an answer to HEAD has no code.
_OTHER_CREDENTIALS = (
    *_EXPIRED, "InvalidAccessKeyId", "InvalidClientTokenId", "SignatureDoesNotMatch", "400", "403",
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError",
)  # fmt: skip
_MISSING = ("NoSuchKey", "NoSuchUpload", "404", "NotFound")
_REGION = re.compile(r"[a-z0-9-]{2,32}")
_CHANGED = ("PreconditionFailed", "412")


@dataclass(frozen=True)
class ObjectInfo:
    """An object as a listing tells of it. `modified`: seconds since 1970, on the store's clock."""

    key: str
    num_bytes: int
    etag: str
    modified: float


@dataclass(frozen=True)
class Uploaded:
    """What was uploaded. `etag`: the store's name of this content; `crc32`: of all of it."""

    etag: str
    crc32: int


@dataclass(frozen=True)
class SentPart:
    """A part of an upload that the store has. `number`: from 1."""

    number: int
    etag: str
    checksum: RangeChecksum


@dataclass
class Traffic:
    """Requests until now. `retries` are among `requests`; `throttled`: answers that said to slow down.

    `seconds`: the time of all requests, added up: over a while, so many of them were under way on average.
    """

    requests: int = 0
    retries: int = 0
    throttled: int = 0
    seconds: float = 0.0

    def since(self, before: Traffic) -> dict[str, float]:
        """What was added to `before`, under the names of the trace (docs/log_format.md)."""
        return {
            "store_requests": float(self.requests - before.requests),
            "store_retries": float(self.retries - before.retries),
            "store_throttled": float(self.throttled - before.throttled),
            "store_request_s": self.seconds - before.seconds,
        }


class Bucket:
    """One bucket. Methods may be called from any thread.

    `deadline_s`: how long one request may take with all its retries; what is under way then is waited for, 2 s at most.
    It begins anew with each answer that says to slow down, until four deadlines have passed.
    `threads`: parts that are sent or read at once, each of which takes 8 MiB of memory, or a
    10,000th of the object if that is more. `listed`: keys in one answer, and in one request to remove.
    Raises ObjectStoreError if botocore is not installed. Every method raises ObjectStoreError naming object and fix.
    """

    def __init__(self, name: str, *, deadline_s: float = 120.0, threads: int = 8, listed: int = LISTED) -> None:
        self.name = name
        self.traffic = Traffic()
        self.hedging = Hedging()
        self._deadline_s = deadline_s
        self._slowed_s = _PATIENCE * deadline_s
        self._threads = threads
        self._listed = listed
        self._lock = threading.Lock()
        self._attempt_s = deadline_s / 4
        self._exceptions, self._client, _ = _client(name, self._attempt_s, threads)
        self._google = speaks_google(_STORE.endpoint)
        # A version that no object has.
        self.no_version = NO_GENERATION if self._google else '"00000000000000000000000000000000"'
        self._last_client: Any = None  # one that is less patient, made when a deadline is near
        known = self._exceptions
        self._of_the_way = (
            known.HTTPClientError,
            known.ConnectionError,
            known.IncompleteReadError,
            _TruncatedError,
            *_errors_in_answers(),
            OSError,
        )

    @staticmethod
    def preload() -> None:
        """Import and read all that a client needs, in a process that forks those which make one.

        The client that is made for this signs nothing, so no credentials are looked for, and sends nothing. What is
        wrong with botocore or its settings is told where a bucket is opened.
        """
        with contextlib.suppress(ModuleNotFoundError):
            import encodings.idna  # noqa: F401  as the first request does

            import botocore.config
            import botocore.exceptions
            import botocore.session

            config = botocore.config.Config(signature_version=botocore.UNSIGNED, defaults_mode="legacy")
            with contextlib.suppress(botocore.exceptions.BotoCoreError, ValueError):
                session = botocore.session.get_session()
                session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
                session.create_client("s3", region_name="us-east-1", config=config)

    def uri(self, key: str = "") -> str:
        return f"s3://{self.name}/{key}"

    @property
    def endpoint(self) -> str:
        """The URL of the store."""
        return self._client.meta.endpoint_url

    def with_deadline(self, deadline_s: float) -> Bucket:
        """This bucket for requests that may take `deadline_s` at most, also where the store tells them to slow down;
        they count in its traffic, too."""
        if deadline_s >= self._slowed_s:
            return self
        hurried = Bucket(
            self.name, deadline_s=min(deadline_s, self._deadline_s), threads=self._threads, listed=self._listed
        )
        hurried.traffic = self.traffic
        hurried._slowed_s = deadline_s
        return hurried

    def check_reachable(self, prefix: str) -> None:
        """Raises ObjectStoreError if the store refuses to read below the prefix, or does not answer in a short time.

        Asks for an object that need not be there: each host does so, and a listing costs as much as a write.
        """

        def drop(answer: Mapping[str, Any], within_s: float) -> None:
            answer["Body"].close()

        with contextlib.suppress(ObjectMissingError):
            deadline_s = min(_CHECK_S, self._deadline_s)
            self._call("reading below", prefix, "get_object", drop, deadline_s=deadline_s, Key=f"{prefix}latest")

    # Small objects

    def get(self, key: str, limit: int) -> tuple[bytes, str]:
        """Content and version of an object of at most `limit` bytes. Raises ObjectMissingError if there is none.

        A version, as writes have them, too, is what `replace` takes: the ETag, with Google the generation.
        """

        def read(answer: Mapping[str, Any], within_s: float) -> tuple[bytes, str]:
            if answer["ContentLength"] > limit:
                raise ObjectStoreError(
                    f"{self.uri(key)} has {answer['ContentLength']} bytes, more than {limit}: it is not this "
                    "program's; give another prefix, or remove it"
                )
            content = bytearray(answer["ContentLength"])
            self._fill(key, answer, Destination(memoryview(content)), within_s, at=0, enough=len(content))
            return bytes(content), self._version_in(answer)

        return self._call("reading", key, "get_object", read, Key=key)

    def put(self, key: str, content: bytes) -> str:
        """Write an object, over one that is there; returns its version."""
        return self._version_in(self._write(key, content))

    def create(self, key: str, content: bytes) -> str | None:
        """Write an object if there is none; its version, or None if there is one of other content."""
        try:
            return self._version_in(self._write(key, content, IfNoneMatch="*"))
        except ObjectChangedError:
            return self._version_of(key, content)

    def replace(self, key: str, content: bytes, version: str) -> str | None:
        """Write an object over the one of `version`; the new one, or None if there is another, or none."""
        try:
            return self._version_in(self._write(key, content, IfMatch=version))
        except (ObjectChangedError, ObjectMissingError):
            return self._version_of(key, content)

    def _put(self, key: str, content: bytes) -> str:
        return _etag_in(self._write(key, content))

    def _write(self, key: str, content: bytes, **conditions: Any) -> Mapping[str, Any]:
        checksum = _base64(crc32(content))
        return self._call("writing", key, "put_object", Key=key, Body=content, ChecksumCRC32=checksum, **conditions)

    def _version_in(self, answer: Mapping[str, Any]) -> str:
        return generation_in(answer) if self._google else _etag_in(answer)

    def _version_of(self, key: str, content: bytes) -> str | None:
        """The version if the object has this content: an earlier request succeeded, and only its answer was lost."""
        try:
            found, version = self.get(key, len(content))
        except ObjectMissingError:
            return None
        except ObjectStoreError:  # longer
            if self.head(key).num_bytes == len(content):
                raise
            return None
        return version if found == content else None

    def head(self, key: str) -> ObjectInfo:
        """Raises ObjectMissingError if there is no such object."""
        answer = self._call("looking at", key, "head_object", Key=key)
        return ObjectInfo(key, answer["ContentLength"], _etag_in(answer), answer["LastModified"].timestamp())

    def list(self, prefix: str, deadline_s: float | None = None) -> Iterator[ObjectInfo]:
        """The objects whose keys begin with `prefix`, in the order of their keys. `deadline_s`: if not the bucket's."""
        more: dict[str, Any] = {}
        while True:
            answer = self._call(
                "listing", prefix, "list_objects_v2", Prefix=prefix, MaxKeys=self._listed, deadline_s=deadline_s, **more
            )
            for found in answer.get("Contents", ()):
                yield ObjectInfo(found["Key"], found["Size"], _etag_in(found), found["LastModified"].timestamp())
            if not answer.get("IsTruncated"):
                return
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, many in a request; it is no error if one is not there."""
        for first in range(0, len(keys), self._listed):
            batch = keys[first : first + self._listed]
            doomed = {"Objects": [{"Key": key} for key in batch], "Quiet": True}
            answer = self._call("removing", batch[0], "delete_objects", Delete=doomed)
            for error in answer.get("Errors", ()):
                why = _refusal(error["Code"], 200, self.name)
                raise ObjectStoreError(f"{self.uri(error['Key'])}: cannot be removed: {why}")

    # Uploads of files

    def unfinished_uploads(self, prefix: str) -> list[tuple[str, str]]:
        """(key, upload id) of the multipart uploads to keys with that prefix that are neither finished nor aborted."""
        found: list[tuple[str, str]] = []
        more: dict[str, Any] = {}
        while True:
            answer = self._call("listing uploads to", prefix, "list_multipart_uploads", Prefix=prefix, **more)
            found += [(upload["Key"], upload["UploadId"]) for upload in answer.get("Uploads", ())]
            if not answer.get("IsTruncated"):
                return found
            more = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Give up a multipart upload and the parts that the store has of it."""
        try:
            self._call("giving up an upload to", key, "abort_multipart_upload", Key=key, UploadId=upload_id)
        except ObjectMissingError:
            return

    def upload(self, key: str, content: Any) -> Uploaded:
        """Write an object whose key nobody else writes, in one request."""
        # botocore rewinds bytes if it is sent to another region, and no views; a multipart upload begins without any.
        return Uploaded(self._put(key, bytes(content)), crc32(content))

    def upload_file(self, path: Path, key: str) -> Uploaded:
        """Write the file at `path` as an object whose key nobody else writes. After an error no upload is left."""
        fd = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            if size <= PART_BYTES:
                return self.upload(key, _read(fd, 0, size, path))
            return self._upload_parts(fd, path, size, key)
        finally:
            os.close(fd)

    def _upload_parts(self, fd: int, path: Path, size: int, key: str) -> Uploaded:
        upload = self.begin_upload(key)

        def send(number: int, start: int, stop: int, given_up: threading.Event) -> SentPart:
            return self.send_part(key, upload, number, start, _read(fd, start, stop - start, path), given_up)

        try:
            return self.finish_upload(key, upload, self._in_parallel(send, parts(size)), size)
        except BaseException:
            self.abort_quietly(key, upload)
            raise

    # Uploads in parts, of which megatron.fileio.objects.upload makes use, too

    def begin_upload(self, key: str) -> str:
        """Begin a multipart upload; its id."""
        answer = self._call(
            "beginning an upload to", key, "create_multipart_upload", Key=key, ChecksumAlgorithm="CRC32"
        )
        return answer["UploadId"]

    def send_part(
        self, key: str, upload: str, number: int, start: int, content: Any, given_up: threading.Event
    ) -> SentPart:
        """Send `content`, bytes or a view of them, which lie in the object from byte `start` on.

        Numbers count from 1, in the order of the bytes; parts may be sent in any order, and at once. All but the last
        have 5 MiB at least. Once `given_up` is set nothing is tried again.
        """
        crc = range_checksum(key, start, content)
        what = f"writing part {number} ({start} to {crc.stop}) of"
        sent = self._call(
            what, key, "upload_part", given_up=given_up, Key=key, UploadId=upload, Body=content, PartNumber=number,
            ChecksumCRC32=_base64(crc.crc32),
        )  # fmt: skip
        return SentPart(number, sent["ETag"], crc)

    def finish_upload(self, key: str, upload: str, sent: Iterable[SentPart], size: int) -> Uploaded:
        """Make an object of `size` bytes of the parts. Raises ObjectStoreError if they are not all of it."""
        ordered = sorted(sent, key=lambda part: part.number)
        described = [
            {"PartNumber": part.number, "ChecksumCRC32": _base64(part.checksum.crc32), "ETag": part.etag}
            for part in ordered
        ]
        whole = combine(by_file(part.checksum for part in ordered).get(key, {}), 0, size)
        if whole.stop != size:
            raise ObjectStoreError(f"{self.uri(key)}: its bytes from {whole.stop} on were never sent")
        return Uploaded(self._complete(key, upload, described, size), whole.crc32)

    def _complete(self, key: str, upload: str, parts: Sequence[Mapping[str, Any]], size: int) -> str:
        arguments = {"Key": key, "UploadId": upload, "MultipartUpload": {"Parts": parts}}
        try:
            return _etag_in(self._call("finishing an upload to", key, "complete_multipart_upload", **arguments))
        except ObjectMissingError:
            # An earlier request has finished it, and the answer was lost. The key is nobody else's.
            found = self.head(key)
            if found.num_bytes != size:
                raise
            return found.etag

    def abort_quietly(self, key: str, upload: str) -> None:
        """The error that led here is the one to tell; the next launch aborts what is left."""
        try:
            self.abort_upload(key, upload)
        except ObjectStoreError:
            return

    # Reads to files

    def download_file(self, key: str, path: Path, num_bytes: int, etag: str) -> int:
        """Read the object with `etag` to the file at `path`, which is new, in parallel ranges; CRC-32 of what came.

        Raises DamagedFileError if the object is missing, or another.
        """
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            sums: list[RangeChecksum] = []

            def fetch(number: int, start: int, stop: int, given_up: threading.Event) -> None:
                content = bytearray(stop - start)
                view = memoryview(content)
                self.read_range(key, etag, start, view, given_up)
                sums.append(range_checksum(key, start, content))
                while view:
                    written = os.pwrite(fd, view, stop - len(view))
                    view = view[written:]

            self._in_parallel(fetch, parts(num_bytes))
            return combine(by_file(sums).get(key, {}), 0, num_bytes).crc32
        finally:
            os.close(fd)

    def read_range(
        self, key: str, etag: str, start: int, into: memoryview, given_up: threading.Event | None = None
    ) -> None:
        """Fill `into` with the bytes from `start` on of the object with `etag`, in one request.

        What is longer than PART_BYTES and does not come in time, or not whole, goes on in another request, with a
        deadline of its own, if so many bytes have come: so a slow link is asked for no more at once than with parts.
        Raises DamagedFileError if the object is missing, or another. Once `given_up` is set nothing is tried again.
        """
        self._read_range(key, etag, start, Destination(into), given_up)

    def read_range_hedged(self, key: str, etag: str, start: int, into: memoryview) -> None:
        """As `read_range`, for ranges of about one size: with a second request where the first is late."""

        def request(destination: Destination) -> None:
            self._read_range(key, etag, start, destination, destination.given_up)

        self.hedging.fill(into, request)

    def _read_range(self, key: str, etag: str, start: int, into: Destination, given_up: threading.Event | None) -> None:
        filled, stop = 0, start + len(into.view)

        def read(answer: Mapping[str, Any], within_s: float) -> int:
            return self._fill(key, answer, into, within_s, at=filled, enough=PART_BYTES)

        try:
            while start + filled < stop:
                first = start + filled
                filled += self._call(
                    f"reading bytes {first} to {stop} of", key, "get_object", read, given_up=given_up, Key=key,
                    Range=f"bytes={first}-{stop - 1}", IfMatch=etag,
                )  # fmt: skip
        except ObjectMissingError:
            raise DamagedFileError(f"{self.uri(key)} is missing") from None
        except ObjectChangedError:
            raise DamagedFileError(f"{self.uri(key)} was replaced: it is not the object that was saved") from None

    def _fill(
        self, key: str, answer: Mapping[str, Any], into: Destination, within_s: float, at: int, enough: int
    ) -> int:
        """Put the body of an answer there, from `at` on; how many bytes came: all, or `enough` at least.

        Raises _TruncatedError, after which the request is tried again.
        """
        begun, filled, wanted = time.monotonic(), 0, len(into.view) - at
        announced = answer["ContentLength"]
        why = None
        with answer["Body"] as body:
            try:
                while announced == wanted > filled and (piece := body.read(min(_PIECE, wanted - filled))):
                    into.put(at + filled, piece)
                    filled += len(piece)
                    if time.monotonic() - begun > within_s:  # one that trickles never runs into a socket's timeout
                        break
            except self._of_the_way as exc:
                why = exc
        if filled == wanted or filled >= enough > 0:
            return filled
        if why is not None:
            raise why
        took = time.monotonic() - begun
        raise _TruncatedError(
            f"{filled} of {wanted} bytes of {self.uri(key)} came in {took:.1f} s ({announced} were announced)"
        )

    def _in_parallel(self, work: Callable[..., Any], parts: Sequence[tuple[int, int, int]]) -> list[Any]:
        """What `work` returns for each part. After an error no part is begun or tried again, and none is under way."""
        given_up = threading.Event()
        if len(parts) <= 1:
            return [work(*part, given_up) for part in parts]
        with ThreadPoolExecutor(min(self._threads, len(parts)), thread_name_prefix="object") as pool:
            begun: list[Future[Any]] = [pool.submit(work, *part, given_up) for part in parts]
            done, left = wait(begun, return_when=FIRST_EXCEPTION)
            given_up.set()
            for future in left:
                future.cancel()
            for future in done:
                future.result()
        return [future.result() for future in begun]

    def _call(
        self,
        what: str,
        key: str,
        method: str,
        use: Callable[[Any, float], Any] | None = None,
        deadline_s: float | None = None,
        given_up: threading.Event | None = None,
        **arguments: Any,
    ) -> Any:
        """The answer to one request, or what `use` makes of it, after as many attempts as the deadline allows.

        `use` is told how many seconds it has. Once `given_up` is set there is no other attempt.
        """
        slowed_s, deadline_s = deadline_s or self._slowed_s, deadline_s or self._deadline_s
        begun, attempts, throttled, renewed = time.monotonic(), 0, 0, False
        until = begun + deadline_s
        while True:
            attempts += 1
            with self._lock:
                self.traffic.requests += 1
                self.traffic.retries += attempts > 1
            attempt = time.monotonic()
            client, within_s = self._client_for(until - attempt)
            try:
                with UnderWay(STORAGE, what, self.uri(key)):
                    answer = getattr(client, method)(Bucket=self.name, **arguments)
                    return answer if use is None else use(answer, within_s)
            except self._of_the_way as exc:
                why, slow = _connection_words(exc), False
            except (self._exceptions.ClientError, self._exceptions.BotoCoreError) as exc:
                if _code_of(exc) in _OTHER_CREDENTIALS and not renewed:
                    renewed = True
                    self._renew(client)
                    continue
                why, slow = self._worth_another(exc, key)
            finally:
                with self._lock:
                    self.traffic.seconds += time.monotonic() - attempt
            throttled += slow
            with self._lock:
                self.traffic.throttled += slow
            first, longest = _BACKOFF_S
            pause = random.uniform(0, min(longest, first * 2**attempts, self._attempt_s))
            if slow:
                until = min(time.monotonic() + deadline_s, begun + slowed_s)
            if time.monotonic() + pause > until or (given_up is not None and given_up.is_set()):
                slowed = f", {throttled} of them answered 'slow down'" if throttled else ""
                raise ObjectStoreError(
                    f"{self.uri(key)}: {what} it did not succeed within {round(until - begun, 1):g} s "
                    f"({attempts} attempts{slowed}): {why}"
                )
            time.sleep(pause)

    def _client_for(self, left_s: float) -> tuple[Any, float]:
        """A client, and how many seconds its attempt may take, where `left_s` are left until the deadline."""
        if left_s >= self._attempt_s or self._attempt_s <= _LAST_S:
            return self._client, self._attempt_s
        with self._lock:
            if self._last_client is None:
                _, self._last_client, _ = _client(self.name, _LAST_S, self._threads)
            return self._last_client, _LAST_S

    def _renew(self, refused: Any) -> None:
        """Look for credentials once more, unless another thread has: a file of the profile may have new ones by now.

        While it has none or a part of them the client stays, and the next call looks again. `refused`: the client whose
        credentials are. Roles of the machine are renewed by botocore before they expire.
        """
        with self._lock:
            if refused not in (self._client, self._last_client):
                return
            self._last_client = None
            with contextlib.suppress(ObjectStoreError):
                _, client, credentials = _client(self.name, self._attempt_s, self._threads)
                if credentials() is not None:
                    self._client = client

    def _worth_another(self, exc: Any, key: str) -> tuple[str, bool]:
        """(what the store answered, whether it said to slow down). Raises what no other attempt will change."""
        if isinstance(exc, self._exceptions.BotoCoreError):
            raise ObjectStoreError(f"{self.uri(key)}: {_fix_of(exc)}") from None
        code = _code_of(exc)
        status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in _THROTTLED or status == 429:
            return f"{status} {code}", True
        if (
            status == 307
            or (status >= 500 and status != 501)
            or code in _CONFLICT
            or code in ("RequestTimeout", "BadDigest")
        ):
            return f"{status} {code}", False
        if code in _CHANGED or status == 412:
            raise ObjectChangedError(f"{self.uri(key)}: is not what it was, or is there already") from None
        if code == "NoSuchBucket" or (status == 404 and code not in _MISSING):
            raise ObjectStoreError(f"{self.uri(key)}: {_refusal('NoSuchBucket', status, self.name)}") from None
        if code in _MISSING:
            raise ObjectMissingError(f"{self.uri(key)} is not there") from None
        raise ObjectStoreError(
            f"{self.uri(key)}: {_refusal(code, status, self.name, _region_in(exc.response))}"
        ) from None


def _code_of(exc: Any) -> str:
    """The store's name of what it refuses, or botocore's of what is wrong on this side."""
    answer = getattr(exc, "response", None)
    return type(exc).__name__ if answer is None else str(answer.get("Error", {}).get("Code", ""))


class _TruncatedError(RuntimeError):
    """Fewer bytes came than the store had announced."""


def _errors_in_answers() -> tuple[type[Exception], ...]:
    """The errors of an answer that was truncated or altered, and of a connection lost while it arrives."""
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError  # a body is read from urllib3's stream: botocore wraps none of these there

    return ResponseParserError, HTTPError


_Credentials = tuple[str, str]  # access key and secret key


def _client(bucket: str, attempt_s: float, connections: int) -> tuple[Any, Any, Callable[[], _Credentials | None]]:
    """botocore's exceptions; its client for S3, which leaves retries to its caller; and what tells the credentials."""
    try:
        import botocore.config
        import botocore.exceptions
        import botocore.session
    except ModuleNotFoundError as exc:
        raise ObjectStoreError(
            f"s3://{bucket}: botocore is not installed, which object storage needs: {INSTALL}"
        ) from exc
    # What they tell at the level debug has access keys in it.
    for name in ("botocore", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # A bucket as part of a host name needs a name server that knows it, which other stores than AWS seldom have.
    own = _STORE.endpoint is not None
    # The CRC-32 of a body is among the headers that are signed; a SHA-256 of it takes longer than sending it.
    settings: dict[str, Any] = {"payload_signing_enabled": False} | ({"addressing_style": "path"} if own else {})
    config = botocore.config.Config(
        parameter_validation=False,  # which refuses views of memory as bodies; they are sent as they are
        connect_timeout=attempt_s,
        read_timeout=attempt_s,
        retries={"total_max_attempts": 1},
        max_pool_connections=max(connections + 2, _CONNECTIONS),
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3=settings,
    )
    try:
        # botocore knows AWS_DEFAULT_REGION alone, other clients of AWS this name, too.
        region = os.environ.get("AWS_REGION") or None
        session = botocore.session.get_session()
        credentials = functools.partial(_complete_credentials, session)
        session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
        if not speaks_google(_STORE.endpoint):
            client = session.create_client("s3", region_name=region, config=config)
            client.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
            return botocore.exceptions, client, credentials

        def signing() -> _Credentials:
            found = credentials()
            if found is None:
                raise botocore.exceptions.NoCredentialsError
            return found

        unsigned = config.merge(botocore.config.Config(signature_version=botocore.UNSIGNED))
        client = session.create_client("s3", region_name=region or "auto", config=unsigned)
        speak_google(client, signing)
        return botocore.exceptions, client, credentials
    except (botocore.exceptions.BotoCoreError, ValueError) as exc:
        raise ObjectStoreError(f"s3://{bucket}: {_fix_of(exc)}") from None


def _complete_credentials(session: Any) -> _Credentials | None:
    """Those that the session has now; None if there are none, or a part of them."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        found = session.get_credentials()
        frozen = found and found.get_frozen_credentials()
    except (BotoCoreError, ClientError):
        return None
    return (frozen.access_key, frozen.secret_key) if frozen and frozen.access_key and frozen.secret_key else None


@functools.cache
def _descriptions(data_path: str | None) -> Any:
    """botocore's loader of its descriptions of services: a loader of its own in each client would read them again."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    """Add the MD5 of a request to remove objects: other stores ask for it instead of the CRC-32 that AWS takes."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


_REFUSALS = {
    "NoSuchBucket": "there is no bucket {bucket} at this endpoint; create it, or correct the URI",
    "AccessDenied": "permission denied; the credentials need s3:GetObject, s3:PutObject, s3:DeleteObject, "
    "s3:AbortMultipartUpload, s3:ListBucket and s3:ListBucketMultipartUploads there",
    "InvalidAccessKeyId": "the store does not know the access key; correct AWS_ACCESS_KEY_ID or the profile",
    "SignatureDoesNotMatch": "the secret key does not fit the access key; correct AWS_SECRET_ACCESS_KEY or the profile",
    "ExpiredToken": "the credentials have expired or are no more valid; renew them, and AWS_SESSION_TOKEN with them",
    "RequestTimeTooSkewed": "the clock of this host is wrong; set it",
    "PermanentRedirect": "the bucket is in {region}; set AWS_REGION to it",
    "AuthorizationHeaderMalformed": "the bucket is in {region}; set AWS_REGION to it",
    "IllegalLocationConstraintException": "the bucket is in {region}; set AWS_REGION to it",
    "NotImplemented": "the store does not know the request; use one with conditional writes and multipart uploads",
}
_SAME = {
    "403": "AccessDenied", "Forbidden": "AccessDenied", "AllAccessDisabled": "AccessDenied",
    **dict.fromkeys((*_EXPIRED, "RequestExpired"), "ExpiredToken"), "301": "PermanentRedirect",
    "InvalidClientTokenId": "InvalidAccessKeyId",
}  # fmt: skip


def _refusal(code: str, status: int, bucket: str, region: str = "another region") -> str:
    """What the store's refusal means and what to do; its own words may hold a key."""
    known = _REFUSALS.get(_SAME.get(code, code))
    answered = f"the store answered {status} {code}"
    return (
        f"{known.format(bucket=bucket, region=region)} ({answered})" if known else f"{answered}; see its documentation"
    )


def _region_in(answer: Mapping[str, Any]) -> str:
    """The region of the bucket, if a refusal names it."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = str(answer.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region") or "")
    return f"region {region}" if _REGION.fullmatch(region) else "another region"


def _fix_of(exc: Exception) -> str:
    """What is wrong on this side, in words that hold no credentials."""
    name = type(exc).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"):
        return (
            f"there are no usable credentials ({name}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, "
            "or give the machine a role"
        )
    if SETTING in str(exc):
        return str(exc)
    if name in ("ValueError", "InvalidEndpointConfigurationError"):
        return "AWS_ENDPOINT_URL is no URL; give http://HOST:PORT or https://HOST"
    return f"the request could not be made ({name}); check the region, the endpoint and ~/.aws/config"


def _connection_words(exc: BaseException) -> str:
    """What happened to the connection; the host is the endpoint's, which is no secret."""
    if isinstance(exc, _TruncatedError):
        return str(exc)
    if type(exc).__name__ == "SSLError":
        return (
            "the store's certificate is not accepted (SSLError); set AWS_CA_BUNDLE to that of who signed it, or "
            "correct AWS_ENDPOINT_URL"
        )
    return f"no answer from the store ({type(exc).__name__}); check AWS_ENDPOINT_URL and the network"


def _read(fd: int, start: int, length: int, path: Path) -> bytes:
    content = os.pread(fd, length, start)
    while len(content) < length:  # a read may be cut short
        more = os.pread(fd, length - len(content), start + len(content))
        if not more:
            raise DamagedFileError(f"{path}: ends at byte {start + len(content)}, and was longer")
        content += more
    return content


def _etag_in(answer: Mapping[str, Any]) -> str:
    """In the quotes that belong to it; some stores leave them out in listings."""
    etag = answer["ETag"]
    return etag if etag.endswith('"') else f'"{etag}"'


def _base64(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
