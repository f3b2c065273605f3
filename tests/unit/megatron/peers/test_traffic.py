"""When copies may go: the profile of a step, the idle spans in it, the token bucket, a sender that keeps to them."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from megatron.peers.client import Peer, Sent, send_copies
from megatron.peers.pacing import MEASURED, Pacing
from megatron.peers.rdma import ports_of_nccl
from megatron.peers.traffic import (
    HELD_NS,
    STALLED_NS,
    VARIABLE,
    Copy,
    Counters,
    LinkRate,
    Observation,
    Profile,
    Span,
    Step,
    StepTimes,
    TokenBucket,
    Traffic,
    interface_towards,
    observe_steps,
    own_step_times,
    profile_of,
    read_counters,
    read_port,
    share_step_times,
    step_times,
)
from megatron.peers.wire import Channel, connect
from restart_trace.clock import now_ns
from restart_trace.cycles import LAUNCH_ID_VARIABLE
from tests.unit.megatron.peers.test_copies import DEADLINE_S, Host, content, fill, let_in

MS = 1_000_000
RATE = 1e8  # bytes a second: 100 kB a ms
STEP = Profile(1000 * MS, (Span(0, 280 * MS), Span(420 * MS, 780 * MS)))


def carried(*spans: tuple[int, int], rate: float = RATE) -> list[tuple[Span, list[int]]]:
    """Spans in ms, at that rate, of one link."""
    return [(Span(start * MS, stop * MS), [int((stop - start) * rate / 1000)]) for start, stop in spans]


def test_idle_is_what_fewer_than_half_of_the_steps_use_with_a_margin() -> None:
    steps = [
        Step(900 * MS, carried((300, 350), (350, 400))),
        Step(1000 * MS, carried((310, 410), (600, 700))),  # the latter in no other step
        Step(1100 * MS, [*carried((500, 510), rate=0.04 * RATE), *carried((990, 1100))]),
        Step(1000 * MS, [*carried((500, 510), rate=0.04 * RATE), *carried((990, 1000))]),
    ]
    assert profile_of(steps, [RATE]) == Profile(1000 * MS, [Span(0, 290 * MS), Span(420 * MS, 970 * MS)])
    assert profile_of([Step(10 * MS, [])] * 4, [0.0]).idle == [Span(0, 10 * MS)]
    assert profile_of([Step(10 * MS, carried((0, 10)))] * 4, [RATE]).idle == []


@pytest.mark.parametrize(("steps", "busy"), [(2, 2), (3, 2), (4, 2), (20, 10)])
def test_idle_does_not_shrink_with_the_number_of_steps(steps: int, busy: int) -> None:
    """Traffic moves a little from step to step: in more of them it is at any instant once."""

    def idle(used_by: int) -> list[Span]:
        quiet = [Step(1000 * MS, carried((0, 100)))] * (steps - used_by)
        used = [Step(1000 * MS, carried((0, 100), (500, 600)))] * used_by
        return list(profile_of([*quiet, *used], [RATE]).idle)

    assert idle(busy - 1) == [Span(120 * MS, 1000 * MS)]
    assert idle(busy) == [Span(120 * MS, 480 * MS), Span(620 * MS, 1000 * MS)]


def test_spans_that_are_too_short_are_left_out_and_of_the_others_a_share_is_used() -> None:
    steps = [Step(1000 * MS, carried((100, 200), (210, 600)))] * 4
    assert profile_of(steps, [RATE]).idle == [Span(0, 80 * MS), Span(620 * MS, 1000 * MS)]
    assert profile_of(steps, [RATE], Pacing(shortest_ms=80)).idle == [Span(620 * MS, 1000 * MS)]
    assert profile_of(steps, [RATE], Pacing(shortest_ms=79, alpha=0.5)).idle == [
        Span(0, 40 * MS),
        Span(620 * MS, 810 * MS),
    ]


@pytest.mark.parametrize(
    ("since", "pause"),
    [
        (0, 0),
        (270 * MS, 0),  # a chunk of 10 ms just fits before the traffic
        (271 * MS, 149 * MS),  # it does not: after the traffic, then
        (420 * MS, 0),
        (771 * MS, 5 * MS),  # nothing is left of this step
    ],
)
def test_a_chunk_goes_where_it_fits(since: int, pause: int) -> None:
    assert STEP.pause_before(since, 10 * MS) == pause


def test_the_bucket_keeps_the_rate() -> None:
    bucket = TokenBucket()
    assert bucket.pause(1 << 40, 0) == 0, "unlimited until the rate is known"
    bucket.rate = 1e9  # a byte a ns
    now, passed = MS, 0
    for _ in range(1000):
        pause = bucket.pause(100_000, now)
        now += pause
        passed += 0 if pause else 100_000
    assert passed >= 100_000 * 499
    assert passed - 10_000_000 <= now - MS <= passed, "10 ms at this rate may go together"


DEVICE = """
import os, sys
from pathlib import Path
port = Path(sys.argv[1])
(port / "counters").mkdir(parents=True)
(port / "state").write_text("4: ACTIVE\\n")
def count(name, words):
    (port / "new").write_text(f"{words}\\n")
    os.replace(port / "new", port / "counters" / name)
