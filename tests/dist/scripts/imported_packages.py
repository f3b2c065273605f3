"""One rank: train as the command line says, then print which packages that are no part of Python were imported."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def installed_packages() -> list[str]:
    """Names of the packages in directories for installed ones whose files were imported; what they vendor is theirs."""
    paths = [Path(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
    inside = [path.parts[path.parts.index("site-packages") + 1] for path in paths if "site-packages" in path.parts]
    return sorted({name.partition(".")[0] for name in inside})


if __name__ == "__main__":
    try:
        runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
    except SystemExit as exit_:
        if exit_.code != 0:
            raise
    print("installed packages:", json.dumps(installed_packages()), flush=True)
