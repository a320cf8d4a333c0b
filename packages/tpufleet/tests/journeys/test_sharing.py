"""People share a pool: edits, holds, fair share, reservations."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.journeys.simulated_hosts import Program
from tpufleet.errors import BadInput
from tpufleet.model.api_types import JobChanges, NewReservation
from tpufleet.model.fleet.hosts import Exit
from tpufleet.model.job.jobs import JobState
from tpufleet.service.fleet import reservations
from tpufleet.service.jobs import commands, job_queue

HOUR = timedelta(hours=1)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def failing() -> Program:
    return Program(
        steps=5, fails=lambda attempt, process, step: Exit(at=NOW, status=1) if step > 2 else None
    )


def started(fleet, *jobs):
    return sorted(jobs, key=lambda job: fleet.store.attempts(job)[0].created_at)


def blocked_pool(fleet, **pool):
    fleet.put_pool(name="lab", largest=1, **pool)
    blocker = fleet.submit(Program(steps=20), pool="lab")
    fleet.until_state(blocker, JobState.RUNNING)
    return blocker


def test_a_priority_changed_while_it_waits_decides_the_order(fleet):
    blocker = blocked_pool(fleet)
    one = fleet.submit(Program(steps=5), pool="lab")
    fleet.run(1)
    two = fleet.submit(Program(steps=5), pool="lab", tags=("old",))
    fleet.run(1)
    changes = JobChanges(priority=5, add_tags=("new",))
    commands.change_job(fleet.context("ann"), fleet.job(two), changes)
    fleet.settle(blocker, one, two)
    assert started(fleet, one, two) == [two, one]
    assert fleet.job(two).spec.tags == ("old", "new")


def test_a_held_job_waits_and_does_not_block_the_queue(fleet):
    blocker = blocked_pool(fleet)
    one = fleet.submit(Program(steps=5), pool="lab")
    two = fleet.submit(Program(steps=5), pool="lab")
    job_queue.hold(fleet.context("ann"), fleet.job(one))
    fleet.settle(blocker, two)
    fleet.run(60)
    assert fleet.job(one).state is JobState.QUEUED and "held by ann" in fleet.job(one).reason
    job_queue.release(fleet.context("ann"), fleet.job(one))
    fleet.settle(one)
    assert fleet.job(one).state is JobState.SUCCEEDED


@pytest.mark.slow
def test_a_user_who_used_much_goes_after_one_who_used_little(fleet):
    fleet.put_pool(name="lab", largest=1)
    heavy = fleet.submit(Program(steps=900), pool="lab", owner="ann")
    fleet.settle(heavy)
    blocker = fleet.submit(Program(steps=60), pool="lab", owner="eve")
    fleet.until_state(blocker, JobState.RUNNING)
    anns = fleet.submit(Program(steps=5), pool="lab", owner="ann")
    fleet.run(2)
    bobs = fleet.submit(Program(steps=5), pool="lab", owner="bob")
    fleet.settle(blocker, anns, bobs)
    assert started(fleet, anns, bobs) == [bobs, anns]
    fleet.restart_controller()
    fleet.run(1)
    ledger = job_queue.usage_ledger(fleet.store)
    assert ledger is not None and ledger.usage["ann"] > 3600 > ledger.usage.get("bob", 0)


def test_a_reserved_pool_runs_only_jobs_of_its_owner(fleet):
    fleet.put_pool(name="lab", largest=2)
    new = NewReservation(id="r1", pool="lab", duration=HOUR, note="demo")
    reservations.reserve(fleet.context("ann"), new)
    fleet.run(1)
    bobs = fleet.submit(Program(steps=5), pool="lab", owner="bob")
    fleet.run(5)
    anns = fleet.submit(Program(steps=5), pool="lab", owner="ann")
    fleet.settle(anns)
    assert fleet.job(bobs).state is JobState.QUEUED
    assert "reserved by ann until" in fleet.job(bobs).reason and "(demo)" in fleet.job(bobs).reason
    reservations.end(fleet.context("ann"), "r1", "")
    fleet.settle(bobs, limit=300)


def test_part_of_a_pool_can_be_reserved_and_a_reservation_ends_by_itself(fleet):
    fleet.put_pool(name="lab", largest=2)
    new = NewReservation(id="r1", pool="lab", slices=1, duration=timedelta(minutes=10))
    reservations.reserve(fleet.context("ann"), new)
    fleet.run(1)
    jobs = [fleet.submit(Program(steps=5), pool="lab", owner="bob") for _ in range(2)]
    wide = fleet.submit(Program(steps=5), pool="lab", owner="bob", slices=2)
    fleet.settle(*jobs, limit=500)
    assert fleet.job(wide).state is JobState.QUEUED
    fleet.settle(wide, limit=1200)


def test_a_job_that_would_run_into_a_reservation_waits(fleet):
    fleet.put_pool(name="lab", largest=1)
    start = fleet.now() + timedelta(minutes=30)
    new = NewReservation(id="r1", pool="lab", starts_at=start, duration=timedelta(minutes=5))
    reservations.reserve(fleet.context("ann"), new)
    fleet.run(1)
    long = fleet.submit(Program(steps=5), pool="lab", owner="bob")
    short = fleet.submit(Program(steps=5), pool="lab", owner="bob", timeout="10m")
    fleet.settle(short, limit=300)
    assert (
        fleet.job(long).state is JobState.QUEUED
        and "reserved by ann from" in fleet.job(long).reason
    )
    fleet.settle(long, limit=3000)
    assert fleet.store.attempts(long)[0].created_at >= start + timedelta(minutes=5)


def test_the_slice_of_a_failed_job_is_held_for_its_owner(fleet):
    fleet.put_pool(name="lab", largest=1, hold_after_failure=timedelta(minutes=30))
    failed = fleet.submit(failing(), pool="lab", owner="ann")
    fleet.settle(failed)
    assert fleet.job(failed).state is JobState.FAILED
    (held,) = fleet.store.slices(pool="lab")
    assert held.reserved_for == "ann"
    bobs = fleet.submit(Program(steps=5), pool="lab", owner="bob")
    fleet.run(700)  # longer than idle slices are kept
    assert fleet.job(bobs).state is JobState.QUEUED
    assert f"{held.id} is held for ann " in fleet.job(bobs).reason
    anns = fleet.submit(Program(steps=5), pool="lab", owner="ann")
    fleet.settle(anns, bobs)
    assert started(fleet, anns, bobs) == [anns, bobs]


def test_the_owner_releases_a_held_slice(fleet):
    fleet.put_pool(name="lab", largest=1, hold_after_failure=timedelta(hours=5))
    failed = fleet.submit(failing(), pool="lab", owner="ann")
    fleet.settle(failed)
    (held,) = fleet.store.slices(pool="lab")
    bobs = fleet.submit(Program(steps=5), pool="lab", owner="bob")
    fleet.run(10)
    commands.release_held_slice(fleet.context("ann"), held.id)
    fleet.settle(bobs, limit=300)


@pytest.mark.parametrize(
    ("reuse", "user", "fails", "takes"),
    [
        ("01", "ann", False, True),
        ("01", "bob", False, False),
        ("01", "ann", True, False),
        ("10", "ann", True, True),
        ("20", "ann", True, False),
        ("20", "bob", True, True),
        ("03", "bob", False, True),
        ("03", "bob", True, False),
        (["own-finished", "own-failed"], "ann", True, True),
        (["others-finished"], "bob", False, True),
    ],
    ids=str,
)
def test_a_job_says_whose_used_slices_it_takes(fleet, reuse, user, fails, takes):
    """The two digits are the permission bits of the former queue: failed, finished."""
    fleet.put_pool(name="lab", smallest=1, largest=1)
    before = fleet.submit(failing() if fails else Program(steps=5), pool="lab", owner=user)
    fleet.settle(before)
    (used,) = fleet.store.slices(pool="lab")
    choosy = fleet.submit(Program(steps=5), pool="lab", owner="ann", reuse=reuse)
    fleet.run(60)
    if takes:
        assert fleet.store.attempts(choosy)[0].slices == (used.id,)
        return
    outcome = "failed" if fails else "finished"
    whose = "own" if user == "ann" else "others"
    assert f"slice {used.id} is free, but {whose}-{outcome}" in fleet.job(choosy).reason
    other = fleet.submit(Program(steps=5), pool="lab", owner="eve")
    fleet.settle(other, limit=300)
    own = fleet.store.attempts(choosy)
    first = fleet.store.attempts(other)[0]
    assert not own or own[0].created_at > first.created_at, "and it does not block the queue"


def test_a_slice_that_no_job_used_is_free_for_all(fleet):
    fleet.put_pool(name="lab", smallest=1, largest=1)
    fleet.run(60)
    choosy = fleet.submit(Program(steps=5), pool="lab", reuse="00")
    fleet.settle(choosy, limit=300)


def test_a_job_that_requires_a_reservation_waits_for_one(fleet):
    fleet.put_pool(name="lab", largest=1)
    careful = fleet.submit(Program(steps=5), pool="lab", require_reservation=True)
    other = fleet.submit(Program(steps=5), pool="lab", owner="bob")
    fleet.settle(other, limit=300)
    assert "requires a reservation; `tpu reserve lab`" in fleet.job(careful).reason
    start = fleet.now() + timedelta(minutes=10)
    new = NewReservation(id="r1", pool="lab", starts_at=start, duration=timedelta(minutes=30))
    reservations.reserve(fleet.context("ann"), new)
    fleet.run(60)
    assert "waits for the reservation of ann at" in fleet.job(careful).reason
    fleet.settle(careful, limit=1200)
    assert fleet.store.attempts(careful)[0].created_at >= start


@pytest.mark.parametrize("field", [{"reuse": "01"}, {"require_reservation": True}], ids=str)
def test_these_fields_need_a_pool(fleet, field):
    with pytest.raises(BadInput, match="only with a pool"):
        fleet.submit(Program(), **field)
