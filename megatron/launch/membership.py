"""Leader election among the coordinators of a launch, in etcd, so that a standby takes over when the leader is lost.

Several coordinators are started for one launch, on different hosts. The one that creates the key `coordinator` leads;
the value is its address, which agents look up whenever they connect. The key has a lease, which the leader renews. When
the leader is lost, the lease expires, etcd deletes the key, and a standby creates it. The key `launch` holds what the
next leader needs: the generation that started last, written before that generation starts. The key `ended` holds the
exit status of the launch.

A leader that cannot reach etcd keeps the ranks that run, but starts no generation. Every write is one transaction with
the condition that the writer still holds `coordinator`, so two leaders never both start ranks (a fencing token, as in
Burrows, "The Chubby Lock Service", OSDI 2006, section 2.4).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

from megatron.launch.etcd import Etcd, MembershipError, StoreAddress, host_port
from megatron.launch.supervise import say

_LEAST_LEASE_S = 2  # the shortest that etcd grants at its default settings
_RENEW_S = 1.0  # at most, between renewals of the lease
_POLL_S = 0.2  # between a standby's attempts to lead, and between attempts to write
_RECORD_S = 0.05  # for which the coordinator waits for a write: agents wait for its answers meanwhile
_END_S = 1.0  # the same at the end of the launch
_PARTS = 10  # of it: one wait alone may be over as soon as this host, and the thread with it, has stood still


class NoLeaderError(OSError):
    """No coordinator leads at present."""


class LaunchEndedError(Exception):
    """The launch has ended; `code` is its exit status."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the launch has ended with exit status {code}")
        self.code = code


class OtherLaunchError(Exception):
    """The name belongs to a launch of another command."""


def command_digest(script: str, arguments: Sequence[str]) -> str:
    """Tells launches apart that were given the same name by mistake."""
    return hashlib.sha256(json.dumps([script, *arguments]).encode()).hexdigest()[:16]


def leader_address(address: StoreAddress, command: str) -> tuple[str, int]:
    """(host, port) of the leader. `command`: the digest of this launch's command.

    Raises NoLeaderError, LaunchEndedError, OtherLaunchError and MembershipError.
    """
    etcd = Etcd(address)
    leader = etcd.get("coordinator")
    if leader is not None:
        _check_same_launch(address, leader, command)
        return leader["host"], leader["port"]
    ended = etcd.get("ended")
    if ended is not None:
        raise LaunchEndedError(ended["code"])
    raise NoLeaderError(f"{address}: no coordinator leads at present")


def _check_same_launch(address: StoreAddress, leader: dict[str, Any], command: str) -> None:
    if leader["command"] != command:
        raise OtherLaunchError(
            f"{address}: {address.name} is the name of a launch with another script or other arguments, whose "
            f"coordinator is {_named(leader)}; give each launch a name of its own"
        )


