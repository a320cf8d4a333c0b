"""The plan for given demands and existing pools: one table for each rule."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.provisioner.builders import NOW, pool_spec, settings
from tpufleet.model.tpu import type_lookup
from tpufleet_gke.provisioner.model import label_keys
from tpufleet_gke.provisioner.model.cluster_state import (
    ClusterState,
    FailureCause,
    ObservedPool,
    OwnerStatus,
    PendingPool,
    PodRef,
    PoolDemand,
    PoolFailure,
    PoolStatus,
    PoolUser,
)
from tpufleet_gke.provisioner.model.gangs import GangMember
from tpufleet_gke.provisioner.model.pool_specs import PoolCapacity, PoolLocation
from tpufleet_gke.provisioner.planning import budgets, planner
from tpufleet_gke.provisioner.planning.request_backoff import PoolKind, RequestBackoff
from tpufleet_gke.provisioner.settings import Limit

OWNER = ("default", "train")
ALIVE = {OWNER: OwnerStatus(uid="uid-default-train")}
SECOND = timedelta(seconds=1)


def at_most(pools):
    return settings(budget_pools=Limit(pools))


def demand(one=None, *, since=NOW, **pod_options):
    one = one or pool_spec(**pod_options)
    ref = PodRef(namespace=one.namespace, name=f"{one.parent.name}-0", uid=one.parent.name)
    return PoolDemand(pod=ref, since=since, pool_spec=one)


def pool(one=None, status=PoolStatus.RUNNING, **other):
    one = one or pool_spec()
    request = one.create_request(one.locations[0])
    created = ObservedPool(
        name=one.name,
        status=status,
        labels=request["config"]["labels"],
        zone=one.locations[0].zone,
        capacity=one.locations[0].capacity,
        machine_type=one.shape.machine_type,
        nodes=one.shape.nodes,
        chips=one.shape.chips,
    )
    return replace(created, **other)


def runs(jobset="train", job=0):
    """A running leader of this JobSet's Job."""
    return PoolUser(owner=("default", jobset), parent=("default", f"{jobset}-slice-{job}"))


def plan(pools=(), demands=(), owners=ALIVE, with_settings=None, now=NOW, backoff=None, **observed):
    state = ClusterState(pools=pools, owners=owners, demands=demands, **observed)
    return planner.plan_pools(state, backoff or RequestBackoff(), with_settings or settings(), now)


def test_a_waiting_pod_gets_a_pool():
    result = plan(demands=[demand()])
    assert [(one.pool_name, one.location) for one in result.creates] == [
        (pool_spec().name, PoolLocation("us-central1-a", PoolCapacity.ON_DEMAND))
    ]


def test_a_pool_is_created_once():
    assert plan(demands=[demand(), demand()]).creates == plan(demands=[demand()]).creates
    assert (
        plan(demands=[demand()], creating={pool_spec().name: PendingPool("default", 16)}).creates
        == ()
    )


STATUSES = [
    pytest.param(PoolStatus.PROVISIONING, None, 0, "waits", id="provisioning"),
    pytest.param(PoolStatus.RECONCILING, None, 0, "waits", id="reconciling"),
    pytest.param(PoolStatus.STOPPING, None, 0, "waits", id="stopping"),
    pytest.param(PoolStatus.UNKNOWN, None, 0, "waits", id="unknown status"),
    pytest.param(PoolStatus.RUNNING, None, 60, "waits", id="running, nodes joining"),
    pytest.param(PoolStatus.RUNNING, None, 601, "deleted", id="running, not serving"),
    pytest.param(PoolStatus.ERROR, FailureCause.OUT_OF_STOCK, 0, "deleted", id="error"),
    pytest.param(
        PoolStatus.RUNNING_WITH_ERROR, FailureCause.OUT_OF_STOCK, 0, "deleted", id="partial slice"
    ),
    pytest.param(
        PoolStatus.RUNNING_WITH_ERROR, FailureCause.TRANSIENT, 60, "waits", id="transient error"
    ),
    pytest.param(
        PoolStatus.RUNNING_WITH_ERROR, FailureCause.TRANSIENT, 301, "deleted", id="lasting error"
    ),
]


