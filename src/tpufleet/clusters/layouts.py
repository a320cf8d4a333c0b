"""Where one control plane keeps its files and on which ports its parts listen. Pure but for
finding the ports."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

PARTS = (
    "etcd", "etcd_peer", "apiserver", "controllers", "scheduler", "kueue_health",
    "kueue_metrics", "kueue_webhook", "jobset_health", "jobset_metrics", "jobset_webhook", "kwok",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
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

    def save(self) -> None:
        words = {**asdict(self), "folder": str(self.folder)}
        (self.folder / "layout.json").write_text(json.dumps(words, indent=1))


def fresh(folder: Path) -> Layout:
    return Layout(folder=folder, ports=dict(zip(PARTS, free_ports(len(PARTS)), strict=True)))


def load(folder: Path) -> Layout | None:
    try:
        said = json.loads((folder / "layout.json").read_text())
    except FileNotFoundError:
        return None
    return Layout(folder=folder, ports=said["ports"])


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now. All are held until the last is found: none comes twice."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
