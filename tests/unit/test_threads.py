"""Which threads are started without the device of the rank, why each of them may be, and what no thread may ask."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Whose threads may run in a process that computes on a device. The other tools and the benchmarks start no such thread.
PACKAGES = ("megatron", "restart_trace", "tools/ckpt_replay", "pretrain_gpt.py")
MAKERS = {"Thread", "Timer", "ThreadPoolExecutor", "ThreadPool", "start_new_thread", "to_thread", "TaskThread"}
SELECTOR = "device_selector"  # as an executor's initializer

FILES = "reads, writes or removes files from host memory, and neither holds nor frees a tensor of a device"
NETWORK = "sends and receives over sockets, from and to host memory"
NO_TORCH = "runs in a process that does not compute: a launcher, its agent or a process of saves"

# By function, or by file where nothing of the file ever touches a device.
WITHOUT_A_DEVICE = {
    "megatron/checkpointing/engines/fastpersist/process.py": NO_TORCH,
    "megatron/checkpointing/engines/memory/early_copy.py": NETWORK,
    "megatron/checkpointing/engines/lazy/engine.py: LazyEngine.placed_tensors": "reads the headers of files",
    "megatron/checkpointing/store/bucket/checkpoints.py": NETWORK,
    "megatron/checkpointing/store/bucket/generations.py": NETWORK,
    "megatron/checkpointing/state/changed_flags.py": FILES,
    "megatron/checkpointing/store/ownership.py": FILES,
    "megatron/checkpointing/preflight/crashes.py": FILES,
    "megatron/checkpointing/preflight/prefetch.py": FILES,
    "megatron/checkpointing/store/removal.py": FILES,
    "megatron/fileio/objects/hedging.py": NETWORK,
    "megatron/fileio/objects/s3.py": NETWORK,
    "megatron/launch/membership.py": NO_TORCH,
    "megatron/peers/ahead.py": NO_TORCH,
    "megatron/peers/holder.py": NO_TORCH,
    "megatron/peers/traffic.py": NO_TORCH,
    "megatron/processes/in_process_restart.py": NETWORK,
    "megatron/processes/parent_process.py": "reads a pipe, and ends the process",
    "megatron/startup/injected_faults.py": "sends a signal to the main thread",
    "megatron/startup/once_per_host.py": NETWORK,
    "megatron/startup/watch.py": "asks other ranks over sockets, and prints stacks",
    "restart_trace/hooks/name_lookup.py": "looks up a host name",
    "restart_trace/device_threads.py: device_thread": "selects the device",
    "tools/ckpt_replay/library.py": "waits for a library, and writes files",
    "tools/ckpt_replay/memory.py": "reads /proc",
    "tools/ckpt_replay/raw_engine.py": "copies between files and tensors that are on the CPU",
    "tools/ckpt_replay/storage.py": FILES,
    "megatron/processes/helper_process.py": "waits for a process to end, and hangs up",
}


def _sources() -> Iterator[Path]:
    for name in PACKAGES:
        path = ROOT / name
        yield from [path] if path.suffix else sorted(path.rglob("*.py"))


def _name(node: ast.expr) -> str:
    """The last part of a name: Thread of threading.Thread."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _makes_a_thread(call: ast.Call, bases: list[str]) -> bool:
    """Whether it makes a thread without the device; `bases`: of the class that it is in, whose `super` may be one."""
    made = _name(call.func)
    if made == "__init__" and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
        made = next((base for base in bases if base in MAKERS), "") if _name(call.func.value.func) == "super" else ""
    if made == "run_in_executor":  # None is the loop's own executor
        return bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value is None
    if made not in MAKERS:
        return False
    chosen = next((keyword.value for keyword in call.keywords if keyword.arg == "initializer"), None)
    return not (isinstance(chosen, ast.Call) and _name(chosen.func) == SELECTOR)


def threads_without_a_device(source: str) -> list[str]:
    """The functions, by their qualified names, that make a thread or an executor without the device."""
    if not any(name in source for name in (*MAKERS, "run_in_executor")):
        return []  # to parse it would take longest
    found: list[str] = []

    def walk(node: ast.AST, names: tuple[str, ...], bases: list[str]) -> None:
        if isinstance(node, ast.ClassDef):
            bases = [_name(base) for base in node.bases]
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names = (*names, node.name)
        if isinstance(node, ast.Call) and _makes_a_thread(node, bases):
            found.append(".".join(names) or "(module)")
        for child in ast.iter_child_nodes(node):
            walk(child, names, bases)

    walk(ast.parse(source), (), [])
    return list(dict.fromkeys(found))


def test_every_thread_has_the_device_selected_or_a_reason() -> None:
    found = [
        (str(path.relative_to(ROOT)), where)
        for path in _sources()
        for where in threads_without_a_device(path.read_text(encoding="utf-8"))
    ]
    names = {name for file, where in found for name in (file, f"{file}: {where}")}
    unknown = [f"{file}: {where}" for file, where in found if not {file, f"{file}: {where}"} & set(WITHOUT_A_DEVICE)]
    assert not unknown, (
        f"start these with restart_trace.device_threads, or say here why they touch no device: {unknown}"
    )
    assert not set(WITHOUT_A_DEVICE) - names, "these reasons are of no thread any more"


def test_what_is_found() -> None:
    source = """
import threading, asyncio
from concurrent.futures import ThreadPoolExecutor
class A:
    def plain(self):
        threading.Thread(target=print).start()
    def pool(self):
        with ThreadPoolExecutor(3) as pool: pass
    def selected(self):
        ThreadPoolExecutor(3, initializer=device_selector())
    def other_initializer(self):
        ThreadPoolExecutor(3, initializer=print)
    async def loops(self, loop, pool):
        await loop.run_in_executor(pool, print)
    async def loops_own(self, loop):
        await loop.run_in_executor(None, print)
class B(ThreadPoolExecutor):
    def __init__(self):
        super().__init__(1)
class C(ThreadPoolExecutor):
    def __init__(self):
        super().__init__(1, initializer=device_selector())
class D(dict):
    def __init__(self):
        super().__init__()
timer = threading.Timer(1, print)
"""
    assert threads_without_a_device(source) == [
        "A.plain", "A.pool", "A.other_initializer", "A.loops_own", "B.__init__", "(module)"
    ]  # fmt: skip


def test_no_event_of_a_device_is_asked_whether_it_has_happened() -> None:
    """torch holds the interpreter's lock in `query`: see megatron/fileio/device_waits.py."""
    asking = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _sources()
        if ".query" in (source := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "query"
    ]
    assert not asking
