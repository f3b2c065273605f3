"""PyPI's moto as an S3 server, with less work for each request: `python -m tests.s3_server FD`, a socket that listens.

It answers as `moto.server` does, but it lists moto's services and matches a host with the patterns of all of them once
for each host, not for each request; it parses each time of a listing once; and it logs no requests.
"""

from __future__ import annotations

import functools
import gc
import sys
from typing import Any

from botocore.utils import parse_to_aware_datetime
from moto.core import serialize
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


class _Dispatcher(DomainDispatcherApplication):
    def __init__(self) -> None:
        super().__init__(create_backend_app)
        self._backend_of = functools.cache(super().get_backend_for_host)

    def get_backend_for_host(self, host: str | None) -> Any:
        return self._backend_of(host)


class _Handler(MotoRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


def serve(listening: int) -> None:
    cached = functools.lru_cache(maxsize=1 << 16)(parse_to_aware_datetime)
    serialize.parse_to_aware_datetime = cached  # pyright: ignore[reportPrivateImportUsage]  moto has no setting for it
    gc.freeze()  # what is imported is no garbage
    make_server("127.0.0.1", 0, _Dispatcher(), threaded=True, request_handler=_Handler, fd=listening).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
