"""Files and ports of one control plane."""

from __future__ import annotations

import json
import random
import socket
import ssl
from dataclasses import asdict, dataclass
from pathlib import Path

from tpufleet.errors import FleetError

PORT_NAMES = (
    "etcd", "etcd_peer", "apiserver", "controllers", "scheduler", "kueue_health",
    "kueue_metrics", "kueue_webhook", "jobset_health", "jobset_metrics", "jobset_webhook", "kwok",
    "lws_health", "lws_webhook", "gke", "gke_health",
)  # fmt: skip


FIRST_PORT = 15000  # above the well-known ports
MIN_PORTS = 2000  # smallest range to choose from
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlPlaneLayout:
    folder: Path
    ports: dict[str, int]

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.ports['apiserver']}"

    def ssl_context(self) -> ssl.SSLContext:
        """TLS context of the cluster administrator."""
        context = ssl.create_default_context(cafile=str(self.pki / "ca.crt"))
        context.load_cert_chain(self.pki / "admin.crt", self.pki / "admin.key")
        return context

    def save(self) -> None:
        fields = {**asdict(self), "folder": str(self.folder)}
        (self.folder / "layout.json").write_text(json.dumps(fields, indent=1))


def new_layout(folder: Path) -> ControlPlaneLayout:
    return ControlPlaneLayout(
        folder=folder, ports=dict(zip(PORT_NAMES, free_ports(len(PORT_NAMES)), strict=True))
    )


def load_layout(folder: Path) -> ControlPlaneLayout | None:
    try:
        fields = json.loads((folder / "layout.json").read_text())
    except FileNotFoundError:
        return None
    return ControlPlaneLayout(folder=folder, ports=fields["ports"])


def free_ports(count: int) -> list[int]:
    """Distinct ports on which nothing listens now.

    They are below the kernel's ephemeral range: the kernel could assign an ephemeral port to
    another process before we listen on it."""
    held: list[socket.socket] = []  # bound until all are found, so that no port repeats
    try:
        ports = list(range(FIRST_PORT, _first_ephemeral_port()))
        random.shuffle(ports)  # so that concurrent callers choose different ones
        for port in ports:
            if len(held) == count:
                break
            candidate = socket.socket()
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                candidate.close()
            else:
                held.append(candidate)
        if len(held) < count:
            raise FleetError(f"cannot find {count} free ports on 127.0.0.1")
        return [bound.getsockname()[1] for bound in held]
    finally:
        for bound in held:
            bound.close()


def _first_ephemeral_port() -> int:
    try:
        return max(int(EPHEMERAL_RANGE.read_text().split()[0]), FIRST_PORT + MIN_PORTS)
    except (OSError, ValueError, IndexError):
        return 2**15
