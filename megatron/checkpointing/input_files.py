"""The content of the files that a run trains on, kept in its checkpoints: a path says nothing of what is there.

A corpus that is made again under its old path is another one, and a moved one is the same.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

from megatron.config import DataConfig
from megatron.fileio.content_identity import content_identity

DATASETS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_FILES = (
    "train_doc_idx_path", "train_sample_idx_path", "train_shuffle_idx_path", "tokenizer_model", "vocab_file",
    "merge_file",
)  # fmt: skip


@functools.cache
def input_contents(data: DataConfig) -> dict[str, list[str]]:
    """Setting -> the identity of each file that it names, in order, read once in a process.

    Of a dataset, that of its index and tokens. A setting with a file that cannot be read is left out: the checks of a
    start refuse it, and a plan may be made without the files.
    """
    found: dict[str, list[str]] = {}
    for name, paths in _named(data):
        with contextlib.suppress(OSError):
            found[name] = [_identity(path, name in DATASETS) for path in paths]
    return found


def _named(data: DataConfig) -> Iterator[tuple[str, list[str]]]:
    for name in DATASETS:
        if getattr(data, name):
            yield name, [prefix for _, prefix in data.blend(name)]
    for name in _FILES:
        path = getattr(data, name)
        if path is not None and not os.path.isdir(path):
            yield name, [path]


def _identity(path: str, is_dataset: bool) -> str:
    if not is_dataset:
        return content_identity(path)
    return content_identity(path + ".idx") + content_identity(path + ".bin")
