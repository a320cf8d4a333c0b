"""What follows from what is wanted and what is there: one table for each rule."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.provisioner.builders import NOW, pool_spec, settings
from tpufleet.provisioner.gke_api.pool_specs import PoolCapacity, PoolLocation
from tpufleet.provisioner.kube import label_keys
from tpufleet.provisioner.planning import plans
from tpufleet.provisioner.planning.cluster_state import (
    ClusterState,
    FailureCause,
    ObservedPool,
    OwnerStatus,
    PendingPool,
    PodRef,
    PoolDemand,
    PoolStatus,
    PoolUser,
)
from tpufleet.provisioner.planning.request_backoff import RequestBackoff
from tpufleet.provisioner.settings import ProvisionerBudget

OWNER = ("default", "train")
ALIVE = {OWNER: OwnerStatus(uid="uid-default-train")}
SECOND = timedelta(seconds=1)


def demand(one=None, *, since=NOW, **asked):
    one = one or pool_spec(**asked)
    ref = PodRef(namespace=one.namespace, name=f"{one.parent.name}-0", uid=one.parent.name)
    return PoolDemand(pod=ref, since=since, pool_spec=one)


def pool(one=None, status=PoolStatus.RUNNING, **other):
    one = one or pool_spec()
    request = one.create_request(one.locations[0])
    made = ObservedPool(
        name=one.name,
        status=status,
        labels=request["config"]["labels"],
        zone=one.locations[0].zone,
        capacity=one.locations[0].capacity,
        machine_type=one.shape.machine_type,
        nodes=one.shape.nodes,
        chips=one.shape.chips,
    )
    return replace(made, **other)


def runs(jobset="train", job=0):
    """A leader of this JobSet's Job, at work."""
    return PoolUser(owner=("default", jobset), parent=("default", f"{jobset}-slice-{job}"))


def plan(pools=(), demands=(), owners=ALIVE, given=None, now=NOW, refusals=None, **seen):
    world = ClusterState(pools=pools, owners=owners, demands=demands, **seen)
    return plans.plan_pools(world, refusals or RequestBackoff(), given or settings(), now)


def test_a_pod_that_waits_gets_a_pool():
    found = plan(demands=[demand()])
    assert [(one.pool_name, one.location) for one in found.creates] == [
        (pool_spec().name, PoolLocation("us-central1-a", PoolCapacity.ON_DEMAND))
    ]


def test_a_pool_is_made_once_however_often_one_looks():
    assert plan(demands=[demand(), demand()]).creates == plan(demands=[demand()]).creates
    assert (
        plan(demands=[demand()], creating={pool_spec().name: PendingPool("default", 16)}).creates
        == ()
    )


STATES = [
    pytest.param(PoolStatus.PROVISIONING, None, 0, "waits", id="provisioning"),
    pytest.param(PoolStatus.RECONCILING, None, 0, "waits", id="reconciling"),
    pytest.param(PoolStatus.STOPPING, None, 0, "waits", id="stopping"),
    pytest.param(PoolStatus.UNKNOWN, None, 0, "waits", id="a state that we do not know"),
    pytest.param(PoolStatus.RUNNING, None, 60, "waits", id="running, nodes are joining"),
    pytest.param(PoolStatus.RUNNING, None, 601, "deleted", id="running, serves nobody"),
    pytest.param(PoolStatus.ERROR, FailureCause.OUT_OF_STOCK, 0, "deleted", id="error"),
    pytest.param(
        PoolStatus.RUNNING_WITH_ERROR, FailureCause.OUT_OF_STOCK, 0, "deleted", id="half a slice"
    ),
    pytest.param(PoolStatus.RUNNING_WITH_ERROR, FailureCause.TRANSIENT, 60, "waits", id="may heal"),
    pytest.param(
        PoolStatus.RUNNING_WITH_ERROR, FailureCause.TRANSIENT, 301, "deleted", id="does not"
    ),
]


@pytest.mark.parametrize(("status", "trouble", "seconds", "follows"), STATES)
def test_each_state_of_a_pool_has_its_consequence(status, trouble, seconds, follows):
    there = pool(status=status, trouble=trouble, words="its own words")
    lame = {there.name: NOW - seconds * SECOND}
    found = plan([there], [demand()], lame_since=lame)
    assert found.creates == ()
    assert bool(found.deletes) is (follows == "deleted")
    assert bool(found.waiting) is (follows == "waits")


def test_a_pool_that_others_run_on_is_left_to_them_and_a_second_one_is_made():
    there = pool()
    ready = {there.name: there.nodes}
    found = plan([there], [demand()], lame_since={there.name: NOW}, ready_nodes=ready)
    assert (found.creates, found.recheck_at) == ((), NOW + 15 * SECOND)
    lame = {there.name: NOW - timedelta(hours=1)}
    found = plan([there], [demand()], lame_since=lame, ready_nodes=ready)
    assert found.deletes == ()
    assert [one.pool_name for one in found.creates] == [pool_spec().long_name]


