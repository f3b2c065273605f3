"""When a host's network carries no traffic of training, and how copies of saves keep to these times.

After GEMINI (Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints", SOSP
2023, section 5): traffic of training is alike from step to step, so some steps are profiled for the spans in which they
leave the network idle, and copies go in chunks within them. What is profiled here is the network interface itself, by
the kernel's counters, and each RDMA port that NCCL uses, by its own, in steps without copies: those are held until
training waits for them. A rank tells when a step
begins, and each rank when training waits for a save, in memory that it shares with the process that sends copies. A
token bucket is filled a little faster than the interface has been seen to carry, so that no long queue is left when an
idle span ends.

What the idle spans did not take goes at once when training waits for it.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.peers.pacing import MEASURED, Pacing
from megatron.peers.rdma import Port
from megatron.peers.wire import PeerError
from restart_trace.clock import now_ns

VARIABLE = "MEGATRON_STEP_TIMES"  # number of the descriptor of the memory that ranks and sender share
HELD_NS = 60_000_000_000  # at most, from the request for a copy on: a lost host costs one save more until it is there
STALLED_NS = 10_000_000_000  # before steps are profiled, no step has ended for so long: a copy is held no longer
_NAME = "megatron_step_times"
_WORDS = 3  # of 8 bytes for each rank: steps begun, ns when the last began, whether training waits for a save
_PROFILED = 4  # steps, unless Pacing says how many
_BUSY_SHARE = 0.5  # of these, and two at least, use the network at an instant that counts as busy
_VALID = 500  # steps, after which others are profiled: batches grow, data moves
_SAMPLE_S = 0.002
_READ_NS = 1_000_000  # a sample whose reading took longer says nothing of when
_BUSY = 0.05  # of the rate of the network: less is no traffic of training, but heartbeats and such
_WINDOW_NS = 10_000_000  # over which a rate is taken
_CHUNK = 256 << 10  # bytes
_LONGEST_CHUNK = 1 << 20  # before it is asked again whether training waits
_CHUNK_NS = 2_000_000  # a chunk is larger if the network takes more in this time
_BURST_NS = 10_000_000  # for which a bucket holds tokens: a thread may be late by that without a loss
_PROBE = 1.1  # the bucket is filled faster by that, else a rate that was taken too low would stay
_SHORTEST_NS = 2_000_000  # an idle span that is shorter is not used, unless Pacing says which
_MARGIN = 0.02  # of a step: kept free before and after traffic, for steps are not quite alike
_LATE = 2.0  # steps' time after which none is under way: ranks evaluate, load or have ended
_POLL_NS = 5_000_000


class Span(NamedTuple):
    """Ns since a step began."""

    start: int
    stop: int


class Step(NamedTuple):
    """One that was profiled: its length, ns, and (when, bytes by link) of what the links carried, in order."""

    length: int
    carried: Sequence[tuple[Span, Sequence[int]]]


class Profile(NamedTuple):
    """A step as it is expected, ns: its length, and when no training uses the network."""

    length: int
    idle: Sequence[Span]

    def pause_before(self, since: int, chunk: int, past: Span | None = None) -> int:
        """Ns to wait until a chunk that takes `chunk` ns may be sent, `since` ns after the step began; 0: now.

        At the end of a step nobody knows when the next one begins: then it is time to ask again. `past`: the span in
        which no more may be sent, nor before it.
        """
        for span in self.idle:
            if max(since, span.start) + chunk <= span.stop and (past is None or span.start > past.start):
                return max(0, span.start - since)
        return _POLL_NS

    def span_at(self, since: int) -> Span | None:
        """The idle span `since` ns after the step began."""
        return next((span for span in self.idle if span.start <= since < span.stop), None)


def profile_of(steps: Sequence[Step], rates: Sequence[float], pacing: Pacing = MEASURED) -> Profile:
    """The median length, and when fewer than `_BUSY_SHARE` of the steps use any link, with a margin around traffic.

    `rates`: bytes a second that each link can carry.
    """
    shortest = _SHORTEST_NS if pacing.shortest_ms is None else int(pacing.shortest_ms * 1e6) + 1
    alpha = 1.0 if pacing.alpha is None else pacing.alpha
    length = int(statistics.median(step.length for step in steps))
    edges: list[tuple[int, int]] = []
    for step in steps:
        for span, by_link in step.carried:
            least = [_BUSY * rate * (span.stop - span.start) for rate in rates]
            if any(num_bytes * 1e9 > busy for num_bytes, busy in zip(by_link, least, strict=True)):
                edges += [(span.start, 1), (span.stop, -1)]
    margin, using, began = int(_MARGIN * length), 0, 0
    busy_in = max(2, math.ceil(_BUSY_SHARE * len(steps)))  # one step alone may be disturbed
    busy: list[Span] = []
    for at, change in sorted(edges):
        using += change
        if change > 0 and using == busy_in:
            began = at
        elif change < 0 and using == busy_in - 1:
            busy.append(Span(began - margin, at + margin))
    idle, position = [], 0
    for start, stop in [*busy, Span(length, length)]:
        if start - position >= shortest:
            idle.append(Span(position, position + int(alpha * (min(start, length) - position))))
        position = max(position, stop)
    return Profile(length, idle)


class StepTimes:
    """What one rank tells of its steps, in shared memory. It writes, the sender reads."""

    def __init__(self, words: memoryview) -> None:
        """`words`: `_WORDS` signed integers of 8 bytes."""
        self._words = words

    def reset(self) -> None:
        """A rank that begins: what the one in its place before it has told is over."""
        self._words[0] = self._words[2] = 0

    @property
    def steps(self) -> int:
        """How many have begun."""
        return self._words[0]

    @property
    def began_ns(self) -> int:
        """When the last one did, monotonic."""
        return self._words[1]

    @property
    def waits(self) -> bool:
        return bool(self._words[2])

    def begin(self, began_ns: int) -> None:
        self._words[1] = began_ns
        self._words[0] += 1

    def set_waiting(self, waits: bool) -> None:
        """Whether training waits for a save."""
        self._words[2] = int(waits)


def share_step_times(ranks: int) -> int:
    """In a launcher, before it forks: a file in memory for what the ranks of this host tell; they find it by their
    environment."""
    number = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    os.ftruncate(number, max(1, ranks) * _WORDS * 8)
    os.environ[VARIABLE] = str(number)
    return number


def own_step_times(local_rank: int) -> StepTimes | None:
    """In a rank: what it tells; None without a launcher that has a sender of copies."""
    text = os.environ.get(VARIABLE, "")
    try:  # the environment alone says nothing: a process that was started, not forked, has no such descriptor
        if f"/memfd:{_NAME}" not in os.readlink(f"/proc/self/fd/{text}"):
            return None
    except OSError:
        return None
    found = step_times(int(text))
    return found[local_rank] if local_rank < len(found) else None


def step_times(number: int) -> list[StepTimes]:
    """What each rank tells in that file."""
    words = memoryview(mmap.mmap(number, 0)).cast("q")
    return [StepTimes(words[at : at + _WORDS]) for at in range(0, len(words), _WORDS)]


class Counters(NamedTuple):
    """Of a link, an interface or an RDMA port: bytes that it has received and sent until `at_ns`, monotonic."""

    at_ns: int
    received: int
    sent: int

    def since(self, before: Counters) -> int:
        """Bytes of the direction that carried more."""
        return max(self.received - before.received, self.sent - before.sent)


def interface_towards(address: str, port: int) -> str:
    """Name of the network interface by which this host reaches another. Raises PeerError."""
    import psutil  # which `restart-launch --help` may be without

    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # sends nothing
            own = probe.getsockname()[0]
    except OSError as error:
        raise PeerError(f"cannot be reached: {error.strerror or error}") from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            return name
    raise PeerError(f"is reached from {own}, an address of no network interface; use --replication-traffic naive")


def read_counters(interface: str) -> Counters | None:
    """Of this process's network namespace (proc(5), /proc/net/dev); None if it was not known when they were read."""
    at_ns, (table,) = _read(Path("/proc/self/net/dev"))
    for line in table.splitlines():
        name, _, rest = line.partition(":")
        if at_ns is not None and name.strip() == interface:
            words = rest.split()
            return Counters(at_ns, int(words[0]), int(words[8]))
    return None


