"""Makes the options of an engine from flags, for the trainer and tools.ckpt_replay alike."""

from __future__ import annotations

import os

from megatron.checkpointing.engines.base import MIB, EngineOptions
from megatron.config import CheckpointConfig
from megatron.config.uris import is_uri
from megatron.peers.pacing import Pacing


def engine_options(flags: CheckpointConfig, rank: int, timeout_minutes: float) -> EngineOptions:
    """What the command line says about how engines work.

    `rank` is that of the process the engine runs in, `timeout_minutes` how long a process group waits there.
    """
    cache = flags.host_cache_size
    return EngineOptions(
        # What goes to object storage needs to outlast nothing on the way there.
        fsync=flags.checkpoint_durability == "fsync" and not is_uri(flags.save),
        verify_checksums=flags.verify_checkpoint == "checksum",
        verify_saved=flags.verify_checkpoint != "none",
        checksum=flags.checksum == "crc32",
        host_cache_bytes=None if cache is None else int(cache * 1024 * MIB),
        io_threads=flags.io_threads,
        saves_to_store=is_uri(flags.save),
        io_block_bytes=int(flags.io_block_size * MIB),
        # Those files are read again at once, to be uploaded: better from the page cache than from the disk.
        direct_io="off" if flags.direct_io == "auto" and is_uri(flags.save) else flags.direct_io,
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK") or 0),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1),
        files_per_node=flags.checkpoint_files_per_node,
        compress_files=flags.checkpoint_compression == "zstd",
        device_timeout_s=60 * timeout_minutes,
        peer_timeout_s=flags.peer_timeout,
        compress_copies=flags.replica_compression == "zstd",
        copy_steps=flags.save_interval if flags.replication_traffic == "interleave" else None,
        copy_pacing=_copy_pacing(flags),
        library=flags.library_options,
    )


def _copy_pacing(flags: CheckpointConfig) -> Pacing:
    elements = flags.snapshot_buffer_size  # in 2^20 of fp32, as in GEMINI's artifact
    return Pacing(
        profile_steps=flags.comm_profile_steps,
        shortest_ms=flags.span_threshold,
        alpha=flags.span_alpha,
        blocks=flags.max_blocks_in_span,
        block_bytes=None if elements is None else int(4 * elements * MIB),
    )
