"""What we ship to deploy: taken by a real API server, and asking for no more than it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from tpufleet import config
from tpufleet.providers.gke import kueue, settings
from tpufleet.provisioner.metrics import ProvisionerMetrics

ROOT = Path(__file__).parents[2] / "deploy" / "k8s"
OVERLAYS = ["overlays/gke", "overlays/local"]
pytestmark = pytest.mark.timeout(600)

# Kinds of others, whose schemas are not here: that they are asked for is checked, not how.
FOREIGN = {
    "monitoring.coreos.com": {
        "ServiceMonitor": "servicemonitors", "PrometheusRule": "prometheusrules",
    },
    "cert-manager.io": {"Issuer": "issuers", "Certificate": "certificates"},
}  # fmt: skip


@cache
def rendered(folder: str) -> list[dict]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl for `kubectl kustomize`; install it")
    done = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def rules() -> list[tuple[str, dict]]:
    return [
        (found["metadata"]["name"], rule)
        for folder in OVERLAYS
        for found in rendered(folder)
        if found["kind"] in ("Role", "ClusterRole")
        for rule in found["rules"]
    ]


def test_no_role_asks_for_everything():
    assert rules()
    for name, rule in rules():
        for field in ("verbs", "resources", "apiGroups"):
            assert "*" not in rule.get(field, []), f"{name}: {field}"
        forbidden = {"escalate", "bind", "impersonate"}
        assert not forbidden & set(rule["verbs"]), name


def test_the_provisioner_changes_no_pod_node_or_jobset():
    for name, rule in rules():
        if name.startswith("tpu-provisioner-manager"):
            if set(rule["resources"]) & {"pods", "nodes", "jobsets"}:
                assert set(rule["verbs"]) <= {"get", "list", "watch"}, name
            assert "secrets" not in rule["resources"]


def test_nobody_reads_secrets_and_no_cluster_role_writes_anything_but_events():
    for folder in OVERLAYS:
        for found in rendered(folder):
            if found["kind"] not in ("Role", "ClusterRole"):
                continue
            for rule in found["rules"]:
                if "secrets" in rule["resources"]:
                    assert not {"get", "list", "watch"} & set(rule["verbs"])
                    assert found["kind"] == "Role"
                writes = set(rule["verbs"]) - {"get", "list", "watch"}
                if found["kind"] == "ClusterRole" and writes:
                    assert rule["resources"] == ["events"]


def pods():
    for folder in OVERLAYS:
        for found in rendered(folder):
            if found["kind"] == "Deployment":
                yield found["metadata"]["name"], found["spec"]["template"]["spec"], found


def test_every_deployment_is_restricted_probed_and_bounded():
    budgets = {
        found["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]
        for folder in OVERLAYS
        for found in rendered(folder)
        if found["kind"] == "PodDisruptionBudget"
    }
    for name, pod, deployment in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert deployment["spec"]["replicas"] >= 2
        assert deployment["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] in budgets
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"] and container["resources"]["requests"]
            assert container["livenessProbe"] and container["readinessProbe"]


def test_every_deployment_starts_a_command_that_there_is():
    commands = {tuple(container["args"]) for _, pod, _ in pods() for container in pod["containers"]}
    assert len(commands) == 4  # server, provisioner, webhook, bridge
    for args in commands:
        # Options are read before help is shown, so a wrong one is found.
        done = subprocess.run(
            [sys.executable, "-m", "tpufleet", *args, "--help"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{args}: {done.stderr}"


def test_the_config_that_is_shipped_for_the_server_is_one_it_takes(tmp_path):
    (config_map,) = [
        found for found in rendered("overlays/gke")
        if found["kind"] == "ConfigMap" and "config.yaml" in found["data"]
    ]  # fmt: skip
    file = tmp_path / "config.yaml"
    file.write_text(config_map["data"]["config.yaml"].replace("PROJECT", "my-project"))
    read = config.load({"TPUFLEET_CONFIG": str(file)}, tmp_path)
    assert read.provider == "gke"
    assert settings.parse(read.gke).queue == "tpu-training-jobs"


def test_every_deployment_says_who_may_speak_with_it():
    selected = [
        found["spec"]["podSelector"]["matchLabels"]
        for folder in OVERLAYS
        for found in rendered(folder)
        if found["kind"] == "NetworkPolicy"
    ]
    for name, _, deployment in pods():
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert any(one.items() <= labels.items() for one in selected), name


@pytest.mark.parametrize("folder", OVERLAYS)
def test_an_overlay_brings_every_namespace_that_it_puts_something_into(folder):
    found = rendered(folder)
    made = {one["metadata"]["name"] for one in found if one["kind"] == "Namespace"}
    needed = {one["metadata"]["namespace"] for one in found if "namespace" in one["metadata"]}
    assert needed and needed <= made


def test_what_the_provisioner_measures_is_asked_for_by_prometheus():
    kinds = {(found["kind"], found["metadata"]["name"]) for found in rendered("overlays/gke")}
    assert ("ServiceMonitor", "tpu-provisioner") in kinds


def test_alerts_ask_for_what_the_provisioner_measures():
    (found,) = [one for one in rendered("overlays/gke") if one["kind"] == "PrometheusRule"]
    rules = [rule for group in found["spec"]["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 5
    for rule in rules:
        asked = set(re.findall(r"tpu_provisioner_[a-z_]+", rule["expr"]))
        known = {name.removesuffix("_bucket") for name in asked}
        assert asked and known <= ProvisionerMetrics().names(), rule["alert"]
        assert rule["annotations"]["summary"]


def test_pods_act_as_google_accounts_by_workload_identity_and_no_key_is_mounted():
    annotated = {
        found["metadata"]["name"]
        for found in rendered("overlays/gke")
        if found["kind"] == "ServiceAccount"
        and "iam.gke.io/gcp-service-account" in found["metadata"].get("annotations", {})
    }
    assert annotated == {"tpu-provisioner-controller-manager", "tpufleet", "tpufleet-bridge"}
    assert "GOOGLE_APPLICATION_CREDENTIALS" not in str(rendered("overlays/gke"))


@pytest.mark.parametrize("name", kueue.manifest_files())
def test_the_queues_are_those_that_the_topology_gives(name):
    written = list(yaml.safe_load_all((ROOT / "queues" / name).read_text()))
    assert written == kueue.manifest_files()[name]


def foreign_crds() -> list[dict]:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return [
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{plural}.{group}"},
            "spec": {
                "group": group,
                "scope": "Namespaced",
                "names": {"kind": kind, "plural": plural},
                "versions": [
                    {"name": "v1", "served": True, "storage": True,
                     "schema": {"openAPIV3Schema": schema}}
                ],
            },
        }
        for group, kinds in FOREIGN.items()
        for kind, plural in kinds.items()
    ]  # fmt: skip


def test_a_real_api_server_takes_every_manifest(plane):
    found = [one for folder in OVERLAYS for one in rendered(folder)]
    # What two overlays share is sent once: a hundred flavors take seconds.
    found = [one for index, one in enumerate(found) if one not in found[:index]]
    names = {one["metadata"]["name"]: one for one in found if one["kind"] == "Namespace"}
    made = [*foreign_crds(), *names.values()]
    plane.kubectl("apply", "-f", "-", given=yaml.safe_dump_all(made))
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    said = plane.kubectl("apply", "--dry-run=server", "-f", "-", given=yaml.safe_dump_all(found))
    assert len(said.splitlines()) == len(found)
