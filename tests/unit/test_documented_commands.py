"""Every command in the documents and in the examples of --help is one that its own parser takes."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.completion import COMMANDS, parser_of, parser_of_analysis
from tests.unit.test_documentation import DOCUMENTS, ROOT
from tools.ckpt_analysis.cli import COMMANDS as ANALYSES
from tools.ckpt_analysis.cli import DEFAULT, PROGRAM

# `ckpt-plan` and `python -m tools.ckpt_plan` are one command.
NAMES = {PROGRAM: PROGRAM, "tools.ckpt_analysis": PROGRAM}
for command, module in COMMANDS.items():
    path = module.partition(":")[0]
    NAMES |= {command: command, path: command, path.rpartition(".")[0]: command}
OPERATORS = {";", "&", "&&", "|", "||", "<", ">", "(", ")"}
NOT_ITS_OWN = ("ckpt-plan", "restart-sweep")  # they hand on what comes after --, before they parse


@cache
def parser(name: str) -> argparse.ArgumentParser:
    return parser_of_analysis() if name == PROGRAM else parser_of(name)


def commands_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """(command, its words) for each command of ours in lines of a shell; variables of the text are put in."""
    known: dict[str, str] = {}
    for line in text.replace("\\\n", "").splitlines():
        if assigned := re.fullmatch(r"(\w+)=\"(.*)\" *(#.*)?", line):
            known[assigned[1]] = assigned[2]
            continue
        line = re.sub(r"\$(\w+)", lambda found: known.get(found[1], "1"), line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        yield from _of_words(list(lexer))


def _of_words(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    for index, word in enumerate(words):
        before = words[index - 1] if index else "("
        if " " in word:  # what `bash -c` is given
            yield from commands_of(word)
        name = NAMES.get(word.removeprefix(".venv/bin/"))
        if name and (before in OPERATORS | {"--", "-m"} or re.fullmatch(r"\w+=.*", before)):
            rest = words[index + 1 :]
            end = next((i for i, one in enumerate(rest) if one in OPERATORS), len(rest))
            yield name, [one for one in rest[:end] if one != "..."]


def refused(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command's parser says to the words; "" if it takes them."""
    if name in NOT_ITS_OWN and "--" in words:
        words = words[: words.index("--")]
    if name == PROGRAM and words and words[0] not in ANALYSES:
        words = [DEFAULT, *words]
    if name == "restart-trace" and words[0] != "run":
        words = ["run", *words]
    try:
        parser(name).parse_args(words)
    except SystemExit as exit_:
        if exit_.code:
            return f"{name} {shlex.join(words)}: {capsys.readouterr().err.splitlines()[-1]}"
    return ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_the_documents_are_taken(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", document.read_text(), re.MULTILINE | re.DOTALL)
    found = [refused(name, words, capsys) for block in blocks for name, words in commands_of(block)]
    assert not any(found), "\n".join(filter(None, found))


def examples() -> dict[str, list[str]]:
    """Command -> the lines of the examples in its --help that begin with the name of a command."""
    texts = {name: parser(name).epilog or "" for name in COMMANDS}
    for name, module in ANALYSES.items():
        texts[f"{PROGRAM} {name}"] = importlib.import_module(module, "tools.ckpt_analysis").EXAMPLES
    return {
        name: [
            re.split(r" {2,}", line)[0]  # what follows says what the line does
            for line in re.sub(r" +\\\n +", " ", f"\n{text}".replace("%(prog)s", name))
            .replace("\n  ", "\n")
            .splitlines()
            if line.partition(" ")[0] in (*NAMES, "torchrun", "zcat", "cat")
        ]
        for name, text in texts.items()
    }


@pytest.mark.parametrize("name", [*COMMANDS, *(f"{PROGRAM} {name}" for name in ANALYSES)])
def test_examples_in_help_are_taken(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = examples()[name]
    found = [refused(command, words, capsys) for line in lines for command, words in commands_of(line)]
    assert lines and not any(found), "\n".join(filter(None, found))
