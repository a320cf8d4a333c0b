"""The namespace for jobs on a cluster with a real node: a volume that all pods share, and the
server settings that point there."""

from __future__ import annotations

import json
from typing import Any

from tpufleet_testbed.kubernetes.control_plane import KubernetesControlPlane
from tpufleet_testbed.kubernetes.node.node_config import NodeLayout

NAMESPACE, CLAIM, MOUNT_PATH = "tpu-training", "shared", "/shared"
SIZE = "100Gi"  # of the claim; not enforced


def manifests(node: NodeLayout, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """A namespace for jobs, with a claim on the node's shared folder."""
    volume = f"{CLAIM}-{namespace}"
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": namespace,
                "labels": {
                    "tpufleet.dev/jobs": "true",
                    "pod-security.kubernetes.io/enforce": "restricted",
                },
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                **common,
                "capacity": {"storage": SIZE},
                "hostPath": {"path": str(node.shared)},
                "claimRef": {"name": CLAIM, "namespace": namespace},
                "persistentVolumeReclaimPolicy": "Retain",
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": CLAIM, "namespace": namespace},
            "spec": {
                **common,
                "volumeName": volume,
                "resources": {"requests": {"storage": SIZE}},
            },
        },
    ]


def apply_manifests(
    plane: KubernetesControlPlane, node: NodeLayout, namespace: str = NAMESPACE
) -> None:
    items = {"apiVersion": "v1", "kind": "List", "items": manifests(node, namespace)}
    plane.kubectl("apply", "--filename=-", stdin=json.dumps(items))


def save_image(node: NodeLayout, image: str) -> None:
    (node.folder / "image").write_text(image)


def server_settings(
    plane: KubernetesControlPlane, node: NodeLayout, namespace: str = NAMESPACE
) -> dict[str, str]:
    # Pods reach this machine only by its address on their bridge.
    address = f"{node.network.gateway}:{node.ports['server']}"
    return {
        "TPUFLEET_PROVIDER": "gke",
        "TPUFLEET_LISTEN": address,
        "TPUFLEET_INSECURE_HTTP": "true",  # the bridge does not leave this machine
        "TPUFLEET_SERVER": f"http://{address}",
        "TPUFLEET_GKE_KUBECONFIG": str(plane.kubeconfig),
        "TPUFLEET_GKE_IMAGE": (node.folder / "image").read_text(),
        "TPUFLEET_GKE_NAMESPACE": namespace,
        "TPUFLEET_GKE_ZONES": node.shape.zone,
        "TPUFLEET_GKE_PLATFORM": "cpu",
        "TPUFLEET_GKE_CPU": "250m",
        "TPUFLEET_GKE_MEMORY": "1Gi",
        "TPUFLEET_GKE_SCRATCH": "1Gi",
        "TPUFLEET_GKE_VOLUMES": f"{MOUNT_PATH}={CLAIM}",
    }
