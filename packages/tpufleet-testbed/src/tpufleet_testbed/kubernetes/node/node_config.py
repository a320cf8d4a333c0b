"""Configuration of the programs of a real node, as data. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpufleet_testbed.kubernetes import kwok_nodes
from tpufleet_testbed.kubernetes.binaries import Build
from tpufleet_testbed.kubernetes.cluster_layout import ControlPlaneLayout
from tpufleet_testbed.kubernetes.node import bridge_network, supervisor
from tpufleet_testbed.kubernetes.node.bridge_network import BridgeNetwork
from tpufleet_testbed.kubernetes.node.supervisor import SupervisedProgram, SupervisorConfig

# Folders that kubelet, containerd and its shims use regardless of configuration; bind-mounted, so
# that each node has its own.
PRIVATE_FOLDERS = (
    "/run/containerd", "/run/netns", "/var/lib/cni", "/var/lib/kubelet", "/var/log/containers",
    "/var/log/pods",
)  # fmt: skip
PORTS = ("kubelet", "health", "dns", "server")  # `server` is reserved for `tpu serve`
PAUSE_IMAGE = "localhost/tpufleet-pause"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeShape:
    """The slice whose hosts the node stands for."""

    accelerator: str = "tpu-v5-lite-podslice"
    topology: str = "4x4"
    chips: int = 16
    zone: str = "us-central1-a"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLayout:
    """Name, files and ports of one node."""

    plane: ControlPlaneLayout
    name: str
    network: BridgeNetwork
    ports: Mapping[str, int]  # by name in PORTS
    shape: NodeShape

    @property
    def folder(self) -> Path:
        return self.plane.folder / "node"

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"

    @property
    def namespace_file(self) -> Path:
        return self.folder / "namespace"

    @property
    def shared(self) -> Path:
        """The folder behind the volume that pods share."""
        return self.plane.folder / "shared"


def containerd_config(node: NodeLayout, *, snapshotter: str, plugins: Path, pause: str) -> str:
    folder = node.folder
    cri = '[plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "{folder / "containerd"}"
state = "{folder / "state"}"
[grpc]
  address = "{node.socket}"
[ttrpc]
  address = "{node.socket}.ttrpc"
# No garbage collection: a layer is loaded before the image that refers to it.
[plugins."io.containerd.gc.v1.scheduler"]
  deletion_threshold = 0
  mutation_threshold = 1000000000
  startup_delay = "8760h"
{cri}]
  sandbox_image = "{pause}"
  # Inside a container, lowering oom_score_adj may be forbidden, and no pod would start.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
{cri}.containerd]
  snapshotter = "{snapshotter}"
  default_runtime_name = "runc"
{cri}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
{cri}.cni]
  bin_dir = "{plugins}"
  conf_dir = "{folder / "cni"}"
"""


def kubelet_config(node: NodeLayout) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "address": node.network.gateway,
        "port": node.ports["kubelet"],
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": node.ports["health"],
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(node.plane.pki / "ca.crt")},
        },
        # Only the API server has a client certificate of this cluster.
        "authorization": {"mode": "AlwaysAllow"},
        "clusterDomain": "cluster.local",
        "clusterDNS": [node.network.gateway],
        "resolvConf": "",
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,  # the machine may have only v1
        "failSwapOn": False,
        # All pods of a slice share the few cores of one machine; quotas would only slow them down.
        "cpuCFSQuota": False,
        "makeIPTablesUtilChains": False,
        "evictionHard": {"memory.available": "100Mi"},
        "imageGCHighThresholdPercent": 100,  # images cannot be pulled again
        "volumeStatsAggPeriod": "5s",  # the default detects full disks after a minute
        "maxPods": 32,
    }


def corefile(node: NodeLayout) -> str:
    return f"""cluster.local:53 {{
  bind {node.network.gateway}
  errors
  ready 127.0.0.1:{node.ports["dns"]}
  kubernetes cluster.local {{
    kubeconfig {node.plane.kubeconfig} local
    pods verified
  }}
}}
"""


def node_labels(node: NodeLayout) -> dict[str, str]:
    zone = node.shape.zone
    return {
        kwok_nodes.POOL: node.name,
        kwok_nodes.ACCELERATOR: node.shape.accelerator,
        kwok_nodes.TOPOLOGY: node.shape.topology,
        "cloud.google.com/gke-spot": "true",  # no taint: also for on-demand jobs
        "topology.kubernetes.io/zone": zone,
        "topology.kubernetes.io/region": zone.rpartition("-")[0],
    }


def supervisor_config(node: NodeLayout, build: Build, runtime: Path) -> SupervisorConfig:
    folder = node.folder
    labels = ",".join(f"{key}={value}" for key, value in node_labels(node).items())
    return supervisor.SupervisorConfig(
        namespace_file=str(node.namespace_file),
        logs=str(node.plane.logs),
        bind_mounts={path: str(folder / "covered" / path.lstrip("/")) for path in PRIVATE_FOLDERS},
        programs=(
            SupervisedProgram(
                name="containerd",
                argv=(str(runtime), "--config", str(folder / "containerd.toml")),
            ),
            SupervisedProgram(
                name="dns",
                argv=(str(build.binary("dns")), "-conf", str(folder / "Corefile")),
            ),
            SupervisedProgram(
                name="kubelet",
                argv=(
                    str(build.binary("kubelet")),
                    f"--config={folder / 'kubelet.yaml'}",
                    f"--kubeconfig={folder / 'kubeconfig'}",
                    f"--root-dir={folder / 'kubelet'}",
                    f"--cert-dir={folder / 'kubelet' / 'pki'}",
                    f"--hostname-override={node.name}",
                    f"--node-ip={node.network.gateway}",
                    f"--node-labels={labels}",
                    f"--register-with-taints={kwok_nodes.TPU}=present:NoSchedule",
                ),
                wait_for_socket=str(node.socket),
            ),
        ),
    )


def cni_file(node: NodeLayout) -> dict[str, object]:
    return bridge_network.cni_config(node.network, node.folder / "addresses")
