"""Files of a sweep, which are written as a whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tools.common.sweep_files import write_json


def test_a_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    precious, file = tmp_path / "precious", tmp_path / "result.json"
    precious.write_text("mine")
    (tmp_path / f".result.json.{os.getpid()}").symlink_to(precious)
    file.symlink_to(precious)
    write_json(file, {"a": 1})
    assert precious.read_text() == "mine" and not file.is_symlink()
    assert json.loads(file.read_text()) == {"a": 1}
