"""Who may import whom, read off the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ("megatron", "restart_trace", "tools", "pretrain_gpt")
HEAVY = {"torch", "deepspeed", "numpy", "sentencepiece", "tokenizers", "polars", "tensorboard"}


@dataclass(frozen=True)
class Import:
    """`importer` imports `target`: `lazy` if in a function, `typing` if for a type checker only."""

    importer: str
    target: str
    lazy: bool
    typing: bool
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def project_files() -> dict[str, Path]:
    files = [ROOT / "pretrain_gpt.py"]
    for package in ("megatron", "restart_trace", "tools"):
        files += (ROOT / package).rglob("*.py")
    return {module_name(path): path for path in files if path.exists()}


FILES = project_files()


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def imports_of(module: str, tree: ast.Module, is_package: bool) -> list[Import]:
    return list(_walk(module, tree, is_package, lazy=False, typing=False))


def _walk(module: str, node: ast.AST, is_package: bool, lazy: bool, typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            for target in _targets(module, child, is_package):
                yield Import(module, target, lazy, typing, child.lineno)
        inside = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        checked = typing or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test))
        yield from _walk(module, child, is_package, inside, checked)


def _targets(module: str, node: ast.Import | ast.ImportFrom, is_package: bool) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        up = node.level - 1 if is_package else node.level
        parents = module.split(".")[: len(module.split(".")) - up]
        base = ".".join([*parents, *([node.module] if node.module else [])])
    # `from package import module` imports the module, not only the package.
    return [full if (full := f"{base}.{alias.name}") in FILES else base for alias in node.names]


def imports_in(package: str) -> list[Import]:
    """All imports of the modules in `package`. Fails without any: then a rule would hold for nothing."""
    members = {name: path for name, path in FILES.items() if within(name, package)}
    assert members, f"no module called {package}: was it renamed? Then its rule here must follow"
    return [
        found
        for name, path in members.items()
        for found in imports_of(name, ast.parse(path.read_text()), path.name == "__init__.py")
    ]


def of_project(found: Import) -> bool:
    return found.target.split(".")[0] in PROJECT


@pytest.mark.parametrize("package", ["restart_trace", "megatron.config"])
def test_no_third_party_at_import_time(package: str) -> None:
    wrong = [
        str(found)
        for found in imports_in(package)
        if not (found.lazy or found.typing or of_project(found))
        and found.target.split(".")[0] not in sys.stdlib_module_names
    ]
    assert not wrong


@pytest.mark.parametrize(
    "statement",
    [
        "import megatron",
        "import megatron.config.arguments",
        "from megatron.training import pretrain",
        "import megatron.checkpointing",
        "import megatron.checkpointing.store.commit",
        "import megatron.checkpointing.engines.registry",
        "import megatron.startup.preflight",
        "import restart_trace.recorder",
        "import restart_trace.startup",
        "import restart_trace.supervisor",
        "from tools.ckpt_analysis.cli import _overview; _overview()",
        "import megatron.launch.cli",
    ],
)
def test_light_imports_stay_light(statement: str) -> None:
    script = f"{statement}\nimport sys\nprint(*{HEAVY!r}.intersection(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.split() == []


def test_the_rules_see_every_kind_of_import() -> None:
    source = """
import torch
from megatron import launch
from ..config import model
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import numpy
def f():
    import deepspeed
"""
    found = imports_of("megatron.launch.example", ast.parse(source), is_package=False)
    assert [(i.target, i.lazy, i.typing) for i in found if i.target != "typing"] == [
        ("torch", False, False),
        ("megatron.launch", False, False),
        ("megatron.config.model", False, False),
        ("numpy", False, True),
        ("deepspeed", True, False),
    ]


# An `import` with a word that begins with one underscore behind it: only sources with one need be parsed.
MAY_IMPORT_A_PRIVATE_NAME = re.compile(r"\bimport\b[^)\n]*(?:\([^)]*)?\b_(?!_)")


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, but for those of its own imports, which are lazy and come one a line."""
    imports = [node for node in function.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    own = sum((node.end_lineno or 0) - node.lineno + 1 for node in imports)
    return (function.end_lineno or 0) - function.lineno + 1 - own


def functions_in(parent: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions, by way of statements alone: expressions, which are most of a tree, have none but lambdas."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        children = getattr(parent, field, [])
        for child in children if isinstance(children, list) else []:
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield child
            yield from functions_in(child)


def test_every_function_is_found() -> None:
    for path in (ROOT / "megatron" / "launch").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        all_nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        assert {node.lineno for node in functions_in(tree)} == {node.lineno for node in all_nodes}


def test_functions_are_of_at_most_sixty_lines() -> None:
    long = [
        f"{module}.{node.name}: {lines_of(node)} lines"
        for module, path in FILES.items()
        for node in functions_in(ast.parse(path.read_text(encoding="utf-8")))
        if lines_of(node) > 60
    ]
    assert not long


def private_imports(source: str) -> list[tuple[int, str]]:
    """(line, name) of each private name that a source imports from the project."""
    if not MAY_IMPORT_A_PRIVATE_NAME.search(source):
        return []
    return [
        (node.lineno, name.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PROJECT
        for name in node.names
        if name.name.startswith("_") and not name.name.startswith("__")
    ]


def test_private_imports_are_found() -> None:
    source = """
from tools.common import a, _b
from megatron import (
    c,
    _d,
)
from restart_trace import (e, _f as g)
from restart_trace import __version__, h as _h
from os import _exit
def function():
    from tools.common import _i
"""
    assert private_imports(source) == [(2, "_b"), (3, "_d"), (7, "_f"), (11, "_i")]


def test_tests_import_no_private_names_of_the_code_that_they_test() -> None:
    private = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in private_imports(path.read_text(encoding="utf-8"))
    ]
    assert not private