@pytest.mark.parametrize(("status", "cause", "seconds", "outcome"), STATUSES)
def test_each_status_of_a_pool_has_its_outcome(status, cause, seconds, outcome):
    existing = pool(status=status, failure=PoolFailure(cause, "a message"))
    not_serving = {existing.name: NOW - seconds * SECOND}
    result = plan([existing], [demand()], not_serving_since=not_serving)
    assert result.creates == ()
    assert bool(result.deletes) is (outcome == "deleted")
    assert bool(result.waiting) is (outcome == "waits")


def ready(*pools):
    """All nodes of these pools are ready and have their chips."""
    return {
        "ready_nodes": {one.name: one.nodes for one in pools},
        "ready_chips": {one.name: one.chips for one in pools},
    }


def test_an_occupied_pool_is_kept_and_a_second_one_is_created():
    existing = pool()
    users = {existing.name: frozenset({runs("other")})}
    owners = ALIVE | {("default", "other"): OwnerStatus(uid="uid-default-other")}
    since = {existing.name: NOW}
    result = plan([existing], [demand()], owners, not_serving_since=since, users=users)
    assert (result.creates, result.recheck_at) == ((), NOW + 15 * SECOND)
    since = {existing.name: NOW - timedelta(hours=1)}
    result = plan(
        [existing], [demand()], owners, not_serving_since=since, users=users, **ready(existing)
    )
    assert result.deletes == ()
    assert [one.pool_name for one in result.creates] == [pool_spec().long_name]


def test_a_complete_pool_whose_pod_waits_is_never_doubled():
    """The pod does not fit; the scheduler's reason is reported, and the pool deleted in the end."""
    existing = pool()
    waiting = replace(demand(), scheduler_message="0/4 nodes are available: 4 Insufficient memory.")
    for seconds, reported, deleted in ((0, False, False), (16, True, False), (601, False, True)):
        up, since = (
            {existing.name: NOW - timedelta(hours=1)},
            {existing.name: NOW - seconds * SECOND},
        )
        result = plan(
            [existing], [waiting], not_serving_since=up, free_since=since, **ready(existing)
        )
        assert result.creates == ()
        assert any("Insufficient memory" in one.reason for one in result.waiting) is reported
        assert [one.misfit for one in result.deletes] == [waiting.pool_spec] * deleted


def test_the_time_in_which_a_pool_must_serve_its_pod_is_a_setting():
    existing = pool(status=PoolStatus.RUNNING)
    changed = settings(not_serving_timeout=60 * SECOND)
    for seconds, deleted in ((59, False), (60, True)):
        since = {existing.name: NOW - seconds * SECOND}
        result = plan([existing], [demand()], not_serving_since=since, with_settings=changed)
        assert bool(result.deletes) is deleted


def test_chips_that_are_not_registered_are_awaited():
    existing = pool()
    nodes = {existing.name: existing.nodes}
    since = {existing.name: NOW - 60 * SECOND}
    result = plan([existing], [demand()], not_serving_since=since, ready_nodes=nodes)
    assert (result.creates, result.deletes) == ((), ())
    assert "0 of 16 chips registered" in result.waiting[0].reason


def test_a_third_pool_is_created_only_while_others_use_both():
    """A pod that fits no node must not get one pool after another."""
    both = [pool(), pool(name=pool_spec().long_name)]
    not_serving = {one.name: NOW - timedelta(hours=1) for one in both}
    owners = ALIVE | {("default", "other"): OwnerStatus(uid="uid-default-other")}
    users = {both[0].name: frozenset({runs("other")})}
    observed = {"not_serving_since": not_serving, **ready(*both)}
    result = plan(both, [demand()], owners, users=users, **observed)
    assert result.creates == ()
    users |= {both[1].name: frozenset({runs("other")})}
    result = plan(both, [demand()], owners, users=users, **observed)
    (created,) = result.creates
    assert created.pool_name == pool_spec().extra_names[0] and created.pool_name not in users
    names = [pool_spec().name, pool_spec().long_name, *pool_spec().extra_names]
    assert len(set(names)) == len(names) and all(len(name) <= 40 for name in names)