def test_a_third_pool_is_made_only_where_others_are_seen_to_run_on_both():
    """A pod that fits no node is not given one pool after the other."""
    both = [pool(), pool(name=pool_spec().long_name)]
    lame = {one.name: NOW - timedelta(hours=1) for one in both}
    ready = {one.name: one.nodes for one in both}
    found = plan(both, [demand()], lame_since=lame, ready_nodes=ready)
    assert (found.creates, found.deletes) == ((), ())
    assert "admission webhook" in found.waiting[0].reason and found.waiting[0].report
    used = {one.name: frozenset({runs("other")}) for one in both}
    found = plan(both, [demand()], lame_since=lame, ready_nodes=ready, used=used)
    (made,) = found.creates
    assert made.pool_name == pool_spec().extra_names[0] and made.pool_name not in used
    names = [pool_spec().name, pool_spec().long_name, *pool_spec().extra_names]
    assert len(set(names)) == len(names) and all(len(name) <= 40 for name in names)


def test_a_pool_of_another_kind_than_is_now_asked_for_is_replaced():
    spot = pool_spec(select={label_keys.SPOT: "true"})
    found = plan([pool()], [demand(spot)])
    assert [one.reason for one in found.deletes] == ["the pods now ask for another kind of pool"]
    assert found.creates == ()
    assert plan([], [demand(spot)]).creates[0].location.capacity is PoolCapacity.SPOT


def test_a_pool_of_another_job_that_has_our_name_is_left_alone_and_a_longer_name_taken():
    other = pool(
        labels={**pool().labels, label_keys.PARENT_NAME: "other", label_keys.OWNER_NAME: "other"}
    )
    owners = ALIVE | {("default", "other"): OwnerStatus(uid="uid-default-train")}
    found = plan([other], [demand()], owners)
    assert found.deletes == ()
    assert [one.pool_name for one in found.creates] == [pool_spec().long_name]
    assert len(pool_spec().long_name) <= 40


def test_a_pool_that_is_not_ours_is_never_touched():
    foreign = pool(labels={label_keys.OWNER_NAME: "train"}, status=PoolStatus.ERROR)
    assert plan([foreign], owners={}, missing_since={OWNER: NOW - 60 * SECOND}).deletes == ()


def ended(seconds):
    return {OWNER: OwnerStatus(uid="uid-default-train", ended_at=NOW - seconds * SECOND)}


def suspended(minutes):
    return {
        OWNER: OwnerStatus(uid="uid-default-train", suspended_at=NOW - timedelta(minutes=minutes))
    }


MISSING = {OWNER: NOW - 2 * SECOND}
ENDS = [
    pytest.param(ALIVE, {}, {}, False, id="alive"),
    pytest.param(ended(0), {}, {}, True, id="ended"),
    pytest.param({}, {"missing_since": MISSING}, {}, True, id="gone"),
    pytest.param({}, {"missing_since": {OWNER: NOW}}, {}, False, id="gone this very moment"),
    pytest.param({OWNER: OwnerStatus(uid="another")}, {}, {}, True, id="made anew"),
    pytest.param(suspended(1), {}, {}, False, id="suspended"),
    pytest.param(suspended(11), {}, {}, True, id="suspended for long"),
    pytest.param(ended(3), {"youngest_node": {pool_spec().name: NOW - 3 * SECOND}}, {}, False,
                 id="its nodes are too young"),
    pytest.param(ended(3), {"youngest_node": {pool_spec().name: NOW - 10 * SECOND}}, {}, True,
                 id="its nodes are old enough"),
    pytest.param(ended(3), {}, {"deletion_delay": 5 * SECOND}, False, id="a delay is asked for"),
    pytest.param(ended(5), {}, {"deletion_delay": 5 * SECOND}, True, id="the delay is over"),
]  # fmt: skip


@pytest.mark.parametrize(("owners", "seen", "given", "deleted"), ENDS)
@pytest.mark.parametrize("status", [s for s in PoolStatus if s is not PoolStatus.STOPPING])
def test_a_pool_lives_as_long_as_its_jobset_in_any_state(status, owners, seen, given, deleted):
    found = plan([pool(status=status)], owners=owners, given=settings(**given), **seen)
    assert bool(found.deletes) is deleted


def test_a_deletion_that_is_due_later_is_looked_at_then():
    nodes = {pool_spec().name: NOW - 3 * SECOND}
    assert plan([pool()], owners=ended(3), youngest_node=nodes).recheck_at == NOW + 7 * SECOND


