"""--deterministic on: two processes have the same gradients to the last bit, and what the settings cost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.dist.harness import HANGS_S, ROOT

PROGRAM = """
import hashlib, json, sys, time
import torch
import torch.nn.functional as F
from megatron.startup.determinism import make_deterministic

device, on, size = sys.argv[1], sys.argv[2] == "on", int(sys.argv[3])
if on:
    make_deterministic()
torch.manual_seed(1)
embedding = torch.nn.Embedding(512, size, device=device, dtype=torch.bfloat16)
inner = torch.nn.Linear(size, 4 * size, device=device, dtype=torch.bfloat16)
outer = torch.nn.Linear(4 * size, size, device=device, dtype=torch.bfloat16)
ids = torch.randint(0, 512, (2, size), device=device)

def step():
    heads = embedding(ids).unflatten(-1, (-1, 64)).transpose(1, 2)
    hidden = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(-2)
    logits = outer(F.silu(inner(hidden))) @ embedding.weight.T
    F.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()

step()  # kernels are loaded, and workspaces made
if device == "cuda":
    torch.cuda.synchronize()
begin = time.monotonic()
for _ in range(5):
    step()
if device == "cuda":
    torch.cuda.synchronize()
gradients = [part.grad.float().cpu().numpy().tobytes() for part in (embedding.weight, inner.weight, outer.weight)]
print(json.dumps({"seconds": time.monotonic() - begin, "hash": hashlib.sha256(b"".join(gradients)).hexdigest()}))
"""


def trained(device: torch.device, on: str) -> dict[str, Any]:
    """Six steps of a small model, their time but for the first, and a hash of its gradients."""
    size = "2048" if device.type == "cuda" else "128"
    command = [sys.executable, "-c", PROGRAM, device.type, on, size]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_processes_have_the_same_gradients(
    device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    one, other, without = trained(device, "on"), trained(device, "on"), trained(device, "off")
    record_property("deterministic_s", min(one["seconds"], other["seconds"]))
    record_property("without_s", without["seconds"])
    assert one["hash"] == other["hash"]
