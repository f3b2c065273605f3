"""The training data of a preset: the user's, or what is made for a run without any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import SettingsError
from .settings import Settings

GIVEN, CORPUS, SYNTHETIC = "given", "corpus", "synthetic"
_TOKENIZER = ("TOKENIZER_TYPE", "TOKENIZER_MODEL", "VOCAB_FILE", "MERGE_FILE")


@dataclass(frozen=True)
class Data:
    """`kind`: given by the user, the corpus of Python's sources, or synthetic. `path`: words of --data-path."""

    kind: str
    path: tuple[str, ...]
    tokenizer_type: str
    tokenizer_model: str = ""
    vocab_file: str = ""
    merge_file: str = ""
    vocab_size: str = ""

    def tokenizer_flags(self) -> list[str]:
        flags = ["--tokenizer-type", self.tokenizer_type]
        for name in ("tokenizer_model", "vocab_file", "merge_file", "vocab_size"):
            if getattr(self, name):
                flags += [f"--{name.replace('_', '-')}", getattr(self, name)]
        return flags


def data_of(given: Settings, model: str, work_dir: Path, default_vocab_size: int) -> Data:
    """The data of a run. Raises SettingsError for a tokenizer without DATA_PATH.

    `default_vocab_size`: --vocab-size of the null tokenizer, which adds an id that ends documents.
    """
    if given.data_path:
        tokenizer = given.tokenizer_type
        if not tokenizer and given.tokenizer_model:
            tokenizer = "GPTSentencePieceTokenizer"
        elif not tokenizer and given.vocab_file:
            tokenizer = "GPT2BPETokenizer"
        found = Data(
            GIVEN,
            tuple(given.data_path.split()),
            tokenizer or "NullTokenizer",
            given.tokenizer_model,
            given.vocab_file,
            given.merge_file,
        )
    else:
        for name in _TOKENIZER:
            if given.value(name):
                raise SettingsError(
                    f"{name}={given.value(name)}: has an effect only with DATA_PATH, which is not set; set DATA_PATH, "
                    "or leave this out"
                )
        data = work_dir / "data"
        if model == "tiny":
            path = (str(data / "corpus_text_document"),)
            found = Data(CORPUS, path, "GPTSentencePieceTokenizer", str(data / "tokenizer.model"))
        else:
            found = Data(SYNTHETIC, (str(data / "synthetic_document"),), "NullTokenizer")
    default = str(default_vocab_size) if found.tokenizer_type == "NullTokenizer" else ""
    return Data(**{**vars(found), "vocab_size": given.vocab_size or default})


def prepare(
    data: Data, work_dir: Path, samples: int, seq_length: int, run_tool: Callable[..., int], say: Callable[[str], None]
) -> None:
    """Make what is not there yet. `samples`: of the whole training, each of `seq_length` tokens.

    `run_tool`: runs a tool of this repository with the training's interpreter, and returns its exit status.
    """
    if data.kind == CORPUS:
        _prepare_corpus(data, work_dir / "data", run_tool, say)
    elif data.kind == SYNTHETIC:
        tokens = (samples + 1) * (seq_length + 1) * 12 // 10  # the training part of the split is 94.9 %
        words = ["--output-prefix", data.path[0], "--tokens", str(tokens), "--vocab-size", data.vocab_size]
        if run_tool("make_synthetic_dataset", *words) != 0:
            raise SettingsError(f"could not write {data.path[0]}")


def _prepare_corpus(data: Data, directory: Path, run_tool: Callable[..., int], say: Callable[[str], None]) -> None:
    if run_tool("build_corpus", "--output-dir", str(directory)) != 0:
        raise SettingsError(f"could not build the corpus in {directory}")
    index, corpus = Path(f"{data.path[0]}.idx"), directory / "corpus.jsonl"
    if index.is_file() and all(_newer(index, other) for other in (corpus, Path(data.tokenizer_model))):
        say(f"dataset {data.path[0]} exists")
        return
    say("tokenizing the corpus")
    words = ["--input", str(corpus), "--output-prefix", str(directory / "corpus"), "--append-eod"]
    words += ["--tokenizer-type", data.tokenizer_type, "--tokenizer-model", data.tokenizer_model]
    if run_tool("preprocess_data", *words, "--document-sizes", "exact", "--workers", "2") != 0:
        raise SettingsError(f"could not tokenize {corpus}")


def _newer(one: Path, other: Path) -> bool:
    return not other.exists() or one.stat().st_mtime_ns > other.stat().st_mtime_ns
