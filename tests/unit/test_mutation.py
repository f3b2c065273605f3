"""The sample of mutants (tests/mutation.py): what is no mutant, whose tests are run. The nightly tries the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutation
from tests.dist.harness import ROOT
from tests.mutation import TESTS, Mutant, drawn, failing_test, is_another_program, modules_of, own_tests

CODE = "def f(a: int | None = 1) -> int | None:\n    b: int | None = a\n    return b\n"


@pytest.mark.parametrize(
    ("old", "new", "another"),
    [
        ("int | None", "int // None", False), ("a\n", "a  # told\n", False), ("= 1", "= //", False),
        ("= 1", "= 2", True), ("= a", "= -a", True), ("return b", "return f", True),
    ],
)  # fmt: skip
def test_only_another_program_is_a_mutant(old: str, new: str, another: bool) -> None:
    assert is_another_program(CODE, CODE.replace(old, new)) == another


def test_the_tests_of_a_module_begin_with_those_of_its_name() -> None:
    tests = own_tests("megatron/checkpointing/store/ownership.py")
    assert "tests/unit/megatron/checkpointing/store/test_ownership.py" in tests[:2]
    assert {f"tests/unit/megatron/checkpointing/store/test_{name}.py" for name in ("commit", "removal")} < set(tests)


def test_tests_that_import_a_module_are_its_tests_wherever_they_are() -> None:
    tests = own_tests("tools/ckpt_analysis/metrics/critical_path.py")
    assert tests[0] == "tests/unit/tools/ckpt_analysis/render/html/test_figures.py"
    assert tests.index("tests/unit/tools/ckpt_analysis/metrics/test_budget.py") < tests.index(
        "tests/unit/tools/ckpt_analysis/commands/test_commands.py"
    )


def test_all_code_of_the_sample_has_tests() -> None:
    for code, tests in TESTS.items():
        assert list((ROOT / code).rglob("*.py")) and list((ROOT / tests).rglob("test_*.py"))


def test_a_part_of_the_sample_is_a_folder_or_a_module() -> None:
    (module,) = modules_of("restart_trace/clock.py")
    assert module == ROOT / "restart_trace" / "clock.py"
    assert module in modules_of("restart_trace") and set(modules_of("restart_trace")) < set(modules_of(None))
    for nowhere in ("restart_trace/clok.py", "megatron/model"):
        with pytest.raises(ValueError, match=f"--part {nowhere}: no module of the sample is there; give a module or"):
            modules_of(nowhere)


def test_each_mutant_of_a_part_is_drawn_once_and_then_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(module: Path) -> list[list[Mutant]]:
        return [[Mutant(module.name, f"{place}", number) for number in range(place)] for place in (1, 3)]

    monkeypatch.setattr(mutation, "mutants_of", made)
    modules = modules_of("restart_trace")[:2]
    found = list(drawn(1, modules))
    assert len(set(found)) == len(found) == 8 and {mutant.module for mutant in found} == {path.name for path in modules}


@pytest.mark.slow
def test_a_failing_test_is_named_and_tests_that_cannot_be_run_kill_no_mutant(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_passes(): pass\ndef test_fails(): assert False\n")
    assert failing_test(tmp_path, ["test_one.py::test_passes"], None) is None
    assert "test_fails" in (failing_test(tmp_path, ["test_one.py"], None) or "")
    with pytest.raises(RuntimeError, match="not found"):
        failing_test(tmp_path, ["test_gone.py"], None)


def test_a_mutant_is_found_by_its_name() -> None:
    mutant = Mutant("restart_trace/clock.py", "core/NumberReplacer", 3)
    assert Mutant.named(mutant.name) == mutant
