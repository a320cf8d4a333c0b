"""Fields of node pools and operations that GKE sets itself, and its defaults. Pure.

From the API reference,
https://cloud.google.com/kubernetes-engine/docs/reference/rest/v1/projects.locations.clusters.nodePools
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from google.cloud import container_v1 as api

from tpufleet.model.tpu import machine_types

ENDPOINT = "https://container.googleapis.com/v1"
COMPUTE = "https://www.googleapis.com/compute/v1"
VERSION = "1.35.4-gke.1200000"
DISK_GB, DISK_TYPE, ACCOUNT = 100, "pd-standard", "default"
_Strategy: Any = api.NodePoolUpdateStrategy


def fill_pool(pool: Any, parent: str, zones: Sequence[str]) -> None:
    """What a request leaves out, and what only GKE knows."""
    project, cluster = parent.split("/")[1], parent.rpartition("/")[2]
    pool.locations = list(pool.locations) or list(zones)
    config = pool.config
    config.disk_size_gb = config.disk_size_gb or DISK_GB
    fits = machine_types.can_have_disk(config.machine_type, DISK_TYPE)
    default = DISK_TYPE if fits else machine_types.default_disk_type(config.machine_type)
    config.disk_type = config.disk_type or default
    config.service_account = config.service_account or ACCOUNT
    pool.version = pool.version or VERSION
    if not pool.upgrade_settings.strategy:
        short_lived = config.flex_start or pool.queued_provisioning.enabled
        pool.upgrade_settings.strategy = (
            _Strategy.SHORT_LIVED if short_lived else _Strategy.SURGE
        )  # fmt: skip
    pool.self_link = f"{ENDPOINT}/{parent}/nodePools/{pool.name}"
    pool.instance_group_urls = [
        f"{COMPUTE}/projects/{project}/zones/{zone}/instanceGroupManagers/"
        f"gke-{cluster}-{pool.name}-{_checksum(pool.name)}-grp"
        for zone in pool.locations
    ]
    set_etag(pool)


def set_etag(pool: Any) -> None:
    """A checksum of the other fields."""
    pool.etag = ""
    pool.etag = _checksum(api.NodePool.to_json(pool))


def new_operation(name: str, kind: Any, parent: str, pool: str, started: str) -> Any:
    _, project, _, location, *_ = parent.split("/")
    running: Any = api.Operation.Status.RUNNING
    return api.Operation(
        name=name,
        operation_type=kind,
        status=running,
        location=location,
        self_link=f"{ENDPOINT}/projects/{project}/locations/{location}/operations/{name}",
        target_link=f"{ENDPOINT}/{parent}/nodePools/{pool}",
        start_time=started,
    )


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
