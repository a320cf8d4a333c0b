"""GKE's slice controller: sub-blocks of an all-capacity reservation, and the Slices formed of them.

https://docs.cloud.google.com/kubernetes-engine/docs/reference/crds/slice and
https://docs.cloud.google.com/kubernetes-engine/docs/how-to/create-dynamic-slices
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from tpufleet.clocks import Clock
from tpufleet.errors import BadRequest, Conflict
from tpufleet_testbed.gke import api_errors
from tpufleet_testbed.kubernetes import kwok_nodes

Json = dict[str, Any]

NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LONGEST_NAME = 49  # the controller appends to it
NODES, CHIPS, MOST_CHIPS = 16, 64, 9216
FINALIZER = "accelerator.gke.io/slice-finalizer"
SLICE, PARTITION = "cloud.google.com/gke-tpu-slice", "cloud.google.com/gke-tpu-partition-4x4x4-id"
STATE = "cloud.google.com/gke-tpu-partition-4x4x4-state"
MODE = "cloud.google.com/gke-accelerator-topology-mode"
BLOCK = "cloud.google.com/gce-topology-block"


@dataclass(slots=True)
class SubBlock:
    """A node pool of 16 nodes."""

    id: str
    block: str = "block-1"
    state: str = "HEALTHY"
    nodes: int = NODES


@dataclass(slots=True)
class EmulatedSlices:
    """`advance` runs everything that is due by the clock."""

    clock: Clock
    sub_blocks: dict[str, SubBlock] = field(default_factory=dict)
    activation_time: timedelta = timedelta(seconds=1)
    deactivation_time: timedelta = timedelta(seconds=1)
    slices: dict[str, Json] = field(default_factory=dict)
    created: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    _due: dict[str, datetime] = field(default_factory=dict)

    def add(self, *names: str, block: str = "block-1") -> None:
        for name in names:
            self.sub_blocks[name] = SubBlock(name, block)

    # The API

    def create(self, manifest: Mapping[str, Any]) -> None:
        name, spec = manifest["metadata"]["name"], manifest["spec"]
        problem = _invalid(name, spec)
        if problem:
            raise BadRequest(api_errors.text("slice-denied", problem=problem))
        if name in self.slices:
            raise Conflict(api_errors.text("slice-exists", name=name))
        self.slices[name] = {
            "metadata": {**manifest["metadata"], "finalizers": [FINALIZER]},
            "spec": dict(spec),
        }
        self.created.append((name, tuple(spec["partitionIds"])))
        self._set(name, "SliceNotCreated")
        self._due[name] = self.clock.now() + self.activation_time

    def delete(self, name: str) -> None:
        metadata = self.slices[name]["metadata"]
        if "deletionTimestamp" not in metadata:
            metadata["deletionTimestamp"] = self.clock.now().isoformat()
            self._set(name, "DEACTIVATING")
            self._due[name] = self.clock.now() + self.deactivation_time

    def set_state(self, sub_block: str, state: str) -> None:
        """HEALTHY, DEGRADED, UNHEALTHY or UNSET; a slice on one that is unhealthy fails."""
        self.sub_blocks[sub_block].state = state
        for name, found in self.slices.items():
            if sub_block in found["spec"]["partitionIds"] and self._is_active(name):
                if state == "UNHEALTHY":
                    self._set(name, "FAILED", api_errors.text("slice-health"))
                elif state == "DEGRADED":
                    self._set(name, "ACTIVE_DEGRADED", ready="True")

    def advance(self) -> None:
        """Finish what is due."""
        for name, due in list(self._due.items()):
            if due > self.clock.now():
                continue
            del self._due[name]
            if "deletionTimestamp" in self.slices[name]["metadata"]:
                del self.slices[name]
            else:
                self._form(name)

    def nodes(self) -> list[Json]:
        of_slice = {
            each: name
            for name, found in self.slices.items()
            if self._is_active(name)
            for each in found["spec"]["partitionIds"]
        }
        nodes = []
        for block in self.sub_blocks.values():
            labels = {
                PARTITION: block.id, MODE: "PROVISION_ONLY", BLOCK: block.block,
                **({SLICE: of_slice[block.id]} if block.id in of_slice else {}),
            }  # fmt: skip
            pool = kwok_nodes.KwokNodePool(
                name=block.id, nodes=block.nodes, accelerator="tpu7x", topology="4x4x4",
                machine_type="tpu7x-standard-4t", chips=4, labels=labels,
            )  # fmt: skip
            for node in kwok_nodes.node_manifests(pool):
                node["metadata"]["annotations"][STATE] = block.state
                node["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
                nodes.append(node)
        return nodes

    def _form(self, name: str) -> None:
        wanted = self.slices[name]["spec"]["partitionIds"]
        found = [self.sub_blocks[each] for each in wanted if each in self.sub_blocks]
        users = {
            each: other
            for other, one in self.slices.items()
            if other != name and one["status"]["conditions"][0]["reason"] != "SliceCreationFailed"
            for each in one["spec"]["partitionIds"]
        }
        taken = [each for each in wanted if each in users]
        if len(found) < len(wanted) or any(block.nodes < NODES for block in found):
            self._set(name, "SliceCreationFailed", api_errors.text("slice-nodes"))
        elif taken:
            used = api_errors.text("slice-overlap", partition=taken[0], other=users[taken[0]])
            self._set(name, "SliceCreationFailed", used)
        elif len({block.block for block in found}) > 1:
            self._set(name, "FAILED", api_errors.text("slice-blocks"))
        elif any(block.state == "UNHEALTHY" for block in found):
            self._set(name, "FAILED", api_errors.text("slice-health"))
        else:
            self._set(name, "ACTIVE", ready="True")

    def _set(self, name: str, reason: str, message: str = "", ready: str = "False") -> None:
        condition = {"type": "Ready", "status": ready, "reason": reason, "message": message}
        condition["lastTransitionTime"] = self.clock.now().isoformat()
        self.slices[name]["status"] = {"conditions": [condition]}

    def _is_active(self, name: str) -> bool:
        return bool(self.slices[name]["status"]["conditions"][0]["status"] == "True")


def _invalid(name: str, spec: Mapping[str, Any]) -> str:
    """What is wrong; empty when nothing is."""
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        return name
    if spec.get("type") != "tpu7x":
        return str(spec.get("type"))
    sizes = [int(size) for size in str(spec.get("topology")).split("x")]
    chips = math.prod(sizes)
    if len(sizes) != 3 or any(size % 4 for size in sizes) or sizes != sorted(sizes):
        return str(spec["topology"])
    if chips > MOST_CHIPS or len(set(spec["partitionIds"])) * CHIPS != chips:
        return f"{spec['topology']}, {spec['partitionIds']}"
    return ""
