"""torch.compile beside the lean imports of the trainer, and its caches over a restart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import HANGS_S, ROOT

PROGRAM = """
import json, sys, time
from megatron.startup.initialize import import_heavy
import_heavy()
import torch
from torch._dynamo.utils import counters
x = torch.linspace(0, 1, 4096, device=sys.argv[1])
def function(x):
    return torch.sin(x) * 2 + torch.cos(x)
begin = time.monotonic()
result = torch.compile(function)(x)
seconds = time.monotonic() - begin
torch.testing.assert_close(result, function(x))
print(json.dumps({"seconds": seconds, **counters["inductor"]}))
"""


def compiler_missing() -> bool:
    """Triton compiles the program that starts a kernel: with CC, or gcc or clang."""
    return not any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang")))


def compiled(cache: Path, device: str = "cuda") -> dict[str, Any]:
    """What a process counts that compiles a function with this cache."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, device], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=HANGS_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_restart_takes_compiled_code_from_the_cache(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if compiler_missing():
        pytest.skip("not observed: there is no C compiler, which Triton needs")
    first, second = compiled(tmp_path / "cache"), compiled(tmp_path / "cache")
    record_property("compiled_s", first["seconds"])
    record_property("from_cache_s", second["seconds"])
    assert first.get("fxgraph_cache_hit", 0) == 0 and first["fxgraph_cache_miss"] == 1
    assert second.get("fxgraph_cache_miss", 0) == 0 and second["fxgraph_cache_hit"] == 1
