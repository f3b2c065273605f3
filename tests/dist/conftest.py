"""Fixtures of the multi-process tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.demo_runs import Demonstration, run_demo
from tests.dist.harness import ROOT


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demonstration:
    """The demonstration: TP2 x PP2 x DP2, all ranks killed at iteration 8, resumed from iteration 5."""
    work = tmp_path_factory.mktemp("demo")
    done = run_demo(work)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (directory,) = work.glob("demo-*")
    return Demonstration(done, work, directory)


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
