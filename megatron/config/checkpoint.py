"""Checkpoints: where, when and how they are saved, and what is restored from them."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.config.errors import ConfigError, refuse, require_at_least, require_one_of, require_positive
from megatron.config.flags import flag, flag_name

_NEED_SAVE = ("keep_last", "no_save_optim", "no_save_rng", "take_over", "allow_other_checkpoints")
_NEED_LOAD = (
    "load_tag",
    "no_load_optim",
    "no_load_rng",
    "no_load_lr_state",
    "finetune",
    "reset_iteration",
    "universal_checkpoint",
    "exit_on_missing_checkpoint",
    "allow_start_over",
    "prefetch_on_start",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpointing: saving, loading, verifying."""

    save: str | None = flag(None, "directory to save checkpoints to")
    save_interval: int | None = flag(None, "iterations between saves; needed with --save")
    keep_last: int | None = flag(None, "keep only this many newest checkpoints (default: all)")
    take_over: bool = flag(
        False, "save to --save although another live launch saves there: that launch stops saving and ends"
    )
    no_save_optim: bool = flag(False, "save no optimizer state")
    no_save_rng: bool = flag(False, "save no random-number state")
    load: str | None = flag(
        None, "directory to load a checkpoint from; if it has none, training starts from iteration 0"
    )
    load_tag: str | None = flag(
        None, "which checkpoint of --load to load, such as global_step5 (default: the newest complete one)"
    )
    no_load_optim: bool = flag(False, "restore no optimizer state")
    no_load_rng: bool = flag(False, "restore no random-number state")
    no_load_lr_state: bool = flag(False, "restore no schedule state")
    finetune: bool = flag(False, "restore weights only and start from iteration 0")
    reset_iteration: bool = flag(
        False,
        "restore weights, optimizer and random state, but count iterations and samples from 0; the schedule continues "
        "from the checkpoint unless --no-load-lr-state is given",
    )
    exit_on_missing_checkpoint: bool = flag(
        False, "stop if --load holds no checkpoint, instead of starting from iteration 0"
    )
    allow_start_over: bool = flag(
        False,
        "start from iteration 0 if every checkpoint in --load is damaged, or `latest` names a missing one",
    )
    allow_other_checkpoints: bool = flag(
        False, "save into a --save that holds checkpoints which this run does not resume from"
    )
    checkpoint_engine: str = flag(
        "torch", "how checkpoint files are written; an unknown name lists the engines"
    )
    checkpoint_durability: str = flag(
        "fsync",
        "fsync: a committed checkpoint survives a power loss; none: as upstream",
        choices=("fsync", "none"),
    )
    host_cache_size: float | None = flag(
        None,
        "host memory that an asynchronous save may use, GiB per rank (default: the size of the rank's "
        "checkpoint, at most half of its share of the free memory)",
    )
    io_threads: int | None = flag(None, "threads that write or read files (default: the engine's own)")
    io_block_size: float = flag(8.0, "size of one read or write of an I/O thread, MiB; engine lazy")
    direct_io: str = flag(
        "auto",
        "bypass the page cache: auto falls back to buffered I/O, and logs it, if the file system refuses; "
        "engine lazy",
        choices=("auto", "on", "off"),
    )
    prefetch_on_start: bool = flag(
        False, "read the rank's part of the checkpoint into the page cache while the process starts"
    )
    prefetch_limit: float | None = flag(
        None,
        "page cache that --prefetch-on-start may fill, GiB per rank (default: half of the rank's share of the free "
        "memory)",
    )
    checksum: str = flag(
        "crc32",
        "checksum to compute while saving, if the file format has none of its own",
        choices=("crc32", "none"),
    )
    verify_checkpoint: str = flag(
        "checksum",
        "check of a checkpoint's files before it is loaded",
        names=("--checkpoint-verify",),
        choices=("checksum", "size"),
    )
    universal_checkpoint: bool = flag(
        False,
        "the same as --redistribute universal: the checkpoint in --load is converted first, not by hand",
    )
    redistribute: str = flag(
        "direct",
        "how a checkpoint of another TP x PP x DP layout is loaded; direct: each rank reads its share; universal: "
        "DeepSpeed's universal checkpoint, converted first",
        choices=("direct", "universal"),
    )
    verify_restored_state: bool = flag(
        False, "record a hash of every tensor when saving, and compare them after loading"
    )
    library_options: tuple[
        tuple[str, Any], ...
    ] = ()  # for the engine's library, of a --deepspeed_config stanza

    def __post_init__(self) -> None:
        for owner, names in (("save", _NEED_SAVE), ("load", _NEED_LOAD)):
            for name in names:
                if getattr(self, owner) is None and getattr(self, name) not in (None, False):
                    raise ConfigError(
                        f"{flag_name(name)} does nothing without --{owner} DIR: add it or drop the flag"
                    )
        for name in ("save", "load"):
            if getattr(self, name) == "":
                refuse("--" + name, "''", "is empty; give a directory")
        if self.save is not None and self.save_interval is None:
            refuse("--save", self.save, "add --save-interval N")
        require_at_least("--save-interval", self.save_interval, 1)
        require_at_least("--keep-last", self.keep_last, 1)
        require_one_of("--checkpoint-durability", self.checkpoint_durability, ("fsync", "none"))
        require_positive("--host-cache-size", self.host_cache_size)
        require_at_least("--io-threads", self.io_threads, 1)
        if self.io_block_size <= 0 or (self.io_block_size * 256) % 1:
            refuse("--io-block-size", self.io_block_size, "must be a multiple of 4 KiB (0.00390625)")
        require_one_of("--direct-io", self.direct_io, ("auto", "on", "off"))
        self._check_prefetch()
        require_one_of("--checksum", self.checksum, ("crc32", "none"))
        require_one_of("--checkpoint-verify", self.verify_checkpoint, ("checksum", "size"))
        require_one_of("--redistribute", self.redistribute, ("direct", "universal"))
        if self.universal_checkpoint:
            object.__setattr__(self, "redistribute", "universal")
        if self.redistribute == "universal":
            self._check_universal()
        if self.load_tag is not None and ("/" in self.load_tag or self.load_tag in ("", ".", "..")):
            refuse("--load-tag", self.load_tag, "must name one directory inside --load, as global_step5")

    def _check_prefetch(self) -> None:
        require_positive("--prefetch-limit", self.prefetch_limit)
        if self.prefetch_limit is not None and not self.prefetch_on_start:
            refuse(
                "--prefetch-limit", self.prefetch_limit, "does nothing without --prefetch-on-start; add it"
            )
        if self.prefetch_on_start and self.direct_io == "on":
            raise ConfigError(
                "--prefetch-on-start reads into the page cache, and --direct-io on reads around it: drop one of "
                "them, or use --direct-io auto"
            )

    def _check_universal(self) -> None:
        if self.load is None:
            raise ConfigError("--redistribute does nothing without --load DIR: add it or drop the flag")
        for name in ("no_load_optim", "finetune"):
            if getattr(self, name):
                raise ConfigError(
                    f"--redistribute universal restores the optimizer's state, too, and {flag_name(name)} is given; "
                    "drop one of the two (--redistribute direct can load weights alone)"
                )