def test_a_pool_that_no_longer_matches_its_pods_is_replaced():
    spot = pool_spec(
        node_selector={label_keys.SPOT: "true"},
        tolerations=[{"key": label_keys.SPOT, "operator": "Exists"}],
    )
    result = plan([pool()], [demand(spot)])
    assert [one.reason for one in result.deletes] == [
        f"its pods now require the label {label_keys.SPOT}=true"
    ]
    assert result.creates == ()
    assert plan([], [demand(spot)]).creates[0].location.capacity is PoolCapacity.SPOT


def test_a_name_used_by_another_job_is_replaced_by_a_longer_one():
    other = pool(
        labels={**pool().labels, label_keys.PARENT_NAME: "other", label_keys.OWNER_NAME: "other"}
    )
    owners = ALIVE | {("default", "other"): OwnerStatus(uid="uid-default-train")}
    result = plan([other], [demand()], owners)
    assert result.deletes == ()
    assert [one.pool_name for one in result.creates] == [pool_spec().long_name]
    assert len(pool_spec().long_name) <= 40


def test_an_unmanaged_pool_is_never_touched():
    foreign = pool(labels={label_keys.OWNER_NAME: "train"}, status=PoolStatus.ERROR)
    assert plan([foreign], owners={}, owner_missing_since={OWNER: NOW - 60 * SECOND}).deletes == ()


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
    pytest.param({}, {"owner_missing_since": MISSING}, {}, True, id="deleted"),
    pytest.param(
        {}, {"owner_missing_since": {OWNER: NOW}}, {}, False, id="missing for less than the grace"
    ),
    pytest.param({OWNER: OwnerStatus(uid="another")}, {}, {}, True, id="recreated"),
    pytest.param(suspended(1), {}, {}, False, id="suspended"),
    pytest.param(suspended(11), {}, {}, True, id="suspended for long"),
    pytest.param(
        ended(3),
        {"youngest_node_at": {pool_spec().name: NOW - 3 * SECOND}},
        {},
        False,
        id="its nodes are too young",
    ),
    pytest.param(
        ended(3),
        {"youngest_node_at": {pool_spec().name: NOW - 10 * SECOND}, "can_cordon": False},
        {},
        True,
        id="its nodes are old enough",
    ),
    pytest.param(ended(3), {}, {"deletion_delay": 5 * SECOND}, False, id="within the delay"),
    pytest.param(ended(5), {}, {"deletion_delay": 5 * SECOND}, True, id="after the delay"),
]


@pytest.mark.parametrize(("owners", "observed", "overrides", "deleted"), ENDS)
@pytest.mark.parametrize(
    "status",
    [each for each in PoolStatus if each not in (PoolStatus.PROVISIONING, PoolStatus.STOPPING)],
)
def test_a_pool_lives_as_long_as_its_jobset(status, owners, observed, overrides, deleted):
    result = plan(
        [pool(status=status)], owners=owners, with_settings=settings(**overrides), **observed
    )
    assert bool(result.deletes) is deleted


NAME = pool_spec().name
NODES_EXPECTED = [
    pytest.param(PoolStatus.PROVISIONING, {}, False, id="being created"),
    pytest.param(PoolStatus.RUNNING, {NAME: NOW - 9 * SECOND}, False, id="running for a moment"),
    pytest.param(PoolStatus.RUNNING, {NAME: NOW - 10 * SECOND}, True, id="running for long"),
    pytest.param(PoolStatus.ERROR, {}, True, id="failed"),
]


