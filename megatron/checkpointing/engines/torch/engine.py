"""torch.save per file, with the files and the meaning of DeepSpeed's default engine, each phase timed apart.

Differences: every file is fsynced (--checkpoint-durability none leaves that out), its checksum goes into the
manifest and is verified while loading, and only known classes are unpickled; what could not be loaded again is
refused when saving.
"""

from __future__ import annotations

from pathlib import Path

from megatron.checkpointing.engines.base import FileState, SavedFile
from megatron.checkpointing.engines.host_staging import Staging, check_loadable, stage_on_host
from megatron.checkpointing.engines.torch_files import TorchFilesEngine, report_writing, write_state
from megatron.fileio.files import sync_file
from megatron.fileio.timed_files import TimedWriter, Timeline
from megatron.fileio.zip_records import open_directory_checksum
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation


class TorchEngine(TorchFilesEngine):
    """The baseline of every comparison. Host memory: a copy of one file's device tensors at a time."""

    name = "torch"

    def _save_file(self, file: FileState, directory: Path, op: Operation) -> SavedFile:
        path, timeline = directory / file.name, Timeline()
        begun = op.until_ns()  # recording the spans of the file before is part of serializing this one
        with op.span("device_to_host", file=file.name) as copying:
            staging = Staging()
            state = stage_on_host(file.state, staging)
            copying.bytes = staging.copied_bytes
        check_loadable(staging, file.name)
        writer = TimedWriter(path, timeline)
        try:
            write_state(state, writer)
            del state  # giving a host copy back to the system takes time, too
            checksum = open_directory_checksum(writer.fileno())  # a few kB, still in the page cache
            apart_ns = copying.duration_ns
            if self.options.fsync:
                with op.span("flush", "fsync", file=file.name) as syncing:
                    sync_file(writer.fileno())
                    syncing.bytes = writer.num_bytes
                apart_ns += syncing.duration_ns
        finally:
            writer.close()
        write_ns = timeline.total("write")
        report_writing(op.add, file.name, begun, now_ns(), write_ns, writer.num_bytes, apart_ns)
        return SavedFile(file.name, writer.num_bytes, checksum)
