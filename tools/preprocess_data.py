"""Tokenize documents out of a JSON lines file into a memory-mapped dataset for pretraining.

    python -m tools.preprocess_data --input corpus.jsonl --output-prefix corpus --append-eod \\
        --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer.model --document-sizes exact

writes ``corpus_text_document.bin`` and ``.idx``, whose common path is training's --data-path. The files equal
those of Megatron-DeepSpeed's tool of the same name and flags, byte for byte (see --document-sizes), with any
--workers. They appear under their names when they are complete. Exit code: 0 done, 2 could not be done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

if __package__ in (None, ""):  # run as a file: the packages are beside tools/
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder, best_fitting_dtype  # noqa: E402
from megatron.tokenizer import TOKENIZER_TYPES, Tokenizer, TokenizerError, build_tokenizer  # noqa: E402
from restart_trace.command_line import CommandParser

logger = logging.getLogger("preprocess_data")

# Workers get chunks of lines, only so many at once: the input is never held in memory as a whole.
_CHUNK_BYTES = 1 << 20
_CHUNK_LINES = 1000
_CHUNKS_PER_WORKER = 4
_TOKENIZER_OPTIONS = ("tokenizer_model", "vocab_file", "merge_file", "vocab_size")


class PreprocessError(ValueError):
    """The input cannot be made into a dataset; the message names file and line."""


@dataclass(frozen=True)
class Settings:
    """What a worker needs to encode lines."""

    input: str
    json_keys: tuple[str, ...]
    append_eod: bool
    exact_sizes: bool
    tokenizer_type: str
    tokenizer_options: dict[str, Any]  # of build_tokenizer

    def tokenizer(self) -> Tokenizer:
        return build_tokenizer(self.tokenizer_type, **self.tokenizer_options)


@dataclass(frozen=True)
class Chunk:
    """Consecutive lines of the input; ``first_line`` counts from 1."""

    first_line: int
    lines: list[bytes]


@dataclass
class Encoded:
    """The documents of a chunk under one key."""

    tokens: npt.NDArray[np.generic]
    sizes: list[int]
    sequences_per_doc: list[int]


@dataclass(frozen=True)
class Result:
    """A chunk after encoding."""

    num_documents: int
    num_bytes: int
    num_blank_lines: int
    by_key: dict[str, Encoded]


class Encoder:
    """Encodes chunks of lines with a tokenizer that is loaded once in each process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tokenizer = settings.tokenizer()
        self.dtype = best_fitting_dtype(self.tokenizer.vocab_size)

    def encode(self, chunk: Chunk) -> Result:
        tokens, sizes, counts = ({key: [] for key in self.settings.json_keys} for _ in range(3))
        blank = 0
        for number, line in enumerate(chunk.lines, chunk.first_line):
            if not line.strip():
                blank += 1
                continue
            try:
                document = _parse(line)
                for key in self.settings.json_keys:
                    before = len(sizes[key])
                    self._encode_text(_texts(document, key), tokens[key], sizes[key])
                    counts[key].append(len(sizes[key]) - before)
            except (PreprocessError, TokenizerError) as error:
                raise PreprocessError(f"{self.settings.input}, line {number}: {error}") from error
        by_key = {key: Encoded(np.array(tokens[key], dtype=self.dtype), sizes[key], counts[key]) for key in tokens}
        num_bytes = sum(map(len, chunk.lines))
        return Result(len(chunk.lines) - blank, num_bytes, blank, by_key)

    def _encode_text(self, texts: list[str], tokens: list[int], sizes: list[int]) -> None:
        """Append one document. Each text is a sequence of its own; a text without tokens leaves no trace."""
        start = len(tokens)
        for text in texts:
            ids = self.tokenizer.tokenize(text)
            if ids:
                tokens.extend(ids)
                sizes.append(len(ids))
        if self.settings.append_eod and len(tokens) > start:
            tokens.append(self.tokenizer.eod)
            if self.settings.exact_sizes:
                sizes[-1] += 1


def _parse(line: bytes) -> dict[str, object]:
    try:
        document = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PreprocessError(f"not UTF-8 (byte {error.start} of the line): convert the file to UTF-8") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise PreprocessError(f"not JSON: {error}: write one JSON object per line") from error
    if not isinstance(document, dict):
        raise PreprocessError(f"a JSON {type(document).__name__}, not an object: write one JSON object per line")
    return document


