"""All stages through a real OpenTofu, against an emulated Google Cloud with the real schema."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.environment import terraform_programs
from tests.environment.environments import environment, example
from tests.environment.test_terraform_stages import EVERYTHING, SHARED_VPC
from tpufleet_gke.environment.config.sections import Environment
from tpufleet_gke.environment.terraform import runner, stages
from tpufleet_gke.environment.terraform.plan_summary import Action, sentence
from tpufleet_gke.environment.terraform.runner import PluginLost, StageRunner, TerraformFailed
from tpufleet_gke.environment.terraform.stages import StageName

pytest.importorskip("grpc", reason="needs the extra `gke`: pip install 'tpufleet[gke]'")

from tpufleet_testbed.terraform.emulated_google_cloud import (
    EmulatedGoogleCloud,
    Refused,
    key_of,
    project_number,
)
from tpufleet_testbed.terraform.google_provider import serve


class Rehearsal:
    """One environment in one folder, and its emulated cloud."""

    def __init__(self, folder: Path, program: str) -> None:
        self.folder, self.program = folder, program
        self.file = folder / "google-cloud.json"
        self.said: list[str] = []

    @contextmanager
    def runner(self, built: Environment, *, creates_before_failure: int | None = None):
        files = stages.all_files(built, str(self.folder))
        runner.write_stages(self.folder, files)
        cloud = EmulatedGoogleCloud(self.file, creates_before_failure=creates_before_failure)
        with serve(cloud) as variables:
            environ = {**os.environ, **variables}
            yield StageRunner(program=self.program, folder=self.folder, environ=environ)

    def apply(self, built: Environment, **failing: int) -> list[str]:
        """What was changed, in words."""
        changed = []
        with self.runner(built, **failing) as run:
            for stage in StageName:
                plan = run.plan(stage)
                run.apply(plan, self.said.append)
                changed += [sentence(change) for change in plan.changes]
        return changed

    def destroy(self, built: Environment) -> None:
        with self.runner(built) as run:
            for stage in reversed(StageName):
                run.apply(run.plan(stage, destroy=True), self.said.append)

    def records(self) -> dict[str, dict]:
        return EmulatedGoogleCloud(self.file).records()


@pytest.fixture
def rehearsal(tmp_path) -> Rehearsal:
    return Rehearsal(tmp_path, terraform_programs.opentofu())


def test_apply_creates_everything_a_second_apply_changes_nothing_and_destroy_leaves_nothing(
    rehearsal,
):
    built = environment(**{**EVERYTHING, "deletion_protection": False})
    created = rehearsal.apply(built)
    assert len(created) == len(rehearsal.records()) > 60
    assert len(rehearsal.said) == len(created)  # progress, one line for each
    assert rehearsal.apply(built) == []
    rehearsal.destroy(built)
    assert rehearsal.records() == {}


def test_the_host_project_of_a_shared_vpc_grants_what_gke_needs(rehearsal):
    built = environment(**SHARED_VPC)
    rehearsal.apply(built)
    number = project_number("my-project")
    granted = {
        (record["role"], record["member"].removeprefix("serviceAccount:").partition("@")[0])
        for record in rehearsal.records().values()
        if record.get("project") == "host-project" and "member" in record
    }
    assert granted == {
        ("roles/container.hostServiceAgentUser", f"service-{number}"),
        ("roles/compute.networkUser", f"service-{number}"),
        ("roles/compute.networkUser", number),
        ("roles/compute.networkUser", "tpu-automation"),
    }
    assert rehearsal.apply(built) == []


TOFU = """#!/bin/sh
# Fails to plan for this reason, as often as the second file says.
case "$2" in
  plan) left=$(cat {left})
    [ "$left" = 0 ] || {{ echo $((left - 1)) > {left}; echo "Error: {reason}" >&2; exit 1; }} ;;
  show) echo '{{}}' ;;
