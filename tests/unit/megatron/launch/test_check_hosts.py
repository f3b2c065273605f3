"""Hosts are compared before any rank is started: by what each tells, or by meeting at the port of the rendezvous."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron.launch.check_hosts import Host, tell, what_is_wrong
from megatron.net.free_port import free_port
from megatron.net.secret import VARIABLE
from tests.unit.certificates import make_files
from tests.unit.trace_helpers import ROOT, SECRET

pytestmark = pytest.mark.slow  # each test starts the check of several hosts

SAME = {"torch": "2.13.0"}
LIMIT_S = 300


def start(action: str, *options: str, stdin: int = subprocess.DEVNULL, path: Path = ROOT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megatron.launch.check_hosts", action, *options],
        cwd=path, env=os.environ | {"PYTHONPATH": f"{path}:{ROOT}"}, text=True,
        stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def meet(place: int, nodes: int, port: int, *options: str, address: str = "127.0.0.1") -> subprocess.Popen[str]:
    settings = ("--address", f"MASTER_ADDR={address}", "--port", f"MASTER_PORT={port}")
    return start("meet", "--place", str(place), "--nodes", str(nodes), *settings, *options)


def refuse(place: int, nodes: int | None, port: int, why: str) -> subprocess.Popen[str]:
    settings = ("--address", "MASTER_ADDR=127.0.0.1", "--port", f"MASTER_PORT={port}", "--why", why)
    return start("refuse", "--place", str(place), *(() if nodes is None else ("--nodes", str(nodes))), *settings)


def said(*started: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Exit status and standard output of each."""
    ended = [(process.communicate(timeout=LIMIT_S)[0].strip(), process.returncode) for process in started]
    return [(code, text) for text, code in ended]


def test_what_a_host_tells_is_judged() -> None:
    started = start(
        "tell", "--place", "0", "--address", "MASTER_ADDR=127.0.0.1", "--port", f"MASTER_PORT={free_port()}"
    )
    line = started.communicate(timeout=LIMIT_S)[0]
    other = json.dumps(asdict(Host(1, "far", json.loads(line)["runs"] | {"torch": "2.0.0"})))
    for lines, expected in ((line, ""), (f"{other}\n{line}", "host far runs torch 2.0.0 (")):
        judge = start("judge", stdin=subprocess.PIPE)
        found = judge.communicate(lines, timeout=LIMIT_S)[0]
        assert judge.returncode == bool(expected) and found.startswith(expected), found
        assert len(found.splitlines()) == bool(expected)


def test_a_name_that_hosts_do_not_know_comes_first() -> None:
    nowhere = tell(1, "MASTER_ADDR=somewhere.invalid", None)
    assert nowhere.unknown.startswith("MASTER_ADDR=somewhere.invalid: ")
    hosts = [Host(0, "a", SAME, taken="MASTER_PORT=1: busy"), Host(1, "b", {}, nowhere.unknown)]
    found = what_is_wrong(hosts)
    assert found is not None and found.startswith("MASTER_ADDR=somewhere.invalid: b cannot resolve it (")


def test_a_port_matters_where_rank_0_runs() -> None:
    with socket.create_server(("", 0)) as taken:
        setting = f"MASTER_PORT={taken.getsockname()[1]}"
        busy = tell(0, None, setting)
    listens = f"{setting}: another process listens there on {busy.name}, where rank 0 runs"
    assert what_is_wrong([busy]) == f"{listens}; set MASTER_PORT to a port that is free there"
    assert what_is_wrong([Host(0, "first", busy.runs), Host(1, "b", busy.runs, taken=busy.taken)]) is None


def test_all_that_meet_go_on_and_leave_the_port_free() -> None:
    port = free_port()
    started = [meet(place, 3, port) for place in (2, 1, 0)]
    assert said(*started) == [(0, "")] * 3
    with socket.create_server(("", port)):
        pass


def test_what_is_wrong_is_told_on_every_host(tmp_path: Path) -> None:
    """One host has a torch of its own; a stranger that connects keeps nobody."""
    old = tmp_path / "torch-2.0.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.0\n")
    port = free_port()
    settings = ("--nodes", "2", "--address", "MASTER_ADDR=127.0.0.1", "--port", f"MASTER_PORT={port}")
    first = start("meet", "--place", "0", *settings)
    while True:
        try:
            stranger = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            assert first.poll() is None
    with stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        second = start("meet", "--place", "1", *settings, path=tmp_path)
        found = said(first, second)
    assert found[0] == found[1] and found[0][0] == 1
    assert " runs torch 2.0.0 (" in found[0][1], found


