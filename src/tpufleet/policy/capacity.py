"""Where to ask for slices next, and the memory of who said no."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from tpufleet.model import topology
from tpufleet.model.jobs import Capacity
from tpufleet.model.pools import CapacityRefusal
from tpufleet.policy import retry_delay

INITIAL_BACKOFF = timedelta(seconds=15)
MAX_BACKOFF = timedelta(minutes=10)
# Somebody has to change a permission or a quota; look again now and then.
PERMANENT_BACKOFF = timedelta(hours=1)


class CapacitySource(NamedTuple):
    """A source, a zone and a kind of capacity."""

    provider: str
    zone: str
    capacity: Capacity

    def __str__(self) -> str:
        return f"{self.zone} ({self.capacity})"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceChoice:
    """A place to ask now; or none, with the reason and the time when one may open."""

    source: CapacitySource | None
    message: str = ""
    until: datetime | None = None
    permanent: bool = False  # every place has refused for good


def allowed_sources(
    providers: Sequence[str],
    zones: Sequence[str],
    kinds: Sequence[Capacity],
    zones_of: Mapping[str, Sequence[str]],
) -> tuple[CapacitySource, ...]:
    """Every place that is allowed, best first: the kind of capacity matters more than the zone."""
    return tuple(
        CapacitySource(provider, zone, kind)
        for kind in kinds
        for provider in providers
        for zone in (zones or zones_of.get(provider, ()))
    )


class RefusalHistory:
    """Refusals, found quickly by place."""

    def __init__(self, refusals: Iterable[CapacityRefusal] = ()) -> None:
        self._by_place: dict[CapacitySource, dict[str, CapacityRefusal]] = {}
        # A long queue asks the same few questions at the same moment.
        self._answers: dict[tuple[CapacitySource, str], CapacityRefusal | None] = {}
        self._answered_at: datetime | None = None
        for refusal in refusals:
            self.record(refusal)

    def record(self, refusal: CapacityRefusal) -> None:
        place = CapacitySource(refusal.provider, refusal.zone, refusal.capacity)
        self._by_place.setdefault(place, {})[refusal.accelerator] = refusal
        self._answered_at = None

    def latest(self, place: CapacitySource, accelerator: str) -> CapacityRefusal | None:
        return self._by_place.get(place, {}).get(accelerator)

    def blocking(
        self, source: CapacitySource, accelerator: str, now: datetime
    ) -> CapacityRefusal | None:
        """The refusal that makes asking pointless for now: of this size, or of a smaller one."""
        if self._answered_at != now:
            self._answers, self._answered_at = {}, now
        question = (source, accelerator)
        if question not in self._answers:
            self._answers[question] = self._find_blocking(source, accelerator, now)
        return self._answers[question]

    def _find_blocking(
        self, place: CapacitySource, accelerator: str, now: datetime
    ) -> CapacityRefusal | None:
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


def choose_source(
    sources: Sequence[CapacitySource], accelerator: str, refusals: RefusalHistory, now: datetime
) -> SourceChoice:
    """The first allowed place that has not just refused."""
    if not sources:
        return SourceChoice(source=None, message="no provider or zone is allowed", permanent=True)
    refused: list[tuple[CapacitySource, CapacityRefusal]] = []
    for place in sources:
        refusal = refusals.blocking(place, accelerator, now)
        if refusal is None:
            return SourceChoice(source=place)
        refused.append((place, refusal))
    soonest = min(refusal.until for _, refusal in refused)
    told = "; ".join(f"{place}: {refusal.message}" for place, refusal in refused)
    return SourceChoice(
        source=None,
        message=told,
        until=soonest,
        permanent=all(refusal.permanent for _, refusal in refused),
    )


def new_refusal(
    source: CapacitySource,
    accelerator: str,
    message: str,
    *,
    previous: CapacityRefusal | None,
    now: datetime,
    permanent: bool = False,
) -> CapacityRefusal:
    """Remember a no; each one in a row is remembered longer."""
    streak = (previous.streak if previous else 0) + 1
    wait = (
        PERMANENT_BACKOFF
        if permanent
        else retry_delay.retry_delay(
            streak, initial=INITIAL_BACKOFF, maximum=MAX_BACKOFF, key=f"{source}{accelerator}"
        )
    )
    return CapacityRefusal(
        provider=source.provider,
        zone=source.zone,
        accelerator=accelerator,
        capacity=source.capacity,
        message=message,
        refused_at=now,
        until=now + wait,
        streak=streak,
        permanent=permanent,
    )


def _covers(refusal: CapacityRefusal, wanted: topology.Accelerator) -> bool:
    if refusal.accelerator == wanted.name:
        return True
    refused = topology.find(refusal.accelerator)
    return (
        not refusal.permanent
        and refused.generation == wanted.generation
        and refused.chips <= wanted.chips
    )
