"""Which source to request slices from next, given recent refusals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from tpufleet.backoff import BackoffPolicy
from tpufleet.model.fleet.pools import CapacityRefusal, RefusalKind
from tpufleet.model.fleet.slices import source_text
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import type_lookup

REFUSAL_BACKOFF = {
    RefusalKind.CAPACITY: BackoffPolicy(first=timedelta(seconds=15), longest=timedelta(minutes=10)),
    # A person is usually at work on these, and expects an effect at once.
    RefusalKind.QUOTA: BackoffPolicy(first=timedelta(seconds=15), longest=timedelta(minutes=1)),
    RefusalKind.ACCESS: BackoffPolicy(first=timedelta(seconds=5), longest=timedelta(minutes=1)),
    RefusalKind.REQUEST: BackoffPolicy(first=timedelta(seconds=30), longest=timedelta(minutes=10)),
    # Each try is paid for: one slice, for some minutes.
    RefusalKind.UNREACHABLE: BackoffPolicy(first=timedelta(minutes=15), longest=timedelta(hours=2)),
}
# Some providers take minutes to refuse. A refusal lasts for this many times as long as it took, so
# that other sources are tried before this one is tried again; at most the longest backoff.
LEARNING_FACTOR = 4
# After a refusal has expired, sources without one come first for this many times its length.
RECENT_FACTOR = 4


class CapacitySource(NamedTuple):
    """A provider, a zone and a capacity type: where slices can be requested."""

    provider: str
    zone: str
    capacity: Capacity

    def __str__(self) -> str:
        return source_text(self.provider, self.zone, self.capacity)


class SourceChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A source to use now; or None, with the reason and when one may become available."""

    source: CapacitySource | None
    message: str = ""
    until: datetime | None = None
    unsatisfiable: bool = False  # waiting cannot help


def allowed_sources(
    providers: Sequence[str],
    zones: Sequence[str],
    kinds: Sequence[Capacity],
    zones_of: Mapping[str, Sequence[str]],
) -> tuple[CapacitySource, ...]:
    """Every allowed source, best first: the capacity type matters more than the zone."""
    return tuple(
        CapacitySource(provider, zone, kind)
        for kind in kinds
        for provider in providers
        for zone in (zones or zones_of.get(provider, ()))
    )


class BlockedSource(NamedTuple):
    """A source that cannot be used now."""

    refusal: CapacityRefusal
    until: datetime
    message: str  # `us-central1-a (spot): no more capacity`


class RefusalHistory:
    """Refusals, indexed by source."""

    def __init__(self, refusals: Iterable[CapacityRefusal] = ()) -> None:
        self._by_source: dict[CapacitySource, dict[str, CapacityRefusal]] = {}
        self._unreachable: dict[str, CapacityRefusal] = {}  # by provider
        # A placement pass looks up the same few keys for every job in the queue.
        self._cache: dict[tuple[CapacitySource, str], BlockedSource | None] = {}
        self._cached_at: datetime | None = None
        for refusal in refusals:
            self.record(refusal)

    def record(self, refusal: CapacityRefusal) -> None:
        self._cached_at = None
        if refusal.kind is RefusalKind.UNREACHABLE:
            self._unreachable[refusal.provider] = refusal
            return
        source = CapacitySource(refusal.provider, refusal.zone, refusal.capacity)
        self._by_source.setdefault(source, {})[refusal.accelerator] = refusal

    def unreachable(self) -> list[CapacityRefusal]:
        """Of providers whose hosts could not reach our server, until one of them does."""
        return [refusal for refusal in self._unreachable.values() if refusal.streak]

    def unreachable_from(self, provider: str) -> CapacityRefusal | None:
        refusal = self._unreachable.get(provider)
        return refusal if refusal is not None and refusal.streak else None

    def without_access(self, provider: str, now: datetime) -> list[CapacityRefusal]:
        """Refusals of this provider that end when a call succeeds again."""
        return [
            refusal
            for source, refusals in self._by_source.items()
            if source.provider == provider
            for refusal in refusals.values()
            if refusal.kind is RefusalKind.ACCESS and not refusal.late and refusal.holds(now)
        ]

    def latest(self, source: CapacitySource, accelerator: str) -> CapacityRefusal | None:
        return self._by_source.get(source, {}).get(accelerator)

    def refused_recently(self, source: CapacitySource, accelerator: str, now: datetime) -> bool:
        """Refused not long ago, and nothing granted since."""
        refusal = self.latest(source, accelerator)
        if refusal is None or not refusal.streak or refusal.refused_at > now:
            return False
        return now < refusal.refused_at + RECENT_FACTOR * (refusal.until - refusal.refused_at)

    def blocking(
        self, source: CapacitySource, accelerator: str, now: datetime
    ) -> CapacityRefusal | None:
        """The refusal, of this or a smaller size, that rules this source out for now."""
        blocked = self.blocked(source, accelerator, now)
        return blocked.refusal if blocked else None

    def blocked(
        self, source: CapacitySource, accelerator: str, now: datetime
    ) -> BlockedSource | None:
        if self._cached_at != now:
            self._cache, self._cached_at = {}, now
        key = (source, accelerator)
        if key not in self._cache:
            refusal = self._find_refusal(source, accelerator, now)
            self._cache[key] = _blocked_by(source, refusal) if refusal else None
        return self._cache[key]

    def holding(
        self, sources: Iterable[CapacitySource], accelerator: str, now: datetime
    ) -> list[CapacityRefusal]:
        """Every refusal that rules one of these sources out for now."""
        accelerator_type = type_lookup.find(accelerator)
        held: dict[str, CapacityRefusal] = {}
        for source in sources:
            unreachable = self.unreachable_from(source.provider)
            refusals = [*self._by_source.get(source, {}).values()]
            for refusal in [*refusals, *([unreachable] if unreachable else [])]:
                everything = refusal.kind is RefusalKind.UNREACHABLE
                if refusal.holds(now) and (everything or _covers(refusal, accelerator_type)):
                    held[refusal.key] = refusal
        return list(held.values())

    def _find_refusal(
        self, source: CapacitySource, accelerator: str, now: datetime
    ) -> CapacityRefusal | None:
        unreachable = self.unreachable_from(source.provider)
        if unreachable is not None and unreachable.holds(now):
            return unreachable
        refusals = self._by_source.get(source)
        if not refusals:
            return None
        accelerator_type = type_lookup.find(accelerator)
        blocked = [
            refusal
            for refusal in refusals.values()
            if refusal.holds(now) and _covers(refusal, accelerator_type)
        ]
        return max(blocked, key=lambda refusal: refusal.until, default=None)


