"""The argument parser of all commands: --help, --version, defaults in help texts, hints for mistyped words.

Standard library only; imported by commands, never by a rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from restart_trace.version import __version__

VERSION_TEXT = f"megatron-restart {__version__}"
_MOST_USAGE_LINES = 3
_SHOWN_NO_DEFAULT: tuple[Any, ...] = (None, False, True, argparse.SUPPRESS, [], ())


class CommandParser(argparse.ArgumentParser):
    """Keeps the line breaks of description and epilog, and shows each default as (default: X).

    A mistyped word is refused with exit status 2 and the most similar valid word; options cannot be abbreviated.
    """

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog, formatter_class=_HelpFormatter, allow_abbrev=False, **options)
        self.add_argument("--version", action="version", version=VERSION_TEXT, help="show the version and exit")
        self._words: list[str] = []

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As in argparse; exits with status 2 and a message if the command line is wrong."""
        self._words = list(sys.argv[1:] if args is None else args)
        self._refuse_words_before_the_command()
        parsed, unknown = self.parse_known_args(self._words, namespace)
        if unknown:
            self.error(self._not_known(unknown))
        return parsed

    def error(self, message: str) -> NoReturn:
        """Exit with status 2. A mistyped option is reported rather than the argument that is missing because of it.

        A usage of many lines is left out: it would hide the one that says what is wrong.
        """
        is_missing = message.startswith("the following arguments are required")
        if is_missing and not self._takes_rest():
            words = self._words[: self._words.index("--")] if "--" in self._words else self._words
            options = set(self._options())
            mistyped = [word for word in words if word[:2] == "--" and word.partition("=")[0] not in options]
            if mistyped:
                message, is_missing = self._not_known(mistyped), False
        usage = self.format_usage()
        usage = usage if usage.count("\n") <= _MOST_USAGE_LINES else ""
        self.exit(2, f"{usage}{self.prog}: error: {message}{'; see --help' if is_missing else ''}\n")

    def _refuse_words_before_the_command(self) -> None:
        """Refuse words between the options and `-- COMMAND`, which argparse would take as part of the command."""
        command = next((one for one in self._actions if one.dest == "command" and one.nargs in ("*", "+")), None)
        if command is None or "--" not in self._words:
            return
        nargs, required = command.nargs, command.required
        command.nargs, command.required = "*", False
        try:
            parsed, unknown = self.parse_known_args(self._words[: self._words.index("--")])
        finally:
            command.nargs, command.required = nargs, required
        if unknown:
            self.error(self._not_known(unknown))
        if parsed.command:
            self.error(f"unexpected argument {parsed.command[0]!r} before --; see --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += hint(str(value), map(str, action.choices or ()))
            raise

    def _not_known(self, words: Sequence[str]) -> str:
        options = list(self._options())
        named = [word.partition("=")[0] for word in words if word.startswith("-")]
        if not named:
            return f"unexpected argument {words[0]!r}; see --help"
        return ", ".join(f"{name}: no such option{hint(name, options) or '; see --help'}" for name in named)

    def _options(self) -> Iterator[str]:
        """Names of the options of this command and of its subcommands."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._options()

    def _takes_rest(self) -> bool:
        return any(action.nargs in (argparse.REMAINDER, argparse.PARSER) for action in self._actions)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if "(default" in text or not action.option_strings or action.default in _SHOWN_NO_DEFAULT:
            return text
        return f"{text} (default: %(default)s)"


def hint(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" with the word of `known` that is most similar to `word`, or "" if none is similar."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
