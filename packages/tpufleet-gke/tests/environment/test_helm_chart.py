"""The Helm chart is generated from the kustomize overlay, and renders to the same manifests."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import yaml

from scripts import build_servers, helm_chart
from tests import yaml_documents
from tests.environment.environments import environment, example
from tests.environment.provider_checks import resources
from tests.k8s.test_manifests import kubectl
from tpufleet import config
from tpufleet.providers.gke import settings as gke_settings
from tpufleet_gke.environment.addons import helm_values, queues, team_manifests


def helm() -> str:
    path = build_servers.find("helm")
    if path is None:
        pytest.skip("helm not found; scripts/build_servers.py helm builds it")
    return path


@cache
def kustomize_rendered() -> list[dict[str, Any]]:
    return helm_chart.rendered(kubectl(), [helm_chart.OVERLAY])


def helm_rendered(*options: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [helm(), "template", "tpufleet", str(helm_chart.CHART), *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [
        document for document in yaml.load_all(done.stdout, Loader=helm_chart.LOADER) if document
    ]


def ordered(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By kind and name; names of settings without the hash of their content."""
    text = helm_chart.SETTINGS_NAME.sub("tpufleet-settings", yaml_documents.dump_all(documents))
    return sorted(
        yaml_documents.load_all(text),
        key=lambda item: (
            item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"],
        ),
    )  # fmt: skip


def test_the_chart_is_up_to_date():
    generated = helm_chart.files(helm_chart.rendered(kubectl()))
    written = {
        str(path.relative_to(helm_chart.CHART)): path.read_text()
        for path in helm_chart.CHART.rglob("*.yaml")
    }
    assert written == generated, "run `python scripts/helm_chart.py --write`"


BRIDGE = ("--set", "replicas.bridge=2")
OPERATOR = ("--api-versions", helm_chart.MONITORING_API)
OVERLAYS = {
    "as tpu cluster install leaves the cluster": ([helm_chart.OVERLAY], ()),
    "with the bridge": ([helm_chart.WITH_BRIDGE], BRIDGE),
    "with the Prometheus operator": ([helm_chart.OVERLAY, helm_chart.MONITORING], OPERATOR),
    "with both": (
        [helm_chart.WITH_BRIDGE, helm_chart.MONITORING, helm_chart.BRIDGE_MONITORING],
        (*BRIDGE, *OPERATOR),
    ),
}


@pytest.mark.parametrize(("overlays", "options"), OVERLAYS.values(), ids=OVERLAYS)
def test_helm_and_kustomize_render_the_same(overlays, options):
    by_helm = ordered(helm_rendered(*options))
    for item in by_helm:  # kustomize has no checksums
        if item["kind"] == "Deployment":
            item["spec"]["template"]["metadata"].pop("annotations", None)
    assert by_helm == ordered(helm_chart.rendered(kubectl(), overlays))


def test_options_of_the_bridge_reach_it():
    options = "{--accelerator=v6e-1,--pool=web}"
    (bridge,) = [
        item for item in helm_rendered("--set", "replicas.bridge=1", "--set", f"bridge={options}")
        if item["kind"] == "Deployment" and item["metadata"]["name"] == helm_chart.BRIDGE
    ]  # fmt: skip
    (container,) = bridge["spec"]["template"]["spec"]["containers"]
    assert {"--accelerator=v6e-1", "--pool=web"} <= set(container["args"])
    assert "--accelerator=v5e-1" not in container["args"]


def test_an_environment_with_the_firestore_bridge_runs_it(tmp_path):
    """Was: it had an account, and no pods."""
    spot = {"type": "v5e-1", "capacity": "spot"}
    built = environment(
        server={"firestore_bridge": True}, tpu_pools={"a": {"type": "v5p-128"}, "b": spot}
    )
    values = tmp_path / "values.yaml"
    values.write_text(helm_values.text(built))
    [bridge] = [
        item for item in helm_rendered("--values", str(values))
        if item["kind"] == "Deployment" and item["metadata"]["name"] == helm_chart.BRIDGE
    ]  # fmt: skip
    assert bridge["spec"]["replicas"] == 2
    [container] = bridge["spec"]["template"]["spec"]["containers"]
    command = [sys.executable, "-m", "tpufleet", *container["args"], "--help"]
    assert {"--accelerator=v5e-1", "--capacity=spot"} <= set(command)
    # Options are parsed before help is shown, so that an invalid one fails.
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_values_of_an_environment_leave_no_placeholder(tmp_path):
    values = tmp_path / "values.yaml"
    values.write_text(helm_values.text(example()))
    documents = helm_rendered("--values", str(values))
    assert "PROJECT" not in yaml_documents.dump_all(documents).replace("GOOGLE_CLOUD_PROJECT", "")
    accounts = {
        item["metadata"]["name"]: item["metadata"].get("annotations", {})
        for item in documents if item["kind"] == "ServiceAccount"
    }  # fmt: skip
    assert accounts["tpufleet"]["iam.gke.io/gcp-service-account"] == (
        "ml-tpufleet@my-project.iam.gserviceaccount.com"
    )


