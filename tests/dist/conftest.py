"""Fixtures of the multi-process tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import ROOT


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a small real dataset: a copy, so that its index cache is this session's own."""
    golden = ROOT / "tests" / "golden" / "upstream_run" / "data"
    directory = tmp_path_factory.mktemp("data")
    for name in ("corpus_text_document.bin", "corpus_text_document.idx"):
        (directory / name).write_bytes((golden / name).read_bytes())
    return data_flags(directory / "corpus_text_document", golden / "tokenizer.model")


def data_flags(prefix: Path, tokenizer_model: Path) -> list[str]:
    return [
        "--data-path", str(prefix), "--split", "100,0,0", "--tokenizer-type", "GPTSentencePieceTokenizer",
        "--tokenizer-model", str(tokenizer_model), "--num-workers", "0", "--eval-iters", "0",
    ]  # fmt: skip
