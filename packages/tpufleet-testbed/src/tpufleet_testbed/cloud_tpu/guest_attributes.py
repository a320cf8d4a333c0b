"""GetGuestAttributes: what the workers of a node wrote to their metadata servers."""

from __future__ import annotations

from collections.abc import Sequence

from google.cloud.tpu_v2.types import cloud_tpu

from tpufleet_testbed.cloud_tpu.api_errors import invalid_argument
from tpufleet_testbed.cloud_tpu.host_backend import HostBackend
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord


def query(
    node: NodeRecord, hosts: HostBackend, path: str, workers: Sequence[str]
) -> list[cloud_tpu.GuestAttributes]:
    """`namespace/` gives every key of it, `namespace/key` one. No worker named: all of them."""
    indexes = [_index(worker, node) for worker in workers] or range(node.accelerator.hosts)
    answers = []
    for index in indexes:
        entries = [
            cloud_tpu.GuestAttributesEntry(namespace=namespace, key=key, value=value)
            for (namespace, key), value in sorted(hosts.guest_attributes(node, index, path).items())
        ]
        if entries:
            value = cloud_tpu.GuestAttributesValue(items=entries)
            answers.append(cloud_tpu.GuestAttributes(query_path=path, query_value=value))
    if not answers:
        raise invalid_argument(f'The "GuestAttributes" value "{path}" was not found.')
    return answers


def _index(worker: str, node: NodeRecord) -> int:
    if not worker.isdecimal() or int(worker) >= node.accelerator.hosts:
        raise invalid_argument(f'The worker "{worker}" was not found.')
    return int(worker)
