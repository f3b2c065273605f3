"""Files of results that are complete at any instant: each is written beside its place, then renamed."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

MOST_BYTES = 6 << 20  # of a file in the archive


def write_text(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(text)
    os.replace(beside, path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def pack(directory: Path, archive: Path) -> list[str]:
    """Pack the files of `directory` into `archive`, a compressed tar file; returns the names of those left out.

    Left out is what has more than MOST_BYTES. Raises OSError.
    """
    left_out = []
    beside = archive.with_name(f".{archive.name}.part")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(beside, "w:gz", compresslevel=6) as packed:
        for path in sorted(directory.rglob("*")):
            if path in (archive, beside) or not path.is_file():
                continue
            name = str(path.relative_to(directory))
            if path.stat().st_size > MOST_BYTES:
                left_out.append(name)
            else:
                packed.add(path, f"{directory.name}/{name}")
    os.replace(beside, archive)
    return left_out
