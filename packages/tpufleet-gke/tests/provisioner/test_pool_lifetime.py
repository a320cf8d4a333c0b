"""How long pools are kept, when Jobs may run on pools that were created for other Jobs."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.provisioner.builders import NOW, pool_spec, settings
from tests.provisioner.test_plans import ALIVE, OWNER, demand, plan, pool, ready, runs
from tpufleet_gke.provisioner.model import label_keys
from tpufleet_gke.provisioner.model.cluster_state import OwnerStatus, PendingPool, PoolStatus
from tpufleet_gke.provisioner.planning import planner, pool_lifetime
from tpufleet_gke.provisioner.planning.pool_lifetime import JOB_SPECIFIC_LABELS
from tpufleet_gke.provisioner.settings import Limit

SECOND = timedelta(seconds=1)
OTHER = ("default", "other")
BOTH = {**ALIVE, OTHER: OwnerStatus(uid="uid-default-other")}
IDLE_GRACE, NODE_JOIN_TIMEOUT = pool_lifetime.IDLE_GRACE, planner.NODE_JOIN_TIMEOUT
LONG_AGO = NOW - timedelta(hours=1)


def used_by(*users, name=None):
    return {name or pool_spec().name: frozenset(users)}


ENDS = {
    "completed": {OWNER: OwnerStatus(uid="uid-default-train", ended_at=LONG_AGO)},
    "recreated": {OWNER: OwnerStatus(uid="another")},
    "suspended": {OWNER: OwnerStatus(uid="uid-default-train", suspended_at=LONG_AGO)},
    "deleted": {},
}


@pytest.mark.parametrize("owners", ENDS.values(), ids=ENDS)
def test_a_pool_of_an_ended_jobset_is_kept_while_another_runs_on_it(owners):
    missing = {OWNER: LONG_AGO}
    other = {OTHER: BOTH[OTHER]}
    kept = plan(
        [pool()], owners=owners | other, users=used_by(runs("other")), owner_missing_since=missing
    )
    assert kept.deletes == ()
    over = {OTHER: OwnerStatus(uid="uid-default-other", ended_at=NOW)}
    gone = plan(
        [pool()], owners=owners | over, users=used_by(runs("other")), owner_missing_since=missing
    )
    assert [one.pool.name for one in gone.deletes] == [pool().name]


def test_a_recreated_jobset_keeps_the_pool_that_its_pods_run_on():
    recreated = {OWNER: OwnerStatus(uid="another")}
    assert plan([pool()], owners=recreated, users=used_by(runs())).deletes == ()
    assert len(plan([pool()], owners=recreated).deletes) == 1


def test_pods_of_an_ended_jobset_do_not_keep_its_pool():
    ended = {OWNER: OwnerStatus(uid="uid-default-train", ended_at=NOW)}
    assert len(plan([pool()], owners=ended, users=used_by(runs())).deletes) == 1


def test_a_pool_that_does_not_serve_its_own_job_is_not_taken_from_others():
    """Half of its nodes are gone, and another Job runs on the rest."""
    not_serving = {pool().name: LONG_AGO}
    result = plan(
        [pool()], [demand()], BOTH, not_serving_since=not_serving, users=used_by(runs("other"))
    )
    assert result.deletes == ()
    assert [one.pool_name for one in result.creates] == [pool_spec().long_name]
    early = {pool().name: NOW}
    result = plan([pool()], [demand()], BOTH, not_serving_since=early, users=used_by(runs("other")))
    assert (result.creates, result.recheck_at) == ((), NOW + 15 * SECOND)


def two_slices(status, **labels):
    """The leader of slice 1 runs on the pool of slice 0, and its own pool is unused."""
    mine, its = pool(), pool(pool_spec(job=1), status=status)
    its = pool(pool_spec(job=1), status=status, labels={**its.labels, **labels})
    observed = {
        "not_serving_since": {mine.name: LONG_AGO},
        "ready_nodes": {mine.name: mine.nodes},
        "users": used_by(runs(job=1)),
    }
    return [mine, its], observed


def test_a_job_whose_pool_is_occupied_waits_for_the_occupants_pool():
    pools, observed = two_slices(PoolStatus.PROVISIONING)
    result = plan(pools, [demand()], **observed)
    assert (result.creates, result.deletes) == ((), ())
    assert pools[1].name in result.waiting[0].reason


def test_a_spare_pool_whose_nodes_do_not_join_is_not_waited_for():
    pools, observed = two_slices(PoolStatus.RUNNING)
    soon = plan(pools, [demand()], idle_since={pools[1].name: NOW}, **observed)
    assert (soon.creates, soon.recheck_at) == ((), NOW + NODE_JOIN_TIMEOUT)
    late = plan(pools, [demand()], idle_since={pools[1].name: NOW - NODE_JOIN_TIMEOUT}, **observed)
    assert [one.pool_name for one in late.creates] == [pool_spec().long_name]


def test_a_pod_that_does_not_fit_a_complete_spare_pool_gets_no_other():
    pools, observed = two_slices(PoolStatus.RUNNING)
    idle, complete = {pools[1].name: LONG_AGO}, observed | ready(*pools)
    free = {pools[1].name: NOW - SECOND}  # the scheduler may not have seen it yet
    result = plan(pools, [demand()], idle_since=idle, free_since=free, **complete)
    assert (result.creates, result.misfits) == ((), ()) and not result.waiting[0].report
    free = {pools[1].name: NOW - NODE_JOIN_TIMEOUT}
    result = plan(pools, [demand()], idle_since=idle, free_since=free, **complete)
    assert result.creates == () and result.waiting[0].report
    assert [one.spec for one in result.misfits] == [pool_spec()]


def test_a_pool_with_a_job_key_is_not_shared():
    pools, observed = two_slices(PoolStatus.PROVISIONING, **{"job-key": "its own"})
    assert [one.pool_name for one in plan(pools, [demand()], **observed).creates] == [
        pool_spec().long_name
    ]


def test_a_spare_pool_is_assigned_to_one_waiting_pod():
    pools, observed = two_slices(PoolStatus.PROVISIONING)
    third = pool(pool_spec(job=2))
    observed["not_serving_since"] |= {third.name: LONG_AGO}
    observed["ready_nodes"] |= {third.name: third.nodes}
    observed["users"] |= used_by(runs(job=3), name=third.name)
    result = plan([*pools, third], [demand(), demand(job=2)], **observed)
    assert len(result.creates) == 1


def test_an_idle_pool_is_deleted_after_the_grace_period():
    idle = {pool().name: NOW}
    result = plan([pool()], idle_since=idle)
    assert (result.deletes, result.recheck_at) == ((), NOW + IDLE_GRACE)
    (gone,) = plan([pool()], idle_since=idle, now=NOW + IDLE_GRACE).deletes
    assert "runs on another pool" in gone.reason


def test_of_two_slices_on_each_others_pools_the_first_to_complete_frees_one_at_once():
    pools, observed = two_slices(PoolStatus.RUNNING)
    idle, complete = {pools[1].name: NOW}, {pools[0].parent: NOW}
    (gone,) = plan(pools, idle_since=idle, completed_jobs=complete, **observed).deletes
    assert gone.pool.name == pools[1].name
    assert f"of Job {'/'.join(pools[0].parent)}, which is complete" in gone.reason


def test_pending_pools_count_towards_the_namespace_budget():
    budget = settings(budget_chips=Limit(namespaces={"*": 16}))
    pending = {"another-pool": PendingPool("default", 16)}
    result = plan(demands=[demand()], with_settings=budget, creating=pending)
    assert (
        result.creates == ()
        and "16 of 16 chips in use in namespace default" in result.waiting[0].reason
    )
    elsewhere = {"another-pool": PendingPool("lab", 16)}
    assert len(plan(demands=[demand()], with_settings=budget, creating=elsewhere).creates) == 1


def test_job_specific_labels_are_set_on_pools():
    """Otherwise two pools of the same kind would never be recognised as such."""
    assert set(JOB_SPECIFIC_LABELS) - set(pool().labels) == set()
    assert label_keys.MANAGER not in JOB_SPECIFIC_LABELS
