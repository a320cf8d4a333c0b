"""How a listing changes a slice, for every state of both."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import NOON, after, make_slice
from tpufleet.model.fleet.cloud_slices import CloudSlice, CloudState
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.slices import LossReason, SliceState
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.job.lifecycle import can_transition
from tpufleet.policy.recovery import slice_observation
from tpufleet.policy.recovery.liveness import AGENT_LEASE

S, C = SliceState, CloudState
SAME = None  # the very same object: nothing changed
COMING = (C.PENDING, C.CREATING, C.UP)

# What the cloud says × what we recorded → the state and loss that follow.
TABLE: dict[CloudState, dict[SliceState, tuple[SliceState, LossReason | None] | None]] = {
    **{
        state: {
            S.REQUESTED: (S.BOOTING, None),
            S.BOOTING: (S.BOOTING, None),
            S.READY: SAME,
            S.DOOMED: SAME,
        }
        for state in COMING
    },
    **{
        state: {
            S.REQUESTED: (S.RELEASING, LossReason.BOOT_FAILED),
            S.BOOTING: (S.RELEASING, LossReason.BOOT_FAILED),
            S.READY: (S.RELEASING, LossReason.HOST_LOST),
            S.DOOMED: (S.RELEASING, LossReason.PREEMPTED),
        }
        for state in (C.STOPPING, C.FAILED)
    },
    C.PREEMPTED: {
        state: (S.RELEASING, LossReason.PREEMPTED)
        for state in (S.REQUESTED, S.BOOTING, S.READY, S.DOOMED)
    },
    C.REFUSED: {
        S.REQUESTED: (S.RELEASING, LossReason.REFUSED),
        S.BOOTING: (S.RELEASING, LossReason.REFUSED),
        S.READY: (S.RELEASING, LossReason.REFUSED),
        S.DOOMED: (S.RELEASING, LossReason.PREEMPTED),
    },
}
for row in TABLE.values():
    row.update({S.RELEASING: SAME, S.GONE: SAME})


def recorded(state: SliceState, **options):
    known = {"loss": LossReason.PREEMPTED, "lost_at": after(-5)} if state is S.DOOMED else {}
    return make_slice(state=state, **{"up_at": after(-9), **known, **options})


def cloud(state: CloudState = C.UP, **options) -> CloudSlice:
    return CloudSlice(id="s0", zone="z1", state=state, **options)


def test_the_table_is_complete():
    assert set(TABLE) == set(CloudState)
    assert all(set(row) == set(SliceState) for row in TABLE.values())


@pytest.mark.parametrize("ours", SliceState)
@pytest.mark.parametrize("theirs", CloudState)
def test_a_slice_that_is_listed(theirs, ours):
    before = recorded(ours)
    observed = slice_observation.apply_cloud_slice(before, cloud(theirs, message="so it is"), NOON)
    expected = TABLE[theirs][ours]
    if expected is SAME:
        assert observed is before
        return
    assert (observed.state, observed.loss) == expected
    assert observed.reason == "so it is"
    assert observed.lost_at == (None if observed.loss is None else before.lost_at or NOON)


@pytest.mark.parametrize("theirs", COMING)
@pytest.mark.parametrize("ours", [S.REQUESTED, S.BOOTING, S.READY])
def test_the_time_when_machines_first_ran_is_recorded(theirs, ours):
    observed = slice_observation.apply_cloud_slice(recorded(ours, up_at=None), cloud(theirs), NOON)
    assert observed.up_at == (NOON if theirs is C.UP else None)


@pytest.mark.parametrize("ours", SliceState)
def test_a_host_lost_by_the_provider_loses_the_slice(ours):
    before = recorded(ours)
    observed = slice_observation.apply_cloud_slice(before, cloud(lost_hosts=(1, 3)), NOON)
    if ours in (S.RELEASING, S.GONE):
        assert observed is before
    else:
        booting = ours in (S.REQUESTED, S.BOOTING)
        known = LossReason.PREEMPTED if ours is S.DOOMED else LossReason.HOST_LOST
        assert observed.loss is (LossReason.BOOT_FAILED if booting else known)
        assert observed.state is S.RELEASING and "lost host 1, 3" in observed.reason


@pytest.mark.parametrize("ours", [S.BOOTING, S.READY, S.DOOMED])
def test_a_suspicion_of_the_provider_loses_nothing(ours):
    """Only the silence of its agent proves that a host is lost."""
    suspected = cloud(lost_hosts=(1,), suspected=True)
    before = recorded(ours)
    assert slice_observation.apply_cloud_slice(before, suspected, NOON).state is ours


@pytest.mark.parametrize("ours", [S.BOOTING, S.READY, S.DOOMED])
def test_a_host_lost_after_a_notice_is_preempted_with_the_providers_message(ours):
    lost = cloud(lost_hosts=(1,), notice=NoticeKind.PREEMPTED, message="host 1: it was evicted")
    observed = slice_observation.apply_cloud_slice(recorded(ours), lost, NOON)
    assert (observed.state, observed.loss) == (S.RELEASING, LossReason.PREEMPTED)
    assert observed.reason == "host 1: it was evicted"


def test_a_booting_slice_changes_only_with_its_message():
    before = recorded(S.BOOTING, reason="no node has room")
    assert (
        slice_observation.apply_cloud_slice(
            before, cloud(C.PENDING, message="no node has room"), NOON
        )
        is before
    )
    assert slice_observation.apply_cloud_slice(before, cloud(C.PENDING), NOON) is before


@pytest.mark.parametrize("notice", NoticeKind)
@pytest.mark.parametrize("ours", SliceState)
def test_a_notice_dooms_only_slices_that_work(notice, ours):
    before = recorded(ours)
    observed = slice_observation.apply_notice(before, notice, NOON)
    if ours in (S.BOOTING, S.READY):
        assert observed.state is S.DOOMED and observed.loss is LossReason(notice.value)
        assert observed.lost_at == NOON and str(notice) in observed.reason
    else:
        assert observed is before


def test_a_notice_says_why_as_soon_as_the_provider_does():
    """Such as the name of the pod that was deleted."""
    told = cloud(C.UP, notice=NoticeKind.PREEMPTED, message="pod a-0 is being deleted")
    by_provider = slice_observation.apply_cloud_slice(recorded(S.READY), told, NOON)
    by_host = slice_observation.apply_notice(recorded(S.READY), NoticeKind.PREEMPTED, NOON)
    assert by_host.reason != told.message
    assert slice_observation.apply_cloud_slice(by_host, told, NOON) == by_provider
    assert by_provider.reason == told.message


# What we recorded, spot or not → what a listing without it means.
ABSENT = {
    S.REQUESTED: (SAME, SAME),
    S.BOOTING: ((S.GONE, LossReason.PREEMPTED), (S.GONE, LossReason.VANISHED)),
    S.READY: ((S.GONE, LossReason.PREEMPTED), (S.GONE, LossReason.VANISHED)),
    S.DOOMED: ((S.GONE, LossReason.PREEMPTED), (S.GONE, LossReason.PREEMPTED)),
    S.RELEASING: ((S.GONE, None), (S.GONE, None)),
    S.GONE: (SAME, SAME),
}


@pytest.mark.parametrize("ours", SliceState)
@pytest.mark.parametrize("kind", [Capacity.SPOT, Capacity.ON_DEMAND], ids=str)
def test_a_slice_that_is_no_longer_listed(ours, kind):
    before = recorded(ours, capacity=kind)
    observed = slice_observation.apply_missing(before, NOON)
    expected = ABSENT[ours][0 if kind is Capacity.SPOT else 1]
    if expected is SAME:
        assert observed is before
    else:
        assert (observed.state, observed.loss) == expected
        assert observed.gone_at == NOON


def test_an_adopted_node_counts_as_gone_once_no_job_can_run_on_it():
    """It is given back, not deleted: an agent that nobody reaches stops its job by itself."""
    lost = recorded(S.RELEASING, node="mels", loss=LossReason.HOST_LOST, lost_at=NOON)
    soon, later = NOON + timedelta(minutes=9), NOON + AGENT_LEASE
    assert slice_observation.apply_missing(lost, soon) is lost
    assert slice_observation.apply_missing(lost, later).state is S.GONE
    for ended in (
        replace(lost, job_id=None),
        replace(lost, fenced_at=NOON),
        replace(lost, node=""),
    ):
        assert slice_observation.apply_missing(ended, soon).state is S.GONE


def test_the_capacity_kind_of_an_adopted_node_is_that_of_the_cloud():
    listed = CloudSlice(id="s1", zone="z", state=C.UP, capacity=Capacity.RESERVED)
    before = recorded(S.READY, node="mels")
    after_listing = slice_observation.apply_cloud_slice(before, listed, NOON)
    assert after_listing.capacity is Capacity.RESERVED


def test_a_slice_that_was_released_keeps_its_reason_when_it_is_gone():
    before = recorded(
        S.RELEASING, loss=LossReason.RELEASED, reason="no longer needed", lost_at=after(-9)
    )
    observed = slice_observation.apply_missing(before, NOON)
    assert (observed.loss, observed.reason, observed.lost_at) == (
        before.loss,
        before.reason,
        before.lost_at,
    )


clouds = st.builds(
    CloudSlice,
    id=st.just("s0"),
    zone=st.just("z1"),
    state=st.sampled_from(list(CloudState)),
    message=st.sampled_from(["", "because"]),
    lost_hosts=st.sampled_from([(), (0,), (1, 2)]),
    notice=st.none() | st.sampled_from(list(NoticeKind)),
)


@given(st.sampled_from(list(SliceState)), st.lists(st.none() | clouds, max_size=12))
def test_every_listing_leads_to_a_legal_transition_and_keeps_the_first_loss(state, listed):
    tpu_slice = recorded(state)
    for number, item in enumerate(listed):
        now = after(number)
        before = tpu_slice
        tpu_slice = (
            slice_observation.apply_cloud_slice(before, item, now)
            if item
            else slice_observation.apply_missing(before, now)
        )
        assert can_transition(before.state, tpu_slice.state)
        assert before.lost_at in (None, tpu_slice.lost_at)
        if tpu_slice is not before:
            assert tpu_slice.state is not before.state, "a change is a change of state"
        again = (
            slice_observation.apply_cloud_slice(tpu_slice, item, now)
            if item
            else slice_observation.apply_missing(tpu_slice, now)
        )
        if item is not None or tpu_slice.state is S.GONE:
            assert again is tpu_slice or (item.notice and tpu_slice.state is S.BOOTING)


def test_a_healthy_listing_never_changes_a_slice_that_works():
    for state in COMING:
        ready = replace(recorded(S.READY), reason="ready after 90 s")
        assert slice_observation.apply_cloud_slice(ready, cloud(state), NOON) is ready


END = after(3600)


@pytest.mark.parametrize(
    ("now", "grace", "up", "state"),
    [
        (3600 - 181, 60, 0, S.READY),
        (3600 - 180, 60, 0, S.DOOMED),
        (3600 - 120, 0, 0, S.DOOMED),
        (1799, 3600, 0, S.READY),  # half of its time is used, whatever the job needs to save
        (1800, 3600, 0, S.DOOMED),
    ],
)
def test_a_slice_is_left_in_time_before_its_known_end(now, grace, up, state):
    tpu_slice = recorded(S.READY, up_at=after(up))
    cloud = CloudSlice(id=tpu_slice.id, zone=tpu_slice.zone, state=C.UP, ends_at=END)
    seen = slice_observation.apply_end(tpu_slice, cloud, timedelta(seconds=grace), after(now))
    assert (seen.state, seen.ends_at) == (state, END)
    if state is S.DOOMED:
        assert seen.loss is LossReason.PREEMPTED
        assert seen.reason == f"its run duration ends at {END:%Y-%m-%d %H:%M} UTC"
