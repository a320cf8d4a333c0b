"""Properties of placement: random jobs, pools, free slices, occupants and quotas."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.policy.builders import MINUTE, NOON, SECOND, after
from tests.policy.placement_builders import (
    SOURCES,
    TYPE,
    ZONES,
    decide,
    free,
    make_pending,
    make_pool,
    make_supply,
    refusal,
)
from tpufleet.model.fleet.pools import Pool
from tpufleet.policy.scheduling import placement
from tpufleet.policy.scheduling.placement import (
    AssignSlices,
    FreeSlice,
    Occupant,
    PendingJob,
    RequestSlices,
    Supersede,
    Supply,
    Wait,
)
from tpufleet.policy.scheduling.source_choice import RefusalHistory

OTHER_TYPE = "v5litepod-8"


@dataclass(frozen=True)
class Scene:
    pending: list[PendingJob]
    supply: Supply
    refusals: RefusalHistory


@st.composite
def scenes(draw) -> Scene:
    names = ["p", "q"]
    pools, available, live, occupants, held = {}, {}, {}, {}, Counter()
    for name in names:
        by_id = [
            FreeSlice(
                f"{name}-{number}",
                draw(st.sampled_from(ZONES)),
                draw(st.sampled_from([TYPE, TYPE, TYPE, OTHER_TYPE])),
            )
            for number in range(draw(st.integers(0, 4)))
        ]
        running = [
            Occupant(
                job_id=f"{name}-run{number}",
                priority=draw(st.integers(0, 3)),
                since=after(draw(st.integers(0, 9))),
                slices=draw(st.integers(1, 3)),
                ends_by=draw(st.none() | st.integers(1, 60).map(lambda m: NOON + m * MINUTE)),
                stopping=draw(st.booleans()),
            )
            for number in range(draw(st.integers(0, 4)))
        ]
        available[name], occupants[name] = by_id, running
        live[name] = len(by_id) + sum(item.slices for item in running)
        for item in running:
            held[(name, draw(st.sampled_from(["ada", "bob"])))] += item.slices
        pools[name] = make_pool(
            name,
            largest=live[name] + draw(st.integers(0, 3)),
            slices_per_user=draw(st.none() | st.integers(0, 6)),
            supersede=draw(st.booleans()),
        )
    pending = [
        make_pending(
            f"job-{number}",
            draw(st.integers(1, 4)),
            pool=draw(st.sampled_from([*names, None])),
            order=draw(st.integers(0, 5)),
            held=draw(st.sampled_from([0, 0, 0, 1])),
            owner=draw(st.sampled_from(["ada", "bob"])),
            priority=draw(st.integers(0, 3)),
            timeout=draw(st.none() | st.integers(1, 60).map(lambda minutes: minutes * MINUTE)),
            accelerator=draw(st.sampled_from([TYPE, TYPE, TYPE, OTHER_TYPE])),
        )
        for number in range(draw(st.integers(0, 8)))
    ]
    supply = Supply(
        pools=pools,
        free=available,
        live=live,
        occupants=occupants,
        held=dict(held),
        pool_sources={name: SOURCES for name in names},
        slices_per_user=draw(st.none() | st.integers(0, 12)),
        pending_requests={
            (SOURCES[0], TYPE): draw(st.sampled_from([0, placement.MAX_PENDING_REQUESTS - 1]))
        },
    )
    refused = draw(st.lists(st.sampled_from(SOURCES), unique=True))
    return Scene(pending, supply, RefusalHistory([refusal(source) for source in refused]))


def by_job(decisions):
    by_id: dict[str, list] = {}
    for item in decisions:
        if not isinstance(item, Supersede):
            by_id.setdefault(item.job_id, []).append(item)
    return by_id


def granted(decisions) -> int:
    """Slices that these decisions of one job give it."""
    taken = sum(len(item.slices) for item in decisions if isinstance(item, AssignSlices))
    return taken + sum(item.count for item in decisions if isinstance(item, RequestSlices))


@given(scenes())
def test_every_job_gets_its_whole_gang_in_one_zone_or_a_reason(scene):
    by_id = by_job(decide(scene.pending, scene.supply, scene.refusals))
    assert set(by_id) == {pending_job.job.id for pending_job in scene.pending}
    zone_of = {item.id: item.zone for items in scene.supply.free.values() for item in items}
    for pending_job in scene.pending:
        mine = by_id[pending_job.job.id]
        assert granted(mine) in (0, pending_job.missing)
        if granted(mine) == 0:
            assert len(mine) == 1 and mine[0].reason
            continue
        zones = {
            zone_of[name] for item in mine if isinstance(item, AssignSlices) for name in item.slices
        }
        zones |= {item.source.zone for item in mine if isinstance(item, RequestSlices)}
        zones |= {pending_job.held_source.zone} if pending_job.held_source else set()
        assert len(zones) == 1


@given(scenes())
def test_no_slice_is_assigned_twice_nor_to_a_job_of_another_pool(scene):
    decisions = decide(scene.pending, scene.supply, scene.refusals)
    pool_of = {item.id: name for name, items in scene.supply.free.items() for item in items}
    jobs = {pending_job.job.id: pending_job.job for pending_job in scene.pending}
    taken = [(name, item.job_id) for item in decisions if isinstance(item, AssignSlices)
             for name in item.slices]  # fmt: skip
    assert len({name for name, _ in taken}) == len(taken)
    assert all(pool_of[name] == jobs[job_id].spec.pool for name, job_id in taken)


@given(scenes())
def test_a_job_gets_only_slices_of_its_type(scene):
    type_of = {item.id: item.accelerator for rows in scene.supply.free.values() for item in rows}
    jobs = {pending_job.job.id: pending_job.job for pending_job in scene.pending}
    for item in decide(scene.pending, scene.supply, scene.refusals):
        if isinstance(item, AssignSlices):
            assert {type_of[name] for name in item.slices} == {jobs[item.job_id].spec.accelerator}
        if isinstance(item, RequestSlices):
            assert item.accelerator == jobs[item.job_id].spec.accelerator
            if item.pool is not None:
                assert item.accelerator == scene.supply.pools[item.pool].accelerator


@given(scenes())
def test_no_pool_exceeds_its_largest_size_and_no_user_a_quota(scene):
    supply = scene.supply
    held, live = Counter(supply.held), Counter(supply.live)
    jobs = {pending_job.job.id: pending_job.job for pending_job in scene.pending}
    for item in decide(scene.pending, supply, scene.refusals):
        if isinstance(item, (AssignSlices, RequestSlices)):
            job = jobs[item.job_id]
            held[(job.spec.pool, job.owner)] += granted([item])
            live[job.spec.pool] += granted([item]) if isinstance(item, RequestSlices) else 0
            pool = supply.pools.get(job.spec.pool)
            if pool is not None:
                assert live[pool.name] <= pool.largest
                if pool.slices_per_user is not None:
                    assert held[(pool.name, job.owner)] <= pool.slices_per_user
            if supply.slices_per_user is not None:
                in_all = sum(count for (_, owner), count in held.items() if owner == job.owner)
                assert in_all <= supply.slices_per_user


@given(scenes())
def test_jobs_overtake_in_a_pool_only_by_backfill(scene):
    decisions = decide(scene.pending, scene.supply, scene.refusals)
    by_id = by_job(decisions)
    for name in scene.supply.pools:
        head = None
        for pending_job in placement.queue_order(
            pending_job for pending_job in scene.pending if pending_job.job.spec.pool == name
        ):
            mine = by_id[pending_job.job.id]
            if head is not None and granted(mine):
                assert all(isinstance(item, AssignSlices) for item in mine), (
                    "it may borrow, not grow"
                )
                assert head.until is not None, "and only when the head's start is known"
                assert (
                    NOON + pending_job.job.spec.timeout + pending_job.job.spec.grace <= head.until
                )
            is_wait = isinstance(mine[0], Wait)
            of_type = pending_job.job.spec.accelerator == scene.supply.pools[name].accelerator
            if head is None and is_wait and of_type and "may hold" not in mine[0].reason:
                head = mine[0]


@given(scenes())
def test_jobs_are_superseded_only_for_higher_priority_and_only_as_many_as_needed(scene):
    decisions = decide(scene.pending, scene.supply, scene.refusals)
    jobs = {pending_job.job.id: pending_job for pending_job in scene.pending}
    for name, occupants in scene.supply.occupants.items():
        known = {item.job_id: item for item in occupants}
        stopped = [
            item for item in decisions if isinstance(item, Supersede) and item.job_id in known
        ]
        if not stopped:
            continue
        assert scene.supply.pools[name].supersede
        [winner] = {item.for_job for item in stopped}
        pending_job = jobs[winner]
        victims = [known[item.job_id] for item in stopped]
        assert all(item.priority < pending_job.job.spec.priority for item in victims)
        assert not any(item.stopping for item in victims)
        free_now = len(scene.supply.free[name])
        headroom = scene.supply.pools[name].largest - scene.supply.live[name]
        coming = sum(item.slices for item in occupants if item.stopping)
        freed = sum(item.slices for item in victims)
        assert coming + freed + headroom + free_now >= pending_job.missing
        assert coming + freed - min(item.slices for item in victims) < pending_job.missing


@given(scenes(), st.randoms(use_true_random=False))
def test_decisions_do_not_depend_on_the_order_of_inputs(scene, random):
    expected = decide(scene.pending, scene.supply, scene.refusals)
    random.shuffle(scene.pending)
    for items in (*scene.supply.free.values(), *scene.supply.occupants.values()):
        random.shuffle(items)
    assert decide(scene.pending, scene.supply, scene.refusals) == expected


# A pool in time: jobs run exactly as long as they may.
@st.composite
def queues(draw):
    largest = draw(st.integers(2, 6))
    running, used = [], 0
    while used < largest and draw(st.booleans()):
        slices = draw(st.integers(1, largest - used))
        used += slices
        running.append((f"run{len(running)}", slices, draw(st.integers(1, 60))))
    waiting = [
        make_pending(
            f"job-{number}",
            draw(st.integers(1, largest)),
            order=number,
            timeout=draw(st.integers(1, 60)) * MINUTE,
            grace=timedelta(0),
        )
        for number in range(draw(st.integers(1, 6)))
    ]
    return make_pool(largest=largest), running, waiting


def starts(pool: Pool, running, waiting) -> dict[str, timedelta]:
    """When each job of the queue starts, if all run for as long as they may."""
    held = {name: (slices, NOON + minutes * MINUTE) for name, slices, minutes in running}
    queue = {pending_job.job.id: pending_job for pending_job in waiting}
    now, started = NOON, {}
    while queue:
        held = {name: row for name, row in held.items() if row[1] > now}
        used = sum(slices for slices, _ in held.values())
        supply = make_supply(
            pool,
            free(*(f"f{number}" for number in range(pool.largest - used))),
            [
                Occupant(job_id=name, priority=0, since=NOON, slices=slices, ends_by=ends)
                for name, (slices, ends) in held.items()
            ],
        )
        for item in placement.place(queue.values(), supply, RefusalHistory(), now):
            if isinstance(item, AssignSlices):
                pending_job = queue.pop(item.job_id)
                started[item.job_id] = now - NOON
                held[item.job_id] = (pending_job.missing, now + pending_job.job.spec.timeout)
        now = min((ends for _, ends in held.values()), default=now + SECOND)
    return started


@settings(max_examples=examples(150))
@given(queues())
def test_backfill_never_delays_the_head(scene):
    pool, running, waiting = scene
    together = starts(pool, running, waiting)
    assert set(together) == {pending_job.job.id for pending_job in waiting}, "every job starts"
    for number, pending_job in enumerate(waiting):
        served = [item for item in waiting[:number] if together[item.job.id] == timedelta(0)]
        if len(served) == number:  # all before it started at once, so it is the head
            alone = starts(pool, running, waiting[: number + 1])
            assert together[pending_job.job.id] == alone[pending_job.job.id]