@pytest.mark.parametrize(("status", "unused_since", "deleted"), NODES_EXPECTED)
def test_a_pool_whose_nodes_are_still_to_come_is_not_deleted_uncordoned(
    status, unused_since, deleted
):
    result = plan([pool(status=status)], owners=ended(0), unused_since=unused_since)
    assert bool(result.deletes) is deleted
    assert deleted or NOW < result.recheck_at <= NOW + 10 * SECOND


CORDONS = [
    pytest.param(ended(0), {}, ["cordon"], None, id="not yet"),
    pytest.param(ended(1), {NAME: NOW - SECOND}, [], NOW + SECOND, id="for a second"),
    pytest.param(ended(2), {NAME: NOW - 2 * SECOND}, ["delete"], None, id="for two seconds"),
    pytest.param(ALIVE, {NAME: NOW - SECOND}, ["lift"], None, id="and is needed again"),
]


@pytest.mark.parametrize(("owners", "since", "actions", "recheck_at"), CORDONS)
def test_a_pool_with_nodes_is_deleted_a_moment_after_its_cordon(owners, since, actions, recheck_at):
    result = plan(
        [pool()], owners=owners, youngest_node_at={NAME: NOW - 60 * SECOND},
        cordoned_since=since, cordoned=frozenset(since),
    )  # fmt: skip
    planned = ["lift" if one.lift else "cordon" for one in result.cordons]
    assert planned + ["delete"] * len(result.deletes) == actions
    assert result.recheck_at == recheck_at


def test_a_cordon_stays_while_gke_refuses_the_deletion():
    backoff = RequestBackoff()
    busy = PoolFailure(FailureCause.TRANSIENT, "busy")
    backoff.record_failed_deletion(NAME, PoolStatus.RUNNING, busy, NOW)
    result = plan(
        [pool()], owners=ended(0), backoff=backoff, youngest_node_at={NAME: NOW - 60 * SECOND},
        cordoned_since={NAME: NOW - SECOND}, cordoned=frozenset([NAME]),
    )  # fmt: skip
    assert not result.cordons and not result.deletes


def test_a_later_deletion_is_rechecked_when_due():
    nodes = {pool_spec().name: NOW - 3 * SECOND}
    assert plan([pool()], owners=ended(3), youngest_node_at=nodes).recheck_at == NOW + 7 * SECOND


def test_a_legacy_label_names_a_jobset_in_the_default_namespace():
    legacy = ObservedPool(
        name="old",
        status=PoolStatus.RUNNING,
        labels={label_keys.MANAGER: label_keys.MANAGER_NAME, label_keys.LEGACY_OWNER: "train"},
    )
    assert plan([legacy]).deletes == ()
    assert [one.pool.name for one in plan([legacy], owners=ended(0)).deletes] == ["old"]


def test_a_deletion_in_progress_is_not_started_again():
    assert plan([pool()], owners=ended(0), deleting=frozenset({pool_spec().name})).deletes == ()


ONE_POOL = "1 of 1 pools in use in namespace default, 1 requested (BUDGET_POOLS)"
BUDGETS = {
    "chips": ({"chips": Limit(31)}, "16 of 31 chips in use, 16 requested (BUDGET_CHIPS)"),
    "pools": ({"pools": Limit(1)}, "1 of 1 pools in use, 1 requested"),
    "a namespace": (
        {"chips": Limit(namespaces={"*": 16})}, "16 of 16 chips in use in namespace default"
    ),
    "this namespace": ({"chips": Limit(namespaces={"default": 31, "*": 99})}, "16 of 31"),
    "pools of a namespace": ({"pools": Limit(namespaces={"*": 1})}, ONE_POOL),
    "pools of this namespace": ({"pools": Limit(namespaces={"default": 1, "*": 9})}, ONE_POOL),
    # 16 chips of v5e at $1.20 per hour each.
    "dollars": ({"dollars": Limit(38)}, "19.2 of 38 dollars in use, 19.2 requested"),
    "dollars of a namespace": (
        {"dollars": Limit(namespaces={"*": 38})}, "19.2 of 38 dollars in use in namespace default"
    ),
    "just enough dollars": ({"dollars": Limit(38.4)}, None),
    "just enough": (
        {"chips": Limit(32, {"*": 32}), "pools": Limit(2, {"*": 2})}, None
    ),
    "another namespace": ({"chips": Limit(namespaces={"other": 0})}, None),
}  # fmt: skip


