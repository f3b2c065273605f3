"""The checkpoints below a prefix of a bucket, as a CheckpointSource: read in ranges, or fetched to the node's disk."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.checkpointing.agreement import CheckpointRejectedError, run_on_all_ranks
from megatron.checkpointing.engines.base import CheckpointEngine, Copies
from megatron.checkpointing.load.storage import Listing, OpenedCheckpoint, StorageSource, check_wanted
from megatron.checkpointing.store.bucket.checkpoints import NodeFiles, StoredCandidate, drop_listings, open_checkpoints
from megatron.config import CheckpointConfig
from megatron.parallel.control_plane import ControlPlane
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)


class BucketSource(StorageSource):
    """Those of --load, or the one of --load-tag there. Files that were fetched are removed by `close`."""

    def __init__(self, control: ControlPlane, options: CheckpointConfig) -> None:
        super().__init__(control)
        self._stored = open_checkpoints("--load", options.load or "", options)
        self._load_tag = options.load_tag
        self._files = NodeFiles(self._stored)

    def search(self) -> Listing:
        found = self._stored.discover(self._load_tag)
        drop_listings()  # of the start: who searches once more wants to know what is new
        return Listing(*found)

    def candidates(self, op: Operation) -> tuple[list[int], list[str]]:
        self.close()
        self._files = NodeFiles(self._stored)
        return super().candidates(op)

    def open(self, op: Operation) -> OpenedCheckpoint:
        found = self.next_candidate(op)
        assert isinstance(found, StoredCandidate)
        return OpenedObjects(self._files.on_this_node(found), files=self._files, control=self.control)

    def close(self) -> None:
        self._files.close()


@dataclass(frozen=True, kw_only=True)
class OpenedObjects(OpenedCheckpoint):
    """A checkpoint in a bucket. What arrives damaged is fetched once more, since the transfer may have damaged it."""

    files: NodeFiles
    control: ControlPlane

    def copies(self, reader: CheckpointEngine, states: Sequence[str], extra: Sequence[str], op: Operation) -> Copies:
        check_wanted(self._in_directory, states)
        yield from self.files.copies(self.candidate, reader, states, extra, op)

    def shared_copies(self, reader: CheckpointEngine, op: Operation) -> Copies:
        candidate, in_directory = self.candidate, self._in_directory
        if reader.wants_placements and reader.reads_ranges_of(in_directory.files.values()):
            try:
                yield self.files.in_ranges(candidate, op)
            except CheckpointRejectedError as exc:
                logger.warning("%s; it is read once more", str(exc).replace(str(candidate.directory), candidate.place))
            finally:
                self.files.measure(op)
        run_on_all_ranks(self.control, op, functools.partial(self.files.fetch, candidate, in_directory.files, op))
        yield in_directory
