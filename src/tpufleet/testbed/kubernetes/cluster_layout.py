"""Where one control plane keeps its files and on which ports its parts listen. Pure but for
finding the ports."""

from __future__ import annotations

import json
import random
import socket
import ssl
from dataclasses import asdict, dataclass
from pathlib import Path

from tpufleet.errors import FleetError

PARTS = (
    "etcd", "etcd_peer", "apiserver", "controllers", "scheduler", "kueue_health",
    "kueue_metrics", "kueue_webhook", "jobset_health", "jobset_metrics", "jobset_webhook", "kwok",
    "lws_health", "lws_webhook",
)  # fmt: skip


FIRST_PORT = 15000  # above those that programs are known by
FEWEST = 2000  # ports to choose from
GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


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
        """With which its administrator speaks with its parts."""
        context = ssl.create_default_context(cafile=str(self.pki / "ca.crt"))
        context.load_cert_chain(self.pki / "admin.crt", self.pki / "admin.key")
        return context

    def save(self) -> None:
        words = {**asdict(self), "folder": str(self.folder)}
        (self.folder / "layout.json").write_text(json.dumps(words, indent=1))


def new_layout(folder: Path) -> ControlPlaneLayout:
    return ControlPlaneLayout(
        folder=folder, ports=dict(zip(PARTS, free_ports(len(PARTS)), strict=True))
    )


def load_layout(folder: Path) -> ControlPlaneLayout | None:
    try:
        said = json.loads((folder / "layout.json").read_text())
    except FileNotFoundError:
        return None
    return ControlPlaneLayout(folder=folder, ports=said["ports"])


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now. All are held until the last is found: none comes twice.

    Below those that the kernel gives out by itself, to whoever asks for any port or connects: it
    would give them away before we listen on them."""
    held: list[socket.socket] = []
    try:
        for port in _shuffled(FIRST_PORT, _first_given_out()):
            if len(held) == count:
                break
            one = socket.socket()
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                one.close()
            else:
                held.append(one)
        if len(held) < count:
            raise FleetError(f"this machine has no {count} ports that are free")
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def _shuffled(first: int, end: int) -> list[int]:
    """So that two who look at the same time find different ones."""
    return random.sample(range(first, end), end - first)


def _first_given_out() -> int:
    try:
        return max(int(GIVEN_OUT.read_text().split()[0]), FIRST_PORT + FEWEST)
    except (OSError, ValueError, IndexError):
        return 2**15
