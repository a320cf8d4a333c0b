"""Whose units are run: one worker's own, or those that the first process claims for a whole gang.

Processes of one mesh must run the same units in the same order. They learn them through the
storage, not through collectives, so that claiming never disturbs the order of device programs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from tpufleet.errors import FleetError, NotFound, Temporary
from tpufleet.runtime.object_store import ObjectStore
from tpufleet.runtime.units import Claim, Units

POLL_SECONDS = 0.5
# Whoever has nothing to do looks less and less often, down to this many polls at once.
MAX_IDLE_POLLS = 4


class GangLost(FleetError, Temporary):
    """The other processes of the gang do not answer. Start the gang again."""


class SoloCoordinator:
    """One process that claims for itself."""

    part, parts = 0, 1

    def __init__(self, units: Units, should_stop: Callable[[], bool], poll: float = POLL_SECONDS):
        self._units, self._should_stop, self._poll = units, should_stop, poll

    def claims(self) -> Iterator[Claim | None]:
        """Units to run, until all are committed or this process is asked to stop. None: the rest
        is held by others, who may yet die."""
        idle = 0
        while not self._should_stop():
            claim = self._units.claim()
            if claim is None and self._units.finished():
                return
            yield claim
            idle = idle + 1 if claim is None else 0
            for _ in range(min(idle, MAX_IDLE_POLLS)):
                if not self._should_stop():
                    time.sleep(self._poll)

    def should_stop(self) -> bool:
        """Whether to drop what is not finished."""
        return self._should_stop()

    def commit(self, claim: Claim, file: Mapping[str, Any], record: Callable[..., Any]) -> None:
        self._units.commit(claim, record([file]))


class GangLeader(SoloCoordinator):
    """The first process of a gang: it claims, tells the others, and commits all parts."""

    def __init__(
        self,
        units: Units,
        should_stop: Callable[[], bool],
        *,
        gang: str,
        parts: int,
        poll: float = POLL_SECONDS,
        timeout: float = 1800.0,
    ):
        super().__init__(units, should_stop, poll)
        self.parts, self._gang, self._patience = parts, gang, timeout

    def claims(self) -> Iterator[Claim | None]:
        number = 0
        for claim in super().claims():
            if claim is not None:
                self._tell(number, asdict(claim))
                number += 1
            yield claim
        self._tell(number, None)

    def should_stop(self) -> bool:
        """What was told to the others is run to its end: they cannot know when this one stops."""
        return False

    def commit(self, claim: Claim, file: Mapping[str, Any], record: Callable[..., Any]) -> None:
        """Once all parts are handed in."""
        objects = self._units.objects
        names = [_part_name(self._gang, claim, part) for part in range(1, self.parts)]
        files = [file, *(_wait(objects, name, self._poll, self._patience) for name in names)]
        self._units.commit(claim, record(files))

    def _tell(self, number: int, body: Any) -> None:
        self._units.objects.create(_news_name(self._gang, number), json.dumps(body).encode())


class GangMember:
    """Another process of the gang: it runs what the leader claims, and hands in its part."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        gang: str,
        part: int,
        parts: int,
        poll: float = POLL_SECONDS,
        timeout: float = 1800.0,
    ):
        self.part, self.parts = part, parts
        self._objects, self._gang, self._poll, self._patience = objects, gang, poll, timeout

    def claims(self) -> Iterator[Claim | None]:
        number, heard = 0, time.monotonic()
        while True:
            name = _news_name(self._gang, number)
            try:
                body = json.loads(self._objects.read(name))
            except NotFound:
                if time.monotonic() - heard > self._patience:
                    raise GangLost(f"{name} did not appear; the leader is gone") from None
                yield None
                time.sleep(self._poll)
                continue
            if body is None:
                return
            number, heard = number + 1, time.monotonic()
            yield Claim(**body)

    def should_stop(self) -> bool:
        return False

    def commit(self, claim: Claim, file: Mapping[str, Any], record: Callable[..., Any]) -> None:
        """Hand the part in; the leader commits."""
        name = _part_name(self._gang, claim, self.part)
        self._objects.create(name, json.dumps(file).encode())


def _wait(objects: ObjectStore, name: str, poll: float, patience: float) -> Any:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            return json.loads(objects.read(name))
        except NotFound:
            time.sleep(poll)
    raise GangLost(f"{name} did not appear within {patience:.0f} s")


def _news_name(gang: str, number: int) -> str:
    return f"gangs/{gang}-{number:06d}.json"


def _part_name(gang: str, claim: Claim, part: int) -> str:
    return f"gangs/{gang}-{claim.unit:08d}-{claim.token:04d}-{part:03d}.json"
