"""Where things are: in a checkout, or where an installed package brings them."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[1]
# An installed package has no .venv, and runs do not belong in site-packages.
INSTALLED = not (ROOT / "setup.py").is_file()
SCRIPTS = PACKAGE / "scripts" if INSTALLED else ROOT / "examples_deepspeed" / "restart_bench"
PROGRAM = str(ROOT / "pretrain_gpt.py")
SETUP_SCRIPT = SCRIPTS / "setup_env.sh"


def runs() -> Path:
    """The directory in which runs without WORK_DIR leave their files."""
    return Path.cwd() / "runs" if INSTALLED else ROOT / "runs"
