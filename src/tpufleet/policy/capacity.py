"""Where to ask for slices next, and the memory of who said no."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from tpufleet.model import topology
from tpufleet.model.jobs import Capacity
from tpufleet.model.pools import Refusal
from tpufleet.policy import spreads

FIRST_WAIT = timedelta(seconds=15)
LONGEST_WAIT = timedelta(minutes=10)
# Somebody has to change a permission or a quota; look again now and then.
PERMANENT_WAIT = timedelta(hours=1)


class Place(NamedTuple):
    """A source, a zone and a kind of capacity."""

    provider: str
    zone: str
    capacity: Capacity

    def __str__(self) -> str:
        return f"{self.zone} ({self.capacity})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A place to ask now; or none, with the reason and the time when one may open."""

    place: Place | None
    words: str = ""
    until: datetime | None = None
    hopeless: bool = False  # every place has refused for good


def places(
    providers: Sequence[str],
    zones: Sequence[str],
    kinds: Sequence[Capacity],
    zones_of: Mapping[str, Sequence[str]],
) -> tuple[Place, ...]:
    """Every place that is allowed, best first: the kind of capacity matters more than the zone."""
    return tuple(
        Place(provider, zone, kind)
        for kind in kinds
        for provider in providers
        for zone in (zones or zones_of.get(provider, ()))
    )


class Memory:
    """Refusals, found quickly by place."""

    def __init__(self, refusals: Iterable[Refusal] = ()) -> None:
        self._by_place: dict[Place, dict[str, Refusal]] = {}
        # A long queue asks the same few questions at the same moment.
        self._answers: dict[tuple[Place, str], Refusal | None] = {}
        self._answered_at: datetime | None = None
        for refusal in refusals:
            self.remember(refusal)

    def remember(self, refusal: Refusal) -> None:
        place = Place(refusal.provider, refusal.zone, refusal.capacity)
        self._by_place.setdefault(place, {})[refusal.accelerator] = refusal
        self._answered_at = None

    def of(self, place: Place, accelerator: str) -> Refusal | None:
        return self._by_place.get(place, {}).get(accelerator)

    def blocking(self, place: Place, accelerator: str, now: datetime) -> Refusal | None:
        """The refusal that makes asking pointless for now: of this size, or of a smaller one."""
        if self._answered_at != now:
            self._answers, self._answered_at = {}, now
        question = (place, accelerator)
        if question not in self._answers:
            self._answers[question] = self._find_blocking(place, accelerator, now)
        return self._answers[question]

    def _find_blocking(self, place: Place, accelerator: str, now: datetime) -> Refusal | None:
        refusals = self._by_place.get(place)
        if not refusals:
            return None
        wanted = topology.find(accelerator)
        blocked = [
            refusal
            for refusal in refusals.values()
            if refusal.until > now and _covers(refusal, wanted)
        ]
        return max(blocked, key=lambda refusal: refusal.until, default=None)


def choose(
    allowed: Sequence[Place], accelerator: str, memory: Memory, now: datetime
) -> Choice:
    """The first allowed place that has not just refused."""
    if not allowed:
        return Choice(place=None, words="no provider or zone is allowed", hopeless=True)
    refused: list[tuple[Place, Refusal]] = []
    for place in allowed:
        refusal = memory.blocking(place, accelerator, now)
        if refusal is None:
            return Choice(place=place)
        refused.append((place, refusal))
    soonest = min(refusal.until for _, refusal in refused)
    told = "; ".join(f"{place}: {refusal.words}" for place, refusal in refused)
    return Choice(
        place=None,
        words=told,
        until=soonest,
        hopeless=all(refusal.permanent for _, refusal in refused),
    )


def refuse(
    place: Place,
    accelerator: str,
    words: str,
    *,
    previous: Refusal | None,
    now: datetime,
    permanent: bool = False,
) -> Refusal:
    """Remember a no; each one in a row is remembered longer."""
    streak = (previous.streak if previous else 0) + 1
    wait = PERMANENT_WAIT if permanent else spreads.backoff(
        streak, first=FIRST_WAIT, longest=LONGEST_WAIT, key=f"{place}{accelerator}"
    )
    return Refusal(
        provider=place.provider,
        zone=place.zone,
        accelerator=accelerator,
        capacity=place.capacity,
        words=words,
        refused_at=now,
        until=now + wait,
        streak=streak,
        permanent=permanent,
    )


def _covers(refusal: Refusal, wanted: topology.Accelerator) -> bool:
    if refusal.accelerator == wanted.name:
        return True
    refused = topology.find(refusal.accelerator)
    return (
        not refusal.permanent
        and refused.generation == wanted.generation
        and refused.chips <= wanted.chips
    )
