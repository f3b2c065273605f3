"""Saves with all engines, or loads what another process, with another torch, saved: `exchange save|load DIRECTORY`.

exit status of `load`: 0 all states came back as they were, 1 some did not, which are printed
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from megatron.checkpointing.store.manifest import saved_file
from tests.conformance.compare import differences
from tests.conformance.states import STATES
from tests.conformance.subjects import Saved, Subject, engines_under_test, traced


def save(subject: Subject, directory: Path) -> None:
    saved = subject.save({f"{number}.pt": make() for number, make in enumerate(STATES.values())}, directory)
    (directory / "manifest.json").write_text(json.dumps([asdict(file) for file in saved.files]))


def load(subject: Subject, directory: Path) -> list[str]:
    """What differs from what was saved."""
    told = json.loads((directory / "manifest.json").read_text())
    files = [saved_file(entry) for entry in told]
    names = [f"{number}.pt" for number in range(len(STATES))]
    found = subject.load(names, Saved(directory, files, traced("save")))
    return [
        difference
        for (what, make), name in zip(STATES.items(), names, strict=True)
        for difference in differences(found[name], make(), what)
    ]


def main() -> int:
    action, directory = sys.argv[1], Path(sys.argv[2])
    found: list[str] = []
    for name in engines_under_test():
        subject = Subject(name)
        try:
            if action == "save":
                save(subject, directory / name)
            else:
                found += [f"{name}: {difference}" for difference in load(subject, directory / name)]
        finally:
            subject.close()
    print(f"torch {torch.__version__}, {action}: {'; '.join(found) or 'no state differs'}")
    return 1 if found else 0


if __name__ == "__main__":  # the engine dcp-process starts a process that imports this
    sys.exit(main())
