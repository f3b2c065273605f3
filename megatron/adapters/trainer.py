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
from megatron.adapters.deepspeed_engine import ranks_of

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def last_complete_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest directory `checkpoint-N` in `output_dir` that Trainer can resume from; None if there is none.

        trainer.train(resume_from_checkpoint=last_complete_checkpoint(output_dir))

    Others are passed over with a warning that says what they lack. Raises CheckpointDamagedError naming a manifest
    that cannot be read, or OSError.
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
        json.loads((checkpoint / "trainer_state.json").read_bytes())
    except FileNotFoundError as exc:
        return f"{Path(exc.filename).name} is missing"
    except ValueError:
        return "trainer_state.json is cut off"
    ranks = ranks_of(checkpoint / tag)
    random_states = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks or 0)]
    for name in random_states:
        if not (checkpoint / name).exists():
            return f"{name} is missing"
        if not zipfile.is_zipfile(checkpoint / name):  # whose directory is at its end
            return f"{name} is cut off"
    return None
