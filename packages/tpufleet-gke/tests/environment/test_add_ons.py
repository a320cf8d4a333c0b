"""`tpu cluster install` and `doctor` act on the cluster of cluster.yaml, and on no other."""

from __future__ import annotations

import pytest

from tests.environment.environments import environment
from tpufleet_gke.environment.addons import install
from tpufleet_gke.environment.addons.install import AddOnFailed, Kubectl

OURS = "gke_my-project_us-central1_ml-cluster"
LOGIN = "gcloud container clusters get-credentials ml-cluster --region us-central1"


@pytest.fixture
def make_kubectl(tmp_path):
    """A kubectl that has a context and notes what it is asked to do."""

    def make(context, *, reachable=True):
        script, calls = tmp_path / "kubectl", tmp_path / "calls"
        script.write_text(f"""#!/bin/sh
echo "$@" >> {calls}
case "$1 $2" in
  "config current-context") [ -n "{context}" ] && echo {context} ;;
  "get --raw") {"echo ok" if reachable else "echo connection refused >&2; exit 1"} ;;
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
    assert f"context is gke_other-project_us-east5_production, not {OURS}" in str(refused.value)
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


def test_queues_alone_are_not_applied_to_another_cluster_either(make_kubectl):
    kubectl, calls = make_kubectl("gke_other-project_us-east5_production")
    with pytest.raises(AddOnFailed):
        install.apply_queues(environment(), kubectl, lambda message: None)
    assert "apply" not in calls.read_text()


def test_doctor_names_another_cluster(make_kubectl):
    kubectl, _ = make_kubectl("gke_other-project_us-east5_production")
    (check,) = install.checks(environment(), kubectl)
    assert not check.ok and OURS in check.detail and LOGIN in check.next
