"""Checks a project for TPUs as Compute Engine instances: what differs from TPU VMs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tpufleet.clocks import SystemClock
from tpufleet.model.fleet import compute_reservations
from tpufleet.model.fleet.compute_reservations import ComputeReservation
from tpufleet.model.fleet.preflight import Check, failed, ok, warning
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import type_lookup
from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet.providers.compute.error_mapping import API
from tpufleet.providers.compute.quota import QuotaReader
from tpufleet.providers.compute.requests import MACHINES
from tpufleet.providers.compute.settings import ComputeSettings
from tpufleet.providers.tpu_vm.preflight import Preflight
from tpufleet.providers.tpu_vm.preflight_accounts import unknown
from tpufleet.providers.tpu_vm.reservations import begin_of, windows

# cloud.google.com/compute/docs/tpus/quickstart-create-tpu-multi-host-slice; the fine-grained set is
# of the methods that the server calls (compute/docs/access/iam).
PERMISSIONS = {
    "roles/compute.instanceAdmin.v1": (
        "compute.disks.create", "compute.images.useReadOnly",
        "compute.instanceGroupManagers.create", "compute.instanceGroupManagers.delete",
        "compute.instanceGroupManagers.get", "compute.instanceGroupManagers.list",
        "compute.instanceTemplates.create", "compute.instanceTemplates.delete",
        "compute.instanceTemplates.get", "compute.instanceTemplates.list",
        "compute.instanceTemplates.useReadOnly", "compute.instances.create",
        "compute.instances.delete", "compute.instances.get", "compute.instances.getGuestAttributes",
        "compute.instances.list", "compute.instances.setLabels", "compute.instances.setMetadata",
        "compute.instances.setServiceAccount", "compute.instances.setTags",
        "compute.resourcePolicies.create",
        "compute.resourcePolicies.delete", "compute.resourcePolicies.get",
        "compute.resourcePolicies.list", "compute.resourcePolicies.use",
        "compute.regionOperations.get", "compute.subnetworks.use",
        "compute.subnetworks.useExternalIp", "compute.zoneOperations.get",
    ),
}  # fmt: skip

# By kind, and whether the project is named. Others name folders or the organisation.
_NOT_SHARED = ((None, False), ("LOCAL", False), ("SPECIFIC_PROJECTS", False))


class ComputePreflight(Preflight):
    section = "compute"
    apis: Mapping[str, str] = {"Compute Engine API": API}
    permissions: Mapping[str, Sequence[str]] = PERMISSIONS

    def _may_have(self, kind: Accelerator) -> bool:
        return kind.machine_type in MACHINES

    def _runtimes(self) -> Iterator[Check]:
        """The machine types and images of the types that the user wants, and the reservation."""
        assert isinstance(self._settings, ComputeSettings)
        images: dict[str, str] = {}
        if self._settings.reservation:
            yield self._reservation(compute_reservations.parse(self._settings.reservation))
        for accelerator, zone, _ in self._pairs():
            kind = type_lookup.find(accelerator)
            name = f"machine type {type_lookup.short_name(accelerator)} {zone}"
            path = f"projects/{self._project}/zones/{zone}/machineTypes/{kind.machine_type}"
            answer = self._rest.get("compute", f"compute/v1/{path}")
            if answer.missing:
                yield warning(
                    name,
                    f"{zone} has no {kind.machine_type}",
                    f'gcloud compute machine-types list --filter="name={kind.machine_type}" '
                    f"--project {self._project}",
                )
            elif answer.status != 200:
                yield unknown(self._project, name, answer)
            else:
                yield ok(name, str(kind.machine_type))
            images[kind.generation] = self._settings.image(kind.generation)
        for generation, image in images.items():
            path = image.partition("/compute/v1/")[2] or image
            answer = self._rest.get("compute", f"compute/v1/{path}")
            listed = path.split("/")[1]
            command = f"gcloud compute images list --project {listed} --no-standard-images"
            if answer.status == 200:
                yield self._disk(generation, str(answer.body.get("diskSizeGb", "0")))
            elif answer.missing:
                yield failed(f"image {generation}", f"{path} not found", command)
            else:
                yield unknown(self._project, f"image {generation}", answer)

    def _reservation(self, wanted: ComputeReservation) -> Check:
        """It exists in one of the zones, has a machine type of the types that the user wants, and
        the project may use it (cloud.google.com/compute/docs/instances/reservations-shared)."""
        owner, name = wanted.project or self._project, f"reservation {wanted.name}"
        answers = [
            (zone, self._rest.get("compute", f"compute/v1/{path}/reservations/{wanted.name}"))
            for zone in self._known_zones()
            for path in (f"projects/{owner}/zones/{zone}",)
        ]
        found = sorted(answers, key=lambda each: (each[1].status != 200, each[1].missing))[:1]
        command = f"gcloud compute reservations list --project {owner}"
        if not found or found[0][1].missing:
            for zone in self._known_zones():
                scope = f"compute/v1/projects/{owner}/zones/{zone}"
                spans = windows(self._rest, scope, wanted.name)
                begin = begin_of(spans, SystemClock().now())
                if begin is not None:
                    return ok(name, f"begins at {begin:%Y-%m-%d %H:%M} UTC")
            return failed(name, f"{wanted.name} not found", command)
        [(zone, answer)] = found
        if answer.status != 200:
            return unknown(owner, name, answer)
        properties = answer.body.get("specificReservation", {}).get("instanceProperties", {})
        machine = str(properties.get("machineType", ""))
        if machine not in {type_lookup.find(kind).machine_type for kind, *_ in self._pairs()}:
            return failed(name, f"has {machine or 'no machine type'}", command)
        share = answer.body.get("shareSettings") or {}
        with_project = (share.get("shareType"), self._project in share.get("projectMap", {}))
        if owner != self._project and with_project in _NOT_SHARED:
            command = f"gcloud compute reservations update {wanted.name} --zone {zone}"
            command += f" --project {owner} --add-share-with {self._project}"
            return failed(name, f"is not shared with {self._project}", command)
        return ok(name, machine)

    def _disk(self, generation: str, needed: str) -> Check:
        assert isinstance(self._settings, ComputeSettings)
        name, size = f"image {generation}", self._settings.disk_gb
        if size < int(needed):
            short = f"needs a boot disk of {needed} GB, and disk_gb is {size}"
            return failed(name, short, f"set `disk_gb: {needed}` of `compute` in the config file")
        return ok(name, f"boot disk of {size} GB")

    def _quota(self) -> Iterator[Check]:
        """Of Compute Engine, by family and region, in chips: that of the Cloud TPU API does not
        count here."""
        reader = QuotaReader(self._rest, self._project)
        now = SystemClock().now()
        for accelerator, zone, capacity in self._pairs():
            kind, slices = type_lookup.find(accelerator), self._slices(accelerator, capacity)
            name = f"quota {type_lookup.short_name(accelerator)} {zone}"
            quota = reader.get(kind, zone, capacity, now)
            if capacity is Capacity.RESERVED:
                yield ok(name, "none needed")
            elif quota is None:
                role = self._grant(f"projects {self._project}", "roles/cloudquotas.viewer")
                yield unknown(self._project, name, reader.refusal, role)
            elif quota.most.chips is None:
                yield ok(name, f"unlimited ({capacity})")
            elif quota.allows(kind.chips, slices):
                yield ok(name, f"{quota} ({capacity})")
            else:
                asked, needed = bool(self._wanted.slices), kind.chips * slices
                places = ",".join(f"{key}={each}" for key, each in quota.most.dimensions.items())
                yield (failed if asked else warning)(
                    name,
                    f"{quota}, and {needed} are needed ({capacity})",
                    self._quota_command(API, quota.most.quota_id, places, needed + quota.in_use),
                )
