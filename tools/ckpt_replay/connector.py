"""Saves and loads by the S3 connector for PyTorch: its S3StorageWriter and S3StorageReader under torch's DCP.

They are called as its users and the benchmark in its repository do: one collective dcp.save and dcp.load, 8 threads
unless --io-threads is given, parts of --io-block-size. There are no checksums and no commit: DCP writes its metadata
last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron.checkpointing.engines.base import EngineOptions, FileState
from megatron.checkpointing.store import naming as names
from megatron.config.uris import ObjectUri
from megatron.fileio.objects.stores import STORES
from restart_trace.clock import now_ns
from restart_trace.recorder import Recorder

from .collective import Names, written_by
from .library import LibrarySave

_THREADS = 8  # thread_count of conf/dcp_fsdp_load.yaml in the connector's repository


class Connector:
    """The library for a process of the default process group that holds what `rank` holds.

    Of several such processes, which name the same tensors, DCP has each write a part of them.
    """

    asynchronous = False
    loads_in_place = True

    def __init__(
        self, options: EngineOptions, rank: int, recorder: Recorder, throughput_target_gbps: float | None
    ) -> None:
        """`throughput_target_gbps`: that of its client, Gbit/s; None: the library's own."""
        import torch.distributed.checkpoint  # noqa: F401  over a second: not for replays without it, nor in a load
        from s3torchconnector import S3ClientConfig

        self._threads = options.io_threads or _THREADS
        path_style = STORES["s3"].endpoint is not None
        config = S3ClientConfig(force_path_style=path_style, part_size=options.io_block_bytes)
        if throughput_target_gbps is not None:
            config = replace(config, throughput_target_gbps=throughput_target_gbps)
        self._config = config
        self._names = Names(rank)
        self._recorder = recorder

    @property
    def client(self) -> dict[str, Any]:
        """What its client runs with: threads of a save, bytes of a part, Gbit/s that it aims at."""
        return {
            "threads": self._threads,
            "part_bytes": self._config.part_size,
            "throughput_target_gbps": self._config.throughput_target_gbps,
        }

    def save(self, place: ObjectUri, step: int, files: Sequence[FileState]) -> LibrarySave:
        from torch.distributed.checkpoint.state_dict_saver import save

        kind = type(self).__name__
        with self._recorder.operation("save", tag=names.tag_of(step), step=step, engine=kind) as op:
            done = LibrarySave(op, now_ns())
            content = self._names.content(files)
            writer, spent, plans, published = _writer(str(place), self._threads, self._config)
            save(content, storage_writer=writer)
            done.committed_ns = now_ns()
            done.blocked_ns = done.committed_ns - done.start_ns
            begun, ended = spent[0]
            done.moving_ns = ended - begun
            tensors, op.bytes = written_by(plans[0])
            op.num_files = min(self._threads, tensors)
            op.add("barrier", None, done.start_ns, begun)
            op.add("flush", "upload", begun, ended, num_bytes=op.bytes)
            for first, last in published:  # on rank 0: of the metadata, without which nothing is a checkpoint
                op.add("barrier", None, ended, first)
                op.add("commit", "publish", first, last)
                ended = last
            op.add("barrier", None, ended, done.committed_ns)
            op.durable = True  # the store has answered each request that completes an object
        return done

    def load_into(
        self, live: Sequence[FileState], planned: Sequence[FileState], place: ObjectUri
    ) -> tuple[dict[str, Any], int]:
        reader, spent = _reader(str(place), self._config)
        states = self._names.load(live, planned, place, reader)
        return states, sum(ended - begun for begun, ended in spent)

    def close(self) -> None:
        return None


def _client(config: Any) -> tuple[str, Any]:
    """(region, the client of the library with its S3ClientConfig `config`)."""
    from s3torchconnector._s3client import S3Client

    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return region, S3Client(region, endpoint=STORES["s3"].endpoint, s3client_config=config)


def _timed(
    call: Callable[..., Any], spent: list[tuple[int, int]], plans: list[Any] | None = None
) -> Callable[..., Any]:
    """`call`, whose begins and ends `spent` gets, and `plans` its first argument."""

    def timed(*arguments: Any, **named: Any) -> Any:
        if plans is not None:
            plans.append(arguments[0])
        begun = now_ns()
        try:
            return call(*arguments, **named)
        finally:
            spent.append((begun, now_ns()))

    return timed


def _writer(uri: str, threads: int, config: Any) -> tuple[Any, list[tuple[int, int]], list[Any], list[tuple[int, int]]]:
    """(writer of DCP; begin and end of its write of this rank's tensors, with the plan of it; and of its metadata)."""
    from s3torchconnector.dcp import S3StorageWriter
    from s3torchconnector.dcp.s3_file_system import S3FileSystem

    region, client = _client(config)
    writer, spent, plans, published = S3StorageWriter(region, uri, thread_count=threads), [], [], []
    writer.fs = S3FileSystem(region, s3_client=client)
    writer.fs.init_path(uri)
    writer.write_data = _timed(writer.write_data, spent, plans)
    writer.finish = _timed(writer.finish, published)
    return writer, spent, plans, published


def _reader(uri: str, config: Any) -> tuple[Any, list[tuple[int, int]]]:
    from s3torchconnector.dcp import S3StorageReader
    from s3torchconnector.dcp.s3_file_system import S3FileSystem

    region, client = _client(config)
    reader, spent = S3StorageReader(region, uri), []
    reader.fs = S3FileSystem(region, s3_client=client, reader_constructor=reader._reader_constructor)
    reader.fs.init_path(uri)
    reader.read_data = _timed(reader.read_data, spent)
    return reader, spent