def test_a_pool_with_the_label_of_old_belongs_to_a_jobset_in_the_namespace_default():
    legacy = ObservedPool(
        name="old", status=PoolStatus.RUNNING,
        labels={label_keys.MANAGER: label_keys.MANAGER_NAME, label_keys.LEGACY_OWNER: "train"},
    )  # fmt: skip
    assert plan([legacy]).deletes == ()
    assert [one.pool.name for one in plan([legacy], owners=ended(0)).deletes] == ["old"]


def test_a_deletion_under_way_is_not_started_again():
    assert plan([pool()], owners=ended(0), stopping=frozenset({pool_spec().name})).deletes == ()


BUDGETS = [
    pytest.param(
        ProvisionerBudget(max_chips=31), "31 chips; 16 are in use, 16 are wanted", id="chips"
    ),
    pytest.param(ProvisionerBudget(max_pools=1), "allows 1 pools", id="pools"),
    pytest.param(
        ProvisionerBudget(max_chips_per_namespace=16),
        "namespace default 16 chips",
        id="a namespace",
    ),
    pytest.param(
        ProvisionerBudget(max_chips_by_namespace={"default": 31}, max_chips_per_namespace=99),
        "31",
        id="this namespace",
    ),
    pytest.param(
        ProvisionerBudget(max_chips=32, max_pools=2, max_chips_per_namespace=32),
        None,
        id="just enough",
    ),
    pytest.param(
        ProvisionerBudget(max_chips_by_namespace={"other": 0}), None, id="another namespace"
    ),
]


@pytest.mark.parametrize(("budget", "words"), BUDGETS)
def test_no_pool_is_made_over_the_budget_and_the_pod_is_told_why(budget, words):
    first, second = pool_spec(), pool_spec(job=1)
    found = plan([pool(first)], [demand(second)], given=settings(budget=budget))
    assert bool(found.creates) is (words is None)
    if words is not None:
        assert [words in hold.reason and hold.report for hold in found.waiting] == [True]


def test_under_a_budget_the_pod_that_waited_longest_is_served_first():
    late, early = demand(job=0, since=NOW), demand(job=1, since=NOW - SECOND)
    found = plan(demands=[late, early], given=settings(budget=ProvisionerBudget(max_pools=1)))
    assert [one.spec.parent.name for one in found.creates] == ["train-slice-1"]


def refused(*places, trouble=FailureCause.OUT_OF_STOCK):
    memory = RequestBackoff()
    shape = pool_spec().shape
    for place in places:
        memory.record_location_failure(
            place, shape.machine_type, shape.nodes, cause=trouble, message="none left", now=NOW
        )
    return memory


A, B = (
    PoolLocation("zone-a", PoolCapacity.ON_DEMAND),
    PoolLocation("zone-b", PoolCapacity.ON_DEMAND),
)


def test_a_zone_that_is_out_of_stock_is_passed_over_for_the_next():
    given = settings(zones=("zone-a", "zone-b"))
    found = plan(demands=[demand(pool_spec(given))], given=given, refusals=refused(A))
    assert [one.location for one in found.creates] == [B]


def test_when_every_zone_is_out_of_stock_the_pod_is_told_and_asked_for_again_later():
    given = settings(zones=("zone-a", "zone-b"))
    memory = refused(A, B)
    found = plan(demands=[demand(pool_spec(given))], given=given, refusals=memory)
    assert found.creates == ()
    assert "zone-a (on-demand): none left; zone-b" in found.waiting[0].reason
    assert NOW < found.recheck_at < NOW + timedelta(minutes=1)
    later = plan(
        demands=[demand(pool_spec(given))], given=given, refusals=memory, now=found.recheck_at
    )
    assert len(later.creates) == 1


def test_another_size_is_not_held_back_by_a_zone_that_lacks_this_one():
    given = settings(zones=("zone-a",))
    small = pool_spec(given, select={label_keys.TOPOLOGY: "2x2"})
    assert plan(demands=[demand(small)], given=given, refusals=refused(A)).creates


def test_waits_grow_and_permanent_refusals_last_until_somebody_acts():
    memory, one = RequestBackoff(), pool_spec()
    waits = []
    for _ in range(4):
        memory.record_pool_failure(one, FailureCause.TRANSIENT, "500", NOW)
        waits.append(memory.failure_of(one).retry_at - NOW)
    assert waits == sorted(waits) and waits[-1] > 3 * waits[0]
    memory.record_pool_failure(one, FailureCause.PERMISSION, "403", NOW)
    assert memory.failure_of(one).retry_at == NOW + timedelta(hours=1)
    assert memory.failure_of(pool_spec(select={"abc": "changed"})) is None


def test_a_pod_of_a_jobset_that_ended_gets_nothing():
    assert plan(demands=[demand()], owners=ended(0)).creates == ()
    assert plan(demands=[demand()], owners=suspended(0)).creates == ()
