"""Variables of the user's environment for ranks on other nodes, and quoting for the shells there.

Processes that a launch starts here inherit the environment; processes that ssh or DeepSpeed's launcher starts elsewhere
do not.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron.fileio.objects.stores import STORES

from .errors import SettingsError
from .settings import DECLARATIONS

_FAMILIES = re.compile(
    r"(NCCL|GLOO|FI|UCX|OMP|CUDA|TORCH|HF|MEGATRON_TLS)_|(LD_LIBRARY_PATH|PYTHONPATH|MEGATRON_LAUNCH_SECRET)$"
)
_OF_SET_UP = ("TORCH_VARIANT", "TORCH_INDEX_URL")  # settings of setup_env.sh, which runs on this node only
_SECRET_NAME = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL")
_ADDRESS_WITH_PASSWORD = re.compile("://[^/@]*:[^/@]*@")
_HIDDEN = "***"


def variables_of_user(environ: Mapping[str, str], export: str) -> list[str]:
    """NAME=VALUE of the variables that every rank gets: those of the families, and those that EXPORT names.

    Raises SettingsError if `export`, the value of EXPORT, has a word that is not the name of a set variable.
    """
    further = export.split()
    for name in further:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            name = name.partition("=")[0]  # a value may be a secret
            raise SettingsError(
                f"EXPORT: a word that begins with {name} is not the name of a variable; give names only"
            )
        if name not in environ:
            raise SettingsError(f"EXPORT: {name} is not set; set it, or leave it out")
    return [f"{name}={value}" for name, value in sorted(environ.items()) if name in further or _is_passed_on(name)]


def _is_passed_on(name: str) -> bool:
    of_store = any(store.is_passed_on(name) for store in STORES.values())
    return of_store or (_FAMILIES.match(name) is not None and name not in _OF_SET_UP)


def is_secret(variable: str) -> bool:
    """Whether NAME=VALUE is a secret: by its name, or because the value is an address with a password.

    Of the settings of the launch scripts only the secret of a launch has such a name because it is one.
    """
    name, _, value = variable.partition("=")
    named = _SECRET_NAME.search(name.upper()) and (name not in DECLARATIONS or name == "MEGATRON_LAUNCH_SECRET")
    return bool(named or _ADDRESS_WITH_PASSWORD.search(value))


def for_display(variables: Iterable[str]) -> list[str]:
    """The variables with *** in place of secrets."""
    return [f"{each.partition('=')[0]}={_HIDDEN}" if is_secret(each) else each for each in variables]


def for_assignment(variable: str) -> str:
    """NAME=VALUE as a shell assigns it."""
    name, _, value = variable.partition("=")
    return variable if value == _HIDDEN else f"{name}={shlex.quote(value)}"


def for_shell_line(words: Sequence[str]) -> str:
    """Words as a line for a shell of this machine. What `for_display` has hidden is not quoted."""
    return " ".join(
        word if word.endswith(f"={_HIDDEN}") and word[:-4].isidentifier() else shlex.quote(word) for word in words
    )


def quoted(*words: str) -> str:
    """Words for any POSIX shell, each quoted: the user's shell on the other node may give = or % a meaning."""
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8", errors="surrogateescape"
    ) as file:
        file.write(text)


def new_private(directory: Path, prefix: str, text: str) -> Path:
    """A new file whose name begins with `prefix`, which only this user may read: each launch has one of its own."""
    import tempfile  # most launches do not wait for it

    directory.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=prefix, dir=directory)
    with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    return Path(name)
