"""What a sweep leaves in its directory: names of its files, and the cell, which one command writes and another reads.

OUT/sweep.yaml          the sweep as it was asked for
OUT/sweep.json          its cells in their order, its settings, its number (format, name, about, id, cells, ...)
OUT/sessions/N.json     each start of the sweep: machine, software, when
OUT/plans/NAME.json     what ckpt-plan says of a layout and an engine, at full size
OUT/cells/NAME/         a cell: result.json once it has ended, its trace, its log, the JSON of what it ran
OUT/aside/NAME.N/       cells that a kill interrupted, or whose failure was repeated
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FORMAT = 1
REQUEST, SWEEP, SESSIONS, PLANS, CELLS, ASIDE = "sweep.yaml", "sweep.json", "sessions", "plans", "cells", "aside"
RESULT, LOG, REPLAY, DRILL, TRACE = "result.json", "log.txt", "replay.json", "drill/drill.json", "trace"
DRILL_TRACE = "drill/trace"
OK, FAILED = "ok", "failed"

STORAGE = "storage"  # a cell that measures the storage itself
MODES = ("replay", "scaled", "restart", "train")
NO_FAULT = "none"
NO_STRIPING = "none"
COLD, WARM, BOTH = "cold", "warm", "cold+warm"


@dataclass(frozen=True)
class Cell:
    """One measurement of a sweep. Of the storage itself (mode `storage`) only index and repeat mean anything.

    `cache`: cold, warm, or cold+warm: a replay measures both kinds of loads. `fault` is FAULT@INJECTION_POINT.
    """

    index: int
    repeat: int
    mode: str
    model: str
    tp: int
    pp: int
    dp: int
    engine: str
    cache: str
    fault: str
    save_interval: int | None
    settings: dict[str, Any]

    @property
    def layout(self) -> str:
        return f"tp{self.tp}_pp{self.pp}_dp{self.dp}"

    @property
    def of_replay(self) -> list[str]:
        """What a replay has beside engine and cache, for people."""
        parts = [str(self.settings["operations"])] if "operations" in self.settings else []
        return parts + ([f"striping {self.settings['striping']}"] if "striping" in self.settings else [])

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def what(self) -> str:
        """What is measured, for people: all but the repeat."""
        if self.mode == STORAGE:
            return "the storage itself"
        parts = [self.mode, self.model, self.layout, self.engine]
        parts += [self.cache] if self.mode != "train" else []
        parts += self.of_replay
        parts += [self.fault] if self.fault != NO_FAULT else []
        parts += [f"every {self.save_interval}"] if self.save_interval is not None else []
        return " ".join(parts)

    @property
    def name(self) -> str:
        """Of its directory."""
        words = "".join(
            c if c.isalnum() or c in "+-" else "_" for c in self.what.replace("the storage itself", STORAGE)
        )
        return f"{self.index:04d}_r{self.repeat}_{words}"

    @property
    def fully_sharded(self) -> bool:
        """Whether it is a replay that divides the model itself among its ranks, by --sharding full in its flags."""
        if self.mode != "replay":
            return False
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--sharding", nargs="?")  # without a value the replay refuses it
        return parser.parse_known_args(shlex.split(self.settings.get("flags", "")))[0].sharding == "full"

    @property
    def plan_name(self) -> str:
        """Of the plan of its checkpoint."""
        vocabulary = self.settings.get("vocab_size")
        divided = "_fully_sharded" if self.fully_sharded else ""
        return f"{self.model}_{self.layout}_{self.engine}{f'_vocab{vocabulary}' if vocabulary else ''}{divided}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"name": self.name}


def cell_of(entry: dict[str, Any]) -> Cell:
    """The cell that `to_json` made an object of. Raises KeyError for one that lacks a field."""
    return Cell(**{field.name: entry[field.name] for field in fields(Cell)})


def write_json(path: Path, content: Any) -> None:
    """Write a file that is there as a whole or not at all, whenever the process ends. Raises OSError naming it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)  # a killed process of this number may have left one, and a link is not followed
        with draft.open("x", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as exc:  # a full file system has no file name in its error
        raise OSError(exc.errno, exc.strerror, str(path)) from exc
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
