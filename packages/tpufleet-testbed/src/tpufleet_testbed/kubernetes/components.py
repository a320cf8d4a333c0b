"""Configuration and command line of each control plane component, as data. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tpufleet_testbed.kubernetes.binaries import Build
from tpufleet_testbed.kubernetes.cluster_layout import ControlPlaneLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One process of the control plane."""

    name: str
    argv: tuple[str, ...]
    ready_url: str | None = None  # answers 200 once the component is ready
    environment: dict[str, str] = field(default_factory=dict)


def config_files(layout: ControlPlaneLayout) -> dict[str, Any]:
    """Content of each configuration file, by file name."""
    ports, folder = layout.ports, layout.folder
    webhooks = str(layout.pki / "webhooks")
    client, peer = (f"http://127.0.0.1:{ports[name]}" for name in ("etcd", "etcd_peer"))
    return {
        "etcd.yaml": {
            "name": "e0",
            "data-dir": str(folder / "etcd"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"e0={peer}",
            "unsafe-no-fsync": True,  # losing the last second of a test cluster is acceptable
            "log-level": "error",
        },
        "kubeconfig": kubeconfig(layout),
        "scheduler.yaml": {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": str(layout.kubeconfig), "qps": 500, "burst": 1000},
            # The back-off of pods is the default, as on GKE: 1 to 10 seconds.
            "leaderElection": {"leaderElect": False},
        },
        "kueue.yaml": {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": "kueue-system",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{ports['kueue_health']}"},
            "metrics": {"bindAddress": f"127.0.0.1:{ports['kueue_metrics']}"},
            "webhook": {"host": "127.0.0.1", "port": ports["kueue_webhook"], "certDir": webhooks},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
            # The rest is as Kueue's release manifests have it: without waitForPodsReady.
            "featureGates": {"VisibilityOnDemand": False},
        },
        "jobset.yaml": {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{ports['jobset_health']}"},
            "metrics": {
                "bindAddress": f"127.0.0.1:{ports['jobset_metrics']}", "certDir": webhooks,
            },
            "webhook": {"host": "127.0.0.1", "port": ports["jobset_webhook"], "certDir": webhooks},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
        },
        "lws.yaml": {
            "apiVersion": "config.lws.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{ports['lws_health']}"},
            "metrics": {"bindAddress": "0"},  # disabled
            "webhook": {"host": "127.0.0.1", "port": ports["lws_webhook"], "certDir": webhooks},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
        },
    }  # fmt: skip


def kubeconfig(layout: ControlPlaneLayout, name: str = "admin") -> dict[str, Any]:
    """Of the user that has the certificate of this name."""
    pki = layout.pki
    cluster = {"server": layout.url, "certificate-authority": str(pki / "ca.crt")}
    user = {
        "client-certificate": str(pki / f"{name}.crt"),
        "client-key": str(pki / f"{name}.key"),
    }
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "local", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": name}}],
        "current-context": "local",
    }


