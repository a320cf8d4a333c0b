"""VMs and managed groups of the emulated Compute Engine: internal records."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tpufleet_testbed.compute_engine.api_errors import ErrorBody
from tpufleet_testbed.compute_engine.catalog import Machine

# In these a VM has a machine, which nobody else can have.
WITH_MACHINE = ("PROVISIONING", "STAGING", "RUNNING", "PENDING_STOP", "STOPPING", "REPAIRING")
# The counters of a group, by status of its VMs.
COUNTERS = {
    "PENDING": "pending", "PROVISIONING": "provisioning", "STAGING": "staging",
    "RUNNING": "running", "REPAIRING": "repairing", "STOPPING": "stopping",
    "STOPPED": "stopped", "TERMINATED": "terminated", "DEPROVISIONING": "deprovisioning",
    "PENDING_STOP": "pendingStop", "SUSPENDING": "suspending", "SUSPENDED": "suspended",
    "": "nonExistent",
}  # fmt: skip


@dataclass(slots=True)
class Maintenance:
    start: datetime
    scheduled: bool = True
    ongoing: bool = False
    can_reschedule: bool = True
    reason: str = "PLANNED_UPDATE"


@dataclass(slots=True, eq=False)
class Vm:
    name: str
    project: str
    zone: str
    number: int
    properties: dict[str, Any]  # of its template, or the body of its request
    machine: Machine
    model: str
    created_at: datetime
    status: str = "PROVISIONING"
    group: Group | None = None
    worker: int = 0
    started_at: datetime | None = None
    terminates_at: datetime | None = None
    preempted: bool = False
    maintenance: Maintenance | None = None
    reservation: str = ""
    quota_kind: str = ""  # that it uses
    operation: dict[str, Any] | None = None  # that creates it, if it belongs to no group
    deletion: dict[str, Any] | None = None
    boots: int = 0
    revision: int = 0  # of labels and metadata
    generation: int = 0  # incremented to cancel what is scheduled

    @property
    def scheduling(self) -> dict[str, Any]:
        found: dict[str, Any] = self.properties.get("scheduling", {})
        return found

    @property
    def has_machine(self) -> bool:
        return self.status in WITH_MACHINE

    @property
    def deletes_itself(self) -> bool:
        """When it is preempted, or its time is over."""
        return self.scheduling.get("instanceTerminationAction") == "DELETE"

    @property
    def restarts(self) -> bool:
        if self.model != "STANDARD":
            return False
        return bool(self.scheduling.get("automaticRestart", True))

    @property
    def metadata(self) -> dict[str, str]:
        items = self.properties.get("metadata", {}).get("items", [])
        return {str(item["key"]): str(item.get("value", "")) for item in items}

    @property
    def key(self) -> str:
        """Unique, unlike names, which are used again, and new at each boot."""
        return f"{self.name}-{self.number}-{self.boots}"


@dataclass(slots=True, eq=False)
class Member:
    """A VM of a group, or the place of one."""

    name: str
    worker: int
    number: int
    action: str = "CREATING"
    vm: Vm | None = None
    errors: list[ErrorBody] = field(default_factory=list)  # of the last attempt
    generation: int = 0


@dataclass(slots=True, eq=False)
class Group:
    name: str
    project: str
    scope: str  # zones/Z or regions/R
    zones: tuple[str, ...]  # where its VMs may be
    number: int
    body: dict[str, Any]
    template: tuple[str, str]  # scope and name
    properties: dict[str, Any]  # of the template
    machine: Machine
    model: str
    target_size: int
    bulk: bool
    created_at: datetime
    policy: tuple[str, str] | None = None
    topology: str = ""
    zone: str = ""  # where its VMs are
    members: dict[str, Member] = field(default_factory=dict)
    in_progress: bool = False
    last_error: ErrorBody | None = None
    last_check_at: datetime | None = None
    waiting_since: datetime | None = None
    topology_state: str = ""
    topology_error: str = ""
    topology_at: datetime | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    created: dict[str, int] = field(default_factory=dict)  # worker numbers by name
    deletion: dict[str, Any] | None = None
    version: int = 0  # its fingerprint
    generation: int = 0

    @property
    def repairs(self) -> bool:
        policy = self.body.get("instanceLifecyclePolicy", {})
        return policy.get("defaultActionOnFailure", "REPAIR") != "DO_NOTHING"

    @property
    def vms(self) -> list[Vm]:
        return [member.vm for member in self.members.values() if member.vm is not None]

    @property
    def all_run(self) -> bool:
        running = sum(vm.status == "RUNNING" for vm in self.vms)
        return 0 < running == self.target_size == len(self.members)

    @property
    def leaving(self) -> bool:
        return any(member.action == "DELETING" for member in self.members.values())
