"""The files of a tokenizer: those of a run for a Hugging Face directory, and the flags for those that are in one."""

from __future__ import annotations

import argparse
import logging
import shlex
import shutil
from pathlib import Path
from typing import Any

from megatron.fileio.content_identity import content_identity
from megatron.fileio.files import sync_file
from megatron.hf.safetensors_files import write_json
from megatron.tokenizer import TokenizerError, tokenizer_info

# --tokenizer-type -> (setting, name of the file in a Hugging Face directory) of each of its files
_FILES = {
    "GPT2BPETokenizer": (("vocab_file", "vocab.json"), ("merge_file", "merges.txt")),
    "GPTSentencePieceTokenizer": (("tokenizer_model", "tokenizer.model"),),
    "SentencePieceTokenizer": (("tokenizer_model", "tokenizer.model"),),
}
_GPT2_CONFIG = {
    "tokenizer_class": "GPT2Tokenizer",
    "add_prefix_space": False,
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>",
}
logger = logging.getLogger(__name__)

TOKENIZER_CONFIG = "tokenizer_config.json"


def end_of_text(arguments: argparse.Namespace, vocab_size: int) -> int | None:
    """The token that ends documents; None if the tokenizer is not here any more, or is another one now."""
    known = vars(arguments)
    kind = known.get("tokenizer_type")
    if kind == "NullTokenizer":
        return vocab_size - 1
    if kind not in _FILES or _missing(known, kind):
        return None
    try:
        size, end = tokenizer_info(kind, **{setting: known[setting] for setting, _ in _FILES[kind]})
    except TokenizerError:
        return None
    return end if size == vocab_size else None


def write_tokenizer(arguments: argparse.Namespace, max_length: int, directory: Path) -> str:
    """Copy the files of the run's tokenizer into `directory`; returns what was done, in words. Raises OSError."""
    known = vars(arguments)
    kind = known.get("tokenizer_type")
    if kind not in _FILES:
        return f"no tokenizer files, since {kind or 'an imported model'} has none"
    if missing := _missing(known, kind):
        return f"no tokenizer files, since {missing}; copy them there"
    for setting, name in _FILES[kind]:
        with open(known[setting], "rb") as source, (directory / name).open("xb") as target:
            shutil.copyfileobj(source, target)
            target.flush()
            sync_file(target.fileno())
    if kind == "GPT2BPETokenizer":
        write_json(directory / TOKENIZER_CONFIG, {**_GPT2_CONFIG, "model_max_length": max_length})
        return f"tokenizer files: vocab.json, merges.txt, {TOKENIZER_CONFIG}"
    return "tokenizer file: tokenizer.model, to be read by the sentencepiece library"


def _missing(known: dict[str, Any], kind: str) -> str | None:
    """Why the files of the tokenizer that the run was trained with cannot be had; None if they can."""
    contents = known.get("input_contents") or {}
    for setting, _ in _FILES[kind]:
        flag, path = f"--{setting.replace('_', '-')}", known.get(setting)
        if path is None:
            return f"the run had no {flag}"
        try:
            found = content_identity(path)
        except OSError as exc:
            return f"{flag} {path} of the run cannot be read ({exc.strerror})"
        if contents.get(setting, [found]) != [found]:
            return f"{flag} {path} is not the file that the run was trained with"
    return None


def tokenizer_flags(directory: Path, vocab_size: int) -> str:
    """The flags of this trainer for the tokenizer in a model directory; of NullTokenizer if there is none for us.

    Logs a warning if that tokenizer is not one of `vocab_size` tokens.
    """
    null = f"--tokenizer-type NullTokenizer --vocab-size {vocab_size - 1}"
    for kind in ("GPTSentencePieceTokenizer", "GPT2BPETokenizer"):
        files = {setting: str((directory / name).absolute()) for setting, name in _FILES[kind]}
        if not all(Path(file).is_file() for file in files.values()):
            continue
        if problem := _problem(kind, files, vocab_size):
            logger.warning(
                "%s: the weights have vocab_size %d: train with the tokenizer that they were trained with, "
                "or with %s on data that has been tokenized by it",
                problem,
                vocab_size,
                null,
            )
        words = [f"--{setting.replace('_', '-')} {shlex.quote(file)}" for setting, file in files.items()]
        return " ".join([f"--tokenizer-type {kind}", *words])
    return null


def _problem(kind: str, files: dict[str, Any], vocab_size: int) -> str | None:
    """Why the tokenizer in `files` cannot be that of `vocab_size` tokens; None if it can."""
    try:
        size, _ = tokenizer_info(kind, **files)
    except TokenizerError as exc:
        return str(exc)
    return None if size == vocab_size else f"the tokenizer of {' and '.join(files.values())} has {size} tokens"
