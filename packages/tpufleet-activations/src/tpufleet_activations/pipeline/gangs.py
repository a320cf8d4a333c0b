"""Coordinators: which units a process runs. Either its own claims, or those of its gang's leader.

All processes of one mesh must run the same units in the same order. They exchange claims through
the storage and not through collectives, so that claiming never disturbs the order of device
programs.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from tpufleet.errors import FleetError, NotFound, Temporary
from tpufleet.runtime.object_store import ObjectStore
from tpufleet.runtime.units import Claim, HeldUnit, Units

POLL_SECONDS = 0.5
# An idle process waits longer after each poll, up to this many poll intervals.
MAX_IDLE_POLLS = 4
# A process may be busy with one unit for minutes before it is heard of again.
GANG_TIMEOUT_SECONDS = 1800.0

ShardFiles = list[dict[str, Any]]  # one process's files of a unit
Outcome = Callable[[ShardFiles], dict[str, Any]]


class GangLost(FleetError, Temporary):
    """Other processes of the gang do not respond. Restart the gang."""


class Coordinator(Protocol):
    """Decides which units this process runs."""

    part: int
    parts: int

    def claims(self) -> Iterator[Claim | None]: ...

    def should_stop(self) -> bool: ...

    def commit(self, claim: Claim, files: ShardFiles, outcome: Outcome) -> None: ...


class SoloCoordinator:
    """One process that claims units for itself."""

    part, parts = 0, 1

    def __init__(
        self,
        units: Units,
        should_stop: Callable[[], bool],
        poll: float = POLL_SECONDS,
        on_wait: Callable[[Sequence[HeldUnit]], None] = lambda held: None,
    ):
        """`on_wait` is called with the units of other workers that this one waits for, and with
        none when it no longer waits."""
        self._units, self._should_stop, self._poll = units, should_stop, poll
        self._on_wait = on_wait
        self._own: set[Claim] = set()  # not committed yet
        self._own_ended = threading.Event()
        self._lock = threading.Lock()  # several threads commit

    def claims(self) -> Iterator[Claim | None]:
        """Units to run, until all are committed or this process is asked to stop. None: all
        remaining units are held by other workers, which may still die."""
        idle = 0
        while not self._should_stop():
            self._own_ended.clear()  # before looking: a commit after that ends the wait
            claim = self._units.claim()
            if claim is None and self._units.finished():
                self._on_wait(())
                return
            self._on_wait(self._units.held if claim is None else ())
            if claim is not None:
                with self._lock:
                    self._own.add(claim)
            yield claim
            idle = idle + 1 if claim is None else 0
            for _ in range(min(idle, MAX_IDLE_POLLS)):
                if self._should_stop() or self._own_ended.wait(self._poll):
                    break

    def should_stop(self) -> bool:
        """Whether to drop unfinished units."""
        return self._should_stop()

    def commit(self, claim: Claim, files: ShardFiles, outcome: Outcome) -> None:
        try:
            self._units.commit(claim, outcome(files))
        finally:
            self._end(claim)

    def _end(self, claim: Claim) -> None:
        """Committed, or fenced. After the last one nothing is worth waiting for, but for units of
        other workers."""
        with self._lock:
            self._own.discard(claim)
            if not self._own:
                self._own_ended.set()


class GangLeader(SoloCoordinator):
    """The first process of a gang: claims units, publishes the claims, and commits all parts."""

    def __init__(
        self,
        units: Units,
        should_stop: Callable[[], bool],
        *,
        gang: str,
        parts: int,
        poll: float = POLL_SECONDS,
        timeout: float = GANG_TIMEOUT_SECONDS,
        on_wait: Callable[[Sequence[HeldUnit]], None] = lambda held: None,
    ):
        super().__init__(units, should_stop, poll, on_wait)
        self.parts, self._gang, self._timeout = parts, gang, timeout

    def claims(self) -> Iterator[Claim | None]:
        number = 0
        for claim in super().claims():
            if claim is not None:
                self._publish(number, asdict(claim))
                number += 1
            yield claim
        self._publish(number, None)

    def should_stop(self) -> bool:
        """Published units are always finished: the members cannot know that the leader stops."""
        return False

    def commit(self, claim: Claim, files: ShardFiles, outcome: Outcome) -> None:
        """Commit once the parts of all members have arrived."""
        objects = self._units.objects
        names = [_part_name(self._gang, claim, part) for part in range(1, self.parts)]
        parts = [_wait_for(objects, name, self._poll, self._timeout) for name in names]
        super().commit(claim, [file for part in (files, *parts) for file in part], outcome)

    def _publish(self, number: int, body: Any) -> None:
        self._units.objects.create(_claim_name(self._gang, number), json.dumps(body).encode())


class GangMember:
    """Another process of the gang: runs the leader's claims, and hands in its part of each unit."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        gang: str,
        part: int,
        parts: int,
        poll: float = POLL_SECONDS,
        timeout: float = GANG_TIMEOUT_SECONDS,
    ):
        self.part, self.parts = part, parts
        self._objects, self._gang, self._poll, self._timeout = objects, gang, poll, timeout

    def claims(self) -> Iterator[Claim | None]:
        number, last_claim = 0, time.monotonic()
        while True:
            name = _claim_name(self._gang, number)
            try:
                body = json.loads(self._objects.read(name))
            except NotFound:
                if time.monotonic() - last_claim > self._timeout:
                    raise _lost(name, self._timeout) from None
                yield None
                time.sleep(self._poll)
                continue
            if body is None:
                return
            number, last_claim = number + 1, time.monotonic()
            yield Claim(**body)

    def should_stop(self) -> bool:
        return False

    def commit(self, claim: Claim, files: ShardFiles, outcome: Outcome) -> None:
        """Hand in this part; the leader commits the unit."""
        name = _part_name(self._gang, claim, self.part)
        self._objects.create(name, json.dumps(files).encode())


def _wait_for(objects: ObjectStore, name: str, poll: float, timeout: float) -> Any:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            return json.loads(objects.read(name))
        except NotFound:
            time.sleep(poll)
    raise _lost(name, timeout)


def _lost(name: str, timeout: float) -> GangLost:
    return GangLost(f"another process of the gang wrote no {name} for {timeout:.0f} s")


def _claim_name(gang: str, number: int) -> str:
    return f"gangs/{gang}-{number:06d}.json"


def _part_name(gang: str, claim: Claim, part: int) -> str:
    return f"gangs/{gang}-{claim.unit:08d}-{claim.token:04d}-{part:03d}.json"
