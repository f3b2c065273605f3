"""Which hosts hold the copies of which host's saves.

The placements are those of Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints", SOSP 2023 (doi:10.1145/3600006.3613145), section 4. `ckpt-analysis project` says how likely each of them
survives the loss of hosts; a test counts that over the placements that this module makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_UNSERVED = (
    "copies on other hosts are held by the agents of megatron.launch; start it with a coordinator (restart-launch "
    "coordinate, or MAX_RESTARTS of the launch scripts)"
)


class PlacementError(ValueError):
    """Copies cannot be placed; the message names flag, value and fix."""


def number_of_copies(asked: int | None, hosts: int, served: bool) -> tuple[int, str | None]:
    """Number of copies of each save on so many hosts, and a warning or None.

    `asked`: the value of --replicas. `served`: every host has a process that holds copies. Raises PlacementError.
    """
    if asked == 1:
        return 1, None
    if asked is not None and asked > hosts:
        raise PlacementError(
            f"--replicas {asked}: more copies than hosts ({hosts}); give {hosts} at most, or more hosts"
        )
    if hosts == 1 or not served:
        if asked is not None:
            raise PlacementError(f"--replicas {asked}: {_UNSERVED}")
        why = "this is one host" if hosts == 1 else _UNSERVED
        return 1, (
            f"--checkpoint-engine memory: {why}, so its saves are in memory of their own host alone: what a lost host "
            "had is loaded from --save"
        )
    return asked or 2, None


def holders(hosts: int, copies: int, *, ring: bool = False) -> list[tuple[int, ...]]:
    """For each of so many hosts the others that hold copies of its saves; `copies` counts its own.

    Groups of `copies` hosts, each of which holds the saves of all its group. If `copies` does not divide `hosts`, the
    last group and what is left over form a ring (mixed). `ring`: all hosts do. In a ring the next ones hold the copies.
    """
    groups = 0 if ring else hosts // copies - (hosts % copies != 0)
    found: list[tuple[int, ...]] = []
    for group in range(groups):
        members = range(group * copies, (group + 1) * copies)
        found += [tuple(other for other in members if other != host) for host in members]
    first = groups * copies
    size = hosts - first
    for at in range(size):
        found.append(tuple(first + (at + step) % size for step in range(1, copies)))
    return found


def place(hosts: Sequence[str], copies: int, domains: Mapping[str, str] | None) -> list[tuple[int, ...]]:
    """As `holders`, by index into `hosts`, with no two copies in one of the `domains` (host -> failure domain).

    Raises PlacementError if that cannot be.
    """
    order = list(range(len(hosts))) if domains is None else _apart([domains[host] for host in hosts], copies)
    found: list[tuple[int, ...]] = [()] * len(hosts)
    for at, others in enumerate(holders(len(hosts), copies)):
        found[order[at]] = tuple(order[other] for other in others)
    if domains is not None:
        _check_apart(hosts, found, domains, copies)
    return found


def _apart(domains: Sequence[str], copies: int) -> list[int]:
    """An order of the hosts in which so many in a row are of different domains, as far as that goes.

    The domain with the most hosts left comes next, of those that the hosts just before are not of.
    """
    left: dict[str, list[int]] = {}
    for host, domain in enumerate(domains):
        left.setdefault(domain, []).append(host)
    order: list[int] = []
    while len(order) < len(domains):
        before = {domains[host] for host in order[len(order) - (copies - 1) :]} if copies > 1 else set()
        free = [domain for domain in left if left[domain] and domain not in before]
        free = free or [domain for domain in left if left[domain]]
        order.append(left[max(free, key=lambda domain: len(left[domain]))].pop(0))
    return order


def _check_apart(hosts: Sequence[str], found: Sequence[Sequence[int]], domains: Mapping[str, str], copies: int) -> None:
    for host, others in enumerate(found):
        group = [hosts[host], *(hosts[other] for other in others)]
        if len({domains[name] for name in group}) < copies:
            sizes: dict[str, int] = {}
            for name in hosts:
                sizes[domains[name]] = sizes.get(domains[name], 0) + 1
            counts = ", ".join(f"{domain} {number}" for domain, number in sorted(sizes.items()))
            raise PlacementError(
                f"--failure-domain: {copies} copies of each save on {len(hosts)} hosts cannot all be in different "
                f"domains (hosts of each: {counts}); spread the hosts more evenly over domains, or lower --replicas"
            )


def read_domains(path: str) -> dict[str, str]:
    """host -> failure domain, of a file with one `HOST DOMAIN` a line; # begins a comment. Raises PlacementError."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no text"
        raise PlacementError(f"--failure-domain {path}: cannot be read: {why}; give a readable file") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[0] in found:
            why = f"names {words[0]} again" if len(words) == 2 else "is not HOST DOMAIN"
            raise PlacementError(f"--failure-domain {path}: line {number} {why}; give each host one line")
        found[words[0]] = words[1]
    return found
