"""The real tool, as a process: upstream's bytes, right boundaries, and nothing left behind on failure."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.tokenizer import build_tokenizer
from tools.preprocess_data import main

pytestmark = pytest.mark.slow  # most start the tool as a process, which starts workers

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "golden" / "upstream_run" / "data"
SENTENCEPIECE = ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", str(DATA / "tokenizer.model")]
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
MODULE = [sys.executable, "-m", "tools.preprocess_data"]


def run(
    arguments: list[Any], command: list[str] = MODULE, cwd: Path = ROOT, **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300, check=False, **options
    )


def call(arguments: list[Any]) -> subprocess.CompletedProcess[str]:
    """`run` with one worker and no start: the tool within this process, which tells what it has to say by its log."""
    said, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(said), root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        code = main([*map(str, arguments)])
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    return subprocess.CompletedProcess([], code, "", said.getvalue())


def corpus(directory: Path, lines: list[Any]) -> Path:
    """A JSON lines file; bytes are written as they are."""
    path = directory / "input.jsonl"
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def contents(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# --- what is written ---


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", ["module", "file"])
def test_bytes_equal_upstreams(tmp_path: Path, workers: int, how: str) -> None:
    command, cwd = (
        (MODULE, ROOT) if how == "module" else ([sys.executable, str(ROOT / "tools" / "preprocess_data.py")], tmp_path)
    )
    done = run(
        ["--input", DATA / "corpus.jsonl", "--json-keys", "text", "--append-eod", "--dataset-impl", "mmap"]
        + [*SENTENCEPIECE, "--output-prefix", tmp_path / "corpus", "--workers", workers, "--log-interval", 100],
        command,
        cwd,
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path) == {"corpus_text_document.bin", "corpus_text_document.idx"}
    for name in contents(tmp_path):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes(), name
    assert "400 documents, " in done.stderr and "documents/s" in done.stderr
    assert "leaves the end-of-document token out" in done.stderr and "--document-sizes exact" in done.stderr
    assert done.stdout == ""


def test_exact_sizes_end_every_document_with_its_end(tmp_path: Path) -> None:
    done = call(
        ["--input", DATA / "corpus.jsonl", "--append-eod", "--document-sizes", "exact", *SENTENCEPIECE]
        + ["--output-prefix", tmp_path / "corpus"]
    )
    assert done.returncode == 0 and "leaves the end-of-document" not in done.stderr
    data = MMapIndexedDataset(tmp_path / "corpus_text_document")
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=str(DATA / "tokenizer.model"))
    lines = (DATA / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    assert (len(data), data.num_trailing_tokens) == (len(lines), 0)
    for i, line in enumerate(lines):
        assert data[i].tolist() == [*tokenizer.tokenize(json.loads(line)["text"]), tokenizer.eod]
    # The tokens are upstream's; only where documents end differs.
    name = "corpus_text_document.bin"
    assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


@pytest.mark.parametrize(
    ("flags", "tokens", "sizes", "doc_idx"),
    [
        ([], [1, 2, 3, 4, 5, 6], [2, 1, 2, 1], [0, 1, 1, 3, 3, 4]),
        (["--append-eod"], [1, 2, 100, 3, 4, 5, 100, 6, 100], [2, 1, 2, 1], [0, 1, 1, 3, 3, 4]),
        (
            ["--append-eod", "--document-sizes", "exact"],
            [1, 2, 100, 3, 4, 5, 100, 6, 100],
            [3, 1, 3, 2],
            [0, 1, 1, 3, 3, 4],
        ),
    ],
)
def test_sequences_empty_documents_and_sizes(
    tmp_path: Path, flags: list[str], tokens: list[int], sizes: list[int], doc_idx: list[int]
) -> None:
    """Lists are sequences of one document; a text without tokens leaves no sequence, as upstream."""
    path = corpus(tmp_path, [{"text": t} for t in ("1 2", "", ["3", "", "4 5"], [], "6")])
    done = call(["--input", path, *NULL, *flags, "--output-prefix", tmp_path / "o"])
    assert done.returncode == 0, done.stderr
    data = MMapIndexedDataset(tmp_path / "o_text_document")
    stored = np.fromfile(tmp_path / "o_text_document.bin", dtype=data[0].dtype)  # sizes need not cover all of it
    assert stored.tolist() == tokens
    assert (data.sizes.tolist(), data.doc_idx.tolist()) == (sizes, doc_idx)


def test_each_key_gets_a_dataset(tmp_path: Path) -> None:
    path = corpus(tmp_path, [{"a": "1 2", "b": "3", "c": "x"}, {"a": "4", "b": "5 6"}])
    done = call(["--input", path, *NULL, "--json-keys", "a", "b", "--output-prefix", tmp_path / "o"])
    assert done.returncode == 0, done.stderr
    for key, expected in (("a", [[1, 2], [4]]), ("b", [[3], [5, 6]])):
        data = MMapIndexedDataset(tmp_path / f"o_{key}_document")
        assert [data[i].tolist() for i in range(len(data))] == expected


def test_many_chunks_keep_the_order_with_any_number_of_workers(tmp_path: Path) -> None:
    path = corpus(tmp_path, [{"text": " ".join(str((i * 7 + k) % 100) for k in range(i % 9))} for i in range(9000)])
    for workers in (1, 3):
        done = run(["--input", path, *NULL, "--output-prefix", tmp_path / str(workers), "--workers", workers])
        assert done.returncode == 0, done.stderr
    for suffix in (".bin", ".idx"):
        one, three = (tmp_path / f"{workers}_text_document{suffix}" for workers in (1, 3))
        assert one.read_bytes() == three.read_bytes()


def test_blank_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = corpus(tmp_path, [{"text": "1"}, b"", b"  ", {"text": "2"}, b""])
    done = call(["--input", path, *NULL, "--output-prefix", tmp_path / "o"])
    assert done.returncode == 0 and "3 blank lines skipped" in done.stderr
    assert len(MMapIndexedDataset(tmp_path / "o_text_document")) == 2


def test_gpt2_bpe_end_to_end(tmp_path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer(add_prefix_space=False)
    trained.train_from_iterator([Path(__file__).read_text()], vocab_size=300, special_tokens=["<|endoftext|>"])
    trained.save_model(str(tmp_path))
    files: dict[str, Any] = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    path = corpus(tmp_path, [{"text": "def run(path):"}])
    done = call(
        ["--input", path, "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", files["vocab_file"]]
        + ["--merge-file", files["merge_file"], "--output-prefix", tmp_path / "o"]
    )
    assert done.returncode == 0, done.stderr
    expected = build_tokenizer("GPT2BPETokenizer", **files).tokenize("def run(path):")
    assert MMapIndexedDataset(tmp_path / "o_text_document")[0].tolist() == expected


def test_an_older_dataset_is_replaced_by_a_good_run_only(tmp_path: Path) -> None:
    path = corpus(tmp_path, [{"text": "1 2 3"}])
    assert call(["--input", path, *NULL, "--output-prefix", tmp_path / "o"]).returncode == 0
    path = corpus(tmp_path, [{"text": "4"}, b"{"])
    assert call(["--input", path, *NULL, "--output-prefix", tmp_path / "o"]).returncode == 2
    assert MMapIndexedDataset(tmp_path / "o_text_document")[0].tolist() == [1, 2, 3]
    path = corpus(tmp_path, [{"text": "4"}])
    assert call(["--input", path, *NULL, "--output-prefix", tmp_path / "o"]).returncode == 0
    assert MMapIndexedDataset(tmp_path / "o_text_document")[0].tolist() == [4]


# --- bad input ---

GOOD = {"text": "1"}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, GOOD, b'{"text": "1"'], "input.jsonl, line 3: not JSON: .*one JSON object per line"),
        (
            [GOOD, b"", {"body": "1", "id": 3}],
            "input.jsonl, line 3: no key 'text' .its keys: body, id.: set --json-keys",
        ),
        ([GOOD, {"text": 5}], "input.jsonl, line 2: key 'text' holds int: .*string"),
        ([GOOD, {"text": ["1", 5]}], "input.jsonl, line 2: key 'text' holds list"),
        ([b"[1]"], "input.jsonl, line 1: a JSON list, not an object"),
        ([GOOD, b'{"text": "\xff"}'], "input.jsonl, line 2: not UTF-8 .byte 10 of the line."),
        ([b"[" * 100_000], "input.jsonl, line 1: not JSON"),
        ([GOOD, {"text": "1 b"}], "input.jsonl, line 2: NullTokenizer takes ids .*'b'"),
        ([GOOD, {"text": "101"}], "input.jsonl, line 2: id 101: .*--vocab-size"),
        ([{"text": ""}], "input.jsonl: key 'text' holds no text in any line"),
        ([b""], "input.jsonl: key 'text' holds no text in any line"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, lines: list[Any], message: str, workers: int) -> None:
    path = corpus(tmp_path, lines)
    arguments = ["--input", path, *NULL, "--output-prefix", tmp_path / "o", "--workers", workers]
    done = call(arguments) if workers == 1 else run(arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()[-1:]
    assert re.search(f"^megatron-preprocess-data: error: .*{message}", line), done.stderr
    assert "Traceback" not in done.stderr
    assert contents(tmp_path) == {"input.jsonl"}


def test_half_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    path = corpus(tmp_path, [{"text": "fine"}, {"text": "\ud800"}])
    done = call(["--input", path, *SENTENCEPIECE, "--output-prefix", tmp_path / "o"])
    assert done.returncode == 2 and "input.jsonl, line 2: the text is not valid Unicode" in done.stderr
    assert contents(tmp_path) == {"input.jsonl"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nowhere.jsonl", *NULL], "--input nowhere.jsonl: No such file or directory"),
        (["--input", ".", *NULL], "--input .: Is a directory"),
        (["--tokenizer-type", "GPTSentencePieceTokenizer"], "--tokenizer-model is missing"),
        (
            ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", "no.model"],
            "--tokenizer-model no.model: no such file",
        ),
        (["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "v"], "--vocab-file v: no such file"),
        (["--tokenizer-type", "HFTokenizer"], "--tokenizer-type HFTokenizer: use one of"),
        ([*NULL, "--output-prefix", "no/such/place"], "--output-prefix no/such/place: .*existing directory"),
        ([*NULL, "--workers", "0"], "--workers 0: give 1 or more"),
        ([*NULL, "--log-interval", "0"], "--log-interval 0: give 1 or more"),
        ([*NULL, "--partitions", "2"], "--partitions 2: not supported, use --workers"),
        ([*NULL, "--split-sentences"], "--split-sentences: not supported"),
        ([*NULL, "--json-keys", "text", "text"], "--json-keys text text: name each key once"),
        ([*NULL, "--dataset-impl", "lazy"], "--dataset-impl: invalid choice: 'lazy'"),
    ],
)
def test_bad_flags_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture, arguments: list[str], message: str,
) -> None:  # fmt: skip
    corpus(tmp_path, [GOOD])
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["--input", "input.jsonl", "--output-prefix", "o", *arguments])
    except SystemExit as stopped:
        code = stopped.code
    told = caplog.text + capfd.readouterr().err
    assert code == 2
    assert re.search(message, told), told
    assert contents(tmp_path) == {"input.jsonl"}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_leaves_nothing(tmp_path: Path, workers: int) -> None:
    """A limit on file size stands in for the disk: writing fails in the same place, with an OSError."""
    path = corpus(tmp_path, [{"text": "1 " * 2000} for _ in range(200)])
    done = run(
        ["--input", path, *NULL, "--output-prefix", tmp_path / "o", "--workers", workers],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert done.returncode == 2
    assert f"--output-prefix {tmp_path}/o: " in done.stderr and "enough space" in done.stderr
    assert contents(tmp_path) == {"input.jsonl"}


# --- killed ---


def start_on_a_pipe(tmp_path: Path, workers: int) -> subprocess.Popen[bytes]:
    """The tool, reading lines that come as long as it runs."""
    os.mkfifo(tmp_path / "pipe")
    process = subprocess.Popen(
        [*MODULE, "--input", str(tmp_path / "pipe"), *NULL, "--output-prefix", str(tmp_path / "o")]
        + ["--workers", str(workers)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=feed, args=(tmp_path / "pipe",), daemon=True).start()
    return process


def feed(path: Path) -> None:
    with contextlib.suppress(BrokenPipeError), open(path, "wb") as pipe:
        while True:
            pipe.write(b'{"text": "1 2 3"}\n' * 10_000)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_of_session(session: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_leaves_no_dataset_and_no_process(tmp_path: Path, workers: int, signum: int) -> None:
    process = start_on_a_pipe(tmp_path, workers)
    wait_for(lambda: sum(path.stat().st_size for path in tmp_path.glob("*.bin.tmp-*")) > 0)
    process.send_signal(signum)
    process.wait(300)
    assert process.returncode != 0
    wait_for(lambda: not processes_of_session(process.pid))
    left = contents(tmp_path) - {"pipe"}
    assert not any(name.endswith((".bin", ".idx")) for name in left)
    if signum != signal.SIGKILL:
        assert left == set()
