"""--train-doc-idx-path, --train-sample-idx-path, --train-shuffle-idx-path: a training set in the order of given files.

The files are upstream's, NumPy arrays as megatron.data.sample_index describes them. Unlike upstream, which builds what
is missing, a missing file is an error.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from megatron.data.gpt_dataset import GPTDataset
from megatron.data.sample_index import EpochPlan


class IndexFiles(NamedTuple):
    """Paths of doc-idx, sample-idx and shuffle-idx."""

    doc: str
    sample: str
    shuffle: str


_DIMENSIONS = {"doc": 1, "sample": 2, "shuffle": 1}


def dataset_of_files(paths: tuple[str, str, str] | None) -> Callable[..., GPTDataset]:
    """A function that builds a dataset from GPTDataset's arguments, with the index files in `paths`, if any."""
    return GPTDataset if paths is None else functools.partial(GivenIndexDataset, files=IndexFiles(*paths))


class GivenIndexDataset(GPTDataset):
    """As GPTDataset, but with the samples and the order of `files`, and an end: that of the files.

    Raises ValueError naming the flag for a file that is missing, no such array, or of other documents.
    """

    def __init__(self, *arguments: Any, files: IndexFiles) -> None:
        super().__init__(*arguments)
        self._files = files
        samples = len(self._arrays()["shuffle_idx"])
        self.plan = EpochPlan(self.plan.num_epochs, samples, samples)

    def build_index(self, num_samples: int | None = None) -> None:
        """Build nothing; check the files, which is left to one process since it reads them whole."""
        arrays = self._arrays()
        doc, sample, shuffle = (arrays[f"{name}_idx"] for name in IndexFiles._fields)
        start, stop = self.documents
        if num_samples is not None and num_samples > len(self):
            self._refuse("shuffle", f"holds {len(self)} samples, and the run reads {num_samples}; train on fewer")
        if len(doc) == 0 or int(doc.min()) < start or int(doc.max()) >= stop:
            self._refuse("doc", f"names documents that are not of this training set, [{start}, {stop})")
        if len(sample) < 2 or int(sample[:, 0].max()) >= len(doc) or int(sample.min()) < 0:
            self._refuse("sample", "names documents that the doc-idx does not have")
        if int(shuffle.min()) < 0 or int(shuffle.max()) >= len(sample) - 1:
            self._refuse("shuffle", "names samples that the sample-idx does not have")

    def _load_block(self, block: int) -> dict[str, npt.NDArray[Any]]:
        if block:
            self._refuse("shuffle", f"holds {len(self)} samples, and more were asked for")
        return self._arrays()

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {f"{name}_idx": self._array(name) for name in IndexFiles._fields}

    def _array(self, name: str) -> npt.NDArray[Any]:
        path = getattr(self._files, name)
        if not os.path.isfile(path):
            self._refuse(name, "no such file")
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            self._refuse(name, f"cannot be read: {error}")
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim != _DIMENSIONS[name]:
            self._refuse(name, f"is no {name}-idx: expected whole numbers in {_DIMENSIONS[name]} dimension(s)")
        if name == "sample" and array.shape[1] != 2 or len(array) == 0:
            self._refuse(name, f"is no {name}-idx: its shape is {array.shape}")
        return array

    def _refuse(self, name: str, why: str) -> NoReturn:
        raise ValueError(f"--train-{name}-idx-path {getattr(self._files, name)}: {why}")
