"""One rank: train as the command line says, then print which packages that are no part of Python were imported."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def installed_packages() -> list[str]:
    """Top-level names of the imported modules that lie in a directory for installed packages."""
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    installed = {name.partition(".")[0] for name, file in files.items() if "site-packages" in Path(file).parts}
    return sorted(installed)


if __name__ == "__main__":
    try:
        runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
    except SystemExit as exit_:
        if exit_.code != 0:
            raise
    print("installed packages:", json.dumps(installed_packages()), flush=True)