def read_port(port: Port) -> Counters | None:
    """Of an RDMA port; None if it was not known when they were read. Raises ValueError if it has none."""
    if port.files is None:
        raise ValueError(f"{port.directory} has no counters of what it carries")
    *files, unit = port.files
    at_ns, (received, sent) = _read(*files)
    return None if at_ns is None else Counters(at_ns, int(received) * unit, int(sent) * unit)


def _read(*files: Path) -> tuple[int | None, list[str]]:
    """When, ns, and what each file holds; None if reading took too long to say when."""
    before = now_ns()
    texts = [file.read_text() for file in files]
    now = now_ns()
    return now if now - before <= _READ_NS else None, texts


class LinkRate:
    """The most that a link has carried in a window, bytes a second; 0 if nothing. By any thread."""

    def __init__(self, read: Callable[[], Counters | None]) -> None:
        self.bytes_per_s = 0.0
        self._read = read
        self._window: deque[Counters] = deque()
        self._lock = threading.Lock()

    def sample(self) -> Counters | None:
        """Read the counters, and take note of them."""
        found = self._read()
        with self._lock:
            if found is None or (self._window and found.at_ns <= self._window[-1].at_ns):
                return None
            self._window.append(found)
            while len(self._window) > 2 and found.at_ns - self._window[1].at_ns >= _WINDOW_NS:
                self._window.popleft()
            took = found.at_ns - self._window[0].at_ns
            if took >= _WINDOW_NS:
                self.bytes_per_s = max(self.bytes_per_s, found.since(self._window[0]) / took * 1e9)
        return found


