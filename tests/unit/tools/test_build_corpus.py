"""tools/build_corpus.py and tools/make_synthetic_dataset.py, run on real sources."""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.tokenizer import build_tokenizer
from tools import build_corpus, make_synthetic_dataset

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["--max-bytes", "400000", "--vocab-size", "600"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    assert build_corpus.main(["--output-dir", str(directory), *SMALL]) == 0
    return directory


def documents(directory: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (directory / "corpus.jsonl").read_text().splitlines()]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_corpus_is_source_text_within_the_bound(built: Path) -> None:
    texts = documents(built)
    assert len(texts) > 10
    assert 200_000 < sum(len(text.encode()) for text in texts) <= 400_000
    assert any("import " in text for text in texts)


def test_tokenizer_serves_training_and_loses_nothing(built: Path) -> None:
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=str(built / "tokenizer.model"))
    assert tokenizer.vocab_size == 600
    assert 0 <= tokenizer.eod < 600
    library = sentencepiece.SentencePieceProcessor(model_file=str(built / "tokenizer.model"))
    for text in [*documents(built)[:5], "def f(x):\n\treturn  'ü€😀'\n\n"]:
        assert library.decode_ids(tokenizer.tokenize(text)) == text


def test_same_input_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    assert build_corpus.main(["--output-dir", str(tmp_path), *SMALL]) == 0
    for name in ("corpus.jsonl", "tokenizer.model"):
        assert digest(tmp_path / name) == digest(built / name)


def test_what_is_there_is_kept_and_what_is_not_is_built(built: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for i, text in enumerate(documents(built)):
        (source / f"m{i}.py").write_text(text)
    command = ["--output-dir", str(tmp_path / "out"), "--source", str(source), *SMALL]
    assert build_corpus.main(command) == 0
    corpus = tmp_path / "out" / "corpus.jsonl"
    first = corpus.stat().st_mtime_ns
    assert build_corpus.main(command) == 0
    assert corpus.stat().st_mtime_ns == first

    (tmp_path / "out" / "tokenizer.model").unlink()
    assert build_corpus.main(command) == 0
    assert (tmp_path / "out" / "tokenizer.model").exists()

    assert build_corpus.main([*command, "--max-bytes", "300000"]) == 0
    assert sum(len(text.encode()) for text in documents(tmp_path / "out")) <= 300_000
    assert not list((tmp_path / "out").glob(".*tmp"))


def test_leaves_out_what_it_cannot_decode(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\ns = '\xe9'\n")
    (tmp_path / "bad.py").write_bytes(b"s = '\xff\xfe'\n")
    (tmp_path / "empty.py").write_bytes(b"\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text("y = 2\n")
    assert sorted(build_corpus.read_documents(tmp_path, 1000)) == ["# -*- coding: latin-1 -*-\ns = 'é'\n", "x = 1\n"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "EMPTY"], "holds no .py files"),
        (["--max-bytes", "1"], "--max-bytes 1"),
        (["--max-bytes", "20000", "--vocab-size", "100000"], "--vocab-size 100000"),
    ],
)
def test_bad_settings_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments = [str(empty) if argument == "EMPTY" else argument for argument in arguments]
    assert build_corpus.main(["--output-dir", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "corpus_build.json").exists()


@pytest.mark.slow
def test_the_default_corpus_is_quick(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "tools.build_corpus", "--output-dir", str(tmp_path)], cwd=ROOT, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 60  # seconds of processor time; some 10
    assert 3_000_000 < (tmp_path / "corpus.jsonl").stat().st_size < 5_000_000


def synthetic(prefix: Path, tokens: int, vocab_size: int = 50256) -> int:
    return make_synthetic_dataset.main(
        ["--output-prefix", str(prefix), "--tokens", str(tokens), "--vocab-size", str(vocab_size)]
    )


def test_synthetic_dataset_holds_what_was_asked_for(tmp_path: Path) -> None:
    prefix = tmp_path / "new" / "random"
    assert synthetic(prefix, 100_000) == 0
    dataset = MMapIndexedDataset(prefix)
    assert dataset.num_tokens == 100_000
    assert dataset.dtype == np.uint16
    ends = {int(dataset[i][-1]) for i in range(len(dataset))}
    assert ends == {50256}
    inner = np.concatenate([dataset[i][:-1] for i in range(len(dataset))])
    assert inner.max() < 50256
    assert len(np.unique(inner)) > 30_000
    assert not list(prefix.parent.glob("*tmp*"))


def test_synthetic_dataset_is_kept_grown_and_repaired(tmp_path: Path) -> None:
    prefix = tmp_path / "random"
    tokens = tmp_path / "random.bin"
    assert synthetic(prefix, 50_000) == 0
    first, written = digest(tokens), tokens.stat().st_mtime_ns
    assert synthetic(prefix, 40_000) == 0
    assert tokens.stat().st_mtime_ns == written
    tokens.write_bytes(tokens.read_bytes()[:1000])
    assert synthetic(prefix, 50_000) == 0
    assert digest(tokens) == first
    assert synthetic(prefix, 60_000) == 0
    assert MMapIndexedDataset(prefix).num_tokens == 60_000


def test_synthetic_dataset_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert synthetic(tmp_path / "file" / "random", 1000) == 2
    assert "--output-prefix" in capsys.readouterr().err
