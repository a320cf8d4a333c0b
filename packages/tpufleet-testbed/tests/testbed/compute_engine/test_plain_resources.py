"""The emulated Compute Engine API, used with Google's client. What is expected is from
https://cloud.google.com/compute/docs/reference/rest/v1."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("google.api_core", reason="pip install google-cloud-compute")

from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials

from tpufleet.errors import ProviderError
from tpufleet.providers.tpu_vm import server_vm
from tpufleet.providers.tpu_vm.google_rest import GoogleRest
from tpufleet.providers.tpu_vm.server_vm import ServerVm, ServerVmSettings
from tpufleet_testbed.cloud_tpu.project_api import ProjectApi

PROJECT, ZONE, REGION = "my-project", "us-central1-a", "us-central1"
SETTINGS = ServerVmSettings(project=PROJECT, zone=ZONE)
METADATA = {"tpufleet-bundle": "gs://b"}


@pytest.fixture
def project():
    project = ProjectApi()
    yield project
    project.close()


@pytest.fixture(scope="module")
def compute():
    """Google's client. Its import takes seconds, so not when tests are collected."""
    return pytest.importorskip("google.cloud.compute_v1", reason="pip install google-cloud-compute")


@pytest.fixture
def connect(project, compute):
    """A client of Google's for a kind of resource."""

    def connect(kind: str):
        client = getattr(compute, f"{kind}Client")
        transport = client.get_transport_class("rest")(
            host=project.url.removeprefix("http://"), credentials=AnonymousCredentials(),
            url_scheme="http",
        )  # fmt: skip
        return client(transport=transport)

    return connect


def deploy(project, settings=SETTINGS):
    vm = ServerVm(GoogleRest(project.url), settings, sleep=lambda seconds: None)
    vm.plan()
    return vm.apply(METADATA)


@pytest.fixture
def deployed(project):
    deploy(project)


@pytest.mark.slow
def test_what_is_deployed_reads_back_through_googles_client(deployed, connect):
    vm = connect("Instances").get(project=PROJECT, zone=ZONE, instance=SETTINGS.name)
    assert vm.machine_type.endswith("machineTypes/e2-small") and vm.status == "RUNNING"
    assert [disk.boot for disk in vm.disks] == [True, False]
    assert not vm.disks[1].auto_delete and vm.disks[1].device_name == server_vm.STATE_DEVICE
    items = {item.key: item.value for item in vm.metadata.items}
    assert items["startup-script"].startswith("#!/bin/bash")
    assert items["enable-guest-attributes"] == "TRUE"
    address = connect("Addresses").get(project=PROJECT, region=REGION, address=SETTINGS.name)
    [access] = vm.network_interfaces[0].access_configs
    assert (access.nat_i_p, access.type_) == (address.address, "ONE_TO_ONE_NAT")
    rule = connect("Firewalls").get(project=PROJECT, firewall=SETTINGS.name)
    assert rule.direction == "INGRESS" and rule.target_tags == vm.tags.items
    assert [(each.I_p_protocol, list(each.ports)) for each in rule.allowed] == [("tcp", ["8470"])]
    assert connect("Disks").get(project=PROJECT, zone=ZONE, disk=f"{SETTINGS.name}-state").size_gb


def test_googles_client_creates_waits_and_deletes(connect, compute):
    disks = connect("Disks")
    created = disks.insert(
        project=PROJECT, zone=ZONE, disk_resource=compute.Disk(name="data", size_gb=10)
    )
    assert connect("ZoneOperations").get(
        project=PROJECT, zone=ZONE, operation=created.name
    ).status is compute.Operation.Status.DONE  # fmt: skip
    with pytest.raises(exceptions.Conflict, match="already exists"):
        disks.insert(project=PROJECT, zone=ZONE, disk_resource=compute.Disk(name="data"))
    disks.delete(project=PROJECT, zone=ZONE, disk="data")
    with pytest.raises(exceptions.NotFound, match="was not found"):
        disks.get(project=PROJECT, zone=ZONE, disk="data")


def test_an_address_and_a_disk_name_the_instance_that_uses_them(deployed, connect):
    addresses, disks = connect("Addresses"), connect("Disks")
    address = {"project": PROJECT, "region": REGION, "address": SETTINGS.name}
    disk = {"project": PROJECT, "zone": ZONE, "disk": f"{SETTINGS.name}-state"}
    used = addresses.get(**address)
    assert used.status == "IN_USE" and len(used.users) == len(disks.get(**disk).users) == 1
    connect("Instances").delete(project=PROJECT, zone=ZONE, instance=SETTINGS.name)
    free = addresses.get(**address)
    assert free.status == "RESERVED" and not free.users and not disks.get(**disk).users


