"""About what VMs, disks and addresses cost: list prices in us-central1, for an estimate. Not
compared with the pages below on a known date, so always shown as "about".

E2-micro, e2-small and e2-medium are billed as 0.25, 0.5 and 1 vCPU. Other regions cost up to a
third more. Today's prices: https://cloud.google.com/compute/vm-instance-pricing,
https://cloud.google.com/compute/disks-image-pricing, https://cloud.google.com/vpc/network-pricing.
"""

from __future__ import annotations

SOURCE = "https://cloud.google.com/compute/vm-instance-pricing"
# By family: of one vCPU, and of one GB of memory, in one hour.
_FAMILIES = {
    "e2": (0.0218, 0.0029),
    "n1": (0.0316, 0.0042),
    "n2": (0.0316, 0.0042),
    "n2d": (0.0275, 0.0037),
    "t2d": (0.0275, 0.0037),
}
_BILLED_CPUS = {"e2-micro": 0.25, "e2-small": 0.5, "e2-medium": 1.0}
_DISK_USD_PER_GB_MONTH = {"pd-standard": 0.04, "pd-balanced": 0.10, "pd-ssd": 0.17}
ADDRESS_USD_PER_HOUR = 0.005  # external IPv4 address of a VM that runs
UNUSED_ADDRESS_USD_PER_HOUR = 0.01
BOOT_DISK_GB = 10
HOURS_PER_MONTH = 730


def disk_usd_per_hour(disk_type: str, size_gb: int) -> float | None:
    """None if the price of this type is not known, as for machines."""
    price = _DISK_USD_PER_GB_MONTH.get(disk_type)
    return None if price is None else size_gb * price / HOURS_PER_MONTH


def machine_usd_per_hour(machine_type: str, cpus: int, memory_mb: int) -> float | None:
    family = _FAMILIES.get(machine_type.partition("-")[0])
    if family is None:
        return None
    cpu, gigabyte = family
    return _BILLED_CPUS.get(machine_type, cpus) * cpu + memory_mb / 1024 * gigabyte
