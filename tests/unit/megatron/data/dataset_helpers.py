"""Datasets to take samples of."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config import DataConfig
from megatron.data.gpt_dataset import GPTDataset, build_train_valid_test_datasets
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder

GOLDEN = Path(__file__).resolve().parents[3] / "golden"
CORPUS = str(GOLDEN / "upstream_run" / "data" / "corpus_text_document")


def sha256(values: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, dtype="<i8").tobytes()).hexdigest()


def alone(error: Exception | None) -> None:
    """The agreement of a single process."""
    if error is not None:
        raise error


def _run(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def build(**changes: Any) -> Any:
    """The datasets of `changes` to these arguments, those of DataConfig among them; `is_builder`: builds the index."""
    arguments: dict[str, Any] = {
        "data_path": [CORPUS],
        "split": "100,0,0",
        "train_valid_test_num_samples": (80, 0, 0),
        "seq_length": 64,
        "seed": 1234,
        "data_cache_path": None,
        "is_builder": True,
        "agree": alone,
    }
    arguments |= changes
    arguments["run_on_builder"] = _run if arguments.pop("is_builder") else lambda _: None
    of_data = {field.name for field in dataclasses.fields(DataConfig)} & arguments.keys()
    data = DataConfig(**{name: arguments.pop(name) for name in of_data})
    return build_train_valid_test_datasets(data, **arguments)


def dataset_of(directory: Path, lengths: list[int], name: str = "d") -> str:
    """A dataset of documents of these lengths with all tokens different."""
    builder = MMapIndexedDatasetBuilder(directory / f"{name}.bin", np.int32)
    token = 0
    for length in lengths:
        builder.add_doc(list(range(token, token + length)), [length])
        token += length
    builder.finalize(directory / f"{name}.idx")
    return str(directory / name)


def in_memory(directory: Path, lengths: list[int], num_samples: int, seq_length: int, seed: int = 1) -> GPTDataset:
    indexed = MMapIndexedDataset(dataset_of(directory, lengths))
    return GPTDataset("train", indexed, (0, len(lengths)), num_samples, seq_length, seed)
