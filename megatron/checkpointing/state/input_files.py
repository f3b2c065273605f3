"""The content of the files that a run trains on, kept in its checkpoints: a path says nothing of what is there.

A corpus that is made again under its old path is another one, and a moved one is the same.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from megatron.config import DataConfig
from megatron.fileio.content_identity import content_identity

DATASETS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_FILES = (
    "train_doc_idx_path", "train_sample_idx_path", "train_shuffle_idx_path", "tokenizer_model", "vocab_file",
    "merge_file",
)  # fmt: skip
_AT_ONCE = 16  # files: a blend has hundreds, of each of which a remote file system takes milliseconds a block


@functools.cache
def input_contents(data: DataConfig) -> dict[str, list[str]]:
    """Setting -> the identity of each file that it names, in order, read once in a process.

    Of a dataset, that of its index and tokens. A setting with a file that cannot be read is left out: the checks of a
    start refuse it, and a plan may be made without the files.
    """
    named = list(_named(data))
    files = [(name, file) for name, paths in named for path in paths for file in _files_of(name, path)]
    found: dict[str, list[str]] = {name: [] for name, _ in named}
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="input-files") as pool:
        for (name, _), identity in zip(files, pool.map(_identity, files), strict=True):
            if identity is None:
                found.pop(name, None)
            elif name in found:
                found[name].append(identity)
    return {name: _joined(name, identities) for name, identities in found.items()}


def _named(data: DataConfig) -> Iterator[tuple[str, list[str]]]:
    for name in DATASETS:
        if getattr(data, name):
            yield name, [prefix for _, prefix in data.blend(name)]
    for name in _FILES:
        path = getattr(data, name)
        if path is not None and not os.path.isdir(path):
            yield name, [path]


def _files_of(name: str, path: str) -> list[str]:
    return [path + ".idx", path + ".bin"] if name in DATASETS else [path]


def _identity(file: tuple[str, str]) -> str | None:
    try:
        return content_identity(file[1])
    except OSError:
        return None


def _joined(name: str, identities: list[str]) -> list[str]:
    """One for each path: that of a dataset has those of its two files."""
    each = 2 if name in DATASETS else 1
    return ["".join(identities[start : start + each]) for start in range(0, len(identities), each)]
