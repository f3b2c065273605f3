"""Where rank 0 stands in a save, by the last record of the save that reached its trace."""

from __future__ import annotations

from typing import Any

STAGES = ("begun", "writing", "fsync", "agreeing", "manifest", "publish", "prune", "telling")
IN_BACKGROUND = ("begun", "fsync", "manifest", "publish", "prune", "telling")  # of engine lazy
SHORT = ("agreeing", "manifest", "publish")


def stage_after(record: dict[str, Any]) -> str | None:
    """What a rank does next in a save, once `record` is in its trace; None if that is nothing to kill it in."""
    if record.get("operation") != "save":
        return None
    if record["type"] == "operation_begin":
        return "begun"
    if record["type"] != "span":
        return None
    if record["phase"] == "flush" and record.get("file", "").startswith("tensor_hashes"):
        return "agreeing" if record["detail"] == "fsync" else None
    following = {
        ("device_to_host", None): "writing",
        ("flush", "write"): "fsync",
        ("barrier", None): "manifest",
        ("commit", "manifest"): "publish",
        ("commit", "publish"): "prune",
        ("commit", "prune"): "telling",
    }
    return following.get((record["phase"], record.get("detail")))
