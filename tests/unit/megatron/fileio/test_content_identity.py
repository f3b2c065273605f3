"""Which content a file has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.fileio.content_identity import content_identity

SIZES = [0, 1, 4096, 1 << 20, (1 << 20) + 1, 5 << 20]


@pytest.mark.parametrize("size", SIZES)
def test_equal_files_have_one_identity_and_others_another(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(content)
    other.write_bytes(content)
    assert content_identity(str(one)) == content_identity(str(other)) and len(content_identity(str(one))) == 32
    for changed in (content + b"x", content[:-1] + bytes([content[-1] ^ 1]) if size else b"y"):
        other.write_bytes(changed)
        assert content_identity(str(one)) != content_identity(str(other))


def test_a_fifo_is_no_file_to_wait_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError):
        content_identity(str(tmp_path / "fifo"))
