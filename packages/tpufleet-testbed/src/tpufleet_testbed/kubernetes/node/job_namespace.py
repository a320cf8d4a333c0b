"""The namespace for jobs on a cluster with a real node: a queue, a volume that all pods share, and
the server settings that point there."""

from __future__ import annotations

import json
from typing import Any

from tpufleet.model.tpu import type_lookup
from tpufleet.providers.gke import kueue
from tpufleet_testbed.kubernetes.control_plane import KubernetesControlPlane
from tpufleet_testbed.kubernetes.node.node_config import NodeLayout

NAMESPACE, CLAIM, MOUNT_PATH = "tpu-training", "shared", "/shared"
SIZE = "100Gi"  # of the claim; not enforced
QUEUE = "tpu-training-jobs"


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
    _apply(plane, manifests(node, namespace))


def _apply(plane: KubernetesControlPlane, objects: list[dict[str, Any]]) -> None:
    items = {"apiVersion": "v1", "kind": "List", "items": objects}
    plane.kubectl("apply", "--filename=-", stdin=json.dumps(items))


def install_queue(plane: KubernetesControlPlane, node: NodeLayout) -> None:
    """Kueue's: jobs wait in it until the slice of the node is free."""
    _apply(plane, queue_manifests(node))


def queue_manifests(node: NodeLayout) -> list[dict[str, Any]]:
    shape = node.shape.accelerator, node.shape.topology
    types = type_lookup.all_types().values()
    kind = next(each for each in types if (each.gke_accelerator, each.topology) == shape)
    name = kueue.flavor_name(kind)
    return [
        *kueue.priority_classes(),
        *(flavor for flavor in kueue.flavors() if flavor["metadata"]["name"] == name),
        kueue.cluster_queue({kind.name: 1}),
        kueue.local_queue(NAMESPACE, name=QUEUE),
    ]


def save_image(node: NodeLayout, image: str) -> None:
    (node.folder / "image").write_text(image)


def server_settings(
    plane: KubernetesControlPlane, node: NodeLayout, namespace: str = NAMESPACE, queue: str = QUEUE
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
        **({"TPUFLEET_GKE_QUEUE": queue} if queue else {}),
        "TPUFLEET_GKE_ZONES": node.shape.zone,
        "TPUFLEET_GKE_PLATFORM": "cpu",
        "TPUFLEET_GKE_CPU": "250m",
        "TPUFLEET_GKE_MEMORY": "1Gi",
        "TPUFLEET_GKE_SCRATCH": "1Gi",
        "TPUFLEET_GKE_VOLUMES": f"{MOUNT_PATH}={CLAIM}",
    }
