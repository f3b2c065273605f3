"""--config FILE: settings from a file, where the environment does not have them.

A line is NAME = VALUE, empty, or a comment that begins with #. A value is taken as it stands, without the blanks and
the pair of quotes around it; nothing in it is expanded. It is not TOML, of which Python 3.10 has no reader: the scripts
run before any package is there.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .errors import SettingsError
from .settings import DECLARATIONS, DRY_RUN, FAULT, FIXED, REPLAY, misspelt, names

OPTION = "--config"
_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")
_QUOTED = re.compile(r"""(["'])((?:(?!\1).)*)\1""")
_SECRET = "MEGATRON_LAUNCH_SECRET"
# What has no effect on a training that a drill starts
NOT_OF_A_DRILL = ("MODE", *names(of=(DRY_RUN, FAULT, REPLAY)))


def taken_from(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The words without --config FILE, and FILE; what comes after -- is another command's. Raises SettingsError."""
    end = words.index("--") if "--" in words else len(words)
    kept, files = [], []
    own = iter(words[:end])
    for word in own:
        name, equals, value = word.partition("=")
        if name != OPTION:
            kept.append(word)
            continue
        files.append(value if equals else next(own, ""))
    if len(files) > 1:
        raise SettingsError(f"{OPTION} {files[1]}: is given twice; write all settings into one file")
    if files == [""]:
        raise SettingsError(f"{OPTION}: give a file with lines NAME = VALUE")
    return [*kept, *words[end:]], files[0] if files else None


def use(file: str | None, refused: Iterable[str] = (), own: Iterable[str] = ()) -> None:
    """Complete the environment of this process, and so of what it starts; None: nothing. Raises as with_settings_of."""
    if file is not None:
        os.environ.update(with_settings_of(file, os.environ, refused, own))


def with_settings_of(
    file: str, environ: Mapping[str, str], refused: Iterable[str] = (), own: Iterable[str] = ()
) -> dict[str, str]:
    """The environment, completed with the settings of a file. What both have is the environment's, and said on stderr.

    `refused`: settings that have no effect for this command; `own`: variables that only it takes. Raises SettingsError
    with file and line, OSError.
    """
    found = read(Path(file), refused, own)
    for name, (line, value) in found.items():
        if environ.get(name) not in (None, "", value):
            print(f"{file}:{line}: {name}: the environment has another value, which counts", file=sys.stderr)
    given = {name: value for name, value in environ.items() if value or name not in found}
    return {name: value for name, (_, value) in found.items()} | given


def read(file: Path, refused: Iterable[str] = (), own: Iterable[str] = ()) -> dict[str, tuple[int, str]]:
    """Name -> (line, value). Raises SettingsError with file and line, OSError."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise SettingsError(f"{OPTION} {file}: is not text in UTF-8") from None
    found: dict[str, tuple[int, str]] = {}
    for number, text in enumerate(lines, start=1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        place = f"{file}:{number}"
        match = _LINE.fullmatch(line)
        if match is None:
            raise SettingsError(f"{place}: is no line NAME = VALUE; correct it, or begin it with #")
        name, value = match[1], _value(match[2], place, match[1])
        if name in found:
            raise SettingsError(f"{place}: {name}: line {found[name][0]} has it already; leave one out")
        if name not in own:
            _check(name, value, place, refused)
        found[name] = (number, value)
    if _SECRET in found and stat.S_IMODE(os.stat(file).st_mode) & 0o077:
        raise SettingsError(f"{file}:{found[_SECRET][0]}: {_SECRET}: others may read the file; chmod 600 {file}")
    return found


def _value(text: str, place: str, name: str) -> str:
    """The value of a line; messages do not show it, as it may be a secret. Raises SettingsError."""
    quoted = _QUOTED.fullmatch(text)
    value = quoted[2] if quoted else text
    if not quoted and (text[:1] in ("'", '"') or re.search(r"\s#", text)):
        raise SettingsError(f"{place}: {name}: put the whole value in quotes, and a comment on a line of its own")
    if any(ord(character) < 32 for character in value):
        raise SettingsError(f"{place}: {name}: the value has a control character; remove it")
    if any(word.startswith("~") for word in value.split()):
        raise SettingsError(f"{place}: {name}: ~ is not expanded in the file; write the path in full")
    return value


def _check(name: str, value: str, place: str, refused: Iterable[str]) -> None:
    """Raises SettingsError for a name that is no setting, or a value of wrong form."""
    if name in FIXED:
        raise SettingsError(f"{place}: {name}: the preset fixes it; choose another preset, or leave it out")
    if name not in DECLARATIONS:
        from restart_trace.command_line import hint  # a launch does not wait for it

        meant = misspelt(name)
        advice = f"; did you mean {meant}?" if meant else hint(name.upper(), DECLARATIONS) or "; --help lists them"
        raise SettingsError(f"{place}: {name}: there is no such setting{advice}")
    if name in refused:
        raise SettingsError(f"{place}: {name}: has no effect here; leave it out")
    wrong = DECLARATIONS[name].check(value) if value else None
    if wrong is not None:
        raise SettingsError(f"{place}: {name}={value}: {wrong}")
