"""Operators that DeepSpeed builds while its engine is made are the phase `compile`, and no part of `engine_init`."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from megatron.parallel.topology import Layout
from megatron.startup.communicators import Communicators
from restart_trace.clock import now_ns
from restart_trace.reading import read_records
from restart_trace.recorder import Recorder
from restart_trace.sink import JsonlSink
from restart_trace.startup import Startup
from tests.unit.trace_helpers import PROCESS

pytestmark = pytest.mark.slow  # imports DeepSpeed and runs a compiler


def test_an_operator_that_is_built_is_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    source = tmp_path / "tiny.cpp"
    source.write_text("#include <Python.h>\nstatic PyModuleDef about = {PyModuleDef_HEAD_INIT, \"tiny\"};\n"
                      "PyMODINIT_FUNC PyInit_tiny() { return PyModule_Create(&about); }\n")  # fmt: skip

    class Tiny(OpBuilder):
        def __init__(self) -> None:
            super().__init__(name="tiny")

        def absolute_name(self) -> str:
            return "deepspeed.ops.tiny"

        def sources(self) -> list[str]:
            return [str(source)]

    recorder = Recorder(JsonlSink(tmp_path / "rank.jsonl"), PROCESS)
    startup = Startup(recorder, None, 0, 0, now_ns())
    with Communicators(startup, Layout(1, 1, 1), timedelta(seconds=60)).apart_from("engine_init"):
        Tiny().load(verbose=False)
    recorder.close()
    spans: list[dict[str, Any]] = [
        r for r in read_records(tmp_path / "rank.jsonl") if r["type"] == "span" and r["phase"] != "process_start"
    ]
    assert [span["phase"] for span in spans] == ["engine_init", "compile", "engine_init"]
    assert [span["end_ns"] for span in spans[:2]] == [span["start_ns"] for span in spans[1:]]
    assert spans[1]["end_ns"] > spans[1]["start_ns"]
