"""Cloud Build pipelines: pinned builders, a plan gate, no downloads by script."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from tests.environment.environments import example
from tpufleet_gke.environment.addons import install
from tpufleet_gke.environment.cloud_build import pipelines
from tpufleet_gke.environment.terraform.stages import StageName

FILES = {name: yaml.safe_load(text) for name, text in pipelines.files(example()).items()}


@pytest.mark.parametrize("name", FILES)
def test_c11_builders_are_pinned_and_nothing_is_downloaded_by_a_script(name):
    for step in FILES[name]["steps"]:
        assert re.search(r":v?[0-9]+(\.[0-9]+)+[a-z0-9.-]*$", step["name"]), step["name"]
        assert not re.search(r"curl|wget|\bsh\b|bash|sed ", str(step.get("args"))), step["id"]


@pytest.mark.parametrize("name", FILES)
def test_a_pipeline_runs_as_the_automation_account(name):
    account = FILES[name]["serviceAccount"]
    assert account.endswith("/tpu-automation@my-project.iam.gserviceaccount.com")
    assert FILES[name]["options"]["logging"] == "CLOUD_LOGGING_ONLY"


def test_c12_only_a_saved_plan_is_applied():
    """Was: -auto-approve of whatever the configuration said at that moment."""
    for name, pipeline in FILES.items():
        for step in pipeline["steps"]:
            assert "-auto-approve" not in step.get("args", []), name
            if "opentofu" in step["name"] and "apply" in step["args"]:
                assert step["args"][-1] == "stage.tfplan"
    assert FILES["provision.yaml"]["substitutions"] == {"_PLAN_BUILD": ""}
    planned = [step["id"] for step in FILES["plan.yaml"]["steps"]]
    assert "plan-1-infrastructure" in planned and "save-1-infrastructure" in planned
    assert not [step for step in planned if step.startswith("apply")]


def test_destroy_goes_backwards_and_keeps_the_bootstrap():
    steps = [step["id"] for step in FILES["destroy.yaml"]["steps"] if "apply" in step["id"]]
    assert steps == ["apply-2-cluster-config", "apply-1-infrastructure"]


STATES = {
    "protected": ('{"values":{"deletion_protection":true}}', 0, False),
    "not protected": ('{"values":{"deletion_protection":false}}', 0, True),
    "empty": ('{"format_version":"1.0"}', 0, True),
    "not readable": ("", 1, False),
}


@pytest.mark.parametrize(("state", "status", "goes_on"), STATES.values(), ids=STATES)
def test_destroy_begins_only_when_the_cluster_is_not_protected(tmp_path, state, status, goes_on):
    steps = FILES["destroy.yaml"]["steps"]
    position = [step["id"] for step in steps].index("check-deletion-protection")
    assert all(step["id"].startswith("init") for step in steps[:position])
    program = tmp_path / "tofu"
    program.write_text(f"#!/bin/sh\necho '{state}'\nexit {status}\n")
    program.chmod(0o755)
    check = steps[position]
    done = subprocess.run(
        [check["entrypoint"], *check["args"]], check=False, capture_output=True, text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode == 0) is goes_on
    assert goes_on or "deletion_protection" in done.stdout


def test_images_go_to_the_registry_of_the_environment():
    for image in FILES["images.yaml"]["images"]:
        assert image.startswith("us-central1-docker.pkg.dev/my-project/ml-images/tpufleet")
        assert not image.endswith(":latest")


def test_c12_add_ons_are_waited_for_before_the_queues():
    steps = [step["id"] for step in FILES["provision.yaml"]["steps"]]
    order = [
        "credentials",
        "install-jobset",
        "wait-jobset",
        "install-kueue",
        "wait-kueue",
        "queues",
    ]
    assert [step for step in steps if step in order] == order


def test_pipelines_name_the_stages_and_add_ons_of_tpu_cluster():
    text = "".join(pipelines.files(example()).values())
    assert set(re.findall(r"-chdir=(\S+?)[, ]", text)) == set(StageName) - {StageName.BOOTSTRAP}
    for addon in install.addons(example()):
        for part in (addon.url, f"-n, {addon.namespace}, deployment/{addon.deployment}"):
            assert part in text
    assert f"--timeout={install.WAIT}" in text and f"{pipelines.RENDERED}/k8s" in text


def test_the_stage_that_grants_the_roles_of_the_account_is_left_to_a_person():
    for name, pipeline in FILES.items():
        assert not [step["id"] for step in pipeline["steps"] if "bootstrap" in step["id"]], name
