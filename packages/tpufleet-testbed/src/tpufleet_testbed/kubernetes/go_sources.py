"""What the control plane is built from: pinned Go modules, shipped as package data."""

from __future__ import annotations

import hashlib
from pathlib import Path

GO_SOURCES = Path(__file__).parent / "golang"
KUBERNETES_VERSION = "1.36.3"
MIN_GO_VERSION = (1, 26)

# In build order: title of the step, Go packages, resulting binaries.
BUILD_STEPS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("the control plane and KWOK", (".",), ("harness",)),
    ("JobSet", ("sigs.k8s.io/jobset",), ("jobset",)),
    ("LeaderWorkerSet", ("sigs.k8s.io/lws/cmd",), ("lws",)),
    ("Kueue", ("./kueue",), ("kueue",)),
    (
        "what a real node needs",
        ("k8s.io/kubernetes/cmd/kubelet", "./dns", "./pause"),
        ("kubelet", "dns", "pause"),
    ),
)

# Main files built from a copy with one line replaced: module, file, our package, line, replacement.
# Kueue reads its metrics certificate from a path that only root can write and that several control
# planes would share.
PATCHED_FILES: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "sigs.k8s.io/kueue",
        "cmd/kueue/main.go",
        "kueue",
        'metricsCertPath := "/etc/kueue/metrics/certs"',
        'metricsCertPath := os.Getenv("KUEUE_METRICS_CERTS")',
    ),
)

# Manifests are copied from the same modules, so that they match the binaries.
MANIFESTS: dict[str, tuple[str, ...]] = {
    "sigs.k8s.io/jobset": (
        "config/components/crd/bases/*.yaml",
        "config/components/webhook/manifests.yaml",
    ),
    "sigs.k8s.io/kueue": (
        "config/components/crd/bases/*.yaml",
        "config/components/webhook/manifests.yaml",
    ),
    "sigs.k8s.io/lws": (
        "config/crd/bases/*.yaml",
        "config/webhook/manifests.yaml",
    ),
    "sigs.k8s.io/kwok": (
        "kustomize/stage/node/fast/node-initialize.yaml",
        "kustomize/stage/node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
        "kustomize/stage/pod/fast/pod-ready.yaml",
    ),
}


def build_key() -> str:
    """Identifies a build: equal sources have equal keys."""
    digest = hashlib.sha256(
        repr((BUILD_STEPS, PATCHED_FILES, MANIFESTS, KUBERNETES_VERSION)).encode()
    )
    for path in sorted(GO_SOURCES.rglob("*")):
        if path.suffix not in (".go", ".mod", ".sum"):
            continue
        digest.update(f"\0{path.relative_to(GO_SOURCES)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def link_flags(version: str = KUBERNETES_VERSION) -> str:
    """Sets the Kubernetes version: Kueue rejects an API server that does not report one."""
    where = "k8s.io/component-base/version"
    major, minor, _ = version.split(".")
    return (
        f"-s -w -X {where}.gitVersion=v{version} "
        f"-X {where}.gitMajor={major} -X {where}.gitMinor={minor}"
    )