def _blocked_by(source: CapacitySource, refusal: CapacityRefusal) -> BlockedSource:
    if refusal.kind is RefusalKind.UNREACHABLE:
        return BlockedSource(refusal, refusal.until, refusal.message)
    return BlockedSource(refusal, refusal.until, f"{source}: {refusal.message}")


def choose_source(
    sources: Sequence[CapacitySource], accelerator: str, refusals: RefusalHistory, now: datetime
) -> SourceChoice:
    """The first source without a current refusal; of those, one without a recent refusal."""
    if not sources:
        return SourceChoice(
            source=None, message="no provider or zone is allowed", unsatisfiable=True
        )
    refused: list[BlockedSource] = []
    retry: CapacitySource | None = None
    for source in sources:
        blocked = refusals.blocked(source, accelerator, now)
        if blocked is not None:
            refused.append(blocked)
        elif not refusals.refused_recently(source, accelerator, now):
            return SourceChoice(source=source)
        else:
            retry = retry or source
    if retry is not None:
        return SourceChoice(source=retry)
    return SourceChoice(
        source=None,
        message="; ".join(dict.fromkeys(blocked.message for blocked in refused)),
        until=min([blocked.until for blocked in refused]),
    )


def new_refusal(
    source: CapacitySource,
    accelerator: str,
    message: str,
    *,
    previous: CapacityRefusal | None,
    now: datetime,
    kind: RefusalKind = RefusalKind.CAPACITY,
    took: timedelta = timedelta(0),
    server_url: str = "",
    detail: str = "",
    late: bool = False,
    until: datetime | None = None,
) -> CapacityRefusal:
    """A refusal to record, `took` after the request; consecutive ones last longer, unless the
    provider knows `until` when."""
    streak = (previous.streak if previous and previous.kind is kind else 0) + 1
    policy = REFUSAL_BACKOFF[kind]
    backoff = policy.delay(streak, key=f"{source}{accelerator}")
    backoff = max(backoff, min(LEARNING_FACTOR * took, policy.longest))
    return CapacityRefusal(
        provider=source.provider,
        zone=source.zone,
        accelerator=accelerator,
        capacity=source.capacity,
        message=message,
        refused_at=now,
        until=until or now + backoff,
        streak=streak,
        kind=kind,
        server_url=server_url,
        detail=detail,
        late=late,
    )


def _covers(refusal: CapacityRefusal, accelerator_type: type_lookup.Accelerator) -> bool:
    if refusal.accelerator == accelerator_type.name or refusal.kind is RefusalKind.ACCESS:
        return True
    refused = type_lookup.find(refusal.accelerator)
    return (
        refusal.kind is not RefusalKind.REQUEST
        and refused.generation == accelerator_type.generation
        and refused.chips <= accelerator_type.chips
    )
