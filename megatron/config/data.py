"""Datasets and tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator

from megatron.config.errors import ConfigError, refuse
from megatron.config.flags import FlagGroup, flag, flag_name

TOKENIZER_TYPES = ("GPT2BPETokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "NullTokenizer")
DATA_IMPLS = ("mmap", "infer")
DEFAULT_SPLIT = "969, 30, 1"
_TOKENIZER_FILES = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
}
_INDEX_FIELDS = ("train_doc_idx_path", "train_sample_idx_path", "train_shuffle_idx_path")
_PATH_FIELDS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def parse_split(text: str) -> tuple[float, float, float]:
    """Fractions of train, validation and test documents from "969,30,1" or "969/30/1"; they add up to 1.

    Raises: ConfigError for anything but one to three non-negative numbers with a positive first one.
    """
    parts = text.split("," if "," in text else "/")
    try:
        weights = [float(part) for part in parts]
    except ValueError:
        refuse("--split", text, "expected numbers separated by commas, as in 969,30,1")
    if len(weights) > 3:
        refuse("--split", text, "at most three parts: training, validation, test")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or weights[0] <= 0:
        refuse("--split", text, "parts must not be negative, and the training part must not be zero")
    weights += [0.0] * (3 - len(weights))
    total = sum(weights)
    return weights[0] / total, weights[1] / total, weights[2] / total


def parse_blend(flag_shown: str, values: tuple[str, ...]) -> list[tuple[float, str]]:
    """(weight, path prefix) of each dataset, weights adding up to 1, from one prefix or weight-prefix pairs.

    Raises: ConfigError naming `flag_shown`.
    """
    if len(values) <= 1:
        return [(1.0, value.strip()) for value in values]
    if len(values) % 2:
        refuse(flag_shown, values, "give one path prefix, or pairs of a weight and a path prefix")
    pairs = []
    for weight_text, prefix in zip(values[::2], values[1::2], strict=True):
        try:
            weight = float(weight_text)
        except ValueError:
            refuse(flag_shown, values, f"expected a weight before {prefix}, got {weight_text}")
        if not math.isfinite(weight) or weight <= 0:
            refuse(flag_shown, values, f"the weight {weight_text} of {prefix} must be positive; or drop that dataset")
        pairs.append((weight, prefix.strip()))
    # Added one by one, unlike sum() from Python 3.12 on: the blend follows the last bit of these, as upstream's.
    total = functools.reduce(operator.add, (weight for weight, _ in pairs))
    return [(weight / total, prefix) for weight, prefix in pairs]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(FlagGroup):
    """Data: datasets and tokenizer."""

    data_path: tuple[str, ...] = flag(
        (), "dataset prefix (the .bin/.idx path without its ending), or weight-prefix pairs; cut by --split"
    )
    train_data_path: tuple[str, ...] = flag((), "training dataset(s), instead of --data-path")
    valid_data_path: tuple[str, ...] = flag((), "validation dataset(s), with --train-data-path")
    test_data_path: tuple[str, ...] = flag((), "test dataset(s), with --train-data-path")
    split: str = flag(DEFAULT_SPLIT, "parts of --data-path for training, validation and test")
    data_impl: str = flag("infer", "dataset format; mmap is the only one, and infer selects it", choices=DATA_IMPLS)
    data_cache_path: str | None = flag(None, "directory for sample index files (default: beside the dataset)")
    train_doc_idx_path: str | None = flag(
        None, "doc-idx file of the training set, instead of building one; needs the next two flags"
    )
    train_sample_idx_path: str | None = flag(None, "sample-idx file of the training set")
    train_shuffle_idx_path: str | None = flag(None, "shuffle-idx file of the training set: the order of its samples")
    num_workers: int = flag(2, "data-loading processes per rank; 0: load in the training process", least=0)
    eod_mask_loss: bool = flag(False, "no loss on end-of-document tokens")
    tokenizer_type: str | None = flag(
        None,
        "tokenizer (default: GPT2BPETokenizer, if --vocab-file and --merge-file are given)",
        choices=TOKENIZER_TYPES,
    )
    tokenizer_model: str | None = flag(None, "SentencePiece model file")
    vocab_file: str | None = flag(None, "vocab.json of the GPT-2 BPE tokenizer")
    merge_file: str | None = flag(None, "merges.txt of the GPT-2 BPE tokenizer")
    vocab_size: int | None = flag(
        None,
        "number of tokens of NullTokenizer, without its end-of-document token; checked against other tokenizers",
        least=1,
    )

    def __post_init__(self) -> None:
        self.check_values()
        for name in _PATH_FIELDS:
            object.__setattr__(self, name, tuple(getattr(self, name)))
            self.blend(name)
        self._check_paths()
        self._check_index_files()
        for name in _TOKENIZER_FILES.get(self.tokenizer_type or "", ()):
            if getattr(self, name) is None:
                self.refuse("tokenizer_type", f"needs {flag_name(name)}")

    def blend(self, name: str) -> list[tuple[float, str]]:
        """(weight, path prefix) of each dataset of the field `name` ("data_path", "train_data_path", ...)."""
        return parse_blend(flag_name(name), getattr(self, name))

    @property
    def prefixes(self) -> list[tuple[str, str]]:
        """(flag, path prefix) of every dataset named on the command line."""
        return [(flag_name(name), prefix) for name in _PATH_FIELDS for _, prefix in self.blend(name)]

    @property
    def split_fractions(self) -> tuple[float, float, float]:
        """Training, validation and test parts of --data-path, adding up to 1."""
        return parse_split(self.split)

    def _check_paths(self) -> None:
        parse_split(self.split)
        separate = [name for name in _PATH_FIELDS[1:] if getattr(self, name)]
        if self.data_path and separate:
            raise ConfigError(f"--data-path and {flag_name(separate[0])} exclude each other: give one of them")
        if separate and not self.train_data_path:
            raise ConfigError(f"{flag_name(separate[0])} needs --train-data-path beside it")
        if separate and self.split != DEFAULT_SPLIT:
            self.refuse("split", "cuts --data-path and does nothing with --train-data-path; drop it")

    @property
    def train_index_files(self) -> tuple[str, str, str] | None:
        """Paths of doc-idx, sample-idx and shuffle-idx, if they are given."""
        doc, sample, shuffle = (getattr(self, name) for name in _INDEX_FIELDS)
        return None if doc is None else (doc, sample, shuffle)

    def _check_index_files(self) -> None:
        given = [name for name in _INDEX_FIELDS if getattr(self, name) is not None]
        missing = [name for name in _INDEX_FIELDS if name not in given]
        if given and missing:
            raise ConfigError(
                f"{flag_name(given[0])} needs {flag_name(missing[0])} beside it: the three belong together"
            )
        if given and (len(self.data_path) > 1 or len(self.train_data_path) > 1):
            raise ConfigError(f"{flag_name(given[0])} describes one dataset, and several are blended: drop it")

    @property
    def unread_tokenizer_files(self) -> list[str]:
        """Tokenizer file flags that were given though the tokenizer does not read them."""
        names = ("tokenizer_model", "vocab_file", "merge_file")
        read = _TOKENIZER_FILES.get(self.tokenizer_type or "", names)
        return [flag_name(n) for n in names if n not in read and getattr(self, n) is not None]
