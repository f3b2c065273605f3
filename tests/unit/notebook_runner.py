"""Runs the code cells of a notebook in its directory, as Jupyter does, without Jupyter.

`python -m tests.unit.notebook_runner FILE` compares what the cells show with what the file holds; `--write` stores it.
A cell shows the value of its last expression; of a figure, which draws itself, nothing is kept.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any


def shown(source: str, names: dict[str, Any]) -> str | None:
    """Run a cell and return the text of the value of its last expression, if it has one."""
    body = ast.parse(source).body
    last = body[-1] if body else None
    if not isinstance(last, ast.Expr):
        exec(compile(source, "<cell>", "exec"), names)
        return None
    exec(compile(ast.Module(body[:-1], []), "<cell>", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    return None if value is None or hasattr(value, "_ipython_display_") else repr(value)


def outputs(text: str | None, number: int) -> list[dict[str, Any]]:
    """The text as a notebook stores it."""
    if text is None:
        return []
    data = {"text/plain": text.splitlines(keepends=True)}
    return [{"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}]


def run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The notebook as stored, and as it is after all cells have run in order."""
    stored, names = json.loads(path.read_text()), {"__name__": "__main__"}
    after = json.loads(path.read_text())
    os.chdir(path.parent)
    for number, cell in enumerate((cell for cell in after["cells"] if cell["cell_type"] == "code"), start=1):
        cell |= {"execution_count": number, "outputs": outputs(shown("".join(cell["source"]), names), number)}
    return stored, after


if __name__ == "__main__":
    file = Path(sys.argv[1]).resolve()
    before, now = run(file)
    if sys.argv[2:] == ["--write"]:
        file.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n")
    elif before != now:
        sys.exit(f"{file}: its cells show something else; to store that, add --write")
