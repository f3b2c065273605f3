"""Engine `fastpersist`: DeepSpeed's checkpoint writer in the training process; its files are those of engine `torch`.

As DeepSpeed's FastCheckpointEngine, it gives torch.save a writer of deepspeed.io. It also times every phase, records
checksums in the manifest, calls fsync as the flag says, and verifies what it loads against an allow-list
(FastCheckpointEngine's own load, torch.load without an allow-list, cannot read what DeepSpeed saves). writer.py says
what else differs.
"""

from __future__ import annotations

from pathlib import Path

from megatron.checkpointing.engines.base import EngineOptions, FileState, SavedFile
from megatron.checkpointing.engines.fastpersist.writer import StateWriter, WriterNotice
from megatron.checkpointing.engines.host_staging import Staging, stage_on_host
from megatron.checkpointing.engines.torch_files import TorchFilesEngine
from restart_trace.recorder import Operation


class FastPersistEngine(TorchFilesEngine):
    """Host memory: a copy of one file's device tensors at a time, and with FastFileWriter 64 MiB pinned.

    --direct-io off takes PyFileWriter, on FastFileWriter, auto what the machine has; of FastFileWriter --io-threads
    and --io-block-size are intra_op_parallelism and block_size of its async_io operator.
    """

    name = "fastpersist"

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._writer = StateWriter(options)
        self._notice = WriterNotice(self.name, options.rank)

    def check_can_save(self) -> None:
        """Chooses the writer, so that building DeepSpeed's operator (once a machine) is no part of the first save."""
        self._writer.choose()

    def _save_file(self, file: FileState, directory: Path, op: Operation) -> SavedFile:
        begun = op.until_ns()  # recording the spans of the file before is part of serializing this one
        with op.span("device_to_host", file=file.name) as span:
            staging = Staging()
            state = stage_on_host(file.state, staging)
            span.bytes = staging.copied_bytes
        path = directory / file.name
        saved = self._writer.write(state, staging, path, file.name, op.add, begun, span.duration_ns)
        self._notice.give(str(self._writer.choose()), op)
        return saved