def test_settings_of_the_slices_reach_the_server_by_both_ways(tmp_path):
    """Topology-aware types and reservations of cluster.yaml, as the server reads them."""
    static = {"type": "v5p-128", "managed_by": "terraform", "topology_aware": True}
    reserved = {"type": "v6e-16", "capacity": "reserved", "reservation": "lab"}
    built = environment(tpu_pools={"a": static, "b": reserved})
    values = tmp_path / "values.yaml"
    values.write_text(helm_values.text(built))
    [by_helm] = [
        item["data"]
        for item in helm_rendered("--values", str(values))
        if item["kind"] == "ConfigMap" and "TPUFLEET_BUCKET" in item["data"]
    ]
    lines = [
        line for line in helm_values.settings_env(built).splitlines() if not line.startswith("#")
    ]
    assert dict(line.split("=", 1) for line in lines) == by_helm
    variables = {"TPUFLEET_CONFIG": str(tmp_path / "none.yaml"), **by_helm}
    settings = gke_settings.parse(config.load(variables, tmp_path).gke)
    assert settings.topology_aware == ("v5p-128",)
    assert settings.reservations == {"v6e-16": "lab"}


def test_every_object_has_one_owner():
    """Else Helm refuses to take over what `tpu cluster install` made, and kustomize changes it."""

    def keys(documents):
        return {
            (item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"])
            for item in documents
        }

    built = environment()  # its one team has the namespace of clusters without teams
    installed = keys([*team_manifests.teams(built), *queues.manifests(built)])
    assert ("Namespace", None, "tpu-training") in installed
    assert not installed & keys(kustomize_rendered())


def test_a_server_runs_the_jobs_of_each_team_where_install_lets_it(tmp_path):
    """Namespaces, queues, accounts and permissions are those of `tpu cluster install`."""
    built = example()
    lines = helm_values.settings_env(built).splitlines()
    variables = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    variables["TPUFLEET_CONFIG"] = str(tmp_path / "none.yaml")
    settings = gke_settings.parse(config.load(variables, tmp_path).gke)
    assert set(settings.teams) == set(built.teams) and len(built.teams) == 2
    installed = {
        (item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]): item
        for item in [*team_manifests.teams(built), *queues.manifests(built)]
    }
    for team in settings.teams.values():
        namespace = team.namespace
        assert ("LocalQueue", namespace, team.queue) in installed
        account = installed["ServiceAccount", namespace, team.service_account]
        assert "iam.gke.io/gcp-service-account" in account["metadata"]["annotations"]
        assert ("NetworkPolicy", namespace, "tpu-workers") in installed
        binding = installed["RoleBinding", namespace, "tpufleet"]
        assert ("Role", namespace, binding["roleRef"]["name"]) in installed
        [subject] = binding["subjects"]
        assert (subject["namespace"], subject["name"]) == ("tpufleet-system", "tpufleet")


def test_every_value_of_an_environment_is_one_of_the_chart():
    defaults = yaml.safe_load((helm_chart.CHART / "values.yaml").read_text())
    given = yaml.safe_load(helm_values.text(example()))
    assert set(given) <= set(defaults)
    for key in ("serviceAccounts", "replicas"):
        assert set(given[key]) <= set(defaults[key])


def test_c7_terraform_binds_the_service_accounts_of_the_manifests():
    """Was: Terraform bound `wid-ksa`, the manifests used `wid-sa`."""
    used = {
        f"[{item['metadata']['namespace']}/{item['metadata']['name']}]"
        for item in kustomize_rendered()
        if item["kind"] == "ServiceAccount"
        and "iam.gke.io/gcp-service-account" in item["metadata"].get("annotations", {})
    }
    bound = {
        block.body["member"].partition("goog")[2]
        for block in resources(example(), "google_service_account_iam_member")
        if isinstance(block.body["member"], str) and "tpu" in block.body["member"]
    }
    assert used and used <= bound


def test_a_changed_value_renames_the_settings_so_that_pods_restart():
    def settings(*options: str) -> set[str]:
        documents = helm_rendered(*options)
        return set(helm_chart.SETTINGS_NAME.findall(yaml_documents.dump_all(documents)))

    before, after = settings(), settings("--set", "bucket=gs://other")
    assert len(before) == len(after) == 1 and before != after


def test_settings_of_the_provisioner_reach_it_and_restart_it():
    def provisioner(*options: str) -> tuple[dict[str, str], dict[str, str]]:
        found = {
            item["kind"]: item for item in helm_rendered(*options)
            if item["metadata"]["name"] in ("manager", "tpu-provisioner-controller-manager")
            and item["kind"] in ("ConfigMap", "Deployment")
        }  # fmt: skip
        template = found["Deployment"]["spec"]["template"]["metadata"]
        return found["ConfigMap"]["data"], template["annotations"]

    before, after = provisioner(), provisioner("--set", "provisioner.WARM_POOL_TTL=10m")
    assert after[0] == {**before[0], "WARM_POOL_TTL": "10m"} and after[1] != before[1]


def test_the_settings_of_the_overlay_are_all_rendered():
    """`tpu cluster render` writes the same file that the overlay has, with values."""

    def names(text: str) -> set[str]:
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {line.partition("=")[0] for line in lines}

    written = helm_values.settings_env(example())
    assert names((helm_chart.OVERLAY / "settings.env").read_text()) <= names(written)
    assert "PROJECT" not in written.replace("GOOGLE_CLOUD_PROJECT", "")
