"""About what a VM for the server costs: list prices in us-central1, in dollars, for an estimate.
Not compared with the pages below on a known date, so always shown as "about".

E2 at 0.0218 per vCPU hour and 0.0029 per GB hour; e2-micro, e2-small and e2-medium are billed as
0.25, 0.5 and 1 vCPU. Other regions cost up to a third more. Today's prices:
https://cloud.google.com/compute/vm-instance-pricing,
https://cloud.google.com/compute/disks-image-pricing, https://cloud.google.com/vpc/network-pricing.
"""

from __future__ import annotations

SOURCE = "https://cloud.google.com/compute/vm-instance-pricing"
MACHINE_USD_PER_HOUR = {"e2-micro": 0.0084, "e2-small": 0.0168, "e2-medium": 0.0335}
DISK_USD_PER_GB_MONTH = 0.10  # pd-balanced
ADDRESS_USD_PER_HOUR = 0.005  # external IPv4 address of a VM that runs
BOOT_DISK_GB = 10
HOURS_PER_MONTH = 730


def disk_usd_per_hour(size_gb: int) -> float:
    return size_gb * DISK_USD_PER_GB_MONTH / HOURS_PER_MONTH


def usd_per_hour(machine_type: str, state_disk_gb: int) -> float | None:
    """None if the price of this machine type is not known."""
    machine = MACHINE_USD_PER_HOUR.get(machine_type)
    if machine is None:
        return None
    return machine + ADDRESS_USD_PER_HOUR + disk_usd_per_hour(state_disk_gb + BOOT_DISK_GB)
