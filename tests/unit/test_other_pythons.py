"""What tests/other_pythons.sh runs has to be able to run there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_test_that_other_pythons_run_imports_torch() -> None:
    """Their environments have none; tests that need it are in files of their own."""
    named = [ROOT / path for path in re.findall(r"tests/unit/\S+", (ROOT / "tests" / "other_pythons.sh").read_text())]
    files = [file for path in named for file in ([path] if path.is_file() else path.glob("test_*.py"))]
    assert len(files) > len(named)
    for file in files:
        tree = ast.parse(file.read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        of_torch = [n for n in imported if n.split(".")[0] == "torch"]
        assert not of_torch, file
