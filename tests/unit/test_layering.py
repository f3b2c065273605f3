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
PROJECT = ("megatron", "tools", "pretrain_gpt")
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
    files = [ROOT / "pretrain_gpt.py", *(ROOT / "megatron").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
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


# Package -> the packages of the project that it may import, itself included without being named.
ALLOWED = {
    "megatron.restart_trace": (),
    "megatron.config": (),
    "megatron.free_port": (),
    "megatron.parent_process": ("megatron.restart_trace.ancestors",),
    "megatron.checkpoint_engines": ("megatron.restart_trace", "megatron.config", "megatron.parent_process"),
    "megatron.topology": (),
    "megatron.checkpoint_layout": ("megatron.topology",),
    "megatron.data": ("megatron.config",),
    "megatron.tokenizer": ("megatron.config",),
    "megatron.accelerator": (),
    "megatron.tensor_parallel": ("megatron.topology", "megatron.config", "megatron.accelerator"),
    "megatron.model": ("megatron.topology", "megatron.config", "megatron.tensor_parallel"),
    "megatron.optimizer": ("megatron.config",),
    "megatron.redistribute": (
        "megatron.restart_trace",
        "megatron.config",
        "megatron.parent_process",
        "megatron.topology",
        "megatron.tensor_parallel",
        "megatron.checkpoint_engines",
        "megatron.checkpoint_layout",
        "megatron.checkpoint_commit",
        "megatron.checkpoint_ownership",
        "megatron.checkpoint_foreign",
        "megatron.checkpoint_placements",
        "megatron.checkpoint_state",
        "megatron.control_plane",
        "megatron.arguments",
        "megatron.changed_flags",
    ),
    "megatron.changed_flags": (
        "megatron.arguments", "megatron.config", "megatron.checkpoint_engines.errors",
    ),
    "megatron.arguments": ("megatron.config", "megatron.deepspeed_config", "megatron.unsupported_flags"),
    "megatron.checkpoint_manifest": (
        "megatron.topology",
        "megatron.checkpoint_layout",
        "megatron.restart_trace.regular",
    ),
    "megatron.preflight": ("megatron.config", "megatron.checkpoint_manifest"),
    "megatron.launch": (
        "megatron.free_port", "megatron.restart_trace", "megatron.heavy_imports", "megatron.parent_process",
    ),
    "megatron.injected_faults": (),
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


# Checkpointing is several modules beside each other; what they may not reach is shorter to say.
ABOVE_CHECKPOINTING = (
    "megatron.training", "megatron.training_checkpoints", "megatron.training_data", "megatron.training_log",
    "megatron.initialize",
    "megatron.engine_setup", "megatron.model", "megatron.data", "megatron.tokenizer", "pretrain_gpt", "tools",
)  # fmt: skip


def test_checkpointing_imports_nothing_of_training() -> None:
    modules = [name for name in FILES if name.startswith("megatron.checkpoint")]
    assert "megatron.checkpointing" in modules
    wrong = [
        str(found)
        for module in modules
        for found in imports_in(module)
        if any(within(found.target, above) for above in ABOVE_CHECKPOINTING)
    ]
    assert not wrong


def test_only_the_entry_point_imports_training() -> None:
    importers = {
        found.importer
        for package in PROJECT
        for found in imports_in(package)
        if within(found.target, "megatron.training")
    }
    assert importers == {"pretrain_gpt"}


@pytest.mark.parametrize("package", ["megatron.restart_trace", "megatron.config"])
def test_no_third_party_at_import_time(package: str) -> None:
    wrong = [
        str(found)
        for found in imports_in(package)
        if not (found.lazy or found.typing or of_project(found))
        and found.target.split(".")[0] not in sys.stdlib_module_names
    ]
    assert not wrong


def engine_modules() -> set[str]:
    modules = set()
    for name, path in FILES.items():
        if within(name, "megatron.checkpoint_engines"):
            tree = ast.parse(path.read_text())
            classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
            if any("CheckpointEngine" in ast.unparse(base) for node in classes for base in node.bases):
                modules.add(name)
    return modules


def test_no_engine_imports_another() -> None:
    engines = engine_modules()
    assert {"megatron.checkpoint_engines.torch_engine", "megatron.checkpoint_engines.none_engine"} <= engines
    wrong = [
        str(found) for engine in engines for found in imports_in(engine) if found.target in engines - {engine}
    ]
    # The registry names engines by strings, so that asking for one imports only that one.
    registry = imports_in("megatron.checkpoint_engines.registry")
    wrong += [str(found) for found in registry if found.target in engines]
    assert not wrong


@pytest.mark.parametrize(
    "statement",
    [
        "import megatron",
        "import megatron.arguments",
        "import megatron.preflight",
        "import megatron.restart_trace.recorder",
        "import megatron.restart_trace.startup",
        "import megatron.restart_trace.supervisor",
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
from megatron import training
from ..config import model
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import numpy
def f():
    import deepspeed
"""
    found = imports_of("megatron.restart_trace.example", ast.parse(source), is_package=False)
    assert [(i.target, i.lazy, i.typing) for i in found if i.target != "typing"] == [
        ("torch", False, False),
        ("megatron.training", False, False),
        ("megatron.config.model", False, False),
        ("numpy", False, True),
        ("deepspeed", True, False),
    ]
