"""What a person makes by hand on the emulated Compute Engine, through Google's client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1 as api

from tpufleet_testbed.cloud_tpu.emulator import Emulator

PROJECT = "my-project"
MACHINE = "ct5p-hightpu-4t"
IMAGE = (
    "projects/ubuntu-os-accelerator-images/global/images/family/"
    "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
)
METADATA = {"startup-script": "echo mine", "team": "vision"}
LABELS = {"owner": "mel"}


class Person:
    def __init__(
        self, emulator: Emulator, zone: str, settle: Callable[[], None] = lambda: None
    ) -> None:
        """`settle` waits until what was begun is done."""
        self._emulator, self._settle = emulator, settle
        self.zone, self.region = zone, zone.rpartition("-")[0]

    def client(self, service: str) -> Any:
        return getattr(api, f"{service}Client")(
            credentials=AnonymousCredentials(),
            client_options={"api_endpoint": self._emulator.project.url},
        )

    def make_instance(
        self, name: str, *, model: str = "STANDARD", machine: str = MACHINE, **more: Any
    ) -> None:
        place = f"zones/{self.zone}"
        fields = _machine(f"{place}/machineTypes/{machine}", f"{place}/diskTypes/", model)
        body = {**fields, "name": name, "labels": LABELS, **more}
        self.client("Instances").insert_unary(
            project=PROJECT, zone=self.zone, instance_resource=api.Instance(body)
        )

    def make_group(
        self, name: str, size: int, *, topology: str = "", bulk: bool = True,
        model: str = "STANDARD", **more: Any,
    ) -> None:  # fmt: skip
        where = {"project": PROJECT, "region": self.region}
        if topology:
            workload = {
                "type_": "HIGH_THROUGHPUT", "accelerator_topology": topology,
            }  # fmt: skip
            policy = api.ResourcePolicy(name=f"{name}-policy", workload_policy=workload)
            self.client("ResourcePolicies").insert_unary(**where, resource_policy_resource=policy)
            self._settle()
            path = f"regions/{self.region}/resourcePolicies/{name}-policy"
            more["resource_policies"] = {"workload_policy": path}
        properties = {**_machine(MACHINE, "", model), "labels": LABELS}
        template = api.InstanceTemplate(name=f"{name}-template", properties=properties)
        self.client("RegionInstanceTemplates").insert_unary(
            **where, instance_template_resource=template
        )
        self._settle()
        if bulk:
            more["target_size_policy"] = {"mode": "BULK"}
        body = {
            "name": name, "base_instance_name": name, "target_size": size,
            "instance_template": f"regions/{self.region}/instanceTemplates/{name}-template",
            "instance_lifecycle_policy": {"default_action_on_failure": "DO_NOTHING"}, **more,
        }  # fmt: skip
        self.client("InstanceGroupManagers").insert_unary(
            project=PROJECT, zone=self.zone,
            instance_group_manager_resource=api.InstanceGroupManager(body),
        )  # fmt: skip

    def instances(self) -> dict[str, api.Instance]:
        found = self.client("Instances").list(project=PROJECT, zone=self.zone)
        return {vm.name: vm for vm in found}

    def labels(self) -> list[dict[str, str]]:
        return [dict(vm.labels) for vm in self.instances().values()]

    def metadata(self) -> list[dict[str, str]]:
        """Without what a group adds to its instances."""
        return [
            {item.key: item.value for item in vm.metadata.items if item.key != "created-by"}
            for vm in self.instances().values()
        ]

    def set_labels(self, name: str, labels: dict[str, str]) -> None:
        print_ = self.instances()[name].label_fingerprint
        self.client("Instances").set_labels_unary(
            project=PROJECT, zone=self.zone, instance=name,
            instances_set_labels_request_resource=api.InstancesSetLabelsRequest(
                labels=labels, label_fingerprint=print_
            ),
        )  # fmt: skip


def _machine(machine: str, disk_types: str, model: str) -> dict[str, Any]:
    parameters = {
        "source_image": IMAGE, "disk_size_gb": 100, "disk_type": f"{disk_types}hyperdisk-balanced",
    }  # fmt: skip
    scheduling = {"on_host_maintenance": "TERMINATE", "provisioning_model": model}
    if model == "SPOT":
        scheduling["instance_termination_action"] = "STOP"
    return {
        "machine_type": machine,
        "disks": [{"boot": True, "auto_delete": True, "initialize_params": parameters}],
        "network_interfaces": [{"network": "global/networks/default"}],
        "scheduling": scheduling,
        "metadata": {"items": [{"key": key, "value": METADATA[key]} for key in METADATA]},
    }
