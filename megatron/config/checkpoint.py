"""Checkpoints: where, when, how, and what of them is restored."""

from __future__ import annotations

import dataclasses

from megatron.config.errors import ConfigError, refuse, require_at_least, require_one_of
from megatron.config.flags import flag, flag_name

_NEED_SAVE = ("save_interval", "keep_last", "no_save_optim", "no_save_rng")
_NEED_LOAD = (
    "load_tag",
    "no_load_optim",
    "no_load_rng",
    "no_load_lr_state",
    "finetune",
    "exit_on_missing_checkpoint",
    "allow_start_over",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpointing: saving, loading, verifying."""

    save: str | None = flag(None, "directory to save checkpoints to")
    save_interval: int | None = flag(None, "iterations between saves; needed with --save")
    keep_last: int | None = flag(None, "keep only this many newest checkpoints (default: all)")
    no_save_optim: bool = flag(False, "save no optimizer state")
    no_save_rng: bool = flag(False, "save no random-number state")
    load: str | None = flag(
        None, "directory to load a checkpoint from; without one there, training starts afresh"
    )
    load_tag: str | None = flag(
        None, "checkpoint of --load to take, as global_step5 (default: the newest complete one)"
    )
    no_load_optim: bool = flag(False, "restore no optimizer state")
    no_load_rng: bool = flag(False, "restore no random-number state")
    no_load_lr_state: bool = flag(False, "restore no schedule state")
    finetune: bool = flag(False, "restore weights only and start from iteration 0")
    exit_on_missing_checkpoint: bool = flag(
        False, "stop when --load holds no checkpoint, instead of starting afresh"
    )
    allow_start_over: bool = flag(False, "start from iteration 0 if every checkpoint in --load is damaged")
    checkpoint_engine: str = flag(
        "torch", "how checkpoint files are written; an unknown name lists those there are"
    )
    checkpoint_durability: str = flag(
        "fsync",
        "fsync: a committed checkpoint survives a power loss; none: as upstream",
        choices=("fsync", "none"),
    )
    verify_checkpoint: str = flag(
        "checksum",
        "check of a checkpoint's files before it is loaded",
        names=("--checkpoint-verify",),
        choices=("checksum", "size"),
    )
    verify_restored_state: bool = flag(
        False, "record a hash of every tensor when saving, and compare them after loading"
    )

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
        require_one_of("--checkpoint-verify", self.verify_checkpoint, ("checksum", "size"))
        if self.load_tag is not None and ("/" in self.load_tag or self.load_tag in ("", ".", "..")):
            refuse("--load-tag", self.load_tag, "must name one directory inside --load, as global_step5")