@pytest.mark.parametrize(("limits", "message"), BUDGETS.values(), ids=BUDGETS)
def test_no_pool_is_created_over_budget_and_the_reason_is_reported(limits, message):
    first, second = pool_spec(), pool_spec(job=1)
    limited = settings(**{f"budget_{unit}": limit for unit, limit in limits.items()})
    result = plan([pool(first)], [demand(second)], with_settings=limited)
    assert bool(result.creates) is (message is None)
    if message is not None:
        (waiting,) = result.waiting
        assert message in waiting.reason and waiting.report


def test_own_prices_replace_list_prices():
    limited = settings(budget_dollars=Limit(38.4), chip_hour_dollars={"v5e": 2})
    result = plan([pool(pool_spec())], [demand(pool_spec(job=1))], with_settings=limited)
    assert "32 of 38.4 dollars in use, 32 requested" in result.waiting[0].reason


def test_a_machine_without_a_known_price_is_not_bought_while_dollars_are_limited(monkeypatch):
    monkeypatch.setattr(budgets, "_list_prices", dict)
    limited = settings(budget_dollars=Limit(1e9))
    machine, on_demand = "tpu7x-standard-4t", PoolCapacity.ON_DEMAND
    assert budgets.chip_hour_dollars(machine, on_demand, limited) is None
    generation = next(
        each.generation for each in type_lookup.all_types().values() if each.machine_type == machine
    )
    priced = settings(budget_dollars=Limit(1e9), chip_hour_dollars={generation: 12})
    assert budgets.chip_hour_dollars(machine, on_demand, priced) == 12
    unpriced = pool_spec()
    unpriced = replace(unpriced, shape=replace(unpriced.shape, machine_type=machine))
    for chosen, bought in ((limited, 0), (priced, 1), (settings(), 1)):
        result = plan(demands=[demand(unpriced)], with_settings=chosen)
        assert len(result.creates) == bought
        assert bought or "set CHIP_HOUR_DOLLARS" in result.waiting[0].reason


def test_under_a_budget_the_longest_waiting_pod_is_served_first():
    late, early = demand(since=NOW), demand(jobset="early", since=NOW - SECOND)
    owners = ALIVE | {("default", "early"): OwnerStatus(uid="uid-default-early")}
    result = plan(demands=[late, early], owners=owners, with_settings=at_most(1))
    assert [one.spec.parent.name for one in result.creates] == ["early-slice-0"]


def out_of_stock(*locations):
    backoff = RequestBackoff()
    kind = PoolKind.of_spec(pool_spec())
    for location in locations:
        failure = PoolFailure(FailureCause.OUT_OF_STOCK, "none left")
        backoff.record_location_failure(location, kind, failure, NOW)
    return backoff


A, B = (
    PoolLocation("zone-a", PoolCapacity.ON_DEMAND),
    PoolLocation("zone-b", PoolCapacity.ON_DEMAND),
)


def test_a_zone_that_is_out_of_stock_is_skipped():
    with_zones = settings(zones=("zone-a", "zone-b"))
    result = plan(
        demands=[demand(pool_spec(with_zones))], with_settings=with_zones, backoff=out_of_stock(A)
    )
    assert [one.location for one in result.creates] == [B]


