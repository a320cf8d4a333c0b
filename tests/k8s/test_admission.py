"""The admission webhook as a real API server calls it."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import yaml

from tests.k8s.rigs import eventually
from tpufleet.kubernetes.connections import JOB, NODE, ResourceKind
from tpufleet_gke.provisioner.kube.admission import AdmissionSettings, job_key
from tpufleet_gke.provisioner.kube.webhook_server import WebhookServer
from tpufleet_gke.provisioner.model import label_keys

CONFIGURATION = ResourceKind(
    "admissionregistration.k8s.io", "v1", "MutatingWebhookConfiguration",
    "mutatingwebhookconfigurations", namespaced=False,
)  # fmt: skip
SHIPPED = Path(__file__).parents[2] / "deploy" / "k8s" / "base" / "admission" / "webhook.yaml"


@pytest.fixture
def admitting(rig):
    """The shipped configuration, calling a webhook on loopback for one namespace."""
    pki = rig.plane.layout.pki
    webhook = WebhookServer(
        "127.0.0.1:0", pki / "webhooks", AdmissionSettings(force_on_demand=True)
    ).start()
    shipped = yaml.safe_load(SHIPPED.read_text())
    (hook,) = shipped["webhooks"]
    authority = base64.b64encode((pki / "ca.crt").read_bytes()).decode()
    url = f"https://127.0.0.1:{webhook.port}/mutate"
    hook["clientConfig"] = {"url": url, "caBundle": authority}
    hook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": rig.namespace}}
    shipped["metadata"] = {"name": f"admission-{rig.namespace}"}
    rig.connection.apply(CONFIGURATION, shipped)
    yield webhook
    rig.connection.delete(CONFIGURATION, f"admission-{rig.namespace}")
    webhook.close()


@pytest.mark.slow
def test_each_job_is_tied_to_a_pool_of_its_own_and_runs_on_demand(rig, admitting):
    rig.provision_here(GCP_FORCE_ON_DEMAND="true")
    rig.submit("tied", slices=3, select={label_keys.SPOT: "true"})
    eventually(lambda: rig.running("tied", 12), 180, rig.describe)
    for job in rig.connection.list(JOB, rig.namespace)[0]:
        select = job["spec"]["template"]["spec"]["nodeSelector"]
        assert select["job-key"] == job_key(rig.namespace, job["metadata"]["name"])
        assert label_keys.SPOT not in select
    nodes = {
        node["metadata"]["name"]: node["metadata"]["labels"]
        for node in rig.connection.list(NODE, labels={label_keys.OWNER_NAMESPACE: rig.namespace})[0]
    }
    for pod in rig.pods("tied"):
        parent = pod["metadata"]["ownerReferences"][0]["name"]
        assert nodes[pod["spec"]["nodeName"]][label_keys.PARENT_NAME] == parent
    assert len(rig.gke.created) == 3


@pytest.mark.slow
def test_jobs_that_disable_provisioning_are_not_changed(rig, admitting):
    job = {
        "metadata": {
            "name": "alone", "namespace": rig.namespace,
            "labels": {label_keys.JOB_KEY: "x" * 40, label_keys.DISABLE: "true"},
        },
        "spec": {"template": {"spec": {
            "restartPolicy": "Never", "containers": [{"name": "main", "image": "busybox"}],
        }}},
    }  # fmt: skip
    created_job = rig.connection.create(JOB, job)
    assert "nodeSelector" not in created_job["spec"]["template"]["spec"]
    rig.connection.delete(JOB, "alone", rig.namespace)