def _texts(document: dict[str, object], key: str) -> list[str]:
    if key not in document:
        keys = ", ".join(sorted(document)) or "none"
        raise PreprocessError(f"no key {key!r} (its keys: {keys}): set --json-keys")
    value = document[key]
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return value
    raise PreprocessError(f"key {key!r} holds {type(value).__name__}: it must be a string or a list of strings")


def read_chunks(path: str) -> Iterator[Chunk]:
    """The lines of a file in chunks. Raises OSError."""
    with open(path, "rb") as file:
        first_line = 1
        while lines := file.readlines(_CHUNK_BYTES):
            for start in range(0, len(lines), _CHUNK_LINES):
                yield Chunk(first_line + start, lines[start : start + _CHUNK_LINES])
            first_line += len(lines)


_worker_encoder: Encoder | None = None


def _start_worker(settings: Settings, parent: int) -> None:
    global _worker_encoder
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Ctrl-C reaches the whole process group; the parent alone reports it and stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    _worker_encoder = Encoder(settings)


def _exit_with_parent(parent: int) -> None:
    # A killed parent cannot stop its workers, and their queue does not tell them.
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _encode_in_worker(chunk: Chunk) -> Result:
    if _worker_encoder is None:
        raise RuntimeError("the worker was not started by _start_worker")
    return _worker_encoder.encode(chunk)


