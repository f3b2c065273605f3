"""A sample of mutants: small changes of the code, each of which a test of the changed code should notice.

    .venv/bin/python -m pip install cosmic-ray==8.7.0
    .venv/bin/python -m tests.mutation --out runs/mutants --minutes 30
    .venv/bin/python -m tests.mutation --out runs/mutants --part megatron/checkpointing/store/bucket
    .venv/bin/python -m tests.mutation --out runs/mutants --mutant restart_trace/clock.py:core/NumberReplacer:3

cosmic-ray makes the mutants, in a copy of the checkout. A mutant is drawn in two steps, a place of the code and then
what is done to it: otherwise arithmetic, which can be replaced in many ways, would be most of the sample. What changes
nothing but annotations is passed over. Nothing else is: some survivors mean the same as the code, and no test can kill
these.

OUT/mutants.jsonl has a line for each mutant, OUT/survivors.diff those that no test noticed.

exit status: 0 at least 90 % are killed, 1 fewer are, 2 a test fails without any mutant, or no mutant was tried
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from tests.dist.harness import ROOT

# Code -> its tests. Those of tests/dist and tests/faults are left out: they take minutes, and each mutant has seconds.
TESTS = {
    "restart_trace": "tests/unit/restart_trace",
    "megatron/checkpointing/state": "tests/unit/megatron/checkpointing/state",
    "megatron/checkpointing/store": "tests/unit/megatron/checkpointing/store",
    "tools/ckpt_analysis/metrics": "tests/unit/tools/ckpt_analysis",  # problems are tested with the reader
}
WANTED = 0.9  # of the mutants are to be killed
SLOWER = 5  # times as long as without a mutant, and a minute: then it hangs, which tells it, too
SURVIVED = "survived"


@dataclass(frozen=True)
class Mutant:
    module: str
    operator: str
    occurrence: int

    @property
    def name(self) -> str:
        return f"{self.module}:{self.operator}:{self.occurrence}"

    @staticmethod
    def named(name: str) -> Mutant:
        module, operator, occurrence = name.rsplit(":", 2)
        return Mutant(module, operator, int(occurrence))

    def code(self, source: str) -> str | None:
        """None: cosmic-ray finds no such place."""
        from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]  of the nightly alone
        from cosmic_ray.plugins import get_operator  # pyright: ignore[reportMissingImports]

        return mutate_code(source, get_operator(self.operator)(), self.occurrence)


class _WithoutAnnotations(ast.NodeTransformer):
    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        node.annotation = ast.Constant(None)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        return node


def is_another_program(source: str, mutated: str) -> bool:
    """Not where annotations alone differ, which nothing of ours evaluates, nor where it is no program any more."""
    try:
        before, after = (ast.dump(_WithoutAnnotations().visit(ast.parse(code))) for code in (source, mutated))
    except SyntaxError:
        return False
    return before != after


@functools.cache
def mutants_of(module: Path) -> list[list[Mutant]]:
    """For each place of the code, what can be done to it."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path  # pyright: ignore[reportMissingImports]
    from cosmic_ray.plugins import get_operator, operator_names  # pyright: ignore[reportMissingImports]

    nodes = list(ast_nodes(get_ast_from_path(module)))
    places: dict[object, list[Mutant]] = {}
    for name in operator_names():
        if get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        positions = (position for node in nodes for position in operator.mutation_positions(node))
        for occurrence, position in enumerate(positions):
            mutant = Mutant(str(module.relative_to(ROOT)), name, occurrence)
            places.setdefault(tuple(map(tuple, position)), []).append(mutant)
    return list(places.values())


def modules_of(part: str | None) -> list[Path]:
    """Those that mutants are made of, or of these those in `part`. Raises ValueError if there are none."""
    modules = [path for code in TESTS for path in sorted((ROOT / code).rglob("*.py")) if path.stat().st_size]
    if part is not None:
        modules = [path for path in modules if path.is_relative_to(ROOT / part)]
    if not modules:
        wanted = ", ".join(TESTS)
        raise ValueError(f"--part {part}: no module of the sample is there; give a module or a folder in {wanted}")
    return modules


def drawn(seed: int, modules: list[Path]) -> Iterator[Mutant]:
    """Until none is left, none twice: a module, the larger the likelier, a place in it, and what is done there."""
    left, draw = {path: path.stat().st_size for path in modules}, random.Random(seed)
    places: dict[Path, list[list[Mutant]]] = {}
    while left:
        (module,) = draw.choices([*left], [*left.values()])
        if module not in places:
            places[module] = mutants_of(module)
        if not places[module]:
            del left[module]
            continue
        place = draw.choice(places[module])
        yield place.pop(draw.randrange(len(place)))
        if not place:
            places[module].remove(place)


