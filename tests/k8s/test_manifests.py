"""The manifests in deploy/: accepted by a real API server, with least privileges."""

from __future__ import annotations

import json
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
from tpufleet_gke.provisioner.metrics import ProvisionerMetrics
from tpufleet_testbed.kubernetes import binaries

ROOT = Path(__file__).parents[2] / "deploy" / "k8s"
OVERLAYS = ["overlays/gke", "overlays/local"]
EVERYTHING = [
    *OVERLAYS,
    "queues",
    "base/bridge",
    "overlays/gke-bridge",
    "overlays/provisioner",
    "base/provisioner/monitoring",
    "base/bridge/monitoring",
]

# Third-party kinds without a schema here: only their presence is checked.
THIRD_PARTY = {
    "monitoring.coreos.com": {
        "ServiceMonitor": "servicemonitors", "PodMonitor": "podmonitors",
        "PrometheusRule": "prometheusrules",
    },
    "cert-manager.io": {"Issuer": "issuers", "Certificate": "certificates"},
}  # fmt: skip


def kubectl() -> list[str]:
    """The installed kubectl, or that of the local control plane."""
    build = binaries.find_cached()
    if build is not None:
        return [str(build.harness), "kubectl"]
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl not found; install it or run `tpu cluster local build`")
    return ["kubectl"]


@cache
def rendered(folder: str) -> list[dict]:
    result = subprocess.run(
        [*kubectl(), "kustomize", str(ROOT / folder)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return [document for document in yaml.safe_load_all(result.stdout) if document]


def rules() -> list[tuple[str, dict]]:
    return [
        (manifest["metadata"]["name"], rule)
        for folder in EVERYTHING
        for manifest in rendered(folder)
        if manifest["kind"] in ("Role", "ClusterRole")
        for rule in manifest["rules"]
    ]


def test_no_role_has_wildcards():
    assert rules()
    for name, rule in rules():
        for field in ("verbs", "resources", "apiGroups"):
            assert "*" not in rule.get(field, []), f"{name}: {field}"
        forbidden = {"escalate", "bind", "impersonate"}
        assert not forbidden & set(rule["verbs"]), name


CORDONS = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]}
SLICES = {  # belong to no namespace
    "apiGroups": ["accelerator.gke.io"],
    "resources": ["slices"],
    "verbs": ["get", "list", "watch", "create", "delete"],
}


def test_the_provisioner_only_reads_pods_and_jobsets_and_cordons_nodes():
    for name, rule in rules():
        if name.startswith("tpu-provisioner-manager") and rule != CORDONS:
            if set(rule["resources"]) & {"pods", "nodes", "jobsets"}:
                assert set(rule["verbs"]) <= {"get", "list", "watch"}, name
            assert "secrets" not in rule["resources"]


def test_no_role_reads_secrets_and_cluster_roles_write_little():
    for folder in EVERYTHING:
        for manifest in rendered(folder):
            if manifest["kind"] not in ("Role", "ClusterRole"):
                continue
            for rule in manifest["rules"]:
                if "secrets" in rule["resources"]:
                    assert not {"get", "list", "watch"} & set(rule["verbs"])
                    assert manifest["kind"] == "Role"
                writes = set(rule["verbs"]) - {"get", "list", "watch"}
                if manifest["kind"] == "ClusterRole" and writes and rule not in (CORDONS, SLICES):
                    assert rule["resources"] == ["events"]


def pods():
    for folder in EVERYTHING:
        for manifest in rendered(folder):
            if manifest["kind"] == "Deployment":
                yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"], manifest


