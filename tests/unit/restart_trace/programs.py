"""Programs as a user could have written them, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def python(code: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that a user could have written, in a directory of its own."""
    kept = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE") and not n.startswith("RESTART_")}
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, str(script)],
        env=kept | {"PYTHONPATH": str(ROOT)} | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
