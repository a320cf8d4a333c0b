"""Which waiting job gets which slices. Gangs are all-or-nothing, and the head of a queue is never
starved.

Jobs are considered by priority, then fair share, then first in, first out. The first job of a pool
that cannot be placed reserves the pool's free slices; a later job may use them only if it is sure
to end before the head could have started (backfill).

More slices for an elastic job that has enough to run come last, and one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import NamedTuple

import msgspec

from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity, Job, JobId
from tpufleet.model.job.spec_types import UsedSlice
from tpufleet.model.people.budgets import BudgetUse
from tpufleet.policy.accounting import budgets
from tpufleet.policy.scheduling import source_choice
from tpufleet.policy.scheduling.queue_order import QueueRank, queue_rank
from tpufleet.policy.scheduling.source_choice import CapacitySource, RefusalHistory

# Pending requests per source. More would only hit the provider's rate limit.
MAX_PENDING_REQUESTS = 256
# The same for a type that the source refused recently: the others wait for the answer to these.
MAX_PROBES = 8
# A job without a time limit starts before a reservation only if that begins later than this.
UNLIMITED_COUNTS_AS = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingJob:
    """A job that lacks slices."""

    job: Job
    missing: int
    optional: bool = False  # it can run without them
    sources: tuple[CapacitySource, ...]  # where it may run, best first; unused for a pool job
    held_source: CapacitySource | None = None  # where it already holds part of its gang
    # Sources that rejected a request of this job as invalid, with their messages.
    rejected: Mapping[CapacitySource, str] = field(default_factory=dict)
    # Slices of its pool where it failed: it gets others, or these last.
    avoided: frozenset[SliceId] = frozenset()
    usage_step: int = 0  # of its owner, see `fair_share`
    rank: tuple[bool, QueueRank] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rank = (self.optional, queue_rank(self.job, self.usage_step))
        object.__setattr__(self, "rank", rank)  # computed once: queues are sorted often


class Occupant(msgspec.Struct, frozen=True, kw_only=True):
    """A job that holds slices of a pool."""

    job_id: JobId
    priority: int
    since: datetime
    slices: int
    ends_by: datetime | None = None  # known when it has a time limit
    stopping: bool = False  # its slices are coming back
    owner: str = ""


class FreeSlice(NamedTuple):
    """A ready slice of a pool that no job holds, and that the pool provides: its settings may have
    been changed since the slice was requested."""

    id: SliceId
    zone: str
    accelerator: str
    reserved_for: str = ""  # only jobs of this user may have it
    reserved_until: datetime | None = None
    last_owner: str = ""  # of the job that used it last; empty: none did
    last_failed: bool = False

    def used_kind(self, owner: str) -> UsedSlice | None:
        """What it is to a job of this user; None: free for all."""
        if not self.last_owner:
            return None
        if self.last_owner == owner:
            return UsedSlice.OWN_FAILED if self.last_failed else UsedSlice.OWN_FINISHED
        return UsedSlice.OTHERS_FAILED if self.last_failed else UsedSlice.OTHERS_FINISHED


class Supply(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity to place jobs on."""

    pools: Mapping[str, Pool] = {}
    free: Mapping[str, Sequence[FreeSlice]] = {}  # by pool
    live: Mapping[str, int] = {}  # slices of each pool
    occupants: Mapping[str, Sequence[Occupant]] = {}
    held: Mapping[tuple[str | None, str], int] = {}  # by pool and owner
    # Of each source and accelerator.
    pending_requests: Mapping[tuple[CapacitySource, str], int] = {}
    pool_sources: Mapping[str, tuple[CapacitySource, ...]] = {}
    slices_per_user: int | None = None  # over all pools
    reservations: Mapping[str, Sequence[Reservation]] = {}  # by pool
    exhausted_budgets: Sequence[BudgetUse] = ()
    admins: Collection[str] = ()  # who may use every pool


class AssignSlices(msgspec.Struct, frozen=True, kw_only=True):
    """Assign these free slices of a pool to the job."""

    job_id: JobId
    slices: tuple[SliceId, ...]