class Observation:
    """What is known of steps before they are profiled."""

    def __init__(self) -> None:
        self.longest_ns = 0  # of those that were seen from their beginning to their end
        self.disturbed = 0  # number of the last one in which copies went while training did not wait

    @property
    def stalled_ns(self) -> int:
        """A step that lasts longer than that is stalled."""
        return max(STALLED_NS, int(_LATE * self.longest_ns))


def observe_steps(
    links: Sequence[LinkRate], times: Sequence[StepTimes], seen: Observation, count: int = _PROFILED
) -> list[Step]:
    """Watch `count` whole steps: what the links carry, but for the time in which training waits for a save.

    A step in which copies went otherwise says nothing of training's traffic, and does not count.
    """
    steps: list[Step] = []
    carried: list[tuple[Span, Sequence[int]]] = []
    number, began, waited = times[0].steps, 0, 0  # the step under way does not count: its beginning was not seen
    before = None
    while len(steps) < count:
        time.sleep(_SAMPLE_S)
        found = [link.sample() for link in links]
        counted = [one for one in found if one is not None]
        if len(counted) < len(links):
            continue
        now = counted[0]
        if times[0].steps != number:
            if began and times[0].steps == number + 1:
                seen.longest_ns = max(seen.longest_ns, times[0].began_ns - began)
                if number != seen.disturbed:
                    steps.append(Step(times[0].began_ns - began - waited, carried))
            elif times[0].steps < number:  # ranks that began anew
                steps.clear()
            number, began, waited, carried = times[0].steps, times[0].began_ns, 0, []
        if before is not None and any(one.waits for one in times):
            waited += now.at_ns - before[0].at_ns
        elif before is not None and began:
            since, more = began + waited, [one.since(earlier) for one, earlier in zip(counted, before, strict=True)]
            if any(more):
                carried.append((Span(max(0, before[0].at_ns - since), now.at_ns - since), more))
        before = counted
    return steps


class TokenBucket:
    """Lets bytes pass at a rate, in bytes a second, which is infinite until it is set."""

    def __init__(self) -> None:
        self.rate = math.inf
        self._tokens = 0.0
        self._at_ns = 0

    def pause(self, count: int, at_ns: int) -> int:
        """Take `count` bytes, and return 0; or take none, and return the ns until there are so many."""
        if self.rate == math.inf:
            return 0
        most = max(count, self.rate * _BURST_NS / 1e9)
        self._tokens = min(most, self._tokens + self.rate * (at_ns - self._at_ns) / 1e9)
        self._at_ns = at_ns
        if self._tokens < count:
            return math.ceil((count - self._tokens) / self.rate * 1e9)
        self._tokens -= count
        return 0


