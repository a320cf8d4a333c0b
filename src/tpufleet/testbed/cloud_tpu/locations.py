"""What a cloud has: zones, a pace of its own, and machines that run on its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from tpufleet.testbed.cloud_tpu.nodes import NodeRecord

REGIONS = {
    "us-central1": "abcf", "us-central2": "b", "us-east1": "cd", "us-east4": "b",
    "us-east5": "abc", "us-west1": "c", "us-west4": "ab", "us-south1": "ab",
    "europe-west1": "c", "europe-west4": "ab", "asia-east1": "c", "asia-northeast1": "b",
    "asia-southeast1": "bc", "southamerica-east1": "c",
}  # fmt: skip
ZONES = tuple(f"{region}-{letter}" for region, letters in REGIONS.items() for letter in letters)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latencies:
    """How long the cloud takes."""

    boot: timedelta = timedelta(seconds=90)
    deletion: timedelta = timedelta(seconds=20)
    refusal: timedelta = timedelta(0)  # until an operation says that there is no stock
    queueing: timedelta = timedelta(0)  # until a queued resource is looked at
    notice: timedelta = timedelta(seconds=30)


class HostBackend(Protocol):
    """What runs on nodes."""

    def boot(self, node: NodeRecord) -> None: ...
    def tell(self, node: NodeRecord) -> None:
        """Its notice changed."""
        ...

    def kill_host(self, node: NodeRecord, host: int) -> None: ...
    def stall_host(self, node: NodeRecord, host: int) -> None: ...
    def end(self, node: NodeRecord) -> None: ...


class NoHosts:
    def boot(self, node: NodeRecord) -> None: ...
    def tell(self, node: NodeRecord) -> None: ...
    def kill_host(self, node: NodeRecord, host: int) -> None: ...
    def stall_host(self, node: NodeRecord, host: int) -> None: ...
    def end(self, node: NodeRecord) -> None: ...
