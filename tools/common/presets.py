"""The presets, and where the scripts of restart_bench are: in a checkout, or where an installed package brings them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_TOOLS = Path(__file__).resolve().parents[1]
_INSTALLED = _TOOLS / "restart_bench"  # setup.py puts them there
SCRIPTS: Path = _INSTALLED if _INSTALLED.is_dir() else _TOOLS.parent / "examples_deepspeed" / "restart_bench"

# Settings of the scripts that are not the user's: an installed package has no .venv, and runs where it is installed.
SETTINGS: dict[str, str] = {"SKIP_SETUP": "1", "PYTHON": sys.executable} if _INSTALLED.is_dir() else {}


def preset_names() -> list[str]:
    """All presets, smallest first."""

    def size(name: str) -> tuple[float, str]:
        parameters = re.search(r"(\d+)([bt])$", name)
        return (float(parameters[1]) * (1000 if parameters[2] == "t" else 1) if parameters else 0.0), name

    return sorted((path.stem for path in (SCRIPTS / "models").glob("*.sh")), key=size)