class Copy:
    """One copy on its way to a peer."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self.asked_ns = now_ns()  # 0: it is to be held no longer
        self.waited_ns = 0
        self.blocks = 0  # sent in `span` of step number `step`, while training does not wait
        self.span: tuple[int, Span] | None = None
        self.at_once_bytes = 0  # sent whatever training does
        self.stalled_bytes = 0  # of these: since no step had ended for long, and none had been profiled

    def before(self, count: int) -> int:
        """Wait until a chunk of the `count` bytes that are left may go; its size. For `Connection.send_file`."""
        began = now_ns()
        while True:
            now = now_ns()
            granted, pause = self._traffic.ask(self, count, now)
            if granted:
                break
            time.sleep(pause / 1e9)
        self.waited_ns += now - began
        return granted


class Traffic:
    """All copies that a host sends, and when they may. `times`: of each of its ranks; the first one tells of steps.

    `ports`: RDMA ports that training uses, too; those without counters are left out.
    """

    def __init__(self, times: Sequence[StepTimes], ports: Sequence[Port] = ()) -> None:
        self._times = times
        self._ports = [LinkRate(functools.partial(read_port, port)) for port in ports if port.files is not None]
        self._bucket = TokenBucket()
        self._lock = threading.Lock()
        self._link: LinkRate | None = None  # which carries the copies
        self.profile: Profile | None = None  # of the newest steps that were profiled
        self._profiled_at = 0  # number of a step
        self._profiling = False
        self._pacing = MEASURED
        self.seen = Observation()  # of steps, until a profile is there

    def begin(self, address: str, port: int, pacing: Pacing = MEASURED) -> Copy:
        """A copy to that peer. `pacing`: the same for all copies of a host. Raises PeerError."""
        with self._lock:
            self._pacing = pacing
            if self._link is None:
                interface = interface_towards(address, port)
                self._link = LinkRate(lambda: read_counters(interface))
            if not 0 <= self._times[0].steps - self._profiled_at <= _VALID:
                self.profile = None
            if self.profile is None and not self._profiling:
                self._profiling, self.seen = True, Observation()
                links = [self._link, *self._ports]
                threading.Thread(target=self._take_profile, args=(links, self.seen), daemon=True).start()
        return Copy(self)

    def _take_profile(self, links: Sequence[LinkRate], seen: Observation) -> None:
        pacing = self._pacing
        steps = observe_steps(links, self._times, seen, pacing.profile_steps or _PROFILED)
        with self._lock:
            self.profile = profile_of(steps, [link.bytes_per_s for link in links], pacing)
            self._profiled_at = self._times[0].steps
            self._profiling = False

    def statistics(self, copies: Sequence[Copy]) -> Mapping[str, Any]:
        """How the copies of one save were sent, for the rank that asked for them."""
        idle = () if self.profile is None else self.profile.idle
        return {
            "waited_s": max((copy.waited_ns for copy in copies), default=0) / 1e9,
            "at_once_bytes": sum(copy.at_once_bytes for copy in copies),
            "stalled_bytes": sum(copy.stalled_bytes for copy in copies),
            "idle_s": None if self.profile is None else sum(span.stop - span.start for span in idle) / 1e9,
            "longest_idle_s": None
            if self.profile is None
            else max((span.stop - span.start for span in idle), default=0) / 1e9,
            "bytes_per_s": 0.0 if self._link is None else self._link.bytes_per_s,
        }

    def ask(self, copy: Copy, count: int, now: int) -> tuple[int, int]:
        """(bytes that may go now, ns to wait if none may)."""
        profile, link, since = self.profile, self._link, now - self._times[0].began_ns
        over = profile is not None and since > _LATE * profile.length  # no step is under way
        if over or now - copy.asked_ns > HELD_NS or any(one.waits for one in self._times):
            count = min(count, _LONGEST_CHUNK)
            copy.at_once_bytes += count
            return count, 0
        if profile is None or link is None:
            if min(since, now - copy.asked_ns) <= self.seen.stalled_ns:
                return 0, _POLL_NS
            self.seen.disturbed = self._times[0].steps
            count = min(count, _LONGEST_CHUNK)
            copy.at_once_bytes += count
            copy.stalled_bytes += count
            return count, 0
        rate = link.bytes_per_s or math.inf
        if self._pacing.block_bytes is not None:
            count = min(count, self._pacing.block_bytes)
        else:
            count = min(count, _LONGEST_CHUNK if rate == math.inf else max(_CHUNK, int(rate * _CHUNK_NS / 1e9)))
        pause = profile.pause_before(since, int(count / rate * 1e9), self._full_span(copy, profile, since))
        if pause:
            return 0, min(pause, _POLL_NS)
        link.sample()
        with self._lock:
            self._bucket.rate = rate * _PROBE
            pause = self._bucket.pause(count, now)
        if pause:
            return 0, pause
        copy.blocks += 1
        return count, 0

    def _full_span(self, copy: Copy, profile: Profile, since: int) -> Span | None:
        """The idle span `since` ns after the step began, if the copy has sent all blocks that may go in it."""
        span = profile.span_at(since)
        if span is None:
            return None
        if copy.span != (self._times[0].steps, span):
            copy.span, copy.blocks = (self._times[0].steps, span), 0
        return span if self._pacing.blocks is not None and copy.blocks >= self._pacing.blocks else None
