"""The bridge network of a node's pods; each cluster has its own."""

from __future__ import annotations

import hashlib
import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path

from tpufleet.errors import FleetError
from tpufleet_testbed.kubernetes import programs

RANGE = ipaddress.ip_network("10.88.0.0/16")
PREFIX_LENGTH = 24  # of the subnet of one cluster


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
        prefix_length = self.subnet.partition("/")[2]
        _ip("address", "add", f"{self.gateway}/{prefix_length}", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")

    def delete(self) -> None:
        if self.exists:
            _ip("link", "delete", self.bridge)


def allocate(folder: Path) -> BridgeNetwork:
    """A bridge named after the cluster's folder, on a subnet to which this machine has no route."""
    # Device names are limited to 15 characters.
    suffix = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    routes = [
        ipaddress.ip_network(route["dst"], strict=False)
        for route in json.loads(_ip("-json", "-4", "route", "show", "table", "all"))
        if route.get("dst", "default") != "default"
    ]
    for subnet in RANGE.subnets(new_prefix=PREFIX_LENGTH):
        if not any(subnet.overlaps(route) for route in routes):
            return BridgeNetwork(bridge=f"tpu-{suffix}", subnet=str(subnet))
    raise FleetError(
        f"no free subnet in {RANGE}: this machine has routes to all of it; "
        "stop an unused cluster with `tpu cluster local down --folder FOLDER`"
    )


def cni_config(network: BridgeNetwork, addresses: Path) -> dict[str, object]:
    """CNI configuration: pods reach each other and this machine, nothing else."""
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
    return programs.run(f"ip {' '.join(args)}", ["ip", *args])