class RequestSlices(msgspec.Struct, frozen=True, kw_only=True):
    """Request this many slices from a provider, together."""

    source: CapacitySource
    accelerator: str
    count: int
    job_id: JobId | None = None
    pool: str | None = None


class Wait(NamedTuple):
    """Nothing available now. A tuple, because a long queue yields one per job in every pass."""

    job_id: JobId
    reason: str
    until: datetime | None = None
    unsatisfiable: bool = False  # waiting cannot help
    # Until the answer to requests of other jobs: a refusal that the job waits for stays its reason,
    # or every attempt to get capacity would rewrite the rows of all jobs in the queue, twice.
    asking: bool = False


class ReleaseGang(msgspec.Struct, frozen=True, kw_only=True):
    """Release a partial gang, because the rest is unavailable where it is held."""

    job_id: JobId
    reason: str


class Supersede(msgspec.Struct, frozen=True, kw_only=True):
    """Stop this job: one of higher priority needs its slices."""

    job_id: JobId
    for_job: JobId


PlacementDecision = AssignSlices | RequestSlices | Wait | ReleaseGang | Supersede


def queue_order(pending: Iterable[PendingJob]) -> list[PendingJob]:
    """What is needed to run first, then by `queue_rank`."""
    return sorted(pending, key=attrgetter("rank"))


def place(
    pending: Iterable[PendingJob], supply: Supply, refusals: RefusalHistory, now: datetime
) -> list[PlacementDecision]:
    """A decision for every pending job."""
    placement_pass = _PlacementPass(supply, refusals, now)
    for pending_job in queue_order(pending):
        if pending_job.job.held_by is not None:
            placement_pass.hold(pending_job.job)
        elif pending_job.optional:
            placement_pass.extend(pending_job)
        else:
            placement_pass.place(pending_job)
    placement_pass.extend_placed()
    return placement_pass.decisions


class _PoolQueue:
    """The state of one pool during a placement pass."""

    __slots__ = (
        "blocked", "free", "head", "headroom", "opens_at", "placed", "pool", "some_reserved"
    )  # fmt: skip

    def __init__(self, pool: Pool, free: Sequence[FreeSlice], live: int) -> None:
        self.pool = pool
        self.free = sorted(
            (each for each in free if each.accelerator == pool.accelerator),
            key=lambda each: each.id,
        )
        self.some_reserved = any(each.reserved_for for each in free)
        self.headroom = max(0, pool.largest - live)
        self.placed: list[Occupant] = []  # in this pass
        self.head: JobId | None = None  # the first job that could not be placed
        self.blocked = ""  # the reason for jobs behind the head
        self.opens_at: datetime | None = None  # when the head can start at the latest, if known

    def usable(self, pending: PendingJob) -> list[FreeSlice]:
        """Free slices that can form one gang: those in the zone it is in, or the best zone. Those
        held for its owner come first."""
        free = self.free
        if self.some_reserved:
            owner = pending.job.owner
            free = [each for each in free if each.reserved_for in ("", owner)]
            free.sort(key=lambda each: each.reserved_for != owner)
        if reuse := pending.job.spec.reuse:
            kinds = (None, *reuse)
            free = [each for each in free if each.used_kind(pending.job.owner) in kinds]
        if pending.avoided:
            others = [each for each in free if each.id not in pending.avoided]
            enough = len(others) + self.headroom >= pending.missing
            free = others if enough else sorted(free, key=lambda each: each.id in pending.avoided)
        if pending.held_source is not None:
            return [each for each in free if each.zone == pending.held_source.zone]
        if pending.missing == 1 or not free:
            return free
        zones = Counter(each.zone for each in free)
        best = max(zones, key=lambda zone: zones[zone])
        return [each for each in free if each.zone == best]


