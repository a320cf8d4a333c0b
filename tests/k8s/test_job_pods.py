"""Pods of jobs with their own settings, admitted by a real API server; and what the shipped network
policy lets them reach."""

from __future__ import annotations

import ipaddress

import pytest

from tests.k8s.rigs import eventually
from tests.k8s.test_manifests import rendered
from tpufleet.kubernetes.connections import JOBSET, NAMESPACE
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.providers.base import Order
from tpufleet.providers.gke import manifests
from tpufleet.providers.gke.settings import GkeSettings


def test_pods_with_settings_of_the_job_are_admitted_in_a_restricted_namespace(rig):
    labels = {"pod-security.kubernetes.io/enforce": "restricted", "tpufleet.dev/jobs": "true"}
    rig.connection.apply(NAMESPACE, {"metadata": {"name": rig.namespace, "labels": labels}})
    rig.plane.kubectl("-n", rig.namespace, "create", "serviceaccount", "trainer")
    settings = GkeSettings(
        namespace=rig.namespace, image="registry/agent:1", service_account="default"
    )
    order = Order(
        id="o1", slices=(SliceId("a"),), accelerator="v5e-16", zone="us-central1-a",
        capacity=Capacity.SPOT, tokens={SliceId("a"): "t"}, server_url="https://fleet",
        fleet="f1", job_id="j1",
        pod=PodSettings(
            image="registry/train:7", cpu="24", memory="96Gi", service_account="trainer",
            volumes={"/data": "my-claim", "/weights": "gs://my-bucket/weights"},
            labels={"team": "nlp"}, tolerations=("dedicated=research:NoSchedule",),
        ),
    )  # fmt: skip
    rig.connection.create(JOBSET, manifests.jobset(order, settings))
    name = manifests.jobset_name(order)
    # Exclusive placement creates the other pods once the leader has a node.
    [pod, *_] = eventually(lambda: rig.pods(name), 60, rig.describe)
    spec = pod["spec"]
    assert spec["serviceAccountName"] == "trainer"
    assert not [each for each in spec["volumes"] if "projected" in each], "no Kubernetes token"
    assert pod["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"
    assert pod["metadata"]["labels"]["team"] == "nlp"
    assert [each["image"] for each in spec["containers"]] == ["registry/train:7"]
    assert [each["name"] for each in spec["containers"]] == ["agent"], "as documented"
    assert pod["metadata"]["name"].startswith(f"{name}-slice-0-0-"), "as documented"
    assert pod["metadata"]["labels"]["job-id"] == "j1"
    assert any(each.get("key") == "dedicated" for each in spec["tolerations"])


def test_the_shipped_account_of_job_pods_exists_and_has_no_rights():
    shipped = rendered("queues")
    [account] = [
        each
        for each in shipped
        if each["kind"] == "ServiceAccount" and each["metadata"]["name"] == "tpu-worker"
    ]
    assert account["metadata"]["namespace"] == "tpu-training"
    bound = [
        subject["name"]
        for each in shipped
        if each["kind"] in ("RoleBinding", "ClusterRoleBinding")
        for subject in each["subjects"]
    ]
    assert bound and "tpu-worker" not in bound


@pytest.mark.parametrize(
    ("address", "port", "allowed"),
    [
        ("169.254.169.252", 988, True),  # GKE metadata server
        ("169.254.169.254", 80, True),  # the same, with Dataplane V2
        ("169.254.169.254", 53, True),  # Cloud DNS
        ("142.250.1.207", 443, True),  # storage.googleapis.com
        ("199.36.153.8", 443, True),  # private.googleapis.com
        ("169.254.20.10", 53, True),  # NodeLocal DNSCache
        ("169.254.169.254", 8080, False),
        ("10.0.0.7", 443, False),  # the cluster
        ("10.0.0.7", 10250, False),  # a kubelet
        ("192.168.1.1", 443, False),
    ],
)
def test_job_pods_reach_google_apis_and_not_the_cluster(address, port, allowed):
    [policy] = [
        each
        for each in rendered("queues")
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "tpu-workers"
    ]
    assert any(_matches(rule, address, port) for rule in policy["spec"]["egress"]) is allowed


def _matches(rule: dict, address: str, port: int) -> bool:
    """Whether an egress rule allows an address outside of the cluster's pods."""
    ports = [each["port"] for each in rule.get("ports", ())]
    if ports and port not in ports:
        return False
    blocks = [each["ipBlock"] for each in rule.get("to", ()) if "ipBlock" in each]
    ip = ipaddress.ip_address(address)
    return "to" not in rule or any(
        ip in ipaddress.ip_network(block["cidr"])
        and not any(ip in ipaddress.ip_network(each) for each in block.get("except", ()))
        for block in blocks
    )
