"""An emulated Compute Engine on a manual clock, with Google's client connected to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1 as api

from tpufleet.clocks import ManualClock
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer
from tpufleet_testbed.cloud_tpu.project_api import ProjectApi
from tpufleet_testbed.compute_engine import metadata
from tpufleet_testbed.compute_engine.engine import ComputeEngine
from tpufleet_testbed.compute_engine.fault_plan import ComputeFaultPlan
from tpufleet_testbed.compute_engine.records import Vm
from tpufleet_testbed.compute_engine.vm_hosts import VmHosts

PROJECT, REGION, ZONE = "my-project", "us-east5", "us-east5-a"
MACHINE = "ct6e-standard-4t"
IMAGE = (
    "projects/ubuntu-os-accelerator-images/global/images/family/"
    "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
)
SPOT = {"provisioning_model": "SPOT", "instance_termination_action": "STOP"}
DELETED_SPOT = {**SPOT, "instance_termination_action": "DELETE"}
STANDARD = {"provisioning_model": "STANDARD"}
FLEX = {
    "provisioning_model": "FLEX_START", "instance_termination_action": "DELETE",
    "max_run_duration": {"seconds": 3600},
}  # fmt: skip
BOUND = {"provisioning_model": "RESERVATION_BOUND", "instance_termination_action": "DELETE"}
REPAIR, LEAVE = "REPAIR", "DO_NOTHING"
LONG = 3600.0  # seconds; longer than anything takes


class _Metadata(VmHosts):
    """VMs without processes, whose metadata can be read."""

    def __init__(self, server: MetadataServer) -> None:
        self.server = server

    def boot(self, vm: Vm, values: Mapping[str, str]) -> None:
        self.server.put(vm.name, dict(values))

    def publish(self, vm: Vm, path: str, value: str) -> None:
        self.server.set_value(vm.name, path, value)


def affinity(*values: str) -> dict[str, Any]:
    return {
        "consume_reservation_type": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": list(values),
    }


def properties(
    machine: str = MACHINE, scheduling: Mapping[str, Any] = STANDARD, **more: Any
) -> api.InstanceProperties:
    fields: dict[str, Any] = {
        "machine_type": machine,
        "disks": [disk()],
        "network_interfaces": [{"network": "global/networks/default"}],
        "scheduling": {"on_host_maintenance": "TERMINATE", **scheduling},
        **more,
    }
    return api.InstanceProperties(fields)


def disk(image: str = IMAGE, **more: Any) -> dict[str, Any]:
    parameters = {
        "source_image": image, "disk_size_gb": 100, "disk_type": "hyperdisk-balanced", **more,
    }  # fmt: skip
    return {"boot": True, "auto_delete": True, "initialize_params": parameters}


class EmulatedCompute:
    def __init__(self, **plan: Any) -> None:
        self.clock = ManualClock()
        self.metadata = MetadataServer()
        self.engine = ComputeEngine(
            self.clock, plan=ComputeFaultPlan(**plan), hosts=_Metadata(self.metadata)
        )
        self.project = ProjectApi(engine=self.engine)
        self._clients: dict[str, Any] = {}

    def close(self) -> None:
        self.project.close()
        self.metadata.close()

    def __getattr__(self, name: str) -> Any:
        """Google's client of a service: `world.InstanceGroupManagers`."""
        if not name[0].isupper():
            raise AttributeError(name)
        if name not in self._clients:
            self._clients[name] = getattr(api, f"{name}Client")(
                credentials=AnonymousCredentials(),
                client_options={"api_endpoint": self.project.url},
            )
        return self._clients[name]

    def _run_due(self) -> datetime:
        with self.engine.lock:
            return self.engine.run_due()

    def advance(self, seconds: float) -> None:
        self.clock.advance(timedelta(seconds=seconds))

    def until(self, condition: Callable[[], object], limit: int = 7200) -> int:
        for second in range(limit):
            self._run_due()
            if condition():
                return second
            self.advance(1)
        raise AssertionError(f"not within {limit} s")

    def operation(self, operation: Any) -> api.Operation:
        common = {"project": PROJECT, "operation": operation.name}
        if operation.zone:
            return self.ZoneOperations.get(**common, zone=operation.zone.rpartition("/")[2])
        if operation.region:
            region = operation.region.rpartition("/")[2]
            return self.RegionOperations.get(**common, region=region)
        return self.GlobalOperations.get(**common)

    def done(self, operation: Any) -> api.Operation:
        """The operation, once it is DONE."""
        place = (operation.zone or operation.region).split("/projects/my-project/")[-1]
        record = self.engine.operations.get(place, operation.name)
        assert record is not None
        self.until(lambda: record["status"] == "DONE")
        return self.operation(operation)

    # Requests
    def add_policy(self, topology: str = "4x4", name: str = "policy", **more: Any) -> Any:
        policy = {"type_": "HIGH_THROUGHPUT", "accelerator_topology": topology, **more}
        policy = {key: value for key, value in policy.items() if value}
        return self.ResourcePolicies.insert_unary(
            project=PROJECT, region=REGION,
            resource_policy_resource=api.ResourcePolicy(name=name, workload_policy=policy),
        )  # fmt: skip

    def get_policy(self, name: str = "policy") -> api.ResourcePolicy:
        return self.ResourcePolicies.get(project=PROJECT, region=REGION, resource_policy=name)

    def add_template(self, name: str = "template", **fields: Any) -> Any:
        template = api.InstanceTemplate(name=name, properties=properties(**fields))
        return self.RegionInstanceTemplates.insert_unary(
            project=PROJECT, region=REGION, instance_template_resource=template
        )

    def get_template(self, name: str = "template") -> api.InstanceTemplate:
        return self.RegionInstanceTemplates.get(
            project=PROJECT, region=REGION, instance_template=name
        )

    def add_group(
        self,
        name: str = "slice",
        size: int = 4,
        *,
        mode: str | None = "BULK",
        policy: str = f"regions/{REGION}/resourcePolicies/policy",
        template: str = f"regions/{REGION}/instanceTemplates/template",
        on_failure: str | None = LEAVE,
        zone: str = ZONE,
        request_id: str = "",
        **more: Any,
    ) -> Any:
        body: dict[str, Any] = {
            "name": name, "base_instance_name": name, "target_size": size,
            "instance_template": template, **more,
        }  # fmt: skip
        if mode:
            body["target_size_policy"] = {"mode": mode}
        if policy:
            body["resource_policies"] = {"workload_policy": policy}
        if on_failure:
            body["instance_lifecycle_policy"] = {"default_action_on_failure": on_failure}
        return self.InstanceGroupManagers.insert_unary(
            api.InsertInstanceGroupManagerRequest(
                project=PROJECT, zone=zone, request_id=request_id or None,
                instance_group_manager_resource=api.InstanceGroupManager(body),
            )
        )  # fmt: skip

    def prepare(
        self, topology: str = "4x4", scheduling: Mapping[str, Any] = STANDARD, **fields: Any
    ) -> None:
        """A policy and a template."""
        self.done(self.add_policy(topology))
        self.done(self.add_template(scheduling=scheduling, **fields))

    def start_slice(
        self,
        topology: str = "4x4",
        size: int = 4,
        scheduling: Mapping[str, Any] = STANDARD,
        **more: Any,
    ) -> Any:
        """A group that is on its way to a slice."""
        self.prepare(topology, scheduling)
        return self.add_group(size=size, **more)

    def running_slice(self, *args: Any, **more: Any) -> api.InstanceGroupManager:
        self.start_slice(*args, **more)
        self.until_active()
        return self.group()

    def until_active(self, limit: int = 7200) -> None:
        [record] = self.engine.groups.values()
        self.until(lambda: record.topology_state == "ACTIVE", limit)

    def group(self, name: str = "slice") -> api.InstanceGroupManager:
        return self.InstanceGroupManagers.get(
            project=PROJECT, zone=ZONE, instance_group_manager=name
        )

    def status(self) -> Any:
        return self.group().status

    def topology(self) -> str:
        found = self.status().applied_accelerator_topologies
        return str(found[0].state) if found else ""

    def counts(self) -> dict[str, int]:
        found = self.status().current_instance_statuses
        shown = type(found).to_dict(found)
        return {key: value for key, value in shown.items() if value}

    def members(self, name: str = "slice", **more: Any) -> list[Any]:
        request = api.ListManagedInstancesInstanceGroupManagersRequest(
            project=PROJECT, zone=ZONE, instance_group_manager=name, **more
        )
        return list(self.InstanceGroupManagers.list_managed_instances(request))

    def errors(self) -> list[Any]:
        return list(
            self.InstanceGroupManagers.list_errors(
                project=PROJECT, zone=ZONE, instance_group_manager="slice"
            )
        )

    def last_error(self) -> Any:
        """Of the last check for capacity; None if there was none."""
        found = self.status().bulk_instance_operation.last_progress_check.error.errors
        return found[0] if found else None

    def resize(self, size: int, name: str = "slice", request_id: str = "") -> Any:
        return self.InstanceGroupManagers.resize_unary(
            api.ResizeInstanceGroupManagerRequest(
                project=PROJECT, zone=ZONE, instance_group_manager=name, size=size,
                request_id=request_id or None,
            )
        )  # fmt: skip

    def delete_group(self, name: str = "slice") -> Any:
        return self.InstanceGroupManagers.delete_unary(
            project=PROJECT, zone=ZONE, instance_group_manager=name
        )

    def patch_group(self, **fields: Any) -> Any:
        return self.InstanceGroupManagers.patch_unary(
            project=PROJECT, zone=ZONE, instance_group_manager="slice",
            instance_group_manager_resource=api.InstanceGroupManager(fields),
        )  # fmt: skip

    def delete_policy(self, name: str = "policy") -> Any:
        return self.ResourcePolicies.delete_unary(
            project=PROJECT, region=REGION, resource_policy=name
        )

    def delete_template(self, name: str = "template") -> Any:
        return self.RegionInstanceTemplates.delete_unary(
            project=PROJECT, region=REGION, instance_template=name
        )

    def add_vm(
        self,
        name: str = "vm",
        *,
        machine: str = MACHINE,
        scheduling: Mapping[str, Any] = STANDARD,
        valid_for: int | None = None,
        request_id: str = "",
        zone: str = ZONE,
        **more: Any,
    ) -> Any:
        body: dict[str, Any] = {
            "name": name, "machine_type": f"zones/{zone}/machineTypes/{machine}",
            "disks": [disk()], "network_interfaces": [{"network": "global/networks/default"}],
            "scheduling": {"on_host_maintenance": "TERMINATE", **scheduling}, **more,
        }  # fmt: skip
        if valid_for is not None:
            body["params"] = {"request_valid_for_duration": {"seconds": valid_for}}
        return self.Instances.insert_unary(
            api.InsertInstanceRequest(
                project=PROJECT, zone=zone, instance_resource=api.Instance(body),
                request_id=request_id or None,
            )
        )  # fmt: skip

    def vm(self, name: str = "vm") -> api.Instance:
        return self.Instances.get(project=PROJECT, zone=ZONE, instance=name)

    def running_vm(self, **more: Any) -> api.Instance:
        self.done(self.add_vm(**more))
        return self.vm(more.get("name", "vm"))

    def on_vm(self, verb: str, name: str = "vm", **more: Any) -> Any:
        call = getattr(self.Instances, f"{verb}_unary")
        return call(project=PROJECT, zone=ZONE, instance=name, **more)

    def vms(self, **more: Any) -> list[api.Instance]:
        request = api.ListInstancesRequest(project=PROJECT, zone=ZONE, **more)
        return list(self.Instances.list(request))

    # What happens to VMs
    def record(self, worker: int = 0) -> Vm:
        self._run_due()
        return next(vm for vm in self.engine.vms.values() if vm.worker == worker)

    def preempt(self, *workers: int) -> None:
        for vm in [self.record(worker) for worker in workers]:
            with self.engine.lock:
                self.engine.preempt(vm, self.clock.now())

    def read_metadata(self, vm: str, path: str) -> str | None:
        self._run_due()
        return self.metadata.read(vm, 0, path)

    def tpu_env(self, worker: int = 0) -> dict[str, str]:
        lines = metadata.slice_attributes(self.record(worker))["tpu-env"].splitlines()
        return {line.partition(":")[0]: line.partition(":")[2].strip(" '") for line in lines}

    def billed(self) -> dict[str, float]:
        """Seconds of each VM."""
        now = self._run_due()
        return {
            entry.node: ((entry.ended_at or now) - entry.began_at).total_seconds()
            for entry in self.engine.ledger.entries
        }
