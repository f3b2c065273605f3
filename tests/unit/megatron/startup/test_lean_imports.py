"""torch's compiler stays out of a start, and is whole for whoever asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each starts an interpreter that imports torch

ROOT = Path(__file__).resolve().parents[4]
DATA = ROOT / "tests" / "golden" / "upstream_run" / "data"


def run(code: str, *arguments: str, **environment: str) -> str:
    """Output of a fresh Python that runs `code` with the project importable."""
    base = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env=base | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_training_that_stepped_and_saved_has_imported_no_compiler_nor_does_a_replay(tmp_path: Path) -> None:
    """Which imports torch.distributed.checkpoint, and sympy with it, for those engines alone that use it."""
    for name in ("corpus_text_document.bin", "corpus_text_document.idx"):
        (tmp_path / name).write_bytes((DATA / name).read_bytes())
    flags = (
        "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --bf16 --swiglu --lr 1e-3 "
        "--micro-batch-size 1 --train-iters 2 --eval-iters 0 --num-workers 0 --split 100,0,0 --clip-grad 1.0 "
        f"--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model {DATA / 'tokenizer.model'} "
        f"--data-path {tmp_path / 'corpus_text_document'} --save {tmp_path / 'save'} --save-interval 1 --log-interval 1"
    )
    code = """
        import runpy, sys
        try:
            runpy.run_path(sys.argv.pop(1), run_name="__main__")
        except SystemExit as exit_:
            assert not exit_.code, exit_.code
        import tools.ckpt_replay.loading, tools.ckpt_replay.saving, tools.ckpt_replay.storage
        heavy = ("torch._dynamo.", "torch._inductor.", "sympy", "torch.fx.experimental.symbolic_shapes.")
        heavy += ("torch.distributed.checkpoint",)
        print("HEAVY", sorted(name for name in sys.modules if name.startswith(heavy)))
        for name in ("torch._dynamo", "torch.fx.experimental.symbolic_shapes"):
            print(name, type(sys.modules[name]).__name__)
    """
    said = run(code, str(ROOT / "pretrain_gpt.py"), *flags.split())
    assert "iteration        2/       2" in said and (tmp_path / "save" / "global_step2" / "manifest.json").exists()
    assert said.splitlines()[-3:] == [
        "HEAVY []", "torch._dynamo _StandIn", "torch.fx.experimental.symbolic_shapes _StandIn",
    ]  # fmt: skip


def test_stand_ins_give_way_to_the_real_modules() -> None:
    """By import of a submodule, as for torch._dynamo here, and by use of an attribute, as for the other one."""
    code = """
    import sys
    from megatron.startup.initialize import import_heavy
    import_heavy()
    import torch
    kind = lambda name: type(sys.modules.get(name)).__name__
    dynamo, shapes = "torch._dynamo", "torch.fx.experimental.symbolic_shapes"
    assert kind(dynamo) == kind(shapes) == "_StandIn"
    assert torch._dynamo.disable(len) is len and torch._dynamo.disable()(len) is len
    torch._dynamo.graph_break()
    sym_eq, expect_true = sys.modules[shapes].sym_eq, sys.modules[shapes].expect_true

    import torch._dynamo.config
    assert kind(dynamo) == "module" and torch._dynamo.config.cache_size_limit > 0
    assert torch._dynamo is sys.modules[dynamo]
    import torch._inductor.config

    calls = []
    def backend(graph, inputs):
        calls.append(len(list(graph.graph.nodes)))
        return graph.forward
    function = torch.compile(lambda x: torch.sin(x) * 2 + 1, backend=backend)
    x = torch.arange(5.0)
    assert torch.equal(function(x), torch.sin(x) * 2 + 1) and calls, "torch.compile compiled nothing"
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1)

    sys.modules[shapes].ShapeEnv()
    assert kind(shapes) == "module"
    real = sys.modules[shapes]
    for one, other in (((1, 2), (1, 2)), ((1, 2), (1, 3)), ((1,), (1, 1)), ((), ())):
        one, other = torch.Size(one), torch.Size(other)
        assert sym_eq(one, other) == real.sym_eq(one, other)
    assert expect_true(True) is real.expect_true(True) is True
    print("fine")
    """
    assert run(code).endswith("fine\n")


def test_switched_off_by_its_variable_and_torch_compile_put_back() -> None:
    code = """
    import os, sys, torch
    from megatron.startup import lean_imports
    lean_imports.install()
    compile = torch.compile
    with lean_imports.without_compile():
        assert torch.compile is compile
    assert type(sys.modules.get("torch._dynamo")).__name__ in ("NoneType", "module")
    assert not [f for f in sys.meta_path if type(f).__name__ == "_SubmoduleFinder"]

    del os.environ["MEGATRON_FULL_IMPORTS"]
    try:
        with lean_imports.without_compile():
            assert torch.compile(len) is len and torch.compile(mode="x")(len) is len
            raise KeyError
    except KeyError:
        assert torch.compile is compile
    print("fine")
    """
    assert run(code, MEGATRON_FULL_IMPORTS="1").endswith("fine\n")


def test_deepspeeds_op_for_shared_memory_is_off_and_no_other() -> None:
    """It would be compiled for half a minute, and leave files in /dev/shm."""
    code = """
        import os
        from megatron.startup.initialize import import_heavy
        import_heavy()
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        assert deepspeed.comm.comm.cdb.shm_comm_op is None
        assert get_accelerator().create_op_builder("CPUAdamBuilder").NAME == "cpu_adam"
        assert "__compatible_ops__" not in vars(deepspeed.ops)
        print("PASSED")
    """
    assert run(code).splitlines()[-1] == "PASSED"
