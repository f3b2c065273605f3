"""source.json: from which checkpoint an export was made, so that a training knows its own; no torch."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpointing.store.manifest import Heading
from restart_trace.strict_json import read_json

SOURCE = "source.json"
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Source:
    """`run_id`: as in the manifest. `save`: hash of the path of the directory of checkpoints, as a copy of that has the
    same `run_id`. `manifest`: the checksum of the checkpoint's manifest, which no other checkpoint has. `exported_by`:
    the run that exported it, which is another one if the checkpoint was copied to it.
    """

    checkpoint: str
    run_id: str
    save: str
    manifest: str
    exported_by: str

    @staticmethod
    def of_checkpoint(checkpoint: Path, exported_by: str = "") -> Source:
        """`exported_by`: "" for an export by hand, which counts as one of the run in the manifest.

        Raises OSError or ValueError if the manifest cannot be read.
        """
        heading = Heading.of(checkpoint)
        save = _of_directory(checkpoint.parent)
        return Source(heading.tag, heading.run_id, save, heading.checksum, exported_by or heading.run_id)

    @staticmethod
    def of_export(out: Path) -> Source | None:
        """What the export `out` says; None if it says nothing, or is not there."""
        try:
            return Source(**read_json(out / SOURCE, _MOST_BYTES))
        except (OSError, ValueError, TypeError):
            return None

    def is_of_run(self, run_id: str, save: Path, out: Path) -> bool:
        """Whether this is the source of an export `out` that the run made which saves to `save`."""
        return (
            run_id != "" and self.exported_by == run_id and (_is_below(out, save) or self.save == _of_directory(save))
        )


def is_export_of(out: Path, checkpoint: Path) -> bool:
    """Whether `out` is an export of this very checkpoint; False if either cannot be read."""
    found = Source.of_export(out)
    try:
        return found is not None and found.manifest == Source.of_checkpoint(checkpoint).manifest
    except (OSError, ValueError):
        return False


def owner_of(run_id: str, save: Path, out: Path) -> str:
    """The owner, as in megatron.fileio.new_directory, of what the run that saves to `save` exports to `out`.

    "" for a run without an id.
    """
    if not run_id:
        return ""
    return run_id if _is_below(out, save) else _hash(f"{run_id} {_of_directory(save)}")


def _is_below(out: Path, save: Path) -> bool:
    """Whether exports move, and are copied, with the directory of checkpoints."""
    return Path(os.path.realpath(out)).is_relative_to(os.path.realpath(save))


def _of_directory(save: Path) -> str:
    return _hash(os.path.realpath(save))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]
