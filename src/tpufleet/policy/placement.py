"""What placement works on, and what it can decide: who needs what, what there is, and what
follows.

Which waiting job gets which slices. Gangs all or nothing; the head of a queue never starves.

Jobs are looked at by priority, then first in, first out. The first job of a pool that cannot be
served keeps the pool's free slices for itself; a later one may borrow them only if it is sure to
end before the head could have started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from typing import NamedTuple

from tpufleet.model.jobs import Job, JobId
from tpufleet.model.pools import Pool
from tpufleet.model.slices import SliceId
from tpufleet.policy import capacity
from tpufleet.policy.capacity import CapacitySource, RefusalHistory


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingJob:
    """A job that lacks slices."""

    job: Job
    missing: int
    sources: tuple[CapacitySource, ...]  # where it may run, best first; unused for a job in a pool
    held_source: CapacitySource | None = None  # where it already holds part of its gang
    rank: tuple[int, datetime, JobId] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rank = (-self.job.spec.priority, self.job.submitted_at, self.job.id)
        object.__setattr__(self, "rank", rank)  # worked out once: queues are sorted often


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupant:
    """A job that holds slices of a pool."""

    job_id: JobId
    priority: int
    since: datetime
    slices: int
    ends_by: datetime | None = None  # known when it has a time limit
    stopping: bool = False  # told to stop; its slices come back


class FreeSlice(NamedTuple):
    """A slice of a pool that is ready and held by nobody."""

    id: SliceId
    zone: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Supply:
    """What there is to place on."""

    pools: Mapping[str, Pool] = field(default_factory=dict)
    free: Mapping[str, Sequence[FreeSlice]] = field(default_factory=dict)  # by pool
    live: Mapping[str, int] = field(default_factory=dict)  # slices of each pool
    occupants: Mapping[str, Sequence[Occupant]] = field(default_factory=dict)
    held: Mapping[tuple[str | None, str], int] = field(default_factory=dict)  # by pool and owner
    pending_requests: Mapping[CapacitySource, int] = field(default_factory=dict)
    pool_sources: Mapping[str, tuple[CapacitySource, ...]] = field(default_factory=dict)
    slices_per_user: int | None = None  # over everything


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignSlices:
    """Give these free slices of a pool to the job."""

    job_id: JobId
    slices: tuple[SliceId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSlices:
    """Ask a provider for this many slices, together."""

    source: CapacitySource
    accelerator: str
    count: int
    job_id: JobId | None = None
    pool: str | None = None


class Wait(NamedTuple):
    """Nothing for it now. A tuple, for a long queue makes one for every job in every plan."""

    job_id: JobId
    reason: str
    until: datetime | None = None
    unsatisfiable: bool = False  # waiting will not help


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseGang:
    """Part of a gang is held where the rest cannot be had: let go of it, and look elsewhere."""

    job_id: JobId
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Supersede:
    """Stop this job: one of higher priority needs its slices."""

    job_id: JobId
    for_job: JobId


PlacementDecision = AssignSlices | RequestSlices | Wait | ReleaseGang | Supersede


# Unanswered requests at one place. More would only meet the provider's rate limit.
MAX_PENDING_REQUESTS = 256


def queue_order(needs: Iterable[PendingJob]) -> list[PendingJob]:
    """Larger priority first; inside one, first in, first out."""
    return sorted(needs, key=attrgetter("rank"))


def place(
    pending: Iterable[PendingJob], supply: Supply, refusals: RefusalHistory, now: datetime
) -> list[PlacementDecision]:
    """A decision for every job in need."""
    desk = _PlacementPass(supply, refusals, now)
    for need in queue_order(pending):
        if need.job.spec.pool is None:
            desk.serve_anywhere(need)
        else:
            desk.serve_from_pool(need)
    return desk.decisions


class _PoolQueue:
    """The state of one pool while its jobs are served in order."""

    __slots__ = ("blocked", "free", "head", "headroom", "opens", "placed", "pool")

    def __init__(self, pool: Pool, free: Sequence[FreeSlice], live: int) -> None:
        self.pool = pool
        self.free = sorted(free)
        self.headroom = max(0, pool.largest - live)
        self.placed: list[Occupant] = []  # served in this very round
        self.head: JobId | None = None  # the first job that could not be served
        self.blocked = ""  # what those behind it are told
        self.opens: datetime | None = None  # when the head can start at the latest, if known

    def usable(self, need: PendingJob) -> list[FreeSlice]:
        """Free slices that can join one gang: all in the zone it already is in, or in the best."""
        if need.held_source is not None:
            return [free for free in self.free if free.zone == need.held_source.zone]
        if need.missing == 1 or not self.free:
            return self.free
        zones = Counter(free.zone for free in self.free)
        best = max(zones, key=lambda zone: zones[zone])
        return [free for free in self.free if free.zone == best]


class _PlacementPass:
    """Serves one job after the other and writes down what it decides."""

    def __init__(self, supply: Supply, memory: RefusalHistory, now: datetime) -> None:
        self.decisions: list[PlacementDecision] = []
        self._supply = supply
        self._memory = memory
        self._now = now
        self._held = dict(supply.held)
        self._held_in_all: dict[str, int] = {}
        for (_, owner), count in supply.held.items():
            self._held_in_all[owner] = self._held_in_all.get(owner, 0) + count
        self._unanswered = dict(supply.pending_requests)
        self._queues = {
            name: _PoolQueue(pool, supply.free.get(name, ()), supply.live.get(name, 0))
            for name, pool in supply.pools.items()
        }
        self._choices: dict[tuple[tuple[CapacitySource, ...], str], capacity.SourceChoice] = {}

    def serve_anywhere(self, need: PendingJob) -> None:
        job = need.job
        if words := self._over_limit(job, need.missing, None):
            return self._wait(job, words, hopeless=self._never_fits(job, None))
        if need.held_source is not None:
            choice = self._choose((need.held_source,), job.spec.accelerator)
            if choice.source is None:
                words = f"the rest of the gang cannot be had in {need.held_source}"
                self.decisions.append(ReleaseGang(job_id=job.id, reason=words))
                return None
        else:
            choice = self._choose(need.sources, job.spec.accelerator)
        if choice.source is None:
            return self._wait(job, choice.message, choice.until, choice.permanent)
        self._ask(need, choice.source, need.missing)
        return None

    def serve_from_pool(self, need: PendingJob) -> None:
        job = need.job
        queue = self._queues.get(job.spec.pool or "")
        if queue is None:
            return self._wait(job, f"there is no pool {job.spec.pool}", hopeless=True)
        if queue.head is not None:
            return self._serve_behind_the_head(need, queue)
        if words := self._over_limit(job, need.missing, queue.pool):
            return self._wait(job, words, hopeless=self._never_fits(job, queue.pool))
        usable = queue.usable(need)
        if need.missing <= len(usable):
            return self._take(need, queue, usable[: need.missing])
        return self._grow_or_block(need, queue, usable)

    def _serve_behind_the_head(self, need: PendingJob, queue: _PoolQueue) -> None:
        job = need.job
        if queue.free and queue.opens and job.spec.timeout:
            usable = queue.usable(need)
            fits = need.missing <= len(usable)
            ends_in_time = self._now + job.spec.timeout + job.spec.grace <= queue.opens
            if fits and ends_in_time and not self._over_limit(job, need.missing, queue.pool):
                return self._take(need, queue, usable[: need.missing])
        return self._wait(job, queue.blocked)

    def _grow_or_block(self, need: PendingJob, queue: _PoolQueue, usable: list[FreeSlice]) -> None:
        """Ask for what is missing, if the pool may grow by that much; else the job is the head."""
        job, pool = need.job, queue.pool
        short = need.missing - len(usable)
        if short > queue.headroom:
            return self._block(need, queue, short)
        places = self._supply.pool_sources.get(pool.name, ())
        if need.held_source is not None or usable:
            zone = need.held_source.zone if need.held_source else usable[0].zone
            places = tuple(place for place in places if place.zone == zone)
            if not places:  # the pool has left that zone; a gang cannot span two
                return self._gather_elsewhere(need, queue, zone)
        choice = self._choose(places, pool.accelerator)
        if choice.source is None:
            queue.head = job.id
            queue.blocked = f"waits its turn in pool {pool.name}, whose next job waits for stock"
            return self._wait(job, choice.message, choice.until, choice.permanent)
        if not self._ask(need, choice.source, short, pool):
            queue.head = job.id
            queue.blocked = f"waits its turn in pool {pool.name}"
            return None
        queue.headroom -= short
        if usable:
            self._take(need, queue, usable)
        return None

    def _gather_elsewhere(self, need: PendingJob, queue: _PoolQueue, zone: str) -> None:
        if need.held_source is not None:
            words = f"the rest of the gang cannot be had in {zone}"
            self.decisions.append(ReleaseGang(job_id=need.job.id, reason=words))
            return None
        queue.free = [free for free in queue.free if free.zone != zone]
        return self.serve_from_pool(need)

    def _block(self, need: PendingJob, queue: _PoolQueue, short: int) -> None:
        job, pool = need.job, queue.pool
        queue.head = job.id
        # The same for all, whoever is next: else each start would change every row behind it.
        queue.blocked = f"waits its turn in pool {pool.name}"
        occupants = self._supply.occupants.get(pool.name, ())
        queue.opens = earliest_start([*occupants, *queue.placed], short - queue.headroom)
        if job.spec.slices > pool.largest:
            words = f"needs {job.spec.slices} slices; pool {pool.name} has at most {pool.largest}"
            return self._wait(job, words, hopeless=True)
        words = f"all {pool.largest} slices of pool {pool.name} are taken; it is next in line"
        if pool.supersede:
            victims = _victims(job, occupants, short - queue.headroom)
            for victim in victims:
                self.decisions.append(Supersede(job_id=victim.job_id, for_job=job.id))
            if victims:
                words = f"jobs of lower priority make way in pool {pool.name}"
        return self._wait(job, words, queue.opens)

    def _take(self, need: PendingJob, queue: _PoolQueue, chosen: Sequence[FreeSlice]) -> None:
        taken = tuple(free.id for free in chosen)
        queue.free = [free for free in queue.free if free.id not in taken]
        self.decisions.append(AssignSlices(job_id=need.job.id, slices=taken))
        spec = need.job.spec
        queue.placed.append(
            Occupant(
                job_id=need.job.id,
                priority=spec.priority,
                since=self._now,
                slices=len(taken),
                ends_by=self._now + spec.timeout + spec.grace if spec.timeout else None,
            )
        )
        self._count(need.job, len(taken))

    def _ask(
        self, need: PendingJob, place: CapacitySource, count: int, pool: Pool | None = None
    ) -> bool:
        unanswered = self._unanswered.get(place, 0)
        if unanswered and unanswered + count > MAX_PENDING_REQUESTS:
            self._unanswered[place] = MAX_PENDING_REQUESTS  # nobody behind it slips past
            self._wait(need.job, f"others before it are being asked for in {place}")
            return False
        self._unanswered[place] = unanswered + count
        self.decisions.append(
            RequestSlices(
                source=place,
                accelerator=need.job.spec.accelerator,
                count=count,
                job_id=need.job.id,
                pool=pool.name if pool else None,
            )
        )
        self._count(need.job, count)
        return True

    def _count(self, job: Job, count: int) -> None:
        key = (job.spec.pool, job.owner)
        self._held[key] = self._held.get(key, 0) + count
        self._held_in_all[job.owner] = self._held_in_all.get(job.owner, 0) + count

    def _over_limit(self, job: Job, count: int, pool: Pool | None) -> str:
        most = self._supply.slices_per_user
        if most is not None and self._held_in_all.get(job.owner, 0) + count > most:
            return f"{job.owner} may hold {most} slices at a time"
        if pool is not None and pool.slices_per_user is not None:
            held = self._held.get((pool.name, job.owner), 0)
            if held + count > pool.slices_per_user:
                return f"{job.owner} may hold {pool.slices_per_user} slices of pool {pool.name}"
        return ""

    def _never_fits(self, job: Job, pool: Pool | None) -> bool:
        """The gang is larger than its owner may ever hold."""
        limits = (self._supply.slices_per_user, pool.slices_per_user if pool else None)
        return any(most is not None and job.spec.slices > most for most in limits)

    def _choose(
        self, places: tuple[CapacitySource, ...], accelerator: str
    ) -> capacity.SourceChoice:
        key = (places, accelerator)
        choice = self._choices.get(key)
        if choice is None:
            choice = capacity.choose_source(places, accelerator, self._memory, self._now)
            self._choices[key] = choice
        return choice

    def _wait(
        self, job: Job, words: str, until: datetime | None = None, hopeless: bool = False
    ) -> None:
        self.decisions.append(Wait(job.id, words, until, hopeless))


def earliest_start(occupants: Sequence[Occupant], missing: int) -> datetime | None:
    """When enough slices are sure to have come back; None while that cannot be known."""
    coming = 0
    for occupant in sorted(
        (occupant for occupant in occupants if occupant.ends_by), key=lambda item: item.ends_by
    ):
        coming += occupant.slices
        if coming >= missing:
            return occupant.ends_by
    return None


def _victims(job: Job, occupants: Sequence[Occupant], short: int) -> list[Occupant]:
    """Whom to stop so that this job can start: the least important, and of those the youngest.

    Nobody is stopped in vain: if all of them together would not do, none is, and nobody is whom
    the others make up for.
    """
    coming = sum(occupant.slices for occupant in occupants if occupant.stopping)
    lower = [
        occupant
        for occupant in occupants
        if occupant.priority < job.spec.priority and not occupant.stopping
    ]
    lower.sort(key=lambda item: (item.priority, -item.since.timestamp(), item.job_id))
    victims: list[Occupant] = []
    for occupant in lower:
        if coming >= short:
            break
        victims.append(occupant)
        coming += occupant.slices
    if coming < short:
        return []
    for victim in reversed(victims[:]):
        if coming - victim.slices >= short:
            victims.remove(victim)
            coming -= victim.slices
    return victims
