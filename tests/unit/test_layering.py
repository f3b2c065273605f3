"""Who may import whom, read off the source."""

from __future__ import annotations

import ast
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


_BELOW_COMMANDS = (
    "discover", "errors", "escaping", "formatting", "iterations", "problems", "report", "results", "run_info", "tables",
)  # fmt: skip

# Package -> the packages of the project that it may import, itself included without being named. The rules within
# megatron and restart_trace are import-linter's, in pyproject.toml.
ALLOWED = {
    "tools.ckpt_analysis": ("restart_trace.schema", "restart_trace.regular"),
    # Beside each other: none of them imports another.
    **{
        f"tools.ckpt_analysis.{package}": (
            "restart_trace.regular", *(f"tools.ckpt_analysis.{module}" for module in _BELOW_COMMANDS)
        )
        for package in ("compare", "imported", "project")
    },
    "tools.ckpt_replay": (
        "restart_trace",
        "megatron.config",
        "megatron.checkpointing.engines",
        "megatron.checkpointing.commit",
        "megatron.checkpointing.naming",
        "megatron.checkpointing.manifest",
        "megatron.parallel.control_plane",
        "megatron.parallel.topology",
        "megatron.processes",
        "megatron.startup.initialize",
        "tools.ckpt_plan",
        "tools.ckpt_overhead",
        "tools.page_cache",
    ),
    "tools.restart_drill": (
        "megatron.processes",
        "restart_trace",
        "megatron.config",
        "megatron.checkpointing.commit",
        "megatron.checkpointing.engines.registry",
        "megatron.startup.injected_faults",
        "tools.page_cache",
    ),
    "tools.page_cache": (),
    "tools.restart_speed": (
        "megatron.processes",
        "restart_trace",
        "tools.restart_drill.launch",
        "tools.ckpt_overhead.report",
    ),
    "tools.redistribute_bench": (
        "megatron.processes",
        "restart_trace",
        "megatron.config",
        "megatron.checkpointing",
        "megatron.parallel.control_plane",
        "tools.ckpt_overhead",
        "tools.page_cache",
    ),
    "tools.preprocess_data": ("megatron.data", "megatron.tokenizer"),
    "tools.build_corpus": (),
    "tools.make_synthetic_dataset": ("megatron.data",),
}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_only_what_lies_below(package: str) -> None:
    allowed = (package, *ALLOWED[package])
    wrong = [
        str(found)
        for found in imports_in(package)
        if of_project(found) and not any(within(found.target, below) for below in allowed)
    ]
    assert not wrong


@pytest.mark.parametrize("package", ["restart_trace", "megatron.config"])
def test_no_third_party_at_import_time(package: str) -> None:
    wrong = [
        str(found)
        for found in imports_in(package)
        if not (found.lazy or found.typing or of_project(found))
        and found.target.split(".")[0] not in sys.stdlib_module_names
    ]
    assert not wrong


def test_pages_are_made_by_the_report_command_alone() -> None:
    package = "tools.ckpt_analysis.html"
    importers = {
        found.importer
        for found in imports_in("tools.ckpt_analysis")
        if within(found.target, package) and not within(found.importer, package)
    }
    assert importers == {"tools.ckpt_analysis.commands.report"}


def test_the_analysis_needs_no_torch() -> None:
    wrong = [
        str(found)
        for found in imports_in("tools.ckpt_analysis")
        if found.target.split(".")[0] in {"torch", "deepspeed"}
    ]
    assert not wrong


@pytest.mark.parametrize(
    "statement",
    [
        "import megatron",
        "import megatron.config.arguments",
        "from megatron.training import pretrain",
        "import megatron.checkpointing",
        "import megatron.checkpointing.commit",
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