count("port_rcv_data", 0)
count("port_xmit_data", 0)
print(flush=True)
for line in sys.stdin:
    steps, ms = divmod(int(line), 20)
    count("port_xmit_data", 25_000 * (3 * steps + min(3, max(0, ms - 5))))
    print(flush=True)
"""


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepTimes]:
    monkeypatch.setenv(VARIABLE, "")
    assert own_step_times(0) is None
    shared = step_times(share_step_times(2))
    assert own_step_times(2) is None
    mine = own_step_times(1)
    assert mine is not None
    mine.begin(123)
    mine.set_waiting(True)
    one = shared[1]
    assert (one.steps, one.began_ns, one.waits) == (1, 123, True)
    assert (shared[0].steps, shared[0].waits) == (0, False), "ranks do not share what they tell"
    mine.reset()
    assert (one.steps, one.waits) == (0, False), "what the one before it has told is over"
    yield one
    os.close(int(os.environ[VARIABLE]))


def test_the_interface_counts_what_goes_over_it() -> None:
    name = interface_towards("127.0.0.1", 9)
    found = [read_counters(name) for _ in range(100)]
    before = next(counters for counters in found if counters is not None)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as one:
        other, _ = listening.accept()
        with other:
            one.sendall(bytes(50_000))
            assert len(other.recv(50_000, socket.MSG_WAITALL)) == 50_000
    after = next(counters for counters in (read_counters(name) for _ in range(100)) if counters is not None)
    assert after.since(before) >= 50_000 and after.at_ns > before.at_ns


def test_steps_are_observed_without_what_training_waits_for(times: StepTimes) -> None:
    """Each of 20 ms, of which 3 ms carry traffic; in the third, training waits 4 ms, in which copies go."""
    at = 0

    def read() -> Counters:
        nonlocal at
        at += MS
        if at % (20 * MS) == 0:
            times.begin(at)
        since, step = at % (20 * MS), at // (20 * MS)
        times.set_waiting(step == 3 and 10 * MS < since <= 14 * MS)
        traffic = 100_000 * (step * 3 + min(3, max(0, since // MS - 5)))
        copies = 100_000 * (4 if step > 3 else min(4, max(0, since // MS - 10)) if step == 3 else 0)
        return Counters(at, 0, traffic + copies)

    link = LinkRate(read)
    steps = observe_steps([link], [times], Observation())
    assert [step.length for step in steps] == [20 * MS, 20 * MS, 16 * MS, 20 * MS], "whole ones only"
    for step in steps:
        assert step.carried == carried((5, 6), (6, 7), (7, 8))
    assert link.bytes_per_s == RATE * 7 / 10, "the most in 10 ms"


def test_copies_keep_to_the_profile_unless_training_waits(times: StepTimes) -> None:
    traffic, began = Traffic([times]), now_ns()
    traffic.profile = STEP
    times.begin(began)
    copy = traffic.begin("127.0.0.1", 9)
    assert traffic.ask(copy, 4096, began + 100 * MS) == (4096, 0)
    assert traffic.ask(copy, 4096, began + 350 * MS) == (0, 5 * MS), "training uses the network"
    assert traffic.ask(copy, 4096, began + 450 * MS) == (4096, 0)
    assert copy.at_once_bytes == 0
    assert traffic.ask(copy, 4096, began + 2001 * MS) == (4096, 0), "no step is under way"
    times.set_waiting(True)
    assert traffic.ask(copy, 4096, began + 350 * MS) == (4096, 0)
    times.set_waiting(False)
    assert traffic.ask(copy, 4096, began + 350 * MS)[0] == 0
    times.begin(began + HELD_NS)
    assert traffic.ask(copy, 4096, began + 2 * HELD_NS) == (4096, 0), "held for long enough"
    assert copy.at_once_bytes == 3 * 4096


def test_a_copy_sends_so_many_blocks_in_a_span_and_as_many_in_the_next(times: StepTimes) -> None:
    traffic, began = Traffic([times]), now_ns()
    traffic.profile = STEP
    times.begin(began)
    copy, other = [traffic.begin("127.0.0.1", 9, Pacing(blocks=2, block_bytes=1000)) for _ in range(2)]
    assert [traffic.ask(copy, 4096, began + at * MS) for at in (100, 110, 120)] == [(1000, 0), (1000, 0), (0, 5 * MS)]
    assert traffic.ask(other, 4096, began + 120 * MS) == (1000, 0), "each copy has its own"
    assert [traffic.ask(copy, 4096, began + at * MS) for at in (430, 440, 450)] == [(1000, 0), (1000, 0), (0, 5 * MS)]
    times.begin(began + 1000 * MS)
    assert traffic.ask(copy, 500, began + 1100 * MS) == (500, 0), "the first span of the next step"
    times.set_waiting(True)
    assert traffic.ask(copy, 4096, began + 1450 * MS) == (4096, 0), "training waits for all"


def test_a_block_is_as_long_as_asked_for_but_no_other_chunk_is_longer_than_1_mib(times: StepTimes) -> None:
    traffic, began, left = Traffic([times]), now_ns(), 64 << 20
    traffic.profile = STEP
    times.begin(began)
    given, measured = (traffic.begin("127.0.0.1", 9, pacing) for pacing in (Pacing(block_bytes=16 << 20), Pacing()))
    assert traffic.ask(measured, left, began + 100 * MS) == (1 << 20, 0)
    traffic.begin("127.0.0.1", 9, Pacing(block_bytes=16 << 20))
    assert traffic.ask(given, left, began + 110 * MS) == (16 << 20, 0)
    times.set_waiting(True)
    assert traffic.ask(given, left, began + 120 * MS) == (1 << 20, 0), "then to be asked again"
    assert traffic.statistics([given])["longest_idle_s"] == max(span.stop - span.start for span in STEP.idle) / 1e9


def test_as_many_steps_are_observed_as_asked_for(times: StepTimes) -> None:
    at = 0

    def read() -> Counters:
        nonlocal at
        at += 10 * MS
        times.begin(at)
        return Counters(at, 0, 0)

    assert len(observe_steps([LinkRate(read)], [times], Observation(), 7)) == 7


def test_a_step_in_which_copies_went_is_not_profiled(times: StepTimes) -> None:
    """Of steps of 20 ms the second is disturbed."""
    at, seen = 0, Observation()

    def read() -> Counters:
        nonlocal at
        at += MS
        if at % (20 * MS) == 0:
            times.begin(at)
        if at == 45 * MS:
            seen.disturbed = times.steps
        return Counters(at, 0, at // MS * 100_000 if 40 * MS < at < 60 * MS else 0)

    steps = observe_steps([LinkRate(read)], [times], seen)
    assert at == 20 * MS * 6 and len(steps) == 4
    assert seen.longest_ns == 20 * MS
    assert [step.carried for step in steps] == [[], [], [], []]


def test_a_copy_goes_at_once_where_no_step_ends_before_there_is_a_profile(times: StepTimes) -> None:
    traffic, began = Traffic([times]), now_ns()
    times.begin(began)
    copy = Copy(traffic)
    copy.asked_ns = began + MS
    assert traffic.ask(copy, 4096, began + STALLED_NS)[0] == 0
    assert traffic.ask(copy, 4096, began + STALLED_NS + 2 * MS) == (4096, 0)
    assert (copy.at_once_bytes, copy.stalled_bytes, traffic.seen.disturbed) == (4096, 4096, 1)
    traffic.seen.longest_ns = STALLED_NS
    assert traffic.ask(copy, 4096, began + STALLED_NS + 2 * MS)[0] == 0, "steps are as long as that"
    assert traffic.ask(copy, 4096, began + 2 * STALLED_NS + 2 * MS) == (4096, 0)
    times.begin(began + 3 * STALLED_NS)
    assert traffic.ask(copy, 4096, began + 3 * STALLED_NS + MS)[0] == 0, "training goes on"
    assert traffic.statistics([copy])["stalled_bytes"] == 8192


def test_traffic_of_rdma_is_traffic_though_the_interface_carries_none(times: StepTimes, tmp_path: Path) -> None:
    """Another process is the device: it counts 100 kB more in each ms of 5 to 8 of a step of 20 ms, which this one asks
    for by writing the time.
    """
    port = tmp_path / "mlx5_0" / "ports" / "1"
    with subprocess.Popen([sys.executable, "-c", DEVICE, port], stdin=PIPE, stdout=PIPE, text=True) as device:
        assert device.stdin is not None and device.stdout is not None
        device.stdout.readline()
        (found,) = ports_of_nccl({}, tmp_path)
        at = 0

        def read() -> Counters:
            assert device.stdin is not None and device.stdout is not None
            print(at // MS, file=device.stdin, flush=True)
            device.stdout.readline()
            while (counters := read_port(found)) is None:  # reading took long
                pass
            return counters._replace(at_ns=at)

        def interface() -> Counters:
            nonlocal at
            at += MS
            if at % (20 * MS) == 0:
                times.begin(at)
            return Counters(at, 0, 0)

        links = [LinkRate(interface), LinkRate(read)]
        steps = observe_steps(links, [times], Observation())
        device.stdin.close()
    assert [link.bytes_per_s for link in links] == [0, RATE * 3 / 10]
    idle = profile_of(steps, [link.bytes_per_s for link in links]).idle
    assert [span.start for span in idle] == [0, 8.4 * MS] and idle[0].stop == 4.6 * MS


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, "launch0")
    one = Host()
    yield one
    one.close()


class Taker:
    """A peer that takes a copy, and notes when its first byte came."""

    def __init__(self, size: int) -> None:
        self.asked, self.complete, self.first_ns = threading.Event(), threading.Event(), 0
        self.taken = bytearray(size)
        listening = socket.create_server(("127.0.0.1", 0))
        self.peer = Peer("taker", *listening.getsockname())
        self._thread = threading.Thread(target=self._take, args=(listening,), daemon=True)
        self._thread.start()

    def _take(self, listening: socket.socket) -> None:
        with listening, Channel(let_in(listening), DEADLINE_S) as channel:
            channel.hear()
            channel.tell(go=True)
            self.asked.set()
            channel.hear()
            view = memoryview(self.taken)
            channel.receive_into(view[:1])
            self.first_ns = now_ns()
            channel.receive_into(view[1:])
            self.complete.set()
            channel.tell(done=True)


def sent_by(host: Host, taker: Taker) -> tuple[threading.Thread, list[Sent]]:
    found: list[Sent] = []

    def send() -> None:
        found.append(send_copies(host.peer, 0, [taker.peer], None, DEADLINE_S, interleave=MEASURED))

    thread = threading.Thread(target=send)
    thread.start()
    return thread, found


def test_a_copy_is_held_until_steps_are_profiled_or_training_waits(host: Host) -> None:
    saved = content(1_000_000)
    fill(host.slots[0], saved, "s1")
    (times,) = step_times(host.process.step_times_file)
    times.begin(now_ns())
    taker = Taker(len(saved))
    thread, found = sent_by(host, taker)
    assert taker.asked.wait(DEADLINE_S)
    thread.join(0.5)  # a sender that does not wait would have begun; one that does cannot have
    waits_from = now_ns()
    times.set_waiting(True)
    thread.join(DEADLINE_S)
    assert taker.taken == saved and taker.first_ns > waits_from
    ((num_bytes, errors, told, _),) = found
    assert (num_bytes, errors, told["at_once_bytes"], told["idle_s"]) == (len(saved), [], len(saved), None)
    assert told["waited_s"] > 0

    times.set_waiting(False)
    taker = Taker(len(saved))
    thread, found = sent_by(host, taker)
    while thread.is_alive():
        times.begin(now_ns())
        thread.join(0.05)
    assert taker.taken == saved
    ((_, errors, told, _),) = found
    assert errors == [] and told["idle_s"] is not None and math.isfinite(told["bytes_per_s"])


def test_a_copy_whose_rank_has_ended_is_held_no_longer(host: Host) -> None:
    """It would keep the peer from taking the copy of the rank's successor."""
    saved = content(1_000_000)
    fill(host.slots[0], saved, "s1")
    (times,) = step_times(host.process.step_times_file)
    times.begin(now_ns())
    taker = Taker(len(saved))
    with connect(host.peer.address, host.peer.port, DEADLINE_S) as channel:
        told = {"slot": 0, "peers": [taker.peer], "keep": None, "timeout_s": 0.4, "interleave": MEASURED}
        channel.tell(launch="launch0", ask="send", **told)
        assert taker.asked.wait(DEADLINE_S)
        assert taker.first_ns == 0
    assert taker.complete.wait(HELD_NS / 2e9)
    assert taker.taken == saved
