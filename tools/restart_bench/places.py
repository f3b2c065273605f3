"""Where things are: in a checkout, or where an installed package brings them.

Symbolic links are kept. Nodes may share a file system under the path that the user gave, /home/u/run, and each have it
mounted elsewhere, as automounters do.
"""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(os.path.abspath(__file__)).parent
ROOT = PACKAGE.parents[1]
# An installed package has no .venv, and runs do not belong in site-packages.
INSTALLED = not (ROOT / "setup.py").is_file()
SCRIPTS = PACKAGE / "scripts" if INSTALLED else ROOT / "examples_deepspeed" / "restart_bench"
PROGRAM = str(ROOT / "pretrain_gpt.py")
SETUP_SCRIPT = SCRIPTS / "setup_env.sh"


def runs() -> Path:
    """The directory in which runs without WORK_DIR leave their files."""
    return Path(working_directory()) / "runs" if INSTALLED else ROOT / "runs"


def working_directory() -> str:
    """The path by which the user's shell names the current directory; without one that of the kernel."""
    named = os.environ.get("PWD", "")
    try:
        there = os.path.isabs(named) and os.path.samefile(named, ".")
    except OSError:
        there = False
    return named if there else os.getcwd()
