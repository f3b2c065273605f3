"""Hugging Face's Trainer with DeepSpeed and engine `lazy`: from which checkpoint it can go on after a crash.

Trainer itself takes the directory `checkpoint-N` with the largest number, whatever is in there. A save of `lazy` ends
after Trainer's, and what Trainer writes beside it, each rank on its own, may be cut off or missing. It resumes without
a word where random states are missing, with others.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
from pathlib import Path

import megatron.adapters.deepspeed  # noqa: F401 - a script that imports this module need not import that one, too
from megatron.adapters.deepspeed_engine import lack_of_files, ranks_of

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_RANDOM_STATE = re.compile(r"rng_state(_\d+)?\.pth")


def last_complete_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest directory `checkpoint-N` in `output_dir` that Trainer can resume from; None if there is none.

        trainer.train(resume_from_checkpoint=last_complete_checkpoint(output_dir))

    Others are passed over with a warning that says what they lack. Where it is not known how many ranks saved it, as
    with torch.save, only the random states that are there are looked at, and a warning says so. Raises
    CheckpointDamagedError naming a manifest that cannot be read, or OSError.
    """
    directory = Path(output_dir)
    found = directory.iterdir() if directory.is_dir() else ()
    numbered = [(int(match[1]), path) for path in found if (match := _CHECKPOINT.fullmatch(path.name))]
    for _, path in sorted(numbered, reverse=True):
        if not path.is_dir():
            continue
        lack = _lack(path)
        if lack is None:
            return str(path)
        logger.warning("%s is not resumed from: %s; its save was not completed", path, lack)
    return None


def _lack(checkpoint: Path) -> str | None:
    """What a directory lacks to be resumed from; None: it is complete."""
    try:
        tag = (checkpoint / "latest").read_text().strip()
        state = (checkpoint / "trainer_state.json").read_bytes()
    except FileNotFoundError as exc:
        return f"{Path(exc.filename).name} is missing"
    if not tag:
        return "latest is empty"
    if not (checkpoint / tag).is_dir():
        return f"{tag} is missing"
    try:
        json.loads(state)
    except ValueError:
        return "trainer_state.json is cut off"
    lack = lack_of_files(checkpoint / tag)
    return lack if lack is not None else _lack_of_random_states(checkpoint, ranks_of(checkpoint / tag))


def _lack_of_random_states(checkpoint: Path, ranks: int | None) -> str | None:
    """As `_lack`, of the files that Trainer has written on each of so many ranks."""
    names = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks or 0)]
    if ranks is None:
        names = sorted(path.name for path in checkpoint.iterdir() if _RANDOM_STATE.fullmatch(path.name))
        if not names:
            return "rng_state.pth or rng_state_*.pth is missing"
    for name in names:
        if not (checkpoint / name).exists():
            return f"{name} is missing"
        if not zipfile.is_zipfile(checkpoint / name):  # whose directory is at its end
            return f"{name} is cut off"
    if ranks is None:
        logger.warning(
            "%s: it is not known how many ranks saved it, so the random states of others than %s were not checked",
            checkpoint, ", ".join(names),
        )  # fmt: skip
    return None
