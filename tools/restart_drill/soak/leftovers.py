"""Files that a launch must not leave in the directory of --save."""

from __future__ import annotations

from ..checkpoints import Checkpoints

_BESIDE_CHECKPOINTS = {"latest", "latest_checkpointed_iteration.txt", ".generations"}


def left_files(checkpoints: Checkpoints, kept: int) -> list[str]:
    """A message for everything besides the newest `kept` checkpoints, their files, and the files that name them."""
    complete = checkpoints.complete()
    found = [f"more than --keep-last {kept} checkpoints: {len(complete)}"] if len(complete) > kept else []
    known = {candidate.directory.name for candidate in complete} | _BESIDE_CHECKPOINTS
    found += [f"in --save: {path.name}" for path in sorted(checkpoints.directory.iterdir()) if path.name not in known]
    for candidate in complete:
        assert candidate.manifest is not None
        listed = {*candidate.manifest.files, "manifest.json"}
        there = {
            str(path.relative_to(candidate.directory)) for path in candidate.directory.rglob("*") if path.is_file()
        }
        found += [f"in {candidate.directory.name}: {name}" for name in sorted(there - listed)]
    return found