class _PlacementPass:
    """Places one job after the other and collects the decisions."""

    def __init__(self, supply: Supply, refusals: RefusalHistory, now: datetime) -> None:
        self.decisions: list[PlacementDecision] = []
        self._supply = supply
        self._refusals = refusals
        self._now = now
        self._held = dict(supply.held)
        self._held_by_owner: dict[str, int] = {}
        for (_, owner), count in supply.held.items():
            self._held_by_owner[owner] = self._held_by_owner.get(owner, 0) + count
        self._pending_requests: Counter[CapacitySource] = Counter()
        self._pending_of_type = Counter(supply.pending_requests)
        for (source, _), count in supply.pending_requests.items():
            self._pending_requests[source] += count
        self._probed: set[tuple[CapacitySource, str]] = set()
        self._queues = {
            name: _PoolQueue(pool, supply.free.get(name, ()), supply.live.get(name, 0))
            for name, pool in supply.pools.items()
        }
        self._extensible: dict[JobId, PendingJob] = {}  # elastic jobs placed in this pass
        self._choices: dict[tuple[tuple[CapacitySource, ...], str], source_choice.SourceChoice] = {}

    def hold(self, job: Job) -> None:
        self._wait(job, f"held by {job.held_by}; `tpu queue release {job.id}` lets it start")

    def place(self, pending: PendingJob) -> None:
        if pending.job.spec.pool is None:
            self._place_anywhere(pending)
        else:
            self._place_in_pool(pending)

    def extend_placed(self) -> None:
        """At once, so that a job that starts now starts with what there is."""
        for pending in list(self._extensible.values()):
            self.extend(pending)

    def extend(self, pending: PendingJob) -> None:
        """As many as there are: each is of use alone. One request tells whether a source that
        refused has more."""
        accelerator = pending.job.spec.accelerator
        for _ in range(pending.missing):
            self.place(replace(pending, missing=1))
            decision = self.decisions[-1]
            if isinstance(decision, Wait) or (
                isinstance(decision, RequestSlices)
                and self._refusals.refused_recently(decision.source, accelerator, self._now)
            ):
                break

    def _place_anywhere(self, pending: PendingJob) -> None:
        job = pending.job
        if reason := self._limit_reason(job, pending.missing, None):
            self._wait(job, reason, unsatisfiable=self._exceeds_limit(job, None))
            return
        held = pending.held_source
        sources = pending.sources if held is None else (held,)
        choice = self._choose(pending, sources, job.spec.accelerator)
        if choice.source is not None:
            self._request(pending, choice.source, pending.missing)
        elif held is not None and not pending.optional:
            self._release_gang(job, str(held))
        else:
            self._wait(job, choice.message, choice.until, choice.unsatisfiable)

    def _place_in_pool(self, pending: PendingJob) -> None:
        job = pending.job
        queue = self._queues.get(job.spec.pool or "")
        if queue is None:
            self._wait(job, f"pool {job.spec.pool} does not exist", unsatisfiable=True)
            return
        if job.spec.accelerator != queue.pool.accelerator:  # the pool was changed since
            self._wait(job, queue.pool.mismatch(job.spec.accelerator), unsatisfiable=True)
            return
        if not queue.pool.admits(job.owner, is_admin=job.owner in self._supply.admins):
            self._wait(job, queue.pool.excludes(job.owner), unsatisfiable=True)
            return
        if job.spec.require_reservation and (lacking := self._no_reservation(job, queue.pool)):
            self._wait(job, *lacking)
            return
        if reserved := self._reserved_by_others(pending, queue):
            self._wait(job, *reserved)
            return
        if job.spec.reuse and (reason := _may_not_reuse(pending, queue)):
            self._wait(job, reason)
            return
        if queue.head is not None:
            self._place_behind_head(pending, queue)
            return
        if reason := self._limit_reason(job, pending.missing, queue.pool):
            self._wait(job, reason, unsatisfiable=self._exceeds_limit(job, queue.pool))
            return
        usable = queue.usable(pending)
        if pending.missing <= len(usable):
            self._assign(pending, queue, usable[: pending.missing])
        else:
            self._grow_or_block(pending, queue, usable)

    def _no_reservation(self, job: Job, pool: Pool) -> tuple[str, datetime | None] | None:
        """It does not block the queue either."""
        own = [
            each
            for each in self._supply.reservations.get(pool.name, ())
            if each.owner == job.owner and each.ends_at > self._now
        ]
        if any(each.active(self._now) for each in own):
            return None
        if own:
            first = min(each.starts_at for each in own)
            return f"waits for the reservation of {job.owner} at {first:%Y-%m-%d %H:%M} UTC", first
        return f"requires a reservation; `tpu reserve {pool.name}` makes one", None

    def _reserved_by_others(
        self, pending: PendingJob, queue: _PoolQueue
    ) -> tuple[str, datetime] | None:
        """Why, and until when, reservations leave too few slices for this job. They do not block
        the queue: a job of the user who has the reservation may be behind it."""
        job, pool = pending.job, queue.pool
        ends_by = self._now + (job.spec.timeout or UNLIMITED_COUNTS_AS)
        claims = [
            (claim, outstanding)
            for claim in self._supply.reservations.get(pool.name, ())
            if claim.owner != job.owner
            and claim.overlaps(self._now, ends_by)
            and (outstanding := claim.slices - self._held.get((pool.name, claim.owner), 0)) > 0
        ]
        held = [free for free in queue.free if free.reserved_for not in ("", job.owner)]
        if not claims and not held:
            return None
        occupants = (*self._supply.occupants.get(pool.name, ()), *queue.placed)
        in_use = sum(occupant.slices for occupant in occupants)
        kept = sum(outstanding for _, outstanding in claims) + len(held)
        if pending.missing <= pool.largest - in_use - kept or job.spec.min_slices > pool.largest:
            return None
        if pending.missing > pool.largest - in_use:
            return None  # it would wait anyway, in its place in the queue
        if not claims:
            first = min(held, key=lambda free: free.reserved_until or self._now)
            until = first.reserved_until or self._now
            return f"slice {first.id} is held for {first.reserved_for} after a failure", until
        claim = min((claim for claim, _ in claims), key=lambda claim: claim.ends_at)
        note = f" ({claim.note})" if claim.note else ""
        when = "" if claim.active(self._now) else f" from {claim.starts_at:%Y-%m-%d %H:%M}"
        return (
            f"{claim.slices} of {pool.largest} slices of pool {pool.name} are reserved by "
            f"{claim.owner}{when} until {claim.ends_at:%Y-%m-%d %H:%M} UTC{note}",
            claim.ends_at,
        )

    def _place_behind_head(self, pending: PendingJob, queue: _PoolQueue) -> None:
        """Backfill, or wait."""
        job = pending.job
        if queue.free and queue.opens_at and job.spec.timeout:
            usable = queue.usable(pending)
            fits = pending.missing <= len(usable)
            ends_in_time = self._now + job.spec.timeout + job.spec.grace <= queue.opens_at
            if fits and ends_in_time and not self._limit_reason(job, pending.missing, queue.pool):
                self._assign(pending, queue, usable[: pending.missing])
                return
        self.decisions.append(Wait(job.id, queue.blocked))

    def _grow_or_block(
        self, pending: PendingJob, queue: _PoolQueue, usable: list[FreeSlice]
    ) -> None:
        """Request the missing slices if the pool may grow by that many; else block the queue."""
        job, pool = pending.job, queue.pool
        short = pending.missing - len(usable)
        if short > queue.headroom:
            self._block(pending, queue, short)
            return
        sources = self._supply.pool_sources.get(pool.name, ())
        if pending.held_source is not None or usable:
            zone = pending.held_source.zone if pending.held_source else usable[0].zone
            sources = tuple(source for source in sources if source.zone == zone)
            if not sources:  # no longer a zone of the pool, and a gang cannot span two
                self._leave_zone(pending, queue, zone)
                return
        choice = self._choose(pending, sources, pool.accelerator)
        if choice.source is None:
            queue.head = job.id
            queue.blocked = f"queued in pool {pool.name}"
            self._wait(job, choice.message, choice.until, choice.unsatisfiable)
            return
        if not self._request(pending, choice.source, short, pool):
            queue.head = job.id
            queue.blocked = f"queued in pool {pool.name}"
            return
        queue.headroom -= short
        if usable:
            self._assign(pending, queue, usable)

    def _leave_zone(self, pending: PendingJob, queue: _PoolQueue, zone: str) -> None:
        if pending.optional:
            self._wait(pending.job, f"{zone} is no longer a zone of the pool")
            return
        if pending.held_source is not None:
            self._release_gang(pending.job, zone)
            return
        queue.free = [free for free in queue.free if free.zone != zone]
        self._place_in_pool(pending)

    def _block(self, pending: PendingJob, queue: _PoolQueue, short: int) -> None:
        job, pool = pending.job, queue.pool
        queue.head = job.id
        # The same text whoever is at the head: else each start would rewrite every row behind it.
        queue.blocked = f"queued in pool {pool.name}"
        occupants = self._supply.occupants.get(pool.name, ())
        queue.opens_at = earliest_start([*occupants, *queue.placed], short - queue.headroom)
        if job.spec.min_slices > pool.largest:
            reason = (
                f"needs {job.spec.min_slices} slices; pool {pool.name} has at most {pool.largest}"
            )
            self._wait(job, reason, unsatisfiable=True)
            return
        slices = "the slice" if pool.largest == 1 else f"all {pool.largest} slices"
        verb = "is" if pool.largest == 1 else "are"
        reason = f"{slices} of pool {pool.name} {verb} in use; first in the queue"
        if pool.supersede and not pending.optional:
            victims = _victims(job, occupants, short - queue.headroom)
            for victim in victims:
                self.decisions.append(Supersede(job_id=victim.job_id, for_job=job.id))
            if victims:
                reason = f"stopping jobs of lower priority in pool {pool.name}"
        self._wait(job, reason, queue.opens_at)

    def _assign(self, pending: PendingJob, queue: _PoolQueue, chosen: Sequence[FreeSlice]) -> None:
        assigned = tuple(free.id for free in chosen)
        first, last = queue.free[0], queue.free[len(assigned) - 1]
        if first is chosen[0] and last is chosen[-1] and not queue.some_reserved:
            del queue.free[: len(assigned)]  # the usual case; the general one is quadratic
        else:
            queue.free = [free for free in queue.free if free.id not in assigned]
        self.decisions.append(AssignSlices(job_id=pending.job.id, slices=assigned))
        zone = CapacitySource(queue.pool.provider, chosen[0].zone, queue.pool.capacity[0])
        self._note_extensible(pending, zone)
        spec = pending.job.spec
        queue.placed.append(
            Occupant(
                job_id=pending.job.id,
                priority=spec.priority,
                since=self._now,
                slices=len(assigned),
                ends_by=self._now + spec.timeout + spec.grace if spec.timeout else None,
            )
        )
        self._count(pending.job, len(assigned))

    def _request(
        self, pending: PendingJob, source: CapacitySource, count: int, pool: Pool | None = None
    ) -> bool:
        requested, accelerator = self._pending_requests[source], pending.job.spec.accelerator
        queued = f"queued behind pending requests in {source}"
        if self._is_probed(source, accelerator, count):
            self._wait(pending.job, queued, asking=True)
            return False
        if requested and requested + count > MAX_PENDING_REQUESTS:
            self._pending_requests[source] = MAX_PENDING_REQUESTS  # later jobs must not overtake
            self._wait(pending.job, queued)
            return False
        self._pending_requests[source] += count
        self._pending_of_type[source, accelerator] += count
        self.decisions.append(
            RequestSlices(
                source=source,
                accelerator=accelerator,
                count=count,
                job_id=pending.job.id,
                pool=pool.name if pool else None,
            )
        )
        self._count(pending.job, count)
        self._note_extensible(pending, source)
        return True

    def _note_extensible(self, pending: PendingJob, source: CapacitySource) -> None:
        more = pending.job.spec.max_slices - pending.job.spec.min_slices
        if more and not pending.optional:
            self._extensible[pending.job.id] = replace(
                pending, missing=more, optional=True, held_source=source
            )

    def _is_probed(self, source: CapacitySource, accelerator: str, count: int) -> bool:
        """Whether enough requests are pending to learn if a source that refused has this type
        again. In a queue of the provider each request keeps its place, however long it takes."""
        probed = (source, accelerator)
        if probed not in self._probed:
            pending = self._pending_of_type[probed]
            if source.capacity is Capacity.QUEUED or not pending or pending + count <= MAX_PROBES:
                return False
            if not self._refusals.refused_recently(source, accelerator, self._now):
                return False
            self._probed.add(probed)  # later jobs must not overtake
        return True

    def _count(self, job: Job, count: int) -> None:
        key = (job.spec.pool, job.owner)
        self._held[key] = self._held.get(key, 0) + count
        self._held_by_owner[job.owner] = self._held_by_owner.get(job.owner, 0) + count

    def _limit_reason(self, job: Job, count: int, pool: Pool | None) -> str:
        """Why a quota or a budget forbids this many more slices; empty when none does."""
        if self._supply.exhausted_budgets:
            reason = budgets.hold_reason(job, self._supply.exhausted_budgets)
            if reason:
                return reason
        quotas = [("", self._supply.slices_per_user, self._held_by_owner.get(job.owner, 0))]
        if pool is not None:
            held = self._held.get((pool.name, job.owner), 0)
            quotas.append((f" of pool {pool.name}", pool.slices_per_user, held))
        for where, limit, held in quotas:
            if limit is not None and held + count > limit:
                return f"quota: {job.owner} may hold {limit} slices{where}"
        return ""

    def _exceeds_limit(self, job: Job, pool: Pool | None) -> bool:
        """The gang alone is larger than its owner's quota."""
        limits = (self._supply.slices_per_user, pool.slices_per_user if pool else None)
        return any(limit is not None and job.spec.min_slices > limit for limit in limits)

    def _choose(
        self, pending: PendingJob, sources: tuple[CapacitySource, ...], accelerator: str
    ) -> source_choice.SourceChoice:
        if pending.rejected:
            allowed = tuple(source for source in sources if source not in pending.rejected)
            if sources and not allowed:
                message = "; ".join(f"{source}: {pending.rejected[source]}" for source in sources)
                return source_choice.SourceChoice(source=None, message=message, unsatisfiable=True)
            sources = allowed
        key = (sources, accelerator)
        choice = self._choices.get(key)
        if choice is None:
            choice = source_choice.choose_source(sources, accelerator, self._refusals, self._now)
            self._choices[key] = choice
        return choice

    def _release_gang(self, job: Job, where: str) -> None:
        reason = f"the rest of the gang is unavailable in {where}"
        self.decisions.append(ReleaseGang(job_id=job.id, reason=reason))

    def _wait(
        self,
        job: Job,
        reason: str,
        until: datetime | None = None,
        unsatisfiable: bool = False,
        *,
        asking: bool = False,
    ) -> None:
        self.decisions.append(Wait(job.id, reason, until, unsatisfiable, asking))


