"""Sharing a pool: priorities, limits, backfill, and jobs that make way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.contract.fake_store import FakeStore
from tests.journeys.simulated_fleet import SimulatedFleet
from tests.journeys.simulated_hosts import Program
from tpufleet.errors import BadInput
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.job.jobs import Capacity, JobState
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.model.people.users import Role, User
from tpufleet.stores.base import ChangeSet, EventQuery


def test_a_pool_keeps_its_smallest_number_of_slices_ready(fleet):
    fleet.put_pool(name="lab", smallest=2, largest=4)
    fleet.run(30)
    assert len(fleet.store.slices(pool="lab")) == 2
    job = fleet.submit(pool="lab")
    fleet.until_state(job, JobState.RUNNING, 8)
    fleet.settle(job)
    assert len(fleet.cloud.existing()) == 2


def test_a_pool_never_grows_past_its_largest(fleet):
    fleet.put_pool(name="lab", largest=3)
    jobs = [fleet.submit(pool="lab") for _ in range(8)]
    most = 0
    while not all(fleet.job(job).ended for job in jobs):
        fleet.tick()
        most = max(most, len(fleet.cloud.existing()))
    assert most == 3
    assert all(fleet.job(job).state is JobState.SUCCEEDED for job in jobs)


def test_idle_slices_are_released_and_a_deleted_pool_empties(fleet):
    fleet.put_pool(name="lab", smallest=1, largest=4, idle_after=timedelta(minutes=1))
    jobs = [fleet.submit(pool="lab") for _ in range(3)]
    fleet.settle(*jobs)
    fleet.until(lambda: len(fleet.cloud.existing()) == 1, 200)
    fleet.delete_pool("lab")
    fleet.until(lambda: fleet.cloud.existing() == [], 60)


def test_jobs_start_by_priority_then_age(fleet):
    fleet.put_pool(name="lab", largest=1)
    blocker = fleet.submit(Program(steps=20), pool="lab")
    fleet.until_state(blocker, JobState.RUNNING)
    low = fleet.submit(Program(steps=5), pool="lab")
    fleet.run(1)
    late = fleet.submit(Program(steps=5), pool="lab", priority=5)
    fleet.run(1)
    later = fleet.submit(Program(steps=5), pool="lab", priority=5)
    fleet.settle(blocker, low, late, later)
    started = sorted((low, late, later), key=lambda job: fleet.store.attempts(job)[0].created_at)
    assert started == [late, later, low]


def test_the_head_of_the_queue_is_not_starved_by_smaller_jobs(fleet):
    fleet.put_pool(name="lab", largest=2)
    first = fleet.submit(Program(steps=60), pool="lab")
    fleet.until_state(first, JobState.RUNNING)
    wide = fleet.submit(Program(steps=5), pool="lab", slices=2)
    fleet.run(2)
    small = [fleet.submit(Program(steps=30), pool="lab") for _ in range(5)]
    fleet.settle(first, wide, *small)
    wide_start = fleet.store.attempts(wide)[0].created_at
    assert all(fleet.store.attempts(job)[0].created_at > wide_start for job in small)


def test_a_short_job_backfills_if_it_ends_in_time(fleet):
    fleet.put_pool(name="lab", smallest=2, largest=2)
    fleet.until(lambda: len(fleet.store.slices(pool="lab")) == 2)
    fleet.run(15)
    first = fleet.submit(Program(steps=300), pool="lab", timeout="10m")
    fleet.until_state(first, JobState.RUNNING)
    wide = fleet.submit(Program(steps=5), pool="lab", slices=2)
    fleet.run(2)
    long = fleet.submit(Program(steps=20), pool="lab", timeout="2h")
    short = fleet.submit(Program(steps=20), pool="lab", timeout="2m")
    fleet.settle(first, wide, long, short)
    start = {job: fleet.store.attempts(job)[0].created_at for job in (wide, long, short)}
    assert start[short] < start[wide] < start[long]


def test_a_user_cannot_exceed_the_pool_quota(fleet):
    fleet.put_pool(name="lab", largest=4, slices_per_user=2)
    mine = [fleet.submit(pool="lab", owner="ann") for _ in range(4)]
    fleet.run(2)
    theirs = fleet.submit(pool="lab", owner="bob")
    fleet.until(lambda: fleet.running(theirs))
    assert sum(1 for job in mine if fleet.gang(job)) == 2
    held_back = [job for job in mine if not fleet.gang(job)]
    assert all("ann may hold 2 slices of pool lab" in fleet.job(job).reason for job in held_back)
    fleet.settle(*mine, theirs)


def test_the_global_quota_also_holds_without_a_pool(make_fleet):
    fleet = make_fleet(slices_per_user=2)
    jobs = [fleet.submit() for _ in range(4)]
    most = 0
    while not all(fleet.job(job).ended for job in jobs):
        fleet.tick()
        most = max(most, sum(1 for job in jobs if fleet.gang(job)))
    assert most == 2


def test_a_job_of_higher_priority_supersedes_a_lower_one_where_the_pool_allows(fleet):
    fleet.put_pool(name="lab", largest=1, supersede=True)
    low = fleet.submit(Program(steps=60, checkpoint_every=1000), pool="lab")
    fleet.until_state(low, JobState.RUNNING)
    fleet.run(20)
    high = fleet.submit(Program(steps=10), pool="lab", priority=10)
    fleet.settle(low, high)
    assert fleet.attempts(low) == ["superseded", "finished"]
    assert fleet.attempts(high) == ["finished"]
    assert fleet.failures(low) == 0
    assert fleet.attempt(low).start_step >= 20


def test_equal_priority_never_supersedes(fleet):
    fleet.put_pool(name="lab", largest=1, supersede=True)
    first = fleet.submit(pool="lab", priority=3)
    fleet.until_state(first, JobState.RUNNING)
    second = fleet.submit(pool="lab", priority=3)
    fleet.settle(first, second)
    assert fleet.attempts(first) == ["finished"]


def test_no_job_is_superseded_unless_it_helps(fleet):
    fleet.put_pool(name="lab", largest=2, supersede=True)
    low = fleet.submit(Program(steps=40), pool="lab")
    middle = fleet.submit(Program(steps=40), pool="lab", priority=9)
    fleet.until(lambda: fleet.running(low) and fleet.running(middle))
    wide = fleet.submit(Program(steps=5), pool="lab", slices=2, priority=5)
    fleet.settle(low, middle, wide)
    assert fleet.attempts(low) == ["finished"]


def test_a_preempted_slice_of_a_pool_is_replaced_for_its_job(fleet):
    fleet.put_pool(name="lab", largest=2)
    job = fleet.submit(pool="lab")
    fleet.until_state(job, JobState.RUNNING)
    fleet.preempt(job)
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "finished"]


def test_a_lost_idle_slice_of_a_pool_is_replaced(fleet):
    fleet.put_pool(name="lab", smallest=1, largest=1)
    fleet.run(20)
    taken = fleet.store.slices(pool="lab")[0].id
    fleet.cloud.vanish(taken)
    fleet.run(30)
    assert [item.id for item in fleet.store.slices(pool="lab")] != [taken]
    assert len(fleet.cloud.existing()) == 1


def test_a_job_never_runs_on_a_slice_of_the_type_that_its_pool_had_before(fleet):
    fleet.put_pool(name="lab", accelerator="v5litepod-16", smallest=1, largest=1)
    fleet.run(30)
    [old] = fleet.store.slices(pool="lab")
    fleet.put_pool(name="lab", accelerator="v5litepod-8", smallest=1, largest=1)
    job = fleet.submit(accelerator="v5litepod-8", pool="lab")
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED
    assert old.id not in fleet.attempt(job).slices
    fleet.run(60)
    [new] = fleet.store.slices(pool="lab")
    assert (new.id in fleet.existing(), new.accelerator) == (True, "v5litepod-8")


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"accelerator": "v5litepod-8"}, id="type"),
        pytest.param({"zones": ("zone-b",)}, id="zone"),
        pytest.param({"capacity": (Capacity.ON_DEMAND,)}, id="capacity"),
        pytest.param({"pod": PodSettings(cpu="8")}, id="pod"),
    ],
)
def test_idle_slices_that_a_changed_pool_no_longer_provides_are_replaced(make_fleet, changed):
    fleet = make_fleet(zones=("zone-a", "zone-b"))
    before = {"name": "lab", "smallest": 2, "largest": 2, "zones": ("zone-a",)}
    fleet.put_pool(**before)
    fleet.run(30)
    old = {each.id for each in fleet.store.slices(pool="lab")}
    fleet.put_pool(**{**before, **changed})
    fleet.run(90)
    new = fleet.store.slices(pool="lab")
    assert len(new) == 2 and not old & {each.id for each in new}
    for field, value in changed.items():
        shown = {"zones": "zone"}.get(field, field)
        assert field == "pod" or all(getattr(each, shown) in value for each in new)
    wanted = fleet.cloud.slice_settings("", changed.get("pod", PodSettings()))
    assert {fleet.cloud.created_with(each.id) for each in new} == {wanted}


def test_idle_slices_with_another_runtime_version_than_the_server_now_has_are_replaced(fleet):
    fleet.put_pool(name="lab", smallest=1, largest=1)
    fleet.run(30)
    [old] = fleet.store.slices(pool="lab")
    fleet.cloud.runtime = "v2"
    fleet.controllers = [fleet.new_controller("two")]
    fleet.run(120)
    [new] = fleet.store.slices(pool="lab")
    assert (new.id != old.id, new.state) == (True, SliceState.READY)
    events = fleet.store.events(EventQuery(slice_id=old.id))
    assert any("pool lab was changed" in e.message for e in events)


def test_slices_of_an_earlier_version_that_recorded_no_settings_are_kept(fleet):
    fleet.put_pool(name="lab", smallest=1, largest=1)
    fleet.run(30)
    [old] = fleet.store.slices(pool="lab")
    fleet.controllers = []
    fleet.store.commit(ChangeSet(slices=[replace(old, settings="")]))
    fleet.cloud.runtime = "v2"
    fleet.controllers = [fleet.new_controller("two")]
    fleet.run(120)
    assert [each.id for each in fleet.store.slices(pool="lab")] == [old.id]


def test_a_running_job_keeps_its_slice_when_the_pod_settings_of_its_pool_change(fleet):
    hour = timedelta(hours=1)
    fleet.put_pool(name="lab", smallest=1, largest=1, idle_after=hour)
    job = fleet.submit(Program(steps=60), pool="lab")
    fleet.until_state(job, JobState.RUNNING)
    [old] = fleet.gang(job)
    changed = {"name": "lab", "smallest": 1, "largest": 1, "idle_after": hour}
    fleet.put_pool(**changed, pod=PodSettings(image="registry/jax:2"))
    next_job = fleet.submit(pool="lab")
    fleet.settle(job, next_job)
    assert fleet.attempts(job) == ["finished"]
    assert old.id not in fleet.attempt(next_job).slices
    assert old.id not in fleet.existing()


def test_a_pool_that_is_saved_again_with_the_same_pod_settings_keeps_its_slices(fleet):
    labels = {"team": "a", "tier": "b"}
    fleet.put_pool(name="lab", smallest=1, largest=1, pod=PodSettings(labels=labels))
    fleet.run(30)
    [old] = fleet.store.slices(pool="lab")
    other_order = dict(reversed(labels.items()))
    fleet.put_pool(name="lab", smallest=1, largest=2, pod=PodSettings(labels=other_order))
    fleet.run(60)
    assert [each.id for each in fleet.store.slices(pool="lab")] == [old.id]


def test_a_running_job_keeps_its_slice_when_the_type_of_its_pool_changes(fleet):
    fleet.put_pool(name="lab", accelerator="v5litepod-16", largest=2, idle_after=timedelta(hours=1))
    job = fleet.submit(Program(steps=60), pool="lab")
    fleet.until_state(job, JobState.RUNNING)
    [old] = fleet.gang(job)
    fleet.put_pool(name="lab", accelerator="v5litepod-8", largest=2, idle_after=timedelta(hours=1))
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]
    fleet.until(lambda: old.id not in fleet.existing(), 60)


def test_a_queued_job_fails_with_the_reason_when_its_pool_gets_another_type(fleet):
    fleet.put_pool(name="lab", accelerator="v5litepod-16", largest=1)
    first = fleet.submit(Program(steps=60), pool="lab")
    fleet.until_state(first, JobState.RUNNING)
    second = fleet.submit(pool="lab")
    fleet.run(2)
    fleet.put_pool(name="lab", accelerator="v5litepod-8", largest=1)
    fleet.settle(first, second)
    assert fleet.job(first).state is JobState.SUCCEEDED
    assert fleet.job(second).state is JobState.FAILED
    assert "but the job needs v5e-16" in fleet.job(second).reason


@pytest.mark.parametrize("fields", [{}, {"require_reservation": True}], ids=str)
def test_a_queued_job_fails_with_the_reason_when_its_owner_is_no_longer_a_member(fleet, fields):
    members(fleet, "ann", "bob")
    first = fleet.submit(Program(steps=60), pool="lab")
    fleet.until_state(first, JobState.RUNNING)
    queued = fleet.submit(pool="lab", owner="bob", **fields)
    fleet.run(2)
    members(fleet, "ann")
    fleet.settle(first, queued)
    assert fleet.job(first).state is JobState.SUCCEEDED
    assert (fleet.job(queued).state, fleet.attempts(queued)) == (JobState.FAILED, [])
    reason = "cannot be placed: bob is not a member of pool lab; an admin can change"
    assert reason in fleet.job(queued).reason


def test_a_running_job_goes_on_when_its_owner_is_no_longer_a_member(fleet):
    members(fleet, "ann", "bob")
    job = fleet.submit(Program(steps=60), pool="lab", owner="bob")
    fleet.until_state(job, JobState.RUNNING)
    members(fleet, "ann")
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]


def test_jobs_of_admins_run_in_pools_that_they_are_not_members_of(fleet):
    members(fleet, "ann")
    fleet.run(2)
    promoted = User(name="bob", role=Role.ADMIN, created_at=fleet.clock.now())
    fleet.context("bob")
    fleet.store.put_user(promoted)
    job = fleet.submit(pool="lab", owner="root")
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED
    members(fleet, "ann", "bob")
    job = fleet.submit(pool="lab", owner="bob")
    members(fleet, "ann")
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


def members(fleet, *names: str) -> None:
    for name in names:
        fleet.context(name)  # makes the user
    fleet.put_pool(name="lab", largest=1, members=names)


TYPES = ("v5litepod-8", "v5litepod-16", "v5litepod-32")
ZONES = ("zone-a", "zone-b")
pool_edits = st.fixed_dictionaries(
    {
        "accelerator": st.sampled_from(TYPES),
        "zones": st.sampled_from([(), *((zone,) for zone in ZONES)]),
        "capacity": st.sampled_from([(kind,) for kind in (Capacity.SPOT, Capacity.ON_DEMAND)]),
        "pod": st.sampled_from([PodSettings(), PodSettings(cpu="8")]),
        "smallest": st.integers(0, 1),
        "largest": st.integers(1, 3),
        "hold_after_failure": st.sampled_from([timedelta(0), timedelta(seconds=40)]),
    }
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("edit"), pool_edits),
        st.tuples(st.just("submit"), st.tuples(st.sampled_from(TYPES), st.integers(1, 2))),
        st.tuples(st.just("run"), st.integers(1, 40)),
        st.tuples(st.just("preempt"), st.integers(0, 3)),
    ),
    min_size=4,
    max_size=14,
)


# Without shrinking, which takes minutes: each example is minutes of a fleet.
@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(pool_edits, actions)
def test_a_pool_may_be_changed_at_any_time(first, steps):
    """The invariants hold throughout, all jobs end, and the pool then has what it should."""
    with TemporaryDirectory() as folder:
        fleet = SimulatedFleet(Path(folder), FakeStore(), zones=ZONES)
        try:
            _change_pool_while_jobs_run(fleet, first, steps)
        finally:
            fleet.close()


def _change_pool_while_jobs_run(
    fleet: SimulatedFleet, edit: dict[str, object], steps: list[tuple[str, object]]
) -> None:
    def submit(wanted: tuple[str, int]) -> None:
        try:
            fleet.submit(Program(steps=15), accelerator=wanted[0], slices=wanted[1], pool="lab")
        except BadInput:
            fleet.programs.popitem()  # the pool does not have that now

    def change(fields: dict[str, object]) -> None:
        nonlocal edit
        edit = fields
        fleet.put_pool(name="lab", **fields)

    def preempt(index: int) -> None:
        running = [job for job in fleet.programs if fleet.running(job)]
        if running:
            fleet.preempt(running[index % len(running)])

    act: dict[str, Callable[..., None]] = {
        "edit": change, "submit": submit, "run": fleet.run, "preempt": preempt,
    }  # fmt: skip
    change(edit)
    for kind, argument in steps:
        act[kind](argument)
    fleet.settle(*fleet.programs)
    fleet.run(150)
    left = fleet.store.slices(pool="lab")
    assert len(left) >= edit["smallest"]
    for tpu_slice in left:
        assert tpu_slice.accelerator == edit["accelerator"]
        assert tpu_slice.zone in (edit["zones"] or ZONES)
        assert tpu_slice.capacity in edit["capacity"]
        wanted = fleet.cloud.slice_settings("", edit["pod"])
        assert fleet.cloud.created_with(tpu_slice.id) == wanted


def test_a_spare_slice_is_taken_in_the_tick_of_a_loss_and_replaced_after(fleet):
    """`smallest` is one more than the job needs."""
    fleet.put_pool(name="lab", smallest=2, largest=3)
    fleet.until(lambda: sum(each.state is SliceState.READY for each in fleet.store.slices()) == 2)
    job = fleet.submit(Program(steps=200), pool="lab")
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(15)
    [lost] = fleet.gang(job)
    [spare] = [each for each in fleet.store.slices() if each.job_id is None and each.live]
    fleet.preempt(job)
    fleet.until(lambda: fleet.store.slice(lost.id).lost_at is not None)
    assert [each.id for each in fleet.gang(job)] == [spare.id]
    assert fleet.store.slice(spare.id).assigned_at == fleet.store.slice(lost.id).lost_at
    fleet.until(lambda: fleet.running_attempt(job) == 1)
    [began] = [each.created_at for each in fleet.store.attempts(job)[1:]]
    assert began - fleet.store.slice(lost.id).lost_at <= timedelta(seconds=2)
    fleet.until(lambda: sum(each.live for each in fleet.store.slices()) == 2, 60)
    assert {each.pool for each in fleet.store.slices() if each.live} == {"lab"}