def encode_all(settings: Settings, workers: int) -> Generator[Result, None, None]:
    """Encode the input, chunks in its order. Raises PreprocessError, TokenizerError, OSError."""
    chunks = read_chunks(settings.input)
    if workers == 1:
        yield from map(Encoder(settings).encode, chunks)
        return
    pool = ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(settings, os.getpid()))
    pending: deque[Future[Result]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_encode_in_worker, chunk))
            if len(pending) >= workers * _CHUNKS_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise PreprocessError(
            f"--workers {workers}: a worker process ended (out of memory?): use fewer workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class Output:
    """The .bin and .idx of one key, under temporary names until ``publish``."""

    def __init__(self, prefix: str, key: str, dtype: npt.DTypeLike) -> None:
        self.prefix = f"{prefix}_{key}_document"
        self._bin, self._idx = f"{self.prefix}.bin", f"{self.prefix}.idx"
        self._suffix = f".tmp-{os.getpid()}"
        for path in (self._bin, self._idx):
            Path(path + self._suffix).unlink(missing_ok=True)  # a link there would be written through
        self.builder = MMapIndexedDatasetBuilder(self._bin + self._suffix, dtype)

    def finalize(self) -> None:
        self.builder.finalize(self._idx + self._suffix)

    def publish(self) -> None:
        # Without an index there is no dataset, so an older index never stands beside the new tokens.
        Path(self._idx).unlink(missing_ok=True)
        os.replace(self._bin + self._suffix, self._bin)
        os.replace(self._idx + self._suffix, self._idx)

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # on a full disk, closing fails to flush
            self.builder.close()
        for path in (self._bin, self._idx):
            Path(path + self._suffix).unlink(missing_ok=True)


def preprocess(settings: Settings, output_prefix: str, workers: int, log_interval: int) -> None:
    """Encode the input and write one dataset for each key.

    Raises PreprocessError, TokenizerError, IndexedDatasetError or OSError and leaves no file behind.
    """
    tokenizer = settings.tokenizer()
    dtype = best_fitting_dtype(tokenizer.vocab_size)
    with contextlib.ExitStack() as undo:
        outputs: dict[str, Output] = {}
        for key in settings.json_keys:
            outputs[key] = Output(output_prefix, key, dtype)
            undo.callback(outputs[key].discard)
        _write_documents(settings, outputs, workers, log_interval)
        for key, output in outputs.items():
            if output.builder.num_tokens == 0:
                raise PreprocessError(f"{settings.input}: key {key!r} holds no text in any line: nothing to train on")
            output.finalize()
        for output in outputs.values():
            output.publish()
            logger.info("%s: %d documents", output.prefix, output.builder.num_documents)


def _write_documents(settings: Settings, outputs: dict[str, Output], workers: int, log_interval: int) -> None:
    start = time.monotonic()
    documents = blank_lines = num_bytes = 0
    with contextlib.closing(encode_all(settings, workers)) as results:
        for result in results:
            for key, encoded in result.by_key.items():
                outputs[key].builder.add_docs(encoded.tokens, encoded.sizes, encoded.sequences_per_doc)
            reported = documents // log_interval
            documents += result.num_documents
            blank_lines += result.num_blank_lines
            num_bytes += result.num_bytes
            if documents // log_interval > reported:
                elapsed = time.monotonic() - start
                logger.info(
                    "%d documents, %.0f documents/s, %.2f MB/s",
                    documents,
                    documents / elapsed,
                    num_bytes / elapsed / 1e6,
                )
    if blank_lines:
        logger.info("%s: %d blank lines skipped", settings.input, blank_lines)


_EPILOG = """\
examples:
  %(prog)s --input text.jsonl --output-prefix data/text --append-eod --workers 8 \\
      --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer.model

exit status: 0 written, 2 wrong arguments or input; nothing is written then
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser("megatron-preprocess-data", description=(__doc__ or "").split("\n\n")[0], epilog=_EPILOG)
    group = parser.add_argument_group("input data")
    group.add_argument("--input", required=True, help="JSON lines file, UTF-8")
    group.add_argument("--json-keys", nargs="+", default=["text"], help="keys to make a dataset of, each its own")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=True, help=", ".join(TOKENIZER_TYPES))
    group.add_argument("--tokenizer-model", help="SentencePiece .model file")
    group.add_argument("--vocab-file", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, default=786, help="number of ids of NullTokenizer")
    group.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    group = parser.add_argument_group("output data")
    group.add_argument("--output-prefix", required=True, help="files are PREFIX_KEY_document.bin and .idx")
    group.add_argument("--dataset-impl", choices=["mmap"], default="mmap", help="the file format")
    group.add_argument(
        "--document-sizes",
        choices=["upstream", "exact"],
        default="upstream",
        help="with --append-eod: upstream leaves the end-of-document token out of the sizes in the index, as "
        "Megatron-DeepSpeed does, so that each document is cut one token further off; exact counts it",
    )
    group = parser.add_argument_group("running")
    group.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    group.add_argument("--partitions", type=int, default=1, help="only 1: use --workers")
    group.add_argument("--log-interval", type=int, default=1000, help="documents between progress lines")
    group.add_argument("--split-sentences", action="store_true", help="not supported: GPT needs whole documents")
    arguments = parser.parse_args(argv)
    if arguments.partitions != 1:
        parser.error(f"--partitions {arguments.partitions}: not supported, use --workers")
    if arguments.split_sentences:
        parser.error("--split-sentences: not supported, GPT pretraining takes whole documents: leave it out")
    for flag in ("workers", "log_interval"):
        if getattr(arguments, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} {getattr(arguments, flag)}: give 1 or more")
    if len(set(arguments.json_keys)) != len(arguments.json_keys):
        parser.error(f"--json-keys {' '.join(arguments.json_keys)}: name each key once")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    settings = Settings(
        input=arguments.input,
        json_keys=tuple(arguments.json_keys),
        append_eod=arguments.append_eod,
        exact_sizes=arguments.document_sizes == "exact",
        tokenizer_type=arguments.tokenizer_type,
        tokenizer_options={name: getattr(arguments, name) for name in _TOKENIZER_OPTIONS},
    )
    # A polite end unwinds like an error, so that temporary files are removed.
    previous = signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        preprocess(settings, arguments.output_prefix, arguments.workers, arguments.log_interval)
    except (ValueError, OSError) as error:
        logger.error("megatron-preprocess-data: error: %s", _explain(error, arguments))
        return 2
    except KeyboardInterrupt:
        logger.error("megatron-preprocess-data: interrupted; nothing was written")
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    if settings.append_eod and not settings.exact_sizes:
        logger.info(
            "note: the index leaves the end-of-document token out of its sizes, as Megatron-DeepSpeed does: "
            "each document is cut one token further off than the last; use --document-sizes exact"
        )
    return 0


def _explain(error: Exception, arguments: argparse.Namespace) -> str:
    if not isinstance(error, OSError):
        return str(error)
    if error.filename == arguments.input:
        return f"--input {arguments.input}: {error.strerror}: give a JSON lines file that can be read"
    fix = "give a path in an existing directory that can be written, with enough space"
    return f"--output-prefix {arguments.output_prefix}: {error}: {fix}"


if __name__ == "__main__":
    sys.exit(main())
