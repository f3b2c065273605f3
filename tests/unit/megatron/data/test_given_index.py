"""--train-doc-idx-path and its companions: the training set in the order of given files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.given_index import dataset_of_files
from tests.unit.megatron.data.dataset_helpers import build, dataset_of, in_memory

LENGTHS = [40, 25, 60, 10]
SEQ = 8


def files_of(directory: Path, **changed: np.ndarray) -> tuple[str, str, str]:
    """Index files of another order than that which would be built: another seed's, and backwards."""
    arrays = in_memory(directory / "other", LENGTHS, 16, SEQ, seed=99).build_block(0)
    arrays["shuffle_idx"] = arrays["shuffle_idx"][::-1]
    paths = {}
    for name, array in (arrays | changed).items():
        paths[name] = directory / f"{name}.npy"
        np.save(paths[name], array)
    return str(paths["doc_idx"]), str(paths["sample_idx"]), str(paths["shuffle_idx"])


def train_set(directory: Path, files: tuple[str, str, str], required: int = 16):
    prefix = dataset_of(directory, LENGTHS)
    return build(
        data_path=[prefix], train_valid_test_num_samples=(16, 0, 0), required_num_samples=(required, 0, 0),
        seq_length=SEQ, train_dataset=dataset_of_files(files),
    )[0]  # fmt: skip


@pytest.fixture()
def directory(tmp_path: Path) -> Path:
    (tmp_path / "other").mkdir()
    return tmp_path


def test_samples_and_order_are_those_of_the_files(directory: Path) -> None:
    other = in_memory(directory / "other", LENGTHS, 16, SEQ, seed=99)
    found = [sample["text"].tolist() for sample in train_set(directory, files_of(directory))]
    assert found == [sample["text"].tolist() for sample in other][::-1]
    assert not list(directory.glob("index-cache/*"))  # nothing was built


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda paths: Path(paths[0]).unlink(), "--train-doc-idx-path .*: no such file"),
        (lambda paths: Path(paths[2]).write_text("x"), "--train-shuffle-idx-path .*: cannot be read"),
        (lambda paths: np.save(paths[1], np.zeros(4, int)), "--train-sample-idx-path .*: is no sample-idx"),
        (lambda paths: np.save(paths[0], np.full(4, 9)), "--train-doc-idx-path .*: names documents that are not"),
        (lambda paths: np.save(paths[2], np.full(16, 99)), "--train-shuffle-idx-path .*: names samples that the"),
    ],
)
def test_file_that_does_not_fit_is_named(
    directory: Path, spoil: Callable[[tuple[str, str, str]], None], message: str
) -> None:
    files = files_of(directory)
    spoil(files)
    with pytest.raises(ValueError, match=message):
        train_set(directory, files)


def test_a_run_longer_than_the_files_is_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="holds 16 samples, and the run reads 17; train on fewer"):
        train_set(directory, files_of(directory), required=17)
