"""Make a corpus and a SentencePiece tokenizer out of Python sources that are on this machine.

    python -m tools.build_corpus --output-dir DIR

writes DIR/corpus.jsonl (one `{"text": ...}` per source file), DIR/tokenizer.model and, last,
DIR/corpus_build.json, which says what they were made with. Where that already says the same, nothing is done.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from restart_trace.command_line import CommandParser

CORPUS = "corpus.jsonl"
TOKENIZER = "tokenizer.model"
BUILD_RECORD = "corpus_build.json"
# Packages installed by others, test data with deliberately broken files, and bytecode.
SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
MAX_LINES_FOR_TOKENIZER = 100_000

logger = logging.getLogger("build_corpus")


@dataclass(frozen=True)
class Settings:
    """What the outputs depend on. max_bytes counts the UTF-8 text of the documents, without JSON."""

    source: str
    max_bytes: int
    vocab_size: int
    model_type: str
    python: str = sys.version.split()[0]


def source_files(source: Path) -> list[Path]:
    """All .py files under `source` in an order that depends on their relative paths alone.

    Ordered by a hash of the path, so that the training, validation and test parts of the corpus, which are
    cut by document order, are alike.

    Raises ValueError if there are none.
    """
    found: list[Path] = []
    for directory, subdirectories, names in os.walk(source):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED_DIRECTORIES]
        found += [Path(directory, name) for name in names if name.endswith(".py")]
    if not found:
        raise ValueError(
            f"--source {source}: holds no .py files (a Python without its sources?); name a directory that does"
        )
    return sorted(found, key=lambda path: _path_hash(path.relative_to(source)))


def _path_hash(path: Path) -> str:
    return hashlib.sha256(path.as_posix().encode()).hexdigest()


def read_documents(source: Path, max_bytes: int) -> list[str]:
    """Texts of the source files, `max_bytes` of UTF-8 at most.

    Files that are empty, cannot be decoded or would pass the bound are left out.
    Raises ValueError if none is left.
    """
    documents: list[str] = []
    total = 0
    for path in source_files(source):
        try:
            with tokenize.open(path) as stream:  # honours the file's own encoding declaration
                text = stream.read()
        except (SyntaxError, UnicodeDecodeError, OSError) as error:
            logger.info("left out %s: %s", path, error)
            continue
        size = len(text.encode("utf-8", errors="surrogatepass"))
        if text.strip() and total + size <= max_bytes:
            documents.append(text)
            total += size
    if not documents:
        raise ValueError(f"--max-bytes {max_bytes}: no file of {source} fits; raise it")
    return documents


def write_corpus(documents: list[str], path: Path) -> None:
    """Write one JSON object per line, atomically."""
    lines = (json.dumps({"text": text}) + "\n" for text in documents)
    _replace(path, "".join(lines).encode())


def train_tokenizer(documents: list[str], vocab_size: int, model_type: str) -> bytes:
    """A serialized SentencePiece model in which every text round-trips.

    Byte fallback gives characters outside of the vocabulary an encoding, and white space is kept as it is,
    since it means something in source code.

    Raises ValueError if `vocab_size` does not suit the corpus.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_spread_lines(documents, MAX_LINES_FOR_TOKENIZER),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            split_digits=True,
            num_threads=1,  # the result must not depend on the machine
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise ValueError(f"--vocab-size {vocab_size}: no tokenizer of this size from this corpus: {error}") from error
    return model.getvalue()


def _spread_lines(documents: list[str], limit: int) -> Iterator[str]:
    """At most `limit` non-empty lines, evenly spread over the documents."""
    lines = [line for text in documents for line in text.splitlines() if line.strip()]
    step = -(-len(lines) // limit)
    yield from lines[:: max(step, 1)]


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # a killed process of this number may have left one, and a link is not followed
    try:
        with temporary.open("xb") as file:
            file.write(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_built(output_dir: Path, settings: Settings) -> bool:
    """True if `output_dir` holds both outputs, made with these settings."""
    if not all((output_dir / name).is_file() for name in (CORPUS, TOKENIZER, BUILD_RECORD)):
        return False
    try:
        return json.loads((output_dir / BUILD_RECORD).read_text()) == asdict(settings)
    except ValueError:
        return False


def build(output_dir: Path, settings: Settings) -> bool:
    """Build what is not there yet; False if all of it was.

    Raises ValueError for settings that do not fit the sources, OSError if `output_dir` cannot be written.
    """
    if is_built(output_dir, settings):
        logger.info("corpus and tokenizer in %s are there", output_dir)
        return False
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / BUILD_RECORD).unlink(missing_ok=True)
    documents = read_documents(Path(settings.source), settings.max_bytes)
    write_corpus(documents, output_dir / CORPUS)
    megabytes = (output_dir / CORPUS).stat().st_size / 1e6
    logger.info("corpus: %d files of %s, %.1f MB", len(documents), settings.source, megabytes)
    logger.info("training a SentencePiece tokenizer, vocabulary %d", settings.vocab_size)
    model = train_tokenizer(documents, settings.vocab_size, settings.model_type)
    _replace(output_dir / TOKENIZER, model)
    _replace(output_dir / BUILD_RECORD, (json.dumps(asdict(settings), indent=2) + "\n").encode())
    return True


_EPILOG = """\
examples:
  %(prog)s --output-dir runs/data

exit status: 0 it is there, 2 it could not be made
"""


def parse_arguments(argv: list[str] | None) -> tuple[Path, Settings]:
    parser = CommandParser("python -m tools.build_corpus", description=(__doc__ or "").splitlines()[0], epilog=_EPILOG)
    parser.add_argument("--output-dir", type=Path, required=True, help="where to write; made if it is not there")
    parser.add_argument(
        "--source",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="directory of .py files (default: Python's standard library)",
    )
    parser.add_argument("--max-bytes", type=int, default=4_000_000, help="size of the corpus")
    parser.add_argument("--vocab-size", type=int, default=4096, help="size of the vocabulary")
    parser.add_argument("--model-type", choices=["bpe", "unigram"], default="bpe", help="of SentencePiece")
    args = parser.parse_args(argv)
    return args.output_dir, Settings(str(args.source), args.max_bytes, args.vocab_size, args.model_type)


def main(argv: list[str] | None = None) -> int:
    output_dir, settings = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="[%(name)s] %(message)s", stream=sys.stderr)
    try:
        build(output_dir, settings)
    except (ValueError, OSError) as error:
        print(f"build_corpus: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