def test_a_disk_in_use_cannot_be_deleted(deployed, connect):
    with pytest.raises(exceptions.BadRequest, match="already being used"):
        connect("Disks").delete(project=PROJECT, zone=ZONE, disk=f"{SETTINGS.name}-state")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Upper"}, "resource.name"),
        ({"machine_type": ""}, "resource.machineType"),
        ({"machine_type": "e2-small"}, "machineType': 'e2-small'. The URL is malformed"),
        ({"machine_type": f"zones/{ZONE}/machineTypes/e9-small"}, "resource does not exist"),
        ({"machine_type": f"zones/{REGION}-b/machineTypes/e2-small"}, "resource does not exist"),
        ({"disks": []}, "resource.disks"),
        ({"network_interfaces": []}, "resource.networkInterfaces"),
        (
            {"network_interfaces": [{"network": "default"}]},
            r"networkInterfaces\[0\].network': 'default'. The URL is malformed",
        ),
        (
            {"network_interfaces": [{"subnetwork": "default"}]},
            r"networkInterfaces\[0\].subnetwork': 'default'. The URL is malformed",
        ),
    ],
    ids=[
        "name",
        "no machine type",
        "name of a type",
        "unknown type",
        "type of another zone",
        "disks",
        "no network",
        "name of a network",
        "name of a subnetwork",
    ],
)
def test_an_invalid_instance_is_refused(connect, compute, change, message):
    fields = {
        "name": "vm", "machine_type": f"zones/{ZONE}/machineTypes/e2-small",
        "disks": [{"boot": True}], "network_interfaces": [{"network": "global/networks/default"}],
    }  # fmt: skip
    with pytest.raises(exceptions.BadRequest, match=message):
        connect("Instances").insert(
            project=PROJECT, zone=ZONE, instance_resource=compute.Instance(**{**fields, **change})
        )


@pytest.mark.parametrize(
    "network",
    [
        "global/networks/default",
        f"projects/{PROJECT}/global/networks/default",
        f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/global/networks/default",
    ],
    ids=["partial", "of a project", "full"],
)
def test_urls_of_networks_are_taken_as_the_reference_says(connect, compute, network):
    instance = compute.Instance(
        name="vm", machine_type=f"zones/{ZONE}/machineTypes/e2-small", disks=[{"boot": True}],
        network_interfaces=[{"network": network}],
    )  # fmt: skip
    connect("Instances").insert(project=PROJECT, zone=ZONE, instance_resource=instance)


SHARED = "projects/host-project/global/networks/shared"


def test_a_firewall_rule_is_in_the_project_of_its_network(connect, compute):
    """https://cloud.google.com/vpc/docs/shared-vpc"""
    allowed = [compute.Allowed(I_p_protocol="tcp", ports=["8470"])]
    rule = compute.Firewall(name="rule", network=SHARED, allowed=allowed)
    with pytest.raises(exceptions.BadRequest, match="Cross project referencing is not allowed"):
        connect("Firewalls").insert(project=PROJECT, firewall_resource=rule)
    connect("Firewalls").insert(project="host-project", firewall_resource=rule)


def test_a_server_in_a_shared_vpc_has_its_firewall_rule_in_the_host_project(project):
    project.state.host_project = "host-project"
    settings = replace(SETTINGS, network=SHARED)
    deploy(project, settings)
    deploy(project, settings)
    inserted = [(path, body["name"]) for verb, path, body in project.tpus.requests
                if verb == "firewalls.insert"]  # fmt: skip
    name = f"{SETTINGS.name}-{PROJECT}"  # others may use the network
    assert inserted == [("compute/v1/projects/host-project/global/firewalls", name)]
    ServerVm(GoogleRest(project.url), settings, sleep=lambda seconds: None).delete()
    assert [kind for _, kind, _ in project.compute.state.resources] == ["disks"]


@pytest.mark.parametrize(
    ("zone", "offered"), [(ZONE, True), ("us-central2-b", False)], ids=["general", "for TPUs"]
)
def test_not_every_zone_has_every_machine_type(connect, zone, offered):
    types = {each.name: each for each in connect("MachineTypes").list(project=PROJECT, zone=zone)}
    assert ("e2-small" in types) is offered and types["n1-standard-1"].memory_mb == 3840
    if not offered:
        with pytest.raises(exceptions.NotFound):
            connect("MachineTypes").get(project=PROJECT, zone=zone, machine_type="e2-small")