class Leadership:
    """A coordinator's claim to lead. Once `campaign` has returned, a thread renews its lease and writes to etcd.

    `leader`: the other coordinator, once one leads in place of this one. `unreachable`: etcd does not answer.
    """

    def __init__(
        self, address: StoreAddress, me: tuple[str, int], heartbeat_timeout_s: float, launch_id: str, command: str
    ) -> None:
        self._etcd = Etcd(address)
        self._address = address
        # The time makes the value unique to this process.
        self._me = {"host": me[0], "port": me[1], "began_ns": time.time_ns(), "command": command}
        self._lease_s = max(_LEAST_LEASE_S, math.ceil(heartbeat_timeout_s))
        self._lease = ""
        self._launch_id, self._command = launch_id, command
        self._changed = threading.Condition()  # for the two below
        self._wanted: dict[str, dict[str, Any]] = {}  # key -> value that the coordinator wants to have written
        self._written: dict[str, dict[str, Any]] = {}
        self._thread = threading.Thread(target=self._keep, name="leadership", daemon=True)
        self.leader: str | None = None
        self.unreachable = False

    def campaign(self) -> dict[str, Any]:
        """Wait until this coordinator leads. Returns what is known of the launch: its `generation` and `launch_id`.

        Raises MembershipError if etcd cannot be reached at first, LaunchEndedError if the launch has ended, and
        OtherLaunchError.
        """
        standby = unreachable = False
        while True:
            try:
                known = self._try_to_lead(standby)
                unreachable = False
            except MembershipError as error:
                if not standby:
                    raise
                if not unreachable:
                    say(f"waits as a standby until etcd answers: {error}")
                known, unreachable = None, True
            if known is not None:
                self._thread.start()
                return known
            standby = True
            time.sleep(_POLL_S)

    def _try_to_lead(self, standby: bool) -> dict[str, Any] | None:
        """What is known of the launch if this coordinator leads now; None if another one does."""
        other = self._claim()
        if other is not None:
            _check_same_launch(self._address, other, self._command)
            if not standby:
                say(f"waits as a standby: the coordinator of {self._address} is {_named(other)}")
            return None
        ended = self._etcd.get("ended")
        if ended is not None and (standby or ended["launch_id"] == self._launch_id):
            self._release()
            raise LaunchEndedError(ended["code"])
        known = None if ended is not None else self._etcd.get("launch")
        if known is None:  # a new launch
            known = {"generation": -1, "launch_id": self._launch_id, "command": self._command}
        elif known["command"] != self._command:
            self._release()
            name = self._address.name
            raise OtherLaunchError(
                f"{self._address}: {name} is the name of a launch with another script or other arguments, whose "
                "coordinators were lost before it ended; give this launch another name, or delete the keys of that "
                f"one: etcdctl del --prefix restart-launch/{name}/"
            )
        else:
            say(f"takes over from the coordinator of {self._address} that was lost")
        if not self._etcd.change_while("coordinator", self._me, {"ended": None, "launch": known}):
            return None  # its lease has expired
        self._written = self._wanted = {"launch": known}
        return known

    def record(self, generation: int, launch_id: str) -> bool:
        """Whether etcd has this generation, so that it may start. Returns soon; call it again if it has not."""
        known = {"generation": generation, "launch_id": launch_id, "command": self._command}
        with self._changed:
            self._want({"launch": known})
            return self._changed.wait_for(lambda: self._written == self._wanted, _RECORD_S)

    def end(self, code: int, launch_id: str) -> None:
        """Record the end of the launch, with which standby coordinators and agents end, too."""
        with self._changed:
            self._want({"ended": {"code": code, "launch_id": launch_id}})
        for _ in range(_PARTS):
            self._thread.join(_END_S / _PARTS)
        if self._written != self._wanted and self.leader is None:
            say(
                f"{self._address}: the end of the launch (exit status {code}) could not be recorded; end its standby "
                "coordinators"
            )

    def _want(self, changes: dict[str, dict[str, Any]]) -> None:
        if self._wanted != changes:
            self._wanted = changes
            self._changed.notify_all()

    def _claim(self) -> dict[str, Any] | None:
        """Try to lead; None if that has succeeded, else the leader."""
        leader = self._etcd.get("coordinator")  # a standby does not take a lease for each attempt
        if leader is None:
            self._lease = self._etcd.grant(self._lease_s)
            leader = self._etcd.create("coordinator", self._me, self._lease)
        return None if leader == self._me else leader

    def _release(self) -> None:
        """Have etcd delete `coordinator`, now or when the lease expires."""
        with contextlib.suppress(MembershipError):
            self._etcd.revoke(self._lease)

    def _keep(self) -> None:
        """Renew the lease, and write what is wanted, until that is the end of the launch, or another one leads."""
        pause = min(self._lease_s / 4, _RENEW_S)
        while True:
            try:
                self.leader = self._renew()
                if self.leader is not None or self._write():
                    return
                if self.unreachable:
                    say(f"etcd at {self._address} answers again")
                self.unreachable = False
            except MembershipError as error:
                if not self.unreachable:
                    say(f"etcd does not answer; ranks go on, and none start again until it does: {error}")
                self.unreachable = True
                time.sleep(_POLL_S)
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._written != self._wanted, pause)

    def _renew(self) -> str | None:
        """Renew the lease, or claim it again if it has expired; the other leader if there is or was one meanwhile."""
        if self._etcd.keep_alive(self._lease):
            return None
        other = self._claim()
        if other is not None:
            return _named(other)
        known = self._etcd.get("launch")
        mine = known in (None, self._written.get("launch"), self._wanted.get("launch"))
        if mine and self._etcd.get("ended") is None:
            if known is None:  # etcd has lost its data
                self._written = {}
            return None
        self._release()
        return "another coordinator"

    def _write(self) -> bool:
        """Write what is wanted; whether that was the end of the launch."""
        wanted = self._wanted
        if wanted != self._written:
            if not self._etcd.change_while("coordinator", self._me, dict(wanted)):
                return False  # the lease has expired just now
            with self._changed:
                self._written = wanted
                self._changed.notify_all()
        if "ended" not in wanted:
            return False
        self._release()
        return True


def _named(leader: dict[str, Any]) -> str:
    return host_port(leader["host"], leader["port"])
