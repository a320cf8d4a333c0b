"""The emulated Compute Engine API, used with Google's client. What is expected is from
https://cloud.google.com/compute/docs/reference/rest/v1."""

from __future__ import annotations

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
SETTINGS = ServerVmSettings(project=PROJECT, zone=ZONE, metadata={"tpufleet-bundle": "gs://b"})


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


@pytest.fixture
def deployed(project):
    ServerVm(GoogleRest(project.url), SETTINGS, sleep=lambda seconds: None).create()


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


def test_a_disk_in_use_cannot_be_deleted(deployed, connect):
    with pytest.raises(exceptions.BadRequest, match="already being used"):
        connect("Disks").delete(project=PROJECT, zone=ZONE, disk=f"{SETTINGS.name}-state")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Upper"}, "resource.name"),
        ({"machine_type": ""}, "resource.machineType"),
        ({"disks": []}, "resource.disks"),
        ({"network_interfaces": []}, "resource.networkInterfaces"),
    ],
    ids=["name", "machine type", "disks", "network"],
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


def test_a_failed_operation_is_told():
    quota = {"code": "QUOTA_EXCEEDED", "message": "Quota 'CPUS' exceeded."}

    class Refusing(GoogleRest):
        def post(self, api, path, body):
            body = {"name": "op", "status": "DONE", "error": {"errors": [quota]}}
            return server_vm.Answer(status=200, body=body)

    with pytest.raises(ProviderError, match="cannot create address tpufleet-server: Quota"):
        ServerVm(Refusing(), SETTINGS, sleep=lambda seconds: None).create()