def test_an_instance_is_changed_while_it_is_stopped(deployed, connect, compute):
    instances, vm = connect("Instances"), {"project": PROJECT, "zone": ZONE}
    vm["instance"] = SETTINGS.name
    before = instances.get(**vm)
    metadata = compute.Metadata(items=[{"key": "a", "value": "b"}], fingerprint="old")
    with pytest.raises(exceptions.PreconditionFailed, match="fingerprint"):
        instances.set_metadata(**vm, metadata_resource=metadata)
    metadata.fingerprint = before.metadata.fingerprint
    instances.set_metadata(**vm, metadata_resource=metadata)
    kind = compute.InstancesSetMachineTypeRequest(
        machine_type=f"zones/{ZONE}/machineTypes/e2-medium"
    )
    with pytest.raises(exceptions.BadRequest, match="stopped instance"):
        instances.set_machine_type(**vm, instances_set_machine_type_request_resource=kind)
    instances.stop(**vm)
    assert instances.get(**vm).status == "TERMINATED"
    instances.set_machine_type(**vm, instances_set_machine_type_request_resource=kind)
    instances.start(**vm)
    after = instances.get(**vm)
    assert after.status == "RUNNING" and after.machine_type.endswith("e2-medium")
    assert [item.key for item in after.metadata.items] == ["a"]
    assert after.network_interfaces[0].network_i_p == before.network_interfaces[0].network_i_p


def test_a_firewall_rule_is_patched(deployed, connect, compute):
    rule = compute.Firewall(source_ranges=["198.51.100.0/24"])
    rules = connect("Firewalls")
    rules.patch(project=PROJECT, firewall=SETTINGS.name, firewall_resource=rule)
    patched = rules.get(project=PROJECT, firewall=SETTINGS.name)
    assert list(patched.source_ranges) == ["198.51.100.0/24"] and patched.target_tags


def test_aggregated_lists_name_the_scope_of_each_resource(deployed, connect):
    found = {
        scope: [disk.name for disk in listed.disks]
        for scope, listed in connect("Disks").aggregated_list(project=PROJECT)
        if listed.disks
    }
    assert found == {f"zones/{ZONE}": [f"{SETTINGS.name}-state"]}


def test_guest_attributes_are_read_once_they_are_written(project, deployed, connect):
    instances = connect("Instances")
    request = {
        "project": PROJECT, "zone": ZONE, "instance": SETTINGS.name, "query_path": "tpufleet/ca",
    }  # fmt: skip
    with pytest.raises(exceptions.NotFound):
        instances.get_guest_attributes(request=request)
    project.compute.state.guest_attributes[SETTINGS.name, "tpufleet/ca"] = "PEM"
    [item] = instances.get_guest_attributes(request=request).query_value.items
    assert (item.namespace, item.key, item.value) == ("tpufleet", "ca", "PEM")


def test_what_was_made_is_deleted_again_when_the_instance_is_refused(project):
    state = project.compute.state
    state.failing["instances"] = "The zone does not have enough resources available."
    with pytest.raises(ProviderError, match="tpufleet-server: The zone"):
        deploy(project)
    assert not state.resources


def test_a_state_disk_that_existed_stays_when_the_instance_is_refused(project):
    rest, state = GoogleRest(project.url), project.compute.state
    deploy(project)
    ServerVm(rest, SETTINGS, sleep=lambda seconds: None).delete()
    state.failing["instances"] = "Quota 'CPUS' exceeded."
    with pytest.raises(ProviderError, match="Quota"):
        deploy(project)
    assert [kind for _, kind, _ in state.resources] == ["disks"]


@pytest.mark.parametrize(
    ("zone", "machine"),
    [(ZONE, "e2-small"), ("us-central2-b", "n1-standard-1")],
    ids=["cheapest of all", "cheapest without E2"],
)
def test_the_machine_type_is_one_that_the_zone_has(project, zone, machine):
    settings = ServerVmSettings(project=PROJECT, zone=zone)
    deploy(project, settings)
    vm = project.compute.state.resources[f"zones/{zone}", "instances", settings.name]
    assert vm["machineType"] == f"zones/{zone}/machineTypes/{machine}"


def test_a_machine_type_that_the_zone_lacks_is_told_before_anything_is_made(project):
    settings = ServerVmSettings(project=PROJECT, zone="us-central2-b", machine_type="e2-small")
    with pytest.raises(ProviderError, match="no machine type e2-small") as refused:
        deploy(project, settings)
    assert "--machine-type, such as n1-standard-1" in str(refused.value)
    assert not project.compute.state.resources