def test_when_every_zone_is_out_of_stock_the_pod_waits_for_a_retry():
    with_zones = settings(zones=("zone-a", "zone-b"))
    backoff = out_of_stock(A, B)
    result = plan(
        demands=[demand(pool_spec(with_zones))], with_settings=with_zones, backoff=backoff
    )
    assert result.creates == ()
    assert "zone-a (on-demand): none left; zone-b" in result.waiting[0].reason
    assert NOW < result.recheck_at < NOW + timedelta(minutes=1)
    later = plan(
        demands=[demand(pool_spec(with_zones))],
        with_settings=with_zones,
        backoff=backoff,
        now=result.recheck_at,
    )
    assert len(later.creates) == 1


def test_a_tenant_is_told_of_a_shortage_but_not_whom_it_hit():
    backoff, spec = RequestBackoff(), pool_spec(namespace="other")
    failure = PoolFailure(FailureCause.OUT_OF_STOCK, "none for secret-job", "gke-c-secret-job-1f")
    kind = PoolKind.of_spec(pool_spec(namespace="secret"))
    backoff.record_location_failure(spec.locations[0], kind, failure, NOW)
    owners = {("other", "train"): OwnerStatus(uid="uid-other-train")}
    (waiting,) = plan(demands=[demand(spec)], owners=owners, backoff=backoff).waiting
    assert waiting.report and "no capacity for another request" in waiting.reason
    assert "secret" not in waiting.reason + waiting.detail


def test_backoff_does_not_apply_to_other_sizes():
    with_zones = settings(zones=("zone-a",))
    small = pool_spec(with_zones, node_selector={label_keys.TOPOLOGY: "2x2"})
    assert plan(demands=[demand(small)], with_settings=with_zones, backoff=out_of_stock(A)).creates


def test_waits_grow_and_permanent_failures_wait_an_hour():
    backoff, spec = RequestBackoff(), pool_spec()
    waits = []
    for _ in range(4):
        backoff.record_pool_failure(spec, PoolFailure(FailureCause.TRANSIENT, "500"), NOW)
        waits.append(backoff.failure_of(spec).retry_at - NOW)
    assert waits == sorted(waits) and waits[-1] > 3 * waits[0]
    backoff.record_pool_failure(spec, PoolFailure(FailureCause.PERMISSION, "403"), NOW)
    assert backoff.failure_of(spec).retry_at == NOW + timedelta(hours=1)
    assert backoff.failure_of(pool_spec(node_selector={"abc": "changed"})) is None


def test_a_pod_of_an_ended_or_suspended_jobset_gets_no_pool():
    assert plan(demands=[demand()], owners=ended(0)).creates == ()
    assert plan(demands=[demand()], owners=suspended(0)).creates == ()


STRANDED = {
    "too many pods": (4, 8, "4 of 4 nodes ready, for 8 pods at a time; set parallelism to 4"),
    "a node is gone": (3, 4, "3 of 4 nodes ready; GKE replaces the missing ones"),
    "taken by something else": (4, 4, "4 of 4 nodes ready: 4 Insufficient google.com/tpu"),
}


@pytest.mark.parametrize(("nodes", "pods", "message"), STRANDED.values(), ids=STRANDED)
def test_a_pod_beside_its_running_leader_is_told_that_no_pool_will_come(nodes, pods, message):
    existing, job = pool(), ("default", "train-slice-0")
    member = GangMember(pool_spec().shape, stage=0, pods=pods)
    known = {OWNER: OwnerStatus(uid="uid-default-train", members={job[1]: member})}
    worker = PoolDemand(
        pod=PodRef(namespace=job[0], name="worker", uid="w", owner_name="train", job=job[1]),
        since=NOW - timedelta(minutes=3),
        scheduler_message="4 Insufficient google.com/tpu",
    )
    observed = {"placed_jobs": frozenset({job}), "users": {existing.name: frozenset({runs()})}}
    observed |= {"ready_nodes": {existing.name: nodes}, "stranded": [worker]}
    (waiting,) = plan([existing], owners=known, **observed).waiting
    assert waiting.report and waiting.reason.endswith(message)
    young = replace(worker, since=NOW - SECOND)
    assert not plan([existing], owners=known, **{**observed, "stranded": [young]}).waiting
