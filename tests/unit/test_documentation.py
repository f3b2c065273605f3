"""The documents refer to what there is: files, sections, modules, and imports that the picture shows."""

from __future__ import annotations

import ast
import re
from itertools import chain
from pathlib import Path

import grimp
import pytest

from tools.restart_drill.faults import FAULTS
from tools.restart_drill.injection_points import STAGES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(path for path in chain(ROOT.glob("*.md"), (ROOT / "docs").rglob("*.md")))
CODE = ("megatron", "restart_trace", "tools", "benchmarks", "tests", "docs", "examples_deepspeed")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{document.name}: {link}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_and_modules_exist(document: Path) -> None:
    if document.name == "CHANGELOG.md":  # it also tells of what was removed
        return
    for word in re.findall(r"`([\w./-]+)`", without_code(document.read_text())):
        if re.split(r"[./]", word)[0] in CODE and re.search(r"[./]\w", word):
            assert exists(word), f"{document.name}: {word}"


def exists(word: str) -> bool:
    """Whether there is such a file or module, or a module that may have such a member; NAME and N stand for any."""
    path = re.sub(r"NAME|N\b", "*", word if "/" in word else word.replace(".", "/"))
    patterns = [path, f"{path}.py"] if "/" in word else [path, f"{path}.py", str(Path(path).parent) + "*"]
    return any(any(ROOT.glob(pattern)) for pattern in patterns)


def drawn() -> tuple[dict[str, str], set[tuple[str, str]]]:
    """Boxes of the picture, with the modules that they stand for, and its arrows."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    picture = text.partition("```mermaid\n")[2].partition("```")[0]
    boxes = dict(re.findall(r"^ +(\w+)\[([\w.]+)[^\]]*\]$", picture, re.MULTILINE))
    return boxes, set(re.findall(r"^ +(\w+) --> (\w+)$", picture, re.MULTILINE))


def imported() -> set[tuple[str, str]]:
    """(box, box) for every import between modules of two boxes."""
    boxes, _ = drawn()
    graph = grimp.build_graph("benchmarks", "megatron", "restart_trace", "tools", cache_dir=None)
    of_module = {}
    for module in graph.modules:
        names = [box for box, package in boxes.items() if f"{module}.".startswith(f"{package}.")]
        if names:
            (of_module[module],) = names
    edges = {
        (box, of_module[other])
        for module, box in of_module.items()
        for other in graph.find_modules_directly_imported_by(module)
        if other in of_module
    }
    program = ast.walk(ast.parse((ROOT / "pretrain_gpt.py").read_text()))
    modules = [node.module for node in program if isinstance(node, ast.ImportFrom) and node.module]
    edges |= {("pretrain_gpt", of_module[module]) for module in modules if module in of_module}
    return {(a, b) for a, b in edges if a != b}


def test_the_picture_shows_the_imports() -> None:
    boxes, arrows = drawn()
    edges = imported()
    assert arrows <= edges, f"drawn, and no import: {sorted(arrows - edges)}"
    reached = set(arrows)
    while more := {(a, d) for a, b in reached for c, d in arrows if b == c} - reached:
        reached |= more
    assert edges <= reached, f"imports that no chain of arrows shows: {sorted(edges - reached)}"
    layers = {path.name for path in (ROOT / "megatron").iterdir() if (path / "__init__.py").exists()}
    assert layers <= boxes.keys()


@pytest.mark.parametrize(
    ("added", "told_apart_by"),
    [
        ("a launcher", r"\bBY_SLURM\b"),
        ("an object store", r"\bobjects\.s3 import|s3://BUCKET|Amazon S3|\bAWS_ENDPOINT"),
    ],
)
def test_an_addition_names_the_files_that_a_search_would_find(added: str, told_apart_by: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    (row,) = re.findall(rf"^\| {added} \|.*$", text, re.MULTILINE)
    modules = [path for top in ("megatron", "tools") for path in (ROOT / top).rglob("*.py")]
    found = {path for path in modules if re.search(told_apart_by, path.read_text())}
    named = {Path(word).name for word in re.findall(r"`([\w./]+\.py)`", row)}
    assert found and {path.name for path in found} <= named, f"{added}: {found}"


def test_every_fault_and_injection_point_is_documented() -> None:
    text = (ROOT / "docs" / "restart_drill.md").read_text()
    rows = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    assert {f"`{name}`" for name in (*FAULTS, *STAGES)} <= set(re.findall(r"`[\w:-]+`", rows))


def test_the_readme_is_short_and_names_commands_that_there_are() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    scripts = re.findall(r"\b(?:bash|python) ([\w./]+\.(?:sh|py))", text) + re.findall(
        r"\.\./(tests/[\w./]+\.py)", text
    )
    assert scripts and not [script for script in scripts if not (ROOT / script).is_file()]
    declared = (ROOT / "setup.py").read_text()
    commands = set(re.findall(r"^\s*\(?(?:cd \w+ && )?((?:ckpt|restart)-[\w-]+)", text, re.MULTILINE))
    assert {"ckpt-analysis", "ckpt-replay", "restart-trace"} <= commands
    assert not [command for command in commands if f"{command} = " not in declared]
