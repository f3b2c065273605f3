"""What a fault comes to, and the places in which checkpoints are, which are put back before each."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tests.faults.injection import Fault

if TYPE_CHECKING:
    from tests.faults.launches import Ended

SAVE, START = "save", "start"
FORMER, NEW = 2, 3  # steps of the newest checkpoint before the save, and of the one that is saved
# Of a save or start that made fewer calls than the run that they were counted in: how many a socket takes is chance.
MISSED = "missed"
_FILE_OF_ENGINE = re.compile(r"/(?:\.incomplete_)?global_step\d+[^/]*/(?!\.?manifest\.json)")
_OWNERSHIP = ".generations"


@dataclass
class Verdict:
    """What one fault has come to: "whole", "told", MISSED, or what is wrong."""

    scenario: str
    of: str
    fault: Fault
    hit: str | None
    outcome: str
    said: str | None
    seconds: float

    @property
    def survived(self) -> bool:
        return self.outcome in ("whole", "told")

    @property
    def broken(self) -> bool:
        return not self.survived and self.outcome != MISSED

    @property
    def key(self) -> tuple[str, str, Fault]:
        return self.scenario, self.of, self.fault


def passed_over(ended: Ended | None) -> str | None:
    lines = [] if ended is None else [line for line in ended.warnings if "passed over" in line]
    return "; ".join(lines) or None


class Place(Protocol):
    """Where checkpoints are: what is there before each fault can be put back."""

    location: str
    flags: list[str]
    has_sockets: bool

    def is_watched(self, path: str) -> bool: ...

    def keep(self) -> None:
        """What is there now is what `reset` puts back."""
        ...

    def reset(self) -> None: ...

    def content(self) -> str:
        """A digest of all that is there; of the owners' files only whether they are whole."""
        ...


class Directory:
    """A directory of a file system."""

    has_sockets = False

    def __init__(self, root: Path, *, shared_calls: bool) -> None:
        """`shared_calls`: calls on files that all engines share count, too."""
        self.flags: list[str] = []
        self._path = root / "save"
        self._before = root / "before"
        self._before.mkdir(parents=True)
        self._shared_calls = shared_calls
        self.location = str(self._path)

    def is_watched(self, path: str) -> bool:
        if path != self.location and not path.startswith(f"{self.location}/"):
            return False
        return self._shared_calls or _FILE_OF_ENGINE.search(path) is not None

    def keep(self) -> None:
        shutil.rmtree(self._before)
        shutil.copytree(self._path, self._before)

    def reset(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        shutil.copytree(self._before, self._path)

    def content(self) -> str:
        files = {str(path.relative_to(self._path)): path for path in self._path.rglob("*")}
        return digest({name: path.read_bytes() if path.is_file() else b"" for name, path in files.items()})


class Prefix:
    """A prefix of the bucket that the server of the environment has; calls on connections to it count."""

    has_sockets = True

    def __init__(self, name: str, root: Path) -> None:
        from megatron.fileio.objects.s3 import Bucket
        from tests.object_storage import BUCKET

        self.location = f"s3://{BUCKET}/{name}"
        self._cache = root / "cache"
        self._cache.mkdir(parents=True)
        self.flags = ["--storage-cache", str(self._cache)]
        self._name = name
        self._bucket = Bucket(BUCKET)
        self._before: dict[str, tuple[str, bytes]] = {}  # key -> (ETag, content)

    def is_watched(self, path: str) -> bool:
        return path.startswith(f"{self._cache}/")

    def _etags(self) -> dict[str, str]:
        return {info.key: info.etag for info in self._bucket.list(f"{self._name}/")}

    def keep(self) -> None:
        self._before = {key: (etag, self._bucket.get(key, 1 << 24)[0]) for key, etag in self._etags().items()}

    def reset(self) -> None:
        there = self._etags()
        changed = [key for key, (etag, _) in self._before.items() if there.get(key) != etag]
        self._bucket.delete([key for key in there if key in changed or key not in self._before])
        for key in changed:
            self._bucket.create(key, self._before[key][1])
        shutil.rmtree(self._cache)
        self._cache.mkdir()

    def content(self) -> str:
        return digest({key: b"" if _OWNERSHIP in key else etag.encode() for key, etag in self._etags().items()})


def digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        if f"/{_OWNERSHIP}/" in f"/{name}":
            with contextlib.suppress(ValueError):
                content = b"whole" if json.loads(content) else b""
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
