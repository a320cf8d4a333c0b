"""All slices of a JobSet that run at the same time get node pools, or none does."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tests.provisioner import builders
from tests.provisioner.builders import NOW, pool_spec, settings
from tests.provisioner.test_plans import demand, out_of_stock, plan, pool, runs
from tpufleet_gke.provisioner.model import gangs, label_keys, pod_owners
from tpufleet_gke.provisioner.model.pool_specs import PoolLocation
from tpufleet_gke.provisioner.settings import Limit

MINUTE, LONG_AGO = timedelta(minutes=1), NOW - timedelta(hours=1)
TWO_POOLS = {"budget_pools": Limit(2)}
ONE_HOST = {"node_selector": {label_keys.TOPOLOGY: "2x2"}}


def jobset(name="train", **replicated_jobs):
    """Of jobs by name: how many, and on whose completion or readiness they depend."""
    waiting = builders.pod(name)["spec"]
    return {
        **builders.jobset(name),
        "spec": {
            "replicatedJobs": [
                {
                    "name": job, "replicas": count,
                    "dependsOn": [{"name": one, "status": status} for one, status in depends],
                    "template": {"spec": {"parallelism": 4, "template": {"spec": waiting}}},
                }
                for job, (count, *depends) in replicated_jobs.items()
            ]
        },
    }  # fmt: skip


def owners(*jobsets):
    return pod_owners.owner_statuses(pod_owners.JOBSET, jobsets)


def slices(name, *jobs, since=NOW):
    return [demand(jobset=name, job=job, since=since) for job in jobs]


def test_four_slices_with_a_budget_for_two_get_none():
    result = plan(
        demands=slices("train", 0, 1, 2, 3), owners=owners(jobset(slice=[4])),
        with_settings=settings(**TWO_POOLS),
    )  # fmt: skip
    assert result.creates == ()
    assert {one.reason for one in result.waiting} == {
        "over budget: 0 of 2 pools in use, 4 requested (BUDGET_POOLS)"
    }


def test_slices_whose_pods_are_still_to_come_count():
    """JobSet creates one Job after the other."""
    for count, bought in ((4, 0), (2, 1)):
        result = plan(
            demands=slices("train", 0), owners=owners(jobset(slice=[count])),
            with_settings=settings(**TWO_POOLS),
        )  # fmt: skip
        assert len(result.creates) == bought


def test_a_gang_that_has_begun_is_completed_before_older_ones_begin():
    others = slices("other", 0, since=LONG_AGO)
    known = owners(jobset(slice=[2]), jobset("other", slice=[1]))
    for waiting in (others, others + slices("train", 1)):
        result = plan([pool()], waiting, known, settings(**TWO_POOLS))
        assert "other-slice-0" not in [one.spec.parent.name for one in result.creates]


LOCATION = PoolLocation("us-central1-a", pool_spec().locations[0].capacity)


def test_while_one_slice_cannot_be_bought_none_is():
    one = demand(pool_spec(job=1, **ONE_HOST))
    result = plan(
        demands=[*slices("train", 0), one], owners=owners(jobset(slice=[2])),
        backoff=out_of_stock(LOCATION),
    )  # fmt: skip
    assert result.creates == ()
    assert "of the same JobSet: us-central1-a " in result.waiting[1].reason


@pytest.mark.parametrize(("since", "released"), [(NOW - 9 * MINUTE, 0), (NOW - 11 * MINUTE, 1)])
def test_slices_that_wait_in_vain_for_the_others_are_released(since, released):
    result = plan(
        [pool()], slices("train", 1, since=since), owners(jobset(slice=[2])),
        settings(budget_pools=Limit(1)),
    )  # fmt: skip
    assert len(result.deletes) == released
    assert released or result.recheck_at == since + 10 * MINUTE


def test_of_two_gangs_that_wait_for_each_other_the_younger_gives_way():
    first, second = pool(), pool(pool_spec(jobset="other"))
    users = {
        first.name: frozenset({runs()}),
        second.name: frozenset({runs("other")}),
    }
    old = slices("train", 1, since=NOW - 12 * MINUTE)
    young = slices("other", 1, since=NOW - 11 * MINUTE)
    known = owners(jobset(slice=[2]), jobset("other", slice=[2]))
    limited = settings(**TWO_POOLS)
    (released,) = plan([first, second], old + young, known, limited, users=users).deletes
    assert (released.pool.name, released.evict) == (second.name, True)
    # Alone, it is released as well, unless another JobSet runs there.
    limited = settings(budget_pools=Limit(1))
    for name, released in (("train", [first.name]), ("other", [])):
        users = {first.name: frozenset({runs(name)})}
        result = plan([first], old, known, limited, users=users)
        assert [one.pool.name for one in result.deletes if one.evict] == released


def test_slices_of_which_gke_has_only_half_are_not_paid_for_ever(make):
    """Pods run on them as soon as they are there, and wait for the others."""
    harness = make(simulate_nodes=True)
    harness.gke.stock = {("us-central1-a", pool_spec(**ONE_HOST).shape.machine_type): 2}
    harness.submit("half", slices=4, **ONE_HOST)
    harness.advance(9 * MINUTE)
    assert list(harness.states().values()).count("RUNNING") == 2
    paid = {"namespace": "default", "owner": "half"}
    value = harness.provisioner.metrics.value
    assert value("tpu_provisioner_chip_seconds_total", {**paid, "used": "false"}) > 0
    assert not value("tpu_provisioner_chip_seconds_total", {**paid, "used": "true"})
    harness.advance(4 * MINUTE)
    released = harness.events.messages("NodePoolDeletionStarted")
    assert len([one for one in released if "cannot get all of its slices" in one]) >= 2


def test_two_gangs_run_one_after_the_other_within_the_budget(make):
    harness = make(simulate_nodes=True, **TWO_POOLS)
    for name in ("one", "two"):
        harness.submit(name, slices=2, **ONE_HOST)
    for name in ("one", "two"):
        harness.advance(MINUTE)
        running = [pod for pod in harness.pod_list if pod["status"]["phase"] == "Running"]
        assert [pod["metadata"]["name"].partition("-")[0] for pod in running] == [name] * 2
        harness.end(name)
    harness.advance(MINUTE)
    assert harness.states() == {}


@pytest.mark.parametrize(
    ("name", "jobs", "machine"),
    [("jobset", 2, "ct5p-hightpu-4t"), ("v4", 1, "ct4p-hightpu-4t")],
)
def test_the_examples_have_a_pod_for_each_host_of_their_slices(name, jobs, machine):
    text = (Path(__file__).parents[4] / f"examples/jobset/{name}.yaml").read_text()
    members = gangs.gang_members(yaml.safe_load(text)).values()
    assert [one.shape.machine_type for one in members] == [machine] * jobs
    assert all(one.pods == one.shape.nodes for one in members)


def test_a_pool_is_released_with_its_job_and_not_only_with_its_jobset():
    first, second = pool(), pool(pool_spec(job=1))
    condition = {"type": "Complete", "status": "True", "lastTransitionTime": NOW.isoformat()}
    job = {
        "metadata": {"name": "train-slice-0", "namespace": "default"},
        "status": {"conditions": [condition]},
    }
    for conditions, released in (([], []), ([condition], [first.name])):
        job["status"]["conditions"] = conditions
        result = plan([first, second], completed_jobs=pod_owners.completed_jobs([job]))
        assert [one.pool.name for one in result.deletes] == released


STAGES = {
    "complete": ("Complete", 1),
    "ready": ("Ready", 0),  # both run at the same time
}


@pytest.mark.parametrize(("status", "bought"), STAGES.values(), ids=STAGES)
def test_a_stage_does_not_pay_for_the_next(status, bought):
    known = owners(jobset(slice=[1], later=[2, ("slice", status)]))
    result = plan(demands=slices("train", 0), owners=known, with_settings=settings(**TWO_POOLS))
    assert len(result.creates) == bought


def test_a_stage_gets_the_budget_of_the_one_before():
    known = owners(jobset(early=[2], slice=[1, ("early", "Complete")]))
    done = {("default", f"train-early-{index}"): NOW for index in range(2)}
    earlier = [
        replace(pool(), name=f"early-{index}", labels={
            **pool().labels, "google.com/tpu-provisioner-parent-name": f"train-early-{index}"
        })
        for index in range(2)
    ]  # fmt: skip
    result = plan(earlier, slices("train", 0), known, settings(**TWO_POOLS), completed_jobs=done)
    assert [one.pool.name for one in result.deletes] == ["early-0", "early-1"]
    result = plan((), slices("train", 0), known, settings(**TWO_POOLS), completed_jobs=done)
    assert len(result.creates) == 1