esac
"""


@pytest.mark.parametrize(
    ("reason", "times", "error"),
    [
        ("Request cancelled: The plugin6.ReadResource request was cancelled.", 1, None),
        ("The plugin6.ReadResource request was cancelled.", 2, PluginLost),
        ("403 forbidden", 1, TerraformFailed),
    ],
    ids=["plugin lost", "lost twice", "another error"],
)
def test_a_plan_is_made_again_if_the_program_loses_its_plugin(tmp_path, reason, times, error):
    program, left = tmp_path / "tofu", tmp_path / "left"
    program.write_text(TOFU.format(left=left, reason=reason))
    program.chmod(0o755)
    left.write_text(str(times))
    runner = StageRunner(program=str(program), folder=tmp_path)
    if error is None:
        assert runner.plan(StageName.INFRASTRUCTURE).changes == []
        return
    with pytest.raises(TerraformFailed) as failed:
        runner.plan(StageName.INFRASTRUCTURE)
    assert type(failed.value) is error


@pytest.mark.slow
def test_the_stages_run_on_terraform_too(tmp_path):
    program = terraform_programs.find("terraform")
    if program is None:
        pytest.skip("terraform not found; https://developer.hashicorp.com/terraform/install")
    rehearsal = Rehearsal(tmp_path, program)
    rehearsal.apply(example())
    assert rehearsal.apply(example()) == []


@pytest.mark.slow
def test_a_change_of_one_pool_touches_one_pool(rehearsal):
    pools = {"a": {"type": "v5e-16", "managed_by": "terraform"},
             "b": {"type": "v5p-128", "managed_by": "terraform"}}  # fmt: skip
    rehearsal.apply(environment(tpu_pools=pools))
    pools["b"]["labels"] = {"tier": "gold"}
    assert rehearsal.apply(environment(tpu_pools=pools)) == [
        "update node pool b-0 (node_config.labels.tier: unset → gold)"
    ]


@pytest.mark.slow
def test_one_more_slice_creates_one_node_pool(rehearsal):
    pools = {"a": {"type": "v5e-16", "managed_by": "terraform", "slices": 2}}
    rehearsal.apply(environment(tpu_pools=pools))
    pools["a"]["slices"] = 3
    changed = rehearsal.apply(environment(tpu_pools=pools))
    assert [line for line in changed if "outputs file" not in line] == ["create node pool a-2"]


@pytest.mark.slow
def test_an_interrupted_apply_continues_where_it_stopped(rehearsal):
    built = example()
    with pytest.raises(TerraformFailed) as failure:
        rehearsal.apply(built, creates_before_failure=30)
    assert "503 backendError" in str(failure.value)
    assert "give the same command again" in str(failure.value)
    before = rehearsal.records()
    assert len(before) == 30
    rehearsal.apply(built)
    after = rehearsal.records()
    assert {key: after[key] for key in before} == before  # nothing created twice
    assert rehearsal.apply(built) == []


@pytest.mark.slow
def test_drift_is_shown_and_repaired(rehearsal):
    built = example()
    rehearsal.apply(built)
    records = rehearsal.records()
    (pool,) = [key for key in records if key.endswith("/cpu")]
    (account,) = [key for key in records if key.endswith("ml-serving-jobs")]
    records[pool]["autoscaling"][0]["total_max_node_count"] = 50
    del records[account]
    rehearsal.file.write_text(json.dumps(records))
    with rehearsal.runner(built) as run:
        plans = [run.plan(stage) for stage in StageName]
    drift = [sentence(change) for plan in plans for change in plan.drift]
    assert "update node pool cpu (autoscaling.total_max_node_count: 5 → 50)" in drift
    assert any(line.startswith("delete service account ml-serving-jobs") for line in drift)
    rehearsal.apply(built)
    assert rehearsal.records()[pool]["autoscaling"][0]["total_max_node_count"] == 5
    assert account in rehearsal.records()


@pytest.mark.slow
def test_a_protected_cluster_is_not_deleted(rehearsal):
    rehearsal.apply(example())
    with pytest.raises(TerraformFailed, match="deletion_protection is set to true"):
        rehearsal.destroy(example())
    assert any(key.startswith("google_container_cluster/") for key in rehearsal.records())


def test_a_plan_says_what_it_costs(rehearsal):
    pools = {"a": {"type": "v5e-16", "managed_by": "terraform"}}
    rehearsal.apply(environment())
    with rehearsal.runner(environment(tpu_pools=pools)) as run:
        changes = run.plan(StageName.INFRASTRUCTURE).changes
    (pool,) = [change for change in changes if change.noun == "node pool"]
    assert (pool.action, pool.name) == (Action.CREATE, "a-0")
    assert pool.usd == pytest.approx(16 * 1.2)


@pytest.mark.slow
def test_the_state_bucket_that_gcloud_created_is_imported(rehearsal):
    """The bucket exists before the first stage, which then manages it."""
    built = example()
    with rehearsal.runner(built) as run:
        versions = rehearsal.folder / StageName.BOOTSTRAP / "versions.tf"
        block = stages.stage_files(built, StageName.BOOTSTRAP)["versions.tf"]
        versions.write_text(versions.read_text() + "\nimport" + block.split("\nimport")[1])
        bucket = {"name": "my-project-ml-automation", "project": "my-project",
                  "location": "US-CENTRAL1", "id": "my-project-ml-automation"}  # fmt: skip
        EmulatedGoogleCloud(rehearsal.file).create("google_storage_bucket", bucket)
        plan = run.plan(StageName.BOOTSTRAP)
        run.apply(plan, rehearsal.said.append)
    assert not [c for c in plan.changes if c.noun == "bucket" and c.action is Action.CREATE]


def test_a_name_that_is_taken_is_reported_with_the_evidence(rehearsal):
    bucket = {"name": "my-project-ml-datasets"}
    EmulatedGoogleCloud(rehearsal.file).create("google_storage_bucket", bucket)
    with pytest.raises(TerraformFailed, match="409 alreadyExists") as failure:
        rehearsal.apply(example())
    first = str(failure.value).splitlines()[0]
    assert first.startswith("tofu") and first.endswith(" apply failed in 1-infrastructure")


def test_a_rehearsal_refuses_what_the_project_has_not_enabled(tmp_path):
    cloud = EmulatedGoogleCloud(tmp_path / "cloud.json")
    service = {"project": "p", "service": "compute.googleapis.com"}
    cloud.create("google_project_service", service)
    cloud.create("google_compute_network", {"project": "p", "name": "n"})
    with pytest.raises(Refused, match="has not been used in project p"):
        cloud.create("google_vertex_ai_tensorboard", {"project": "p", "display_name": "x"})


REFUSED = {
    "a budget of nothing": (
        "google_billing_budget", {"amount": [{"specified_amount": [{"units": "0"}]}]},
        "must be positive",
    ),
    "a machine type": (
        "google_container_node_pool",
        {"node_config": [{"machine_type": "n2-standrad-8"}], "placement_policy": []},
        "Machine type with name 'n2-standrad-8' does not exist",
    ),
    "a permission": (
        "google_project_iam_custom_role", {"permissions": ["container.nodePools.create"]},
        "Permission container.nodePools.create is not valid",
    ),
    "half a slice": (
        "google_container_node_pool",
        {
            "node_config": [{"machine_type": "ct5lp-hightpu-4t"}], "node_count": 2,
            "placement_policy": [{"tpu_topology": "4x4"}],
        },
        "2 nodes of ct5lp-hightpu-4t are not 4x4",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "record", "message"), REFUSED.values(), ids=REFUSED)
def test_the_rehearsal_refuses_what_google_refuses(tmp_path, kind, record, message):
    cloud = EmulatedGoogleCloud(tmp_path / "cloud.json")
    with pytest.raises(Refused, match=message):
        cloud.create(kind, {"name": "x", **record})
    assert cloud.records() == {}
    with pytest.raises(Refused, match="does not exist"):
        cloud.update(kind, {"name": "x"})
    existing = {key_of(kind, {"name": "x"}): {"name": "x"}}
    cloud.write(existing)
    with pytest.raises(Refused, match=message):  # a change to it
        cloud.update(kind, {"name": "x", **record})
    assert cloud.records() == existing
