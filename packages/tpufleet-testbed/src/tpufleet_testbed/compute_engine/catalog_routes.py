"""Routes of what the catalogue has: projects, regions, zones, machine types, images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tpufleet_testbed.cloud_tpu.api_errors import PROJECT_NUMBER
from tpufleet_testbed.compute_engine import catalog, validation, views
from tpufleet_testbed.compute_engine.api_errors import call_error, invalid_field
from tpufleet_testbed.compute_engine.calls import Body, Call


def routes(
    page: Callable[[Call, list[Body]], Body],
    other_machines: Callable[[str], list[Body]],  # by scope
    missing: Iterable[str],
) -> dict[str, Callable[[Call], Body]]:
    return {
        "projects.get": lambda call: project(call.project),
        "regions.get": lambda call: region(call.project, call.name),
        "regions.list": lambda call: page(
            call, [region(call.project, name) for name in catalog.regions()]
        ),
        "zones.get": lambda call: zone(call.project, call.name),
        "zones.list": lambda call: page(
            call, [zone(call.project, name) for name in catalog.zones()]
        ),
        "machineTypes.get": lambda call: _machine(_machines(call, other_machines), call),
        "machineTypes.list": lambda call: page(call, _machines(call, other_machines)),
        "images.get": lambda call: image(call.project, call.name, missing),
        "images.getFromFamily": lambda call: from_family(call.project, call.name, missing),
        "images.list": lambda call: page(call, images(call.project)),
    }


def project(name: str) -> Body:
    return {
        "kind": "compute#project", "name": name, "id": str(PROJECT_NUMBER),
        "selfLink": views.link(name, "")[:-1],
        "defaultServiceAccount": f"{PROJECT_NUMBER}-compute@developer.gserviceaccount.com",
        # Quotas of TPU families are not among these; Cloud Quotas has them.
        "quotas": [{"metric": "NETWORKS", "limit": 15.0, "usage": 1.0}],
    }  # fmt: skip


def region(project: str, name: str) -> Body:
    if name not in catalog.regions():
        raise call_error("not-found", target=f"projects/{project}/regions/{name}")
    inside = [each for each in catalog.zones() if catalog.region_of(each) == name]
    return {
        "kind": "compute#region", "name": name, "status": "UP",
        "selfLink": views.link(project, f"regions/{name}"),
        "zones": [views.link(project, f"zones/{each}") for each in inside],
        "quotas": [
            {"metric": "CPUS", "limit": 2400.0, "usage": 0.0},
            {"metric": "IN_USE_ADDRESSES", "limit": 2300.0, "usage": 0.0},
            {"metric": "SSD_TOTAL_GB", "limit": 81920.0, "usage": 0.0},
        ],
    }  # fmt: skip


def zone(project: str, name: str) -> Body:
    if name not in catalog.zones():
        raise call_error("not-found", target=f"projects/{project}/zones/{name}")
    return {
        "kind": "compute#zone", "name": name, "status": "UP",
        "selfLink": views.link(project, f"zones/{name}"),
        "region": views.link(project, f"regions/{catalog.region_of(name)}"),
    }  # fmt: skip


def _machines(call: Call, others: Callable[[str], list[Body]]) -> list[Body]:
    zone(call.project, call.place)
    found = [
        {
            "kind": "compute#machineType", "name": machine.name, "zone": call.place,
            "guestCpus": machine.cpus, "memoryMb": machine.memory_gib * 1024,
            "architecture": "X86_64",
            "selfLink": views.link(call.project, f"{call.scope}/machineTypes/{machine.name}"),
            "accelerators": [
                {
                    "guestAcceleratorType": machine.generation.tpu_family.lower(),
                    "guestAcceleratorCount": machine.chips,
                }
            ],
        }
        for machine in catalog.machines().values()
        if call.place in machine.zones
    ]  # fmt: skip
    return [*found, *others(call.scope)]


def _machine(machines: list[Body], call: Call) -> Body:
    for found in machines:
        if found["name"] == call.name:
            return found
    raise validation.missing(call.project, call.scope, "machineTypes", call.name)


def families() -> list[str]:
    return list(
        dict.fromkeys(generation.image_family for generation in catalog.GENERATIONS.values())
    )


def images(project: str) -> list[Body]:
    if project != catalog.IMAGES["project"]:
        return []
    return [_image(family, index) for family in families() for index in (0, 1)]


def _image(family: str, index: int) -> Body:
    project = catalog.IMAGES["project"]
    name = f"{family}-{catalog.IMAGES['builds'][index]}"
    shown: Body = {
        "kind": "compute#image", "name": name, "family": family, "status": "READY",
        "architecture": "X86_64", "diskSizeGb": str(catalog.IMAGES["disk_size_gb"]),
        "selfLink": views.link(project, f"global/images/{name}"),
    }  # fmt: skip
    if index:
        replacement = views.link(project, f"global/images/{family}-{catalog.IMAGES['builds'][0]}")
        shown["deprecated"] = {"state": "DEPRECATED", "replacement": replacement}
    return shown


def image(project: str, name: str, missing: Iterable[str]) -> Body:
    for found in images(project):
        if found["name"] == name and name not in missing:
            return found
    raise call_error("not-found", target=f"projects/{project}/global/images/{name}")


def from_family(project: str, family: str, missing: Iterable[str]) -> Body:
    for found in images(project):
        if found["family"] == family and family not in missing:
            return found
    raise call_error("not-found", target=f"projects/{project}/global/images/family/{family}")


def check_image(url: str, missing: Iterable[str]) -> None:
    """Images of other projects are a customer's own, and all exist, except those in `missing`."""
    match = validation.URL.fullmatch(url)
    field = "resource.properties.disks[0].initializeParams.sourceImage"
    if match is None or match["kind"] != "images":
        raise invalid_field(field, url, "The URL is malformed.")
    name, own = match["name"], match["project"] or ""
    plain = name.removeprefix("family/")
    known: Mapping[str, Any] = {each["name"]: each for each in images(own)}
    official = own == catalog.IMAGES["project"]
    if plain in missing or (official and plain not in (*known, *families())):
        raise invalid_field(field, url, "The referenced image resource cannot be found.")