def _may_not_reuse(pending: PendingJob, queue: _PoolQueue) -> str | None:
    """Why it leaves free slices to others. It does not block the queue: they may want them."""
    short = pending.missing - len(queue.usable(pending))
    if short <= queue.headroom:
        return None
    owner, reuse = pending.job.owner, pending.job.spec.reuse
    left = [each for each in queue.free if each.used_kind(owner) not in (None, *reuse)]
    if not left:
        return None
    kind = left[0].used_kind(owner)
    return f"slice {left[0].id} is free, but {kind}; the job reuses only {', '.join(reuse)}"


def earliest_start(occupants: Sequence[Occupant], missing: int) -> datetime | None:
    """When enough slices are sure to be free; None while that is unknown."""
    freed = 0
    ending = [(occupant.ends_by, occupant.slices) for occupant in occupants if occupant.ends_by]
    for ends_by, slices in sorted(ending, key=lambda item: item[0]):
        freed += slices
        if freed >= missing:
            return ends_by
    return None


def _victims(job: Job, occupants: Sequence[Occupant], missing: int) -> list[Occupant]:
    """A minimal set of jobs to stop so that this one can start, or none if all would not do.

    Lowest priority first, and of those the youngest.
    """
    freed = sum(occupant.slices for occupant in occupants if occupant.stopping)
    candidates = [
        occupant
        for occupant in occupants
        if occupant.priority < job.spec.priority and not occupant.stopping
    ]
    candidates.sort(key=lambda item: (item.priority, -item.since.timestamp(), item.job_id))
    victims: list[Occupant] = []
    for occupant in candidates:
        if freed >= missing:
            break
        victims.append(occupant)
        freed += occupant.slices
    if freed < missing:
        return []
    for victim in reversed(victims[:]):
        if freed - victim.slices >= missing:
            victims.remove(victim)
            freed -= victim.slices
    return victims