def base_components(layout: ControlPlaneLayout, build: Build) -> tuple[Component, Component]:
    """etcd and the API server: everything else needs them ready."""
    pki, ports, harness = layout.pki, layout.ports, str(build.harness)
    etcd_url = f"http://127.0.0.1:{ports['etcd']}"
    return (
        Component(
            name="etcd",
            argv=(harness, "etcd", str(layout.folder / "etcd.yaml")),
            ready_url=f"{etcd_url}/health",
        ),
        Component(
            name="kube-apiserver",
            argv=(
                str(build.kubernetes), "kube-apiserver",
                f"--etcd-servers={etcd_url}",
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                f"--secure-port={ports['apiserver']}",
                f"--tls-cert-file={pki / 'server.crt'}",
                f"--tls-private-key-file={pki / 'server.key'}",
                f"--client-ca-file={pki / 'ca.crt'}",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={pki / 'sa.pub'}",
                f"--service-account-signing-key-file={pki / 'sa.key'}",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--authorization-mode=Node,RBAC",
                "--allow-privileged=true",
                # GKE has it: pods that request google.com/tpu tolerate the taint of that name.
                "--enable-admission-plugins=ExtendedResourceToleration",
                "--kubelet-preferred-address-types=InternalIP",
                f"--kubelet-client-certificate={pki / 'admin.crt'}",
                f"--kubelet-client-key={pki / 'admin.key'}",
                "--endpoint-reconciler-type=none",
                "--enable-priority-and-fairness=false",
                "--max-requests-inflight=0",
                "--max-mutating-requests-inflight=0",
                f"--requestheader-client-ca-file={pki / 'ca.crt'}",
                "--requestheader-allowed-names=admin",
                "--requestheader-extra-headers-prefix=X-Remote-Extra-",
                "--requestheader-group-headers=X-Remote-Group",
                "--requestheader-username-headers=X-Remote-User",
                f"--proxy-client-cert-file={pki / 'admin.crt'}",
                f"--proxy-client-key-file={pki / 'admin.key'}",
            ),
            ready_url=f"{layout.url}/readyz",
        ),
    )  # fmt: skip


def controller_components(layout: ControlPlaneLayout, build: Build) -> tuple[Component, ...]:
    pki, ports, config = layout.pki, layout.ports, layout.kubeconfig
    kubernetes = str(build.kubernetes)
    auth_flags = (
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        f"--tls-cert-file={pki / 'server.crt'}",
        f"--tls-private-key-file={pki / 'server.key'}",
    )
    return (
        Component(
            name="kube-controller-manager",
            argv=(
                kubernetes, "kube-controller-manager", f"--kubeconfig={config}", *auth_flags,
                "--bind-address=127.0.0.1", f"--secure-port={ports['controllers']}",
                "--leader-elect=false",
                f"--service-account-private-key-file={pki / 'sa.key'}",
                f"--root-ca-file={pki / 'ca.crt'}",
                "--kube-api-qps=500", "--kube-api-burst=1000",
            ),
            ready_url=f"https://127.0.0.1:{ports['controllers']}/healthz",
        ),
        Component(
            name="kube-scheduler",
            argv=(
                kubernetes, "kube-scheduler",
                f"--config={layout.folder / 'scheduler.yaml'}", *auth_flags,
                "--bind-address=127.0.0.1", f"--secure-port={ports['scheduler']}",
            ),
            ready_url=f"https://127.0.0.1:{ports['scheduler']}/healthz",
        ),
    )  # fmt: skip


def extension_components(layout: ControlPlaneLayout, build: Build) -> tuple[Component, ...]:
    """Components that need the CRDs to be installed."""
    ports, config = layout.ports, layout.kubeconfig
    environment = {"KUBECONFIG": str(config)}
    return (
        extension(build, layout, "kueue"),
        extension(build, layout, "jobset"),
        Component(
            name="kwok",
            argv=(
                str(build.harness), "kwok", f"--kubeconfig={config}",
                f"--config={layout.folder / 'kwok.yaml'}",
                "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
                "--node-ip=127.0.0.1", "--cidr=10.64.0.0/10",
                f"--server-address=127.0.0.1:{ports['kwok']}",
                "--node-lease-duration-seconds=40",  # the default makes nodes flap
            ),
            ready_url=f"http://127.0.0.1:{ports['kwok']}/healthz",
            environment=environment,
        ),
    )  # fmt: skip


def extension(build: Build, layout: ControlPlaneLayout, name: str) -> Component:
    return Component(
        name=name,
        environment={"KUEUE_METRICS_CERTS": str(layout.pki / "webhooks")},
        argv=(
            str(build.binary(name)),
            f"--config={layout.folder / f'{name}.yaml'}",
            f"--kubeconfig={layout.kubeconfig}",
        ),
        ready_url=f"http://127.0.0.1:{layout.ports[f'{name}_health']}/readyz",
    )
