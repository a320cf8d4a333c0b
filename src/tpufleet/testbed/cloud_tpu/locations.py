"""Zones of the emulated cloud, and how long its operations take."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

REGIONS = {
    "us-central1": "abcf", "us-central2": "b", "us-east1": "cd", "us-east4": "b",
    "us-east5": "abc", "us-west1": "c", "us-west4": "ab", "us-south1": "ab",
    "europe-west1": "c", "europe-west4": "ab", "asia-east1": "c", "asia-northeast1": "b",
    "asia-southeast1": "bc", "southamerica-east1": "c",
}  # fmt: skip
AI_ZONES = ("us-central1-ai1a", "us-south1-ai1b")
ZONES = (
    *(f"{region}-{letter}" for region, letters in REGIONS.items() for letter in letters),
    *AI_ZONES,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latencies:
    """How long operations of the cloud take."""

    boot: timedelta = timedelta(seconds=90)
    deletion: timedelta = timedelta(seconds=20)
    stockout: timedelta = timedelta(0)  # until an operation fails for lack of stock
    queueing: timedelta = timedelta(0)  # until a queued resource is first considered
    notice_period: timedelta = timedelta(seconds=30)  # from a notice to the preemption
