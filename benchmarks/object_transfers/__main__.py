"""Command line: `python -m benchmarks.object_transfers BUCKET`: what sending and reading one object costs.

Of each way wall time, and processor time of this process and, with --server PID, of the store: blocks sent as engine
`lazy` sends them, a file written and uploaded as those of other engines are, and the S3 connector for PyTorch; ranges
read to memory, a file fetched and read, and the connector. Ways are taken in turn, --rounds times, after one round
that does not count. The bucket is that of AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from megatron.fileio.checksums import crc32
from megatron.fileio.objects.bucket import Bucket
from megatron.fileio.objects.parts import MIB, PART_BYTES, parts
from megatron.fileio.objects.upload import ObjectUpload
from restart_trace.command_line import CommandParser

_HEADER = 4096
_THREADS = 8
_PREFIX = "benchmarks.object_transfers"
_EPILOG = """\
examples:
  python -m benchmarks.object_transfers checkpoints                   with AWS_ENDPOINT_URL and credentials set
  python -m benchmarks.object_transfers --mib 64 --rounds 2 --server "$(pgrep juicefs)" checkpoints

exit status: 0 measured, 2 wrong arguments
"""


class Transfers:
    """The ways to move one object of `num_bytes` of random bytes."""

    def __init__(self, bucket: str, num_bytes: int, directory: Path) -> None:
        self._bucket = Bucket(bucket, threads=_THREADS)
        self._name = bucket
        self._size = num_bytes
        self._file = directory / "file"
        self._content = np.random.default_rng(1).integers(0, 256, PART_BYTES + _HEADER, dtype=np.uint8)
        self._target = np.empty(num_bytes, dtype=np.uint8)
        self._etag = ""

    def send_blocks(self) -> None:
        upload = ObjectUpload(self._bucket, self._key("blocks"), self._size, _HEADER, PART_BYTES)
        content = self._content.data

        def send(start: int) -> None:
            upload.write(content, min(PART_BYTES, self._size - start), start)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(send, range(_HEADER, self._size, PART_BYTES)))
        upload.write(content, _HEADER, 0)
        upload.cut_off(self._size)
        upload.close()
        assert upload.result is not None
        self._etag = upload.result.etag

    def send_file(self) -> None:
        with self._file.open("wb") as file:
            for start in range(0, self._size, PART_BYTES):
                file.write(self._content.data[: min(PART_BYTES, self._size - start)])
        self._bucket.upload_file(self._file, self._key("file"))
        self._file.unlink()

    def send_by_connector(self) -> None:
        with self._connector().put_object(self._name, self._key("connector")) as writer:
            for start in range(0, self._size, PART_BYTES):
                writer.write(self._content.data[: min(PART_BYTES, self._size - start)])

    def read_ranges(self) -> None:
        def read(part: tuple[int, int, int]) -> None:
            _, start, stop = part
            view = self._target.data[start:stop]
            self._bucket.read_range_hedged(self._key("blocks"), self._etag, start, view)
            crc32(view)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(read, parts(self._size)))

    def read_file(self) -> None:
        self._bucket.download_file(self._key("blocks"), self._file, self._size, self._etag)
        with self._file.open("rb", buffering=0) as file:
            file.readinto(self._target.data)
        crc32(self._target.data)
        self._file.unlink()

    def read_by_connector(self) -> None:
        reader = self._connector().get_object(self._name, self._key("connector"))
        reader.readinto(self._target.data)

    def remove(self) -> None:
        self._bucket.delete([self._key(name) for name in ("blocks", "file", "connector")])

    @staticmethod
    def _connector() -> Any:
        from tools.ckpt_replay.connector import client_of_connector  # with torch

        return client_of_connector()

    def _key(self, name: str) -> str:
        return f"{_PREFIX}/{name}"


def measure(transfers: Transfers, rounds: int, server: int | None) -> dict[str, list[tuple[float, float, float]]]:
    """(wall, client and server s) of each way and round."""
    ways: list[Callable[[], None]] = [
        transfers.send_blocks, transfers.send_file, transfers.send_by_connector,
        transfers.read_ranges, transfers.read_file, transfers.read_by_connector,
    ]  # fmt: skip
    processes = [psutil.Process(), *([] if server is None else [psutil.Process(server)])]
    found: dict[str, list[tuple[float, float, float]]] = {}
    for counts in range(rounds + 1):
        for way in ways:
            before, begun = [sum(process.cpu_times()[:2]) for process in processes], time.monotonic()
            way()
            wall = time.monotonic() - begun
            took = [sum(process.cpu_times()[:2]) - b for process, b in zip(processes, before, strict=True)]
            if counts:
                found.setdefault(way.__name__, []).append((wall, took[0], took[1] if server else float("nan")))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(prog="python -m benchmarks.object_transfers", description=(__doc__ or ""), epilog=_EPILOG)
    parser.add_argument("bucket", help="its name; what is made there is removed again")
    parser.add_argument("--mib", type=int, default=512, help="size of the object (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--server", type=int, metavar="PID", help="of a store on this machine")
    arguments = parser.parse_args(argv)
    for flag, value in (("--mib", arguments.mib), ("--rounds", arguments.rounds)):
        if value < 1:
            parser.error(f"{flag} {value}: must be at least 1")
    with tempfile.TemporaryDirectory() as directory:
        transfers = Transfers(arguments.bucket, arguments.mib * MIB, Path(directory))
        try:
            found = measure(transfers, arguments.rounds, arguments.server)
        finally:
            transfers.remove()
    gib = arguments.mib / 1024
    print(f"{arguments.mib} MiB, {arguments.rounds} rounds, load {os.getloadavg()[0]:.1f}; medians, least and most")
    print("| way | MiB/s | client s/GiB | server s/GiB |\n|---|---|---|---|")
    for name, samples in found.items():
        rates = [arguments.mib / wall for wall, _, _ in samples]
        columns = [rates, [client / gib for _, client, _ in samples], [at / gib for _, _, at in samples]]
        cells = [f"{statistics.median(c):.4g} [{min(c):.4g} to {max(c):.4g}]" for c in columns]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
