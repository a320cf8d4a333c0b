"""The bridge that the pods of a node are on: one of its own for each cluster."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tpufleet.errors import FleetError

RANGE = ipaddress.ip_network("10.88.0.0/16")
SIZE = 24  # bits of one cluster's part of it


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeNetwork:
    bridge: str
    subnet: str

    @property
    def gateway(self) -> str:
        """The machine's own address on the bridge."""
        return str(next(ipaddress.ip_network(self.subnet).hosts()))

    @property
    def exists(self) -> bool:
        return (Path("/sys/class/net") / self.bridge).exists()

    def create(self) -> None:
        _ip("link", "add", self.bridge, "type", "bridge")
        bits = self.subnet.partition("/")[2]
        _ip("address", "add", f"{self.gateway}/{bits}", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")

    def delete(self) -> None:
        if self.exists:
            _ip("link", "delete", self.bridge)


def allocate(folder: Path) -> BridgeNetwork:
    """Named after the cluster's folder, on a range that this machine has no route to."""
    # A device's name has 15 letters at most.
    mark = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    taken = [
        ipaddress.ip_network(route["dst"], strict=False)
        for route in json.loads(_ip("-json", "-4", "route", "show", "table", "all"))
        if route.get("dst", "default") != "default"
    ]
    for part in RANGE.subnets(new_prefix=SIZE):
        if not any(part.overlaps(one) for one in taken):
            return BridgeNetwork(bridge=f"tpu-{mark}", subnet=str(part))
    raise FleetError(f"this machine has routes to all of {RANGE}; end a cluster that is not used")


def cni_config(network: BridgeNetwork, addresses: Path) -> dict[str, object]:
    """How each pod is put on the bridge. Pods reach each other and this machine, nothing else."""
    return {
        "cniVersion": "0.4.0",
        "name": network.bridge,
        "plugins": [
            {
                "type": "bridge", "bridge": network.bridge, "isGateway": True, "ipMasq": False,
                "ipam": {
                    "type": "host-local", "dataDir": str(addresses),
                    "ranges": [[{"subnet": network.subnet}]],
                },
            }
        ],
    }  # fmt: skip


def _ip(*args: str) -> str:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FleetError(f"ip {' '.join(args)} failed: {done.stderr.strip()}")
    return done.stdout
