"""A checkpoint engine of another package: each file in the safetensors format, everything in one go."""

import hashlib
import json
import os

import safetensors.torch

from megatron.checkpointing.engines import codec
from megatron.checkpointing.engines.base import CheckpointEngine, SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError


class ExampleEngine(CheckpointEngine):
    name = "example"

    def _save_file(self, file, directory, op):
        with op.span("serialize", file=file.name):
            skeleton, tensors = codec.split(file.state)  # JSON, and tensors by name
            tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
            content = safetensors.torch.save(tensors, {"skeleton": json.dumps(skeleton)})
            checksum = "sha256:" + hashlib.sha256(content).hexdigest()
        with (directory / file.name).open("xb") as out:
            with op.span("flush", "write", file=file.name) as span:
                span.bytes = out.write(content)
                out.flush()
            if self.options.fsync:
                with op.span("flush", "fsync", file=file.name):
                    os.fsync(out.fileno())
        return SavedFile(file.name, len(content), checksum)

    def _load_file(self, path, expected, op):
        with op.span("load", "read", file=path.name) as span:
            content = path.read_bytes()
            span.bytes = len(content)
        with op.span("load", "verify", file=path.name):
            wanted = expected.checksum if expected and self.options.verify_checksums else None
            if wanted and wanted != "sha256:" + hashlib.sha256(content).hexdigest():
                raise CheckpointDamagedError(f"{path}: does not have the checksum {wanted} it was saved with")
        with op.span("load", "deserialize", file=path.name):
            try:
                tensors = safetensors.torch.load(content)
                header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
                return codec.join(json.loads(header["__metadata__"]["skeleton"]), tensors)
            except (safetensors.SafetensorError, LookupError, ValueError) as exc:
                raise CheckpointDamagedError(f"{path}: is damaged: {exc}") from exc
