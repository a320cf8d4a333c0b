"""Pools that others run on than those that they were made for: the scheduler sends pods where there
is room, and no pool that somebody works on is taken away for the end of somebody else."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.provisioner.builders import NOW, pool_spec, settings
from tests.provisioner.test_plans import ALIVE, OWNER, demand, plan, pool, runs
from tpufleet.provisioner.kube import label_keys
from tpufleet.provisioner.planning.cluster_state import OwnerStatus, PendingPool, PoolStatus
from tpufleet.provisioner.planning.pool_lifetime import (
    IDLE_GRACE,
    JOB_SPECIFIC_LABELS,
    NODE_JOIN_TIMEOUT,
)
from tpufleet.provisioner.settings import ProvisionerBudget

SECOND = timedelta(seconds=1)
OTHER = ("default", "other")
BOTH = {**ALIVE, OTHER: OwnerStatus(uid="uid-default-other")}
LONG_AGO = NOW - timedelta(hours=1)


def by(*uses, name=None):
    return {name or pool_spec().name: frozenset(uses)}


ENDS = {
    "it completed": {OWNER: OwnerStatus(uid="uid-default-train", ended_at=LONG_AGO)},
    "it was made anew": {OWNER: OwnerStatus(uid="another")},
    "it is suspended": {OWNER: OwnerStatus(uid="uid-default-train", suspended_at=LONG_AGO)},
    "it is gone": {},
}


@pytest.mark.parametrize("owners", ENDS.values(), ids=ENDS)
def test_a_pool_whose_jobset_has_ended_is_kept_while_another_runs_on_it(owners):
    missing = {OWNER: LONG_AGO}
    other = {OTHER: BOTH[OTHER]}
    kept = plan([pool()], owners=owners | other, used=by(runs("other")), missing_since=missing)
    assert kept.deletes == ()
    over = {OTHER: OwnerStatus(uid="uid-default-other", ended_at=NOW)}
    gone = plan([pool()], owners=owners | over, used=by(runs("other")), missing_since=missing)
    assert [one.pool.name for one in gone.deletes] == [pool().name]


def test_a_jobset_that_is_made_anew_keeps_the_pool_that_its_pods_were_sent_to():
    anew = {OWNER: OwnerStatus(uid="another")}
    assert plan([pool()], owners=anew, used=by(runs())).deletes == ()
    assert len(plan([pool()], owners=anew).deletes) == 1


def test_pods_that_still_stand_on_the_pool_of_a_jobset_that_ended_do_not_keep_it():
    ended = {OWNER: OwnerStatus(uid="uid-default-train", ended_at=NOW)}
    assert len(plan([pool()], owners=ended, used=by(runs())).deletes) == 1


def test_a_pool_that_fails_its_own_job_is_not_taken_from_others():
    """Half of its nodes are gone, and another Job works on the rest."""
    lame = {pool().name: LONG_AGO}
    found = plan([pool()], [demand()], BOTH, lame_since=lame, used=by(runs("other")))
    assert found.deletes == ()
    assert [one.pool_name for one in found.creates] == [pool_spec().long_name]
    early = {pool().name: NOW}
    found = plan([pool()], [demand()], BOTH, lame_since=early, used=by(runs("other")))
    assert (found.creates, found.recheck_at) == ((), NOW + 15 * SECOND)


def two_slices(status, **labels):
    """The leader of slice 1 was sent to the pool of slice 0, and its own is not used."""
    mine, its = pool(), pool(pool_spec(job=1), status=status)
    its = pool(pool_spec(job=1), status=status, labels={**its.labels, **labels})
    seen = {
        "lame_since": {mine.name: LONG_AGO},
        "ready_nodes": {mine.name: mine.nodes},
        "used": by(runs(job=1)),
    }
    return [mine, its], seen


def test_who_lost_its_pool_to_a_sibling_waits_for_the_one_that_was_made_for_that():
    pools, seen = two_slices(PoolStatus.PROVISIONING)
    found = plan(pools, [demand()], **seen)
    assert (found.creates, found.deletes) == ((), ())
    assert pools[1].name in found.waiting[0].reason


def test_a_pool_that_the_pod_could_have_run_on_and_did_not_is_of_no_use_to_it():
    pools, seen = two_slices(PoolStatus.RUNNING)
    soon = plan(pools, [demand()], idle_since={pools[1].name: NOW}, **seen)
    assert (soon.creates, soon.recheck_at) == ((), NOW + NODE_JOIN_TIMEOUT)
    late = plan(pools, [demand()], idle_since={pools[1].name: NOW - NODE_JOIN_TIMEOUT}, **seen)
    assert [one.pool_name for one in late.creates] == [pool_spec().long_name]


def test_a_pool_that_is_tied_to_its_job_is_nobody_elses():
    pools, seen = two_slices(PoolStatus.PROVISIONING, **{"job-key": "its own"})
    assert [one.pool_name for one in plan(pools, [demand()], **seen).creates] == [
        pool_spec().long_name
    ]


def test_one_pool_is_promised_to_one_of_those_that_wait():
    pools, seen = two_slices(PoolStatus.PROVISIONING)
    third = pool(pool_spec(job=2))
    seen["lame_since"] |= {third.name: LONG_AGO}
    seen["ready_nodes"] |= {third.name: third.nodes}
    seen["used"] |= by(runs(job=3), name=third.name)
    found = plan([*pools, third], [demand(), demand(job=2)], **seen)
    assert len(found.creates) == 1


def test_a_pool_that_nobody_uses_while_its_job_runs_elsewhere_goes_after_a_while():
    idle = {pool().name: NOW}
    found = plan([pool()], idle_since=idle)
    assert (found.deletes, found.recheck_at) == ((), NOW + IDLE_GRACE)
    (gone,) = plan([pool()], idle_since=idle, now=NOW + IDLE_GRACE).deletes
    assert "runs on another pool" in gone.reason


def test_what_was_asked_for_counts_for_the_budget_of_its_namespace_too():
    given = settings(budget=ProvisionerBudget(max_chips_per_namespace=16))
    asked = {"another-pool": PendingPool("default", 16)}
    found = plan(demands=[demand()], given=given, creating=asked)
    assert found.creates == () and "namespace default 16 chips" in found.waiting[0].reason
    elsewhere = {"another-pool": PendingPool("lab", 16)}
    assert len(plan(demands=[demand()], given=given, creating=elsewhere).creates) == 1


def test_keys_that_are_personal_are_labels_that_pools_carry():
    """Or two pools of one kind would never be taken for such."""
    assert set(JOB_SPECIFIC_LABELS) - set(pool().labels) == set()
    assert label_keys.MANAGER not in JOB_SPECIFIC_LABELS