def test_every_deployment_is_restricted_with_probes_and_limits():
    budgets = {
        manifest["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]
        for folder in EVERYTHING
        for manifest in rendered(folder)
        if manifest["kind"] == "PodDisruptionBudget"
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


def test_every_deployment_runs_a_valid_command():
    commands = {tuple(container["args"]) for _, pod, _ in pods() for container in pod["containers"]}
    assert len(commands) == 4  # server, provisioner, webhook, bridge
    for args in commands:
        # Options are parsed before help is shown, so that an invalid one fails.
        done = subprocess.run(
            [sys.executable, "-m", "tpufleet", *args, "--help"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{args}: {done.stderr}"


def test_the_server_accepts_the_shipped_config(tmp_path):
    config_maps = [
        manifest["data"] for manifest in rendered("overlays/gke") if manifest["kind"] == "ConfigMap"
    ]
    file = tmp_path / "config.yaml"
    file.write_text(next(data["config.yaml"] for data in config_maps if "config.yaml" in data))
    variables = next(data for data in config_maps if "TPUFLEET_BUCKET" in data)
    read = config.load(
        {"TPUFLEET_CONFIG": str(file), "TPUFLEET_STORE": "postgresql://db/fleet",
         **{name: value.replace("PROJECT", "my-project") for name, value in variables.items()}},
        tmp_path,
    )  # fmt: skip
    assert read.provider == "gke" and read.shares_files
    parsed = settings.parse(read.gke)
    assert parsed.queue == "tpu-training-jobs"
    assert parsed.image == "us-docker.pkg.dev/my-project/tpufleet/tpufleet:0.1.0"


def test_every_placeholder_is_in_the_settings():
    """`tpu deploy init` replaces them there."""
    shipped = [path for path in ROOT.rglob("*") if path.is_file()]
    found = {path.relative_to(ROOT) for path in shipped if "PROJECT" in path.read_text()}
    assert found == {
        Path("overlays/gke/settings.env"),
        Path("overlays/provisioner/settings.env"),
        Path("base/bridge/account.yaml"),  # replaced by components/gke
        Path("components/gke/kustomization.yaml"),  # GOOGLE_CLOUD_PROJECT
    }
    for manifest in rendered("overlays/gke"):
        if manifest["kind"] == "Deployment":
            for container in manifest["spec"]["template"]["spec"]["containers"]:
                assert container["image"] == "us-docker.pkg.dev/PROJECT/tpufleet/tpufleet:0.1.0"


def test_every_secret_and_config_map_that_a_pod_uses_is_created_or_documented():
    documented = (ROOT.parents[1] / "docs" / "kubernetes.md").read_text()
    documented += (ROOT.parents[1] / "docs" / "firestore.md").read_text()
    created = {
        (manifest["kind"], manifest["metadata"]["name"])
        for folder in EVERYTHING
        for manifest in rendered(folder)
    }
    for _, pod, _ in pods():
        text = str(pod)
        for name in re.findall(
            r"'secretName': '([^']+)'|'secretKeyRef': {[^}]*'name': '([^']+)'", text
        ):
            secret = name[0] or name[1]
            issued = secret == "admission-controller-tls"  # by cert-manager
            assert issued or f"`{secret}`" in documented, secret
        for name in re.findall(r"'config[mM]ap(?:Ref)?': {'name': '([^']+)'", text):
            assert ("ConfigMap", name) in created, name


def test_every_deployment_has_a_network_policy():
    selected = [
        manifest["spec"]["podSelector"]["matchLabels"]
        for folder in EVERYTHING
        for manifest in rendered(folder)
        if manifest["kind"] == "NetworkPolicy"
    ]
    for name, _, deployment in pods():
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert any(one.items() <= labels.items() for one in selected), name


@pytest.mark.parametrize("folder", [*OVERLAYS, "queues"])
def test_an_overlay_creates_every_namespace_that_it_uses(folder):
    manifests = rendered(folder)
    created = {
        manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "Namespace"
    }
    needed = {
        manifest["metadata"]["namespace"]
        for manifest in manifests
        if "namespace" in manifest["metadata"]
    }
    assert needed and needed <= created


def group(manifest: dict) -> str:
    return manifest["apiVersion"].partition("/")[0]


@pytest.mark.parametrize("folder", [*OVERLAYS, "overlays/gke-bridge", "overlays/provisioner"])
def test_an_overlay_needs_no_kind_that_the_documented_cluster_lacks(folder):
    """`tpu cluster install` brings cert-manager, JobSet and Kueue; other kinds fail."""
    assert "monitoring.coreos.com" not in {group(manifest) for manifest in rendered(folder)}


def test_prometheus_scrapes_the_provisioner():
    (monitor,) = [
        one for one in rendered("base/provisioner/monitoring") if one["kind"] == "ServiceMonitor"
    ]
    (service,) = [
        one
        for one in rendered("overlays/gke")
        if one["kind"] == "Service" and one["metadata"]["name"] == "tpu-provisioner-metrics"
    ]
    assert monitor["metadata"]["namespace"] == service["metadata"]["namespace"]
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]


def test_alerts_use_metrics_that_the_provisioner_exports():
    (manifest,) = [
        one for one in rendered("base/provisioner/monitoring") if one["kind"] == "PrometheusRule"
    ]
    rules = [rule for group in manifest["spec"]["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 5
    told = {"dollars_total", "chip_seconds_total", "oldest_wait_seconds"}
    assert all(any(f"tpu_provisioner_{name}" in rule["expr"] for rule in rules) for name in told)
    for rule in rules:
        asked = set(re.findall(r"tpu_provisioner_[a-z_]+", rule["expr"]))
        known = {name.removesuffix("_bucket") for name in asked}
        assert asked and known <= ProvisionerMetrics().names(), rule["alert"]
        assert rule["annotations"]["summary"]


def test_the_provisioner_alone_has_one_image_and_settings_that_restart_it():
    manifests = rendered("overlays/provisioner")
    assert "cert-manager.io" not in {group(one) for one in manifests}
    (deployment,) = [one for one in manifests if one["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"].endswith("/tpufleet/tpufleet:0.1.0")
    names = [one["configMapRef"]["name"] for one in container["envFrom"]]
    assert names[0] == "manager" and re.fullmatch(r"provisioner-settings-[0-9a-z]{10}", names[1])


def test_the_board_of_node_pools_uses_metrics_that_exist():
    board = json.loads((ROOT.parent / "monitoring/grafana-provisioner.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = {name for text in expressions for name in re.findall(r"\b(?:tpu|kueue)_\w+", text)}
    # https://kueue.sigs.k8s.io/docs/reference/metrics/
    kueue = {"kueue_pending_workloads", "kueue_admitted_active_workloads"}
    assert {name.removesuffix("_bucket") for name in used} - kueue == {
        name for name in ProvisionerMetrics().names() if name.startswith("tpu_provisioner")
    }


def test_pods_use_workload_identity_and_mount_no_keys():
    annotated = {
        manifest["metadata"]["name"]: manifest["metadata"]["annotations"][
            "iam.gke.io/gcp-service-account"
        ]
        for manifest in rendered("overlays/gke")
        if manifest["kind"] == "ServiceAccount"
        and "iam.gke.io/gcp-service-account" in manifest["metadata"].get("annotations", {})
    }
    assert annotated == {
        "tpu-provisioner-controller-manager": "tpu-provisioner@PROJECT.iam.gserviceaccount.com",
        "tpufleet": "tpufleet@PROJECT.iam.gserviceaccount.com",
    }
    assert "GOOGLE_APPLICATION_CREDENTIALS" not in str(rendered("overlays/gke"))


QUEUES = {
    "flavors.yaml": kueue.flavors(),
    "priorities.yaml": kueue.priority_classes(),
    "queue.yaml": [kueue.cluster_queue({"v5litepod-16": 2}), kueue.local_queue("tpu-training")],
}


@pytest.mark.parametrize("name", QUEUES)
def test_the_queues_match_the_topology(name):
    written = list(yaml.safe_load_all((ROOT / "queues" / name).read_text()))
    assert written == QUEUES[name]


def third_party_crds(*groups: str) -> list[dict]:
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
        for group in groups
        for kind, plural in THIRD_PARTY[group].items()
    ]  # fmt: skip


def test_a_real_api_server_accepts_every_manifest(plane):
    manifests = [manifest for folder in EVERYTHING for manifest in rendered(folder)]
    # Overlays share objects; sending each once saves seconds for a hundred flavors.
    manifests = [
        manifest for index, manifest in enumerate(manifests) if manifest not in manifests[:index]
    ]
    namespaces = {
        manifest["metadata"]["name"]: manifest
        for manifest in manifests
        if manifest["kind"] == "Namespace"
    }
    prerequisites = [*third_party_crds(*THIRD_PARTY), *namespaces.values()]
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(prerequisites))
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    output = plane.kubectl(
        "apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump_all(manifests)
    )
    assert len(output.splitlines()) == len(manifests)