def directory_of_tests(module: str) -> str:
    (directory,) = (tests for code, tests in TESTS.items() if module.startswith(f"{code}/"))
    return directory


def own_tests(module: str, root: Path = ROOT) -> list[str]:
    """The unit tests of a module in `root`: first files that have its name or import it, then those of its folder."""
    directory = directory_of_tests(module)
    dotted = module.removesuffix(".py").replace("/", ".")
    every = sorted((root / "tests" / "unit").rglob("test_*.py"))
    named = [path for path in every if Path(module).stem in path.stem]
    importing = [path for path in every if dotted in path.read_text()]
    mirrored = root / "tests" / "unit" / Path(module).parent
    rest = sorted((root / directory).rglob("test_*.py"), key=lambda path: (mirrored not in path.parents, path))
    return [str(path.relative_to(root)) for path in dict.fromkeys([*named, *importing, *rest])]


def copy_of_the_checkout(place: Path) -> Path:
    """What git tracks or could add: tests look at the whole tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def failing_test(tree: Path, tests: list[str], limit_s: float | None) -> str | None:
    """The first that fails, "hangs" after `limit_s`, None if all pass. RuntimeError: none can be run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=tree, env=environment, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as running:  # fmt: skip
        try:
            output, _ = running.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            return "hangs"
    if running.returncode == pytest.ExitCode.OK:
        return None
    if running.returncode in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(output[-1000:])
    told = [line for line in output.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return told[0] if told else output[-1000:]


@dataclass
class Sample:
    """Tries mutants in `tree` and writes what became of them to `out`."""

    tree: Path
    out: Path
    _limits_s: dict[str, float] = field(default_factory=dict)
    _written: int = 0

    def outcome(self, mutant: Mutant) -> str | None:
        """SURVIVED, or what killed it; None: it is no mutant. RuntimeError: tests fail without it or cannot be run."""
        path = self.tree / mutant.module
        source = path.read_text()
        mutated = mutant.code(source)
        if mutated is None or not is_another_program(source, mutated):
            return None
        tests = own_tests(mutant.module, self.tree)
        limit_s = self._limit_s(mutant.module, tests)
        self._write(path, mutated)
        try:
            killed_by = failing_test(self.tree, tests, limit_s)
        finally:
            self._write(path, source)
        with (self.out / "mutants.jsonl").open("a") as lines:
            lines.write(json.dumps(asdict(mutant) | {"killed_by": killed_by}) + "\n")
        if killed_by is None:
            with (self.out / "survivors.diff").open("a") as diffs:
                diffs.write(f"# {mutant.name}\n")
                before, after = source.splitlines(True), mutated.splitlines(True)
                diffs.writelines(difflib.unified_diff(before, after, mutant.module, mutant.module))
        return killed_by or SURVIVED

    def _limit_s(self, module: str, tests: list[str]) -> float:
        """What these tests may take with a mutant."""
        key = directory_of_tests(module)  # whose tests are most of them
        if key not in self._limits_s:
            began = time.monotonic()
            if (failed := failing_test(self.tree, tests, None)) is not None:
                raise RuntimeError(f"fails without any mutant: {failed}")
            self._limits_s[key] = 60 + SLOWER * (time.monotonic() - began)
        return self._limits_s[key]

    def _write(self, path: Path, code: str) -> None:
        """With a time of its own: compiled code of another content counts as stale by size and time alone."""
        path.write_text(code)
        self._written += 1
        os.utime(path, (self._written, self._written))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="new directory for the outcomes")
    parser.add_argument("--minutes", type=float, default=30, help="no mutant is begun later (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (default: 1)")
    parser.add_argument("--part", metavar="PATH", help="only mutants of this module or folder")
    parser.add_argument("--mutant", action="append", metavar="NAME", help="try this one; may be given several times")
    arguments = parser.parse_args(argv)
    try:
        arguments.modules = modules_of(arguments.part)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    arguments.out.mkdir(parents=True)
    began = time.monotonic()
    mutants = map(Mutant.named, arguments.mutant) if arguments.mutant else drawn(arguments.seed, arguments.modules)
    outcomes = []
    tree = copy_of_the_checkout(arguments.out.resolve() / "tree")
    try:
        sample = Sample(tree, arguments.out)
        for mutant in mutants:
            if time.monotonic() - began > 60 * arguments.minutes:
                break
            if (outcome := sample.outcome(mutant)) is not None:
                outcomes.append(outcome)
                print(f"{mutant.name}: {outcome}", flush=True)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(tree)
    killed = sum(outcome != SURVIVED for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} mutants killed; {WANTED:.0%} are wanted")
    if not outcomes:
        return 2
    return 0 if killed >= WANTED * len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