def test_a_number_that_two_hosts_have_is_named() -> None:
    port = free_port()
    found = said(meet(0, 3, port), meet(1, 3, port), meet(1, 3, port))
    assert {code for code, _ in found} == {1}
    assert {text.partition(":")[0] for _, text in found} == {"NODE_RANK=1"}


def test_hosts_that_do_not_come_are_named() -> None:
    port = free_port()
    assert said(meet(0, 4, port, "--timeout", "0.1")) == [
        (1, "NODE_RANK 1, 2, 3 of 4 nodes did not come; start this script on every node")
    ]
    ((code, text),) = said(meet(1, 4, port, "--timeout", "0.1"))
    assert code == 1
    assert text.startswith(
        f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: the launch of NODE_RANK 0 was not met there from "
    )


def test_what_keeps_a_host_from_meeting_is_told_at_once() -> None:
    for place in range(2):
        ((code, text),) = said(meet(place, 2, free_port(), address="somewhere.invalid"))
        assert code == 1 and text.startswith("MASTER_ADDR=somewhere.invalid: ")
    with socket.create_server(("", 0)) as taken:
        ((code, text),) = said(meet(0, 2, taken.getsockname()[1]))
    assert code == 1 and "another process listens there on " in text


def test_a_host_that_was_refused_ends_the_wait_of_all_others() -> None:
    """Those that have come are told before the rest has, and that is told as it comes."""
    port = free_port()
    first, second = meet(0, 4, port), meet(1, 4, port)
    refused = refuse(2, 4, port, "NODE_RANK=2 is refused:\n x=1: use 2")
    assert said(second, refused) == [(1, "NODE_RANK=2 is refused: x=1: use 2"), (0, "")]
    assert first.poll() is None
    assert said(meet(3, 4, port), first) == [(1, "NODE_RANK=2 is refused: x=1: use 2")] * 2


def test_who_does_not_know_the_secret_ends_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv(VARIABLE, "other" * 8)
    stranger = refuse(1, 2, port, "mine")
    monkeypatch.setenv(VARIABLE, SECRET)
    first = meet(0, 2, port)
    for line in stranger.stderr or ():  # it has been there, and goes on trying
        assert "does not know the secret of this launch" in line
        break
    assert said(meet(1, 2, port), first) == [(0, "")] * 2
    stranger.kill()
    stranger.communicate()


def test_hosts_meet_with_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that has no certificate is not heard, and says why; files that cannot be used are refused at once."""
    port, files = free_port(), make_files(tmp_path / "tls")
    stranger = refuse(1, 2, port, "mine")
    for variable, path in files.variables.items():
        monkeypatch.setenv(variable, path)
    first = meet(0, 2, port)
    for line in stranger.stderr or ():
        assert "does it alone use TLS?" in line
        break
    assert said(meet(1, 2, port), first) == [(0, "")] * 2
    stranger.kill()
    stranger.communicate()
    files.key.chmod(0o644)
    ((code, text),) = said(meet(0, 2, free_port()))
    assert code == 1 and text.startswith(f"--tls-key-file {files.key}: others may access it (mode 644)")


def test_without_a_secret_host_0_says_so_and_one_that_is_too_short_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    alone = meet(0, 2, free_port(), "--timeout", "0.1")
    assert f"{VARIABLE} is not set: any process that reaches port" in alone.communicate(timeout=LIMIT_S)[1]
    monkeypatch.setenv(VARIABLE, "short")
    ((code, text),) = said(meet(0, 2, free_port()))
    assert code == 1 and text.startswith(f"{VARIABLE}: has 5 characters")


def test_host_0_tells_of_its_own_refusal() -> None:
    """Of two that are refused each has said its own already."""
    port = free_port()
    started = refuse(0, 3, port, "zero"), meet(1, 3, port), refuse(2, 3, port, "two")
    assert said(*started) == [(0, ""), (1, "zero"), (0, "")]


def test_a_refusal_that_nobody_can_be_told_of_is_no_error() -> None:
    with socket.create_server(("", 0)) as taken:
        assert said(refuse(0, 2, taken.getsockname()[1], "zero")) == [(0, "")]
    nobody = [refuse(place, None, free_port(), "zero") for place in (0, 1)]
    assert [process.poll() for process in nobody] == [None, None]
    for process in nobody:
        process.kill()
        process.communicate(timeout=LIMIT_S)
