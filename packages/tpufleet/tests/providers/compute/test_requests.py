"""The request bodies, compared with Google's pages:
docs.cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice and reference/rest/v1."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from tests.providers.orders import order
from tpufleet.errors import BadInput, BadRequest
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu.type_lookup import find
from tpufleet.providers.compute import naming, requests
from tpufleet.providers.compute.naming import Location
from tpufleet.providers.compute.settings import ComputeSettings, parse

ZONE = "us-central1-c"
LOCATION = Location(project="my-project", zone=ZONE)
SETTINGS = ComputeSettings(project="my-project", zones=(ZONE,), reservation="calendar-7")


def ordered(accelerator: str = "tpu7x-64", *slices: str, **more: Any):
    return order(*(slices or ("train-0",)), accelerator=accelerator, zone=ZONE, **more)


def template(accelerator: str = "tpu7x-64", settings: ComputeSettings = SETTINGS, **more: Any):
    return requests.template(ordered(accelerator, **more), find(accelerator), settings)


def group(accelerator: str = "tpu7x-64", *, bulk: bool = True, **more: Any) -> dict[str, Any]:
    wanted = ordered(accelerator, "a-0", "a-1", **more)
    return requests.group(wanted, wanted.slices[1], find(accelerator), "t", LOCATION, bulk=bulk)


def test_a_slice_of_several_hosts_is_a_bulk_group_with_the_topology_of_its_chips():
    body = group()
    assert body["name"] == body["baseInstanceName"] == "a-1"
    assert body["targetSize"] == 8
    assert body["targetSizePolicy"] == {"mode": "BULK"}
    assert body["instanceLifecyclePolicy"] == {"defaultActionOnFailure": "DO_NOTHING"}
    policy = requests.policy("test", "2x4x4")
    assert policy["workloadPolicy"] == {
        "type": "HIGH_THROUGHPUT",
        "acceleratorTopology": "2x4x4",
        "acceleratorTopologyMode": "AUTO_CONNECT",
    }
    where = "projects/my-project/regions/us-central1"
    assert body["instanceTemplate"] == f"{where}/instanceTemplates/t"
    assert body["resourcePolicies"] == {
        "workloadPolicy": f"{where}/resourcePolicies/{policy['name']}"
    }


def test_a_zone_that_refuses_bulk_mode_gets_a_group_without_it():
    assert "targetSizePolicy" not in group(bulk=False)


def test_each_slice_of_a_gang_has_its_own_token_and_name_in_its_metadata():
    metadata = group()["allInstancesConfig"]["properties"]["metadata"]
    assert json.loads(metadata["tpufleet-slices"]) == ["a-1"]
    assert json.loads(metadata["tpufleet-tokens"]) == {"a-1": "token of a-1"}
    assert metadata["tpufleet-server"] == "http://10.0.0.1:8470"
    assert "startup-script" not in metadata, "it is part of the shared template"


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (Capacity.SPOT, {"provisioningModel": "SPOT", "instanceTerminationAction": "STOP",
                         "automaticRestart": False}),
        (Capacity.ON_DEMAND, {"provisioningModel": "STANDARD", "automaticRestart": True}),
        (Capacity.QUEUED, {"provisioningModel": "FLEX_START", "instanceTerminationAction": "DELETE",
                           "maxRunDuration": {"seconds": "604800"}, "automaticRestart": False}),
        (Capacity.RESERVED, {"provisioningModel": "RESERVATION_BOUND", "automaticRestart": False,
                             "instanceTerminationAction": "DELETE"}),
    ],
)  # fmt: skip
def test_each_capacity_type_has_its_provisioning_model(capacity, expected):
    scheduling = template(capacity=capacity)["properties"]["scheduling"]
    assert scheduling == {"onHostMaintenance": "TERMINATE", **expected}


def test_reserved_capacity_names_its_reservation_and_spot_uses_none():
    reserved = template(capacity=Capacity.RESERVED)["properties"]["reservationAffinity"]
    assert reserved == {
        "consumeReservationType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": ["calendar-7"],
    }
    spot = template()["properties"]["reservationAffinity"]
    assert spot == {"consumeReservationType": "NO_RESERVATION"}


@pytest.mark.parametrize(
    ("accelerator", "machine", "image", "disk"),
    [
        ("v5p-16", "ct5p-hightpu-4t", "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e", "pd-balanced"),
        ("v6e-16", "ct6e-standard-4t", "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
         "hyperdisk-balanced"),
        ("tpu7x-64", "tpu7x-standard-4t", "ubuntu-accel-2404-amd64-tpu-tpu7x",
         "hyperdisk-balanced"),
    ],
)  # fmt: skip
def test_each_generation_has_its_machine_image_and_disk(accelerator, machine, image, disk):
    properties = template(accelerator)["properties"]
    assert properties["machineType"] == machine
    [boot] = properties["disks"]
    assert boot["initializeParams"]["sourceImage"].endswith(f"images/family/{image}")
    assert boot["initializeParams"]["diskType"] == disk
    assert boot["initializeParams"]["diskSizeGb"] == "100"


def test_hosts_have_a_scope_for_storage_and_no_external_address_where_none_is_wanted():
    properties = template(settings=replace(SETTINGS, external_ips=False))["properties"]
    [account] = properties["serviceAccounts"]
    assert account["scopes"] == ["https://www.googleapis.com/auth/cloud-platform"]
    [interface] = properties["networkInterfaces"]
    assert interface["nicType"] == "GVNIC" and "accessConfigs" not in interface
    assert "accessConfigs" in template()["properties"]["networkInterfaces"][0]


def test_a_subnetwork_names_its_network_itself():
    """Google refuses a network that is not that of the subnetwork."""
    own = replace(SETTINGS, subnetwork=("projects/host/regions/us-central1/subnetworks/tpus",))
    [interface] = template(settings=own)["properties"]["networkInterfaces"]
    assert interface["subnetwork"] == "projects/host/regions/us-central1/subnetworks/tpus"
    assert "network" not in interface
    [interface] = template()["properties"]["networkInterfaces"]
    assert interface["network"] == "projects/my-project/global/networks/default"


def test_slices_of_one_configuration_share_a_template_and_others_do_not():
    one, same = template(), requests.template(
        ordered("tpu7x-64", "other-0"), find("tpu7x-64"), SETTINGS
    )  # fmt: skip
    assert one == same
    names = {
        one["name"],
        template(capacity=Capacity.QUEUED)["name"],
        template(settings=replace(SETTINGS, disk_gb=200))["name"],
        template(fleet="another")["name"],
    }
    assert len(names) == 4 and all(len(name) <= 63 for name in names)


@pytest.mark.parametrize(
    ("accelerator", "capacity", "grouped"),
    [
        ("v6e-4", Capacity.SPOT, False),
        ("v6e-4", Capacity.ON_DEMAND, False),
        ("v6e-4", Capacity.QUEUED, True),
        ("v6e-4", Capacity.RESERVED, True),
        ("v6e-16", Capacity.SPOT, True),
    ],
)
def test_a_single_host_is_an_instance_unless_it_waits_or_is_reserved(
    accelerator, capacity, grouped
):
    assert requests.uses_group(find(accelerator), capacity) is grouped
    assert ("resourcePolicies" in group(accelerator)) is (accelerator == "v6e-16")


def test_an_instance_carries_what_template_and_group_say_together():
    wanted = ordered("v6e-4")
    body = requests.instance(wanted, wanted.slices[0], find("v6e-4"), SETTINGS, LOCATION)
    assert body["name"] == "train-0"
    assert body["machineType"] == f"zones/{ZONE}/machineTypes/ct6e-standard-4t"
    [boot] = body["disks"]
    assert boot["initializeParams"]["diskType"] == f"zones/{ZONE}/diskTypes/hyperdisk-balanced"
    keys = {item["key"] for item in body["metadata"]["items"]}
    assert {"startup-script", "tpufleet-tokens", "tpufleet-chips"} <= keys
    assert body["labels"][naming.SLICE] == "train-0"


@pytest.mark.parametrize(
    ("accelerator", "more", "hint"),
    [
        ("v5e-16", {}, "use the provider tpu-vm"),
        ("tpu7x-2", {}, "use the provider gke"),
        ("v6e-16", {"zone": "us-east5-a"}, "add it to compute.zones"),
        ("v5p-8192", {}, "v5p-8192 needs 1,024 VMs; a group of Compute Engine has at most"),
    ],
)
def test_what_compute_engine_does_not_offer_is_refused_with_what_does(accelerator, more, hint):
    with pytest.raises(BadRequest, match=hint):
        requests.validate(
            order("a", **{"accelerator": accelerator, "zone": ZONE, **more}), SETTINGS
        )


def test_reserved_capacity_without_a_reservation_is_refused():
    with pytest.raises(BadRequest, match="no reservation"):
        requests.validate(ordered(capacity=Capacity.RESERVED), replace(SETTINGS, reservation=""))


def test_settings_are_checked():
    for outside in ("8d", "9m"):
        with pytest.raises(BadInput, match="from 10m to 7d"):
            parse({"project": "my-project", "zones": [ZONE], "max_run_duration": outside})
    with pytest.raises(BadInput, match="is not a reservation"):
        parse({"project": "my-project", "zones": [ZONE], "reservation": "a/b"})
    settings = parse({"project": "my-project", "zones": [ZONE], "max_run_duration": "12h"})
    assert settings.max_run_duration == timedelta(hours=12)
