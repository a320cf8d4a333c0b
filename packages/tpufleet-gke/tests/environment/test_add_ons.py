"""`tpu cluster install` and `doctor` act on the cluster of cluster.yaml, and on no other."""

from __future__ import annotations

import json

import pytest

from tests.environment.environments import environment
from tpufleet.model.fleet.preflight import CheckStatus
from tpufleet_gke.environment.addons import install
from tpufleet_gke.environment.addons.install import AddOnFailed, Kubectl, WebhookUnavailable

OURS = "gke_my-project_us-central1_ml-cluster"
LOGIN = "gcloud container clusters get-credentials ml-cluster --region us-central1"


@pytest.fixture
def make_kubectl(tmp_path):
    """A kubectl that has a context and notes what it is asked to do."""

    def make(context, *, reachable=True, stored=()):
        script, calls = tmp_path / "kubectl", tmp_path / "calls"
        crds = tmp_path / "crds"
        crds.write_text(json.dumps({"items": [
            {"metadata": {"name": f"{name}.{group}"}, "spec": {"group": group},
             "status": {"storedVersions": versions}}
            for name, group, versions in stored
        ]}))  # fmt: skip
        script.write_text(f"""#!/bin/sh
echo "$@" >> {calls}
case "$1 $2" in
  "config current-context") [ -n "{context}" ] && echo {context} ;;
  "get --raw") {"echo ok" if reachable else "echo connection refused >&2; exit 1"} ;;
  "get customresourcedefinitions") cat {crds} ;;
  "get "*) echo not found >&2; exit 1 ;;
esac
""")
        script.chmod(0o755)
        calls.touch()
        return Kubectl(command=[str(script)], sleep=lambda seconds: None), calls

    return make


def test_install_refuses_another_gke_cluster_and_changes_nothing(make_kubectl):
    kubectl, calls = make_kubectl("gke_other-project_us-east5_production")
    with pytest.raises(AddOnFailed) as refused:
        install.install(environment(), kubectl, lambda message: None)
    assert f"us-east5_production, not {OURS}" in str(refused.value)
    assert LOGIN in str(refused.value)
    assert "apply" not in calls.read_text()


def test_install_says_what_to_do_when_the_cluster_cannot_be_reached(make_kubectl):
    kubectl, calls = make_kubectl(OURS, reachable=False)
    with pytest.raises(AddOnFailed) as refused:
        install.install(environment(), kubectl, lambda message: None)
    assert "connection refused" in str(refused.value) and LOGIN in str(refused.value)
    assert "apply" not in calls.read_text()


@pytest.mark.parametrize("context", [OURS, "local", ""])
def test_install_goes_on_in_its_cluster_and_in_one_that_is_not_gke(make_kubectl, context):
    kubectl, calls = make_kubectl(context)
    install.install(environment(), kubectl, lambda message: None)
    assert calls.read_text().count("apply --server-side") == 5


WEBHOOK = "Internal error occurred: failed calling webhook"


@pytest.mark.parametrize(
    ("answer", "error", "calls"),
    [(WEBHOOK, WebhookUnavailable, install.ATTEMPTS), ("invalid", AddOnFailed, 1)],
    ids=["webhook", "refused"],
)
def test_only_for_a_webhook_objects_are_applied_again(tmp_path, answer, error, calls):
    script, log = tmp_path / "kubectl", tmp_path / "calls"
    script.write_text(f'#!/bin/sh\necho "$1" >> {log}\necho "{answer}" >&2\nexit 1\n')
    script.chmod(0o755)
    with pytest.raises(AddOnFailed) as failed:
        Kubectl(command=[str(script)], sleep=lambda seconds: None).apply([])
    assert type(failed.value) is error and log.read_text().count("apply") == calls


KUEUE = "kueue.x-k8s.io"
STORED = [
    ("workloads", KUEUE, ["v1beta1", "v1beta2"]), ("topologies", KUEUE, ["v1beta2"]),
    ("certificates", "cert-manager.io", ["v1beta1"]),
]  # fmt: skip


@pytest.mark.parametrize(("kueue", "refused"), [("v0.20.0", True), ("v0.18.3", False)])
def test_kueue_is_not_upgraded_past_a_version_that_objects_are_stored_as(
    make_kubectl, kueue, refused
):
    kubectl, calls = make_kubectl(OURS, stored=STORED)
    built = environment(addons={"kueue": kueue})
    problems = [each for each in install.checks(built, kubectl) if each.name == "Kueue objects"]
    assert [each.status for each in problems] == [CheckStatus.FAILED] * refused
    try:
        install.install(built, kubectl, lambda message: None)
    except AddOnFailed as error:
        assert "stored as v1beta1 (workloads.kueue.x-k8s.io)" in str(error)
        assert "migrate-to-v1beta2.sh" in str(error)
        assert "kubectl patch crd workloads." in str(error)
    assert ("apply" in calls.read_text()) is not refused


def test_kueue_is_upgraded_once_its_objects_are_migrated(make_kubectl):
    kubectl, calls = make_kubectl(OURS, stored=[("workloads", KUEUE, ["v1beta2"])])
    install.install(environment(addons={"kueue": "v0.20.0"}), kubectl, lambda message: None)
    assert "apply" in calls.read_text()


def test_queues_alone_are_not_applied_to_another_cluster_either(make_kubectl):
    kubectl, calls = make_kubectl("gke_other-project_us-east5_production")
    with pytest.raises(AddOnFailed):
        install.apply_queues(environment(), kubectl, lambda message: None)
    assert "apply" not in calls.read_text()


def test_doctor_names_another_cluster(make_kubectl):
    kubectl, _ = make_kubectl("gke_other-project_us-east5_production")
    (check,) = install.checks(environment(), kubectl)
    assert check.status is CheckStatus.FAILED and OURS in check.message and LOGIN in check.fix
