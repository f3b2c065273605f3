"""Which versions and sources a process runs, for comparison with other hosts."""

from __future__ import annotations

import functools
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import megatron
import restart_trace
from restart_trace.process import versions
from restart_trace.version import __version__

_SHOWN = 8
_MAY_DIFFER = ("kernel", "python")  # of Python the first two numbers may not


@functools.cache
def what_runs() -> dict[str, str]:
    """What has to be the same on all hosts: versions of Python, of what is installed, of this project and its sources.

    Imports none of it. Takes 0.1 s of a processor the first time.
    """
    installed = {name: version for name, version in versions().items() if name not in _MAY_DIFFER}
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"Python": python, **installed, "megatron-restart": f"{__version__} source {source_checksum()}"}


def difference(hosts: Sequence[tuple[str, Mapping[str, str]]]) -> str | None:
    """What the user is to be told if hosts, each a name and what it runs, do not all run the same; else None.

    They are compared with what most of them run, and with the first if no more run one than another.
    """
    counts = Counter(_fixed(runs) for _, runs in hosts)
    if len(counts) < 2:
        return None
    usual = max(counts, key=lambda runs: counts[runs])
    names = {kind: [name for name, runs in hosts if _fixed(runs) == kind] for kind in counts}
    like = names[usual][0]
    found = [
        f"{_named(names[other])} {_differing(dict(other), dict(usual), like)}" for other in counts if other != usual
    ]
    return (
        f"{'; '.join(found)}: a run needs the same on all hosts; use one environment and one checkout, best on a file "
        "system that all of them share"
    )


def _fixed(runs: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, str(version)) for name, version in runs.items()))  # it may come from another program


def _named(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"host {names[0]} runs"
    return f"hosts {', '.join(names[:_SHOWN])}{' ...' if len(names) > _SHOWN else ''} run"


def _differing(runs: Mapping[str, str], usual: Mapping[str, str], like: str) -> str:
    names = sorted(name for name in {*runs, *usual} if runs.get(name) != usual.get(name))
    return ", ".join(f"{name} {runs.get(name, 'none')} ({like}: {usual.get(name, 'none')})" for name in names)


@functools.cache
def source_checksum() -> str:
    """CRC-32 of the sources of both packages, by path, as hex: they are a megabyte, and each host reads them once."""
    crc = 0
    for package in (megatron, restart_trace):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            crc = zlib.crc32(path.read_bytes(), zlib.crc32(str(path.relative_to(root)).encode(), crc))
    return f"{crc:08x}"
