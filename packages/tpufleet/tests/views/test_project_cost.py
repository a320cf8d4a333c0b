"""What a project pays for: `tpu cost project`, and what refuses to leave something behind."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from google.cloud import tpu_v2

from tests.views.emulated_cloud import Cloud
from tpufleet.providers.tpu_vm import api, server_vm
from tpufleet.providers.tpu_vm.google_rest import GoogleRest
from tpufleet.providers.tpu_vm.server_vm import ServerVm, ServerVmSettings

ZONE = "us-central1-a"
BY_HAND = {"tpufleet-operation": "by-hand"}


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.emulator.close()


@pytest.fixture
def server(cloud):
    """The VM of `tpu deploy server`: its internal address."""
    settings = ServerVmSettings(project="my-project", zone=ZONE)
    vm = ServerVm(GoogleRest(cloud.emulator.project.url), settings, sleep=lambda seconds: None)
    vm.plan()
    vm.apply({})
    internal, external = vm.hosts()
    cloud.tpu.environ["TPUFLEET_SERVER"] = f"https://{external}:8470"
    return internal


def compute(cloud, kind, name, **body):
    cloud.emulator.project.compute.state.resources[f"zones/{ZONE}", kind, name] = {
        "name": name,
        **body,
    }


def test_slices_of_compute_engine_belong_to_the_server_that_their_hosts_connect_to(cloud, server):
    labels = {"tpufleet-fleet": "f00", "tpufleet-job": "j-1"}

    def metadata(address: str, group: str = "") -> dict[str, list[dict[str, str]]]:
        created = f"projects/1/zones/{ZONE}/instanceGroupManagers/{group}"
        by = [{"key": "created-by", "value": created}] if group else []
        return {"items": [{"key": "tpufleet-server", "value": f"https://{address}:8470"}, *by]}

    adopted = {"tpufleet-adopted": "mels-1a2b", "tpufleet-node": "mels"}
    for name, address, group, more in (
        ("ours", server, "", {}), ("left", "10.128.9.9", "", {}),
        ("left-1", "10.128.9.9", "gone", {}), ("mels-x7k2", server, "mels", adopted),
    ):  # fmt: skip
        compute(
            cloud, "instances", name, status="RUNNING", labels={**labels, **more},
            machineType=f"zones/{ZONE}/machineTypes/ct6e-standard-4t",
            scheduling={"provisioningModel": "SPOT"}, metadata=metadata(address, group),
        )  # fmt: skip
    found = cloud.tpu.json("cost", "project")
    rows = {row["name"]: row for row in found["resources"] if row["kind"] == "VM"}
    ends = {name: (row["belongs"], row["next"]) for name, row in rows.items() if name in
            ("ours", "left", "left-1", "mels-x7k2")}  # fmt: skip
    assert ends == {
        "mels-x7k2": ("adopted", "tpu adopt undo mels"),
        "ours": ("ours", "tpu cancel j-1"),
        "left": ("orphaned", f"gcloud compute instances delete left --zone {ZONE}"),
        "left-1": (
            "orphaned",
            f"gcloud compute instance-groups managed delete gone --zone {ZONE}",
        ),
    }


def test_slices_of_a_server_that_may_run_are_not_called_orphaned(cloud, server):
    compute(
        cloud, "instances", "systemd", status="RUNNING",
        machineType=f"zones/{ZONE}/machineTypes/e2-small",
        networkInterfaces=[{"networkIP": "10.128.7.7"}],
    )  # fmt: skip
    compute(cloud, "forwardingRules", "gke", IPAddress="10.128.8.8")
    for name, address in (("vm", "10.128.7.7"), ("gke", "10.128.8.8"), ("vpn", "192.168.1.5"),
                          ("gone", "10.128.9.9")):  # fmt: skip
        cloud.create(name, {"tpufleet-fleet": "f00"}, address)
    rows = {row["name"]: row for row in cloud.tpu.json("cost", "project")["resources"]}
    belongs = {name: (rows[name]["belongs"], bool(rows[name]["next"])) for name in rows
               if rows[name]["kind"] == "TPU VM"}  # fmt: skip
    others = ("others", False)
    assert belongs == {"vm": others, "gke": others, "vpn": others, "gone": ("orphaned", True)}


def test_groups_of_one_name_in_two_zones_are_two(cloud):
    resources = cloud.emulator.project.compute.state.resources
    for zone in (ZONE, "us-central1-b"):
        resources[f"zones/{zone}", "instanceGroupManagers", "workers"] = {
            "name": "workers", "targetSize": 1,
        }  # fmt: skip
    created = f"projects/1/zones/{ZONE}/instanceGroupManagers/workers"
    compute(
        cloud, "instances", "workers-1", status="RUNNING",
        machineType=f"zones/{ZONE}/machineTypes/e2-small",
        metadata={"items": [{"key": "created-by", "value": created}]},
    )  # fmt: skip
    rows = cloud.tpu.json("cost", "project")["resources"]
    groups = {row["location"]: row["type"] for row in rows if row["kind"] == "group"}
    assert groups == {ZONE: "1 VMs", "us-central1-b": "0 VMs"}


def test_every_resource_is_listed_with_owner_price_and_what_ends_it(cloud, server):
    fleet = {"tpufleet-fleet": "f00", "tpufleet-job": "j-1"}
    cloud.create("ours", fleet, server)
    cloud.create("mine", {**fleet, "tpufleet-adopted": "mine-1a2b"}, server)
    cloud.create("left", {"tpufleet-fleet": "0ld"}, "10.128.9.9", zone="us-west4-a")
    cloud.create("lab", {"tpufleet-fleet": "1ab"}, "fleet.example.org")
    cloud.create("hand", BY_HAND, zone="us-south1-a")
    cloud.create("colleague", {})
    gke = {"goog-k8s-cluster-name": "c", "goog-k8s-node-pool-name": "tpus"}
    for index in range(2):
        compute(
            cloud, "instances", f"gke-{index}", status="RUNNING", labels=gke,
            machineType=f"zones/{ZONE}/machineTypes/ct5lp-hightpu-4t",
            scheduling={"provisioningModel": "SPOT"},
        )  # fmt: skip
    compute(cloud, "disks", "data", type=f"zones/{ZONE}/diskTypes/pd-ssd", sizeGb="1000")
    compute(cloud, "addresses", "old", status="RESERVED", address="203.0.113.99")
    cloud.emulator.project.state.clusters.append(
        {
            "name": "c", "location": "us-central1", "status": "RUNNING",
            "nodePools": [
                {"name": "tpus", "status": "RUNNING", "config": {
                    "machineType": "ct5lp-hightpu-4t",
                    "labels": {"google.com/nodepool-manager": "tpu-provisioner"},
                }},
            ],
        }
    )  # fmt: skip
    found = cloud.tpu.json("cost", "project")
    rows = {(row["kind"], row["name"]): row for row in found["resources"]}
    slice_price = pytest.approx(4 * 0.48)
    expected = {
        ("TPU VM", "ours"): ("ours", slice_price, "tpu cancel j-1"),
        ("TPU VM", "mine"): ("adopted", slice_price, "tpu adopt undo mine"),
        ("TPU VM", "left"): ("orphaned", slice_price, "tpu vm delete left --zone us-west4-a"),
        ("TPU VM", "lab"): ("others", slice_price, ""),
        ("TPU VM", "hand"): ("by hand", slice_price, "tpu vm delete hand --zone us-south1-a"),
        ("TPU VM", "colleague"): ("others", slice_price, ""),
        ("VM", "tpufleet-server"): (
            "ours", pytest.approx(0.0217, abs=1e-3),
            "tpu deploy server --delete --name tpufleet-server",
        ),
        ("disk", "tpufleet-server-state"): ("ours", pytest.approx(0.00137, abs=1e-4), ""),
        ("cluster", "c"): ("others", 0.10, ""),
        ("node pool", "c/tpus"): ("ours", pytest.approx(2 * 4 * 0.48), ""),
        ("disk", "data"): ("others", pytest.approx(0.2329, abs=1e-3), ""),
        ("address", "old"): ("others", 0.01, ""),
    }  # fmt: skip
    assert {
        key: (row["belongs"], row["usd_per_hour"], row["next"]) for key, row in rows.items()
    } == expected
    assert found["usd_per_hour"] == pytest.approx(6 * 1.92 + 3.84 + 0.37, abs=0.01)
    table = cloud.tpu.ok("cost", "project")
    assert "about $15.7" in table and "per day" in table


def test_a_queued_resource_without_a_node_is_listed(cloud):
    from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit, CloudCapacity

    cloud.emulator.cloud.stock = CloudCapacity(nodes=(CapacityLimit(zone=ZONE, most=0),))
    kind = tpu_v2.QueuedResource.Tpu.NodeSpec
    path = f"projects/my-project/locations/{ZONE}"
    node = tpu_v2.Node(
        accelerator_type="v5litepod-4", runtime_version="v2-alpha-tpuv5-lite",
        labels={"tpufleet-fleet": "0ld"}, metadata={"tpufleet-server": "https://10.128.9.9:8470"},
    )  # fmt: skip
    queued = tpu_v2.QueuedResource(
        tpu=tpu_v2.QueuedResource.Tpu(node_spec=[kind(parent=path, node_id="n", node=node)])
    )
    api.connect(cloud.emulator.endpoint).create_queued_resource(
        {"parent": path, "queued_resource_id": "q", "queued_resource": queued}
    )
    [row] = cloud.tpu.json("cost", "project")["resources"]
    assert (row["kind"], row["belongs"], row["usd_per_hour"]) == ("queued resource", "orphaned", 0)
    assert row["next"].startswith("gcloud compute tpus queued-resources delete q --zone ")


def test_a_part_that_cannot_be_read_is_told_and_the_others_are_listed(cloud):
    cloud.create("hand", BY_HAND)
    cloud.emulator.project.compute.state.denied = True
    answer = cloud.tpu("cost", "project")
    assert "hand" in answer.stdout and "warning: not listed: instances: Required" in answer.stderr


def test_a_server_with_live_slices_is_not_deleted(cloud, server):
    fleet = {"tpufleet-fleet": "f00", "tpufleet-job": "j-1"}
    cloud.create("tpf-1", fleet, server, zone="us-south1-a")
    answer = cloud.tpu("deploy", "server", "--delete", "--state", "--yes")
    assert answer.exit_code == 1 and "manages 1 slice (about $1.92 per hour)" in answer.stderr
    assert "tpf-1 in us-south1-a\n  next: tpu cancel j-1" in answer.stderr
    assert len(cloud.emulator.project.compute.state.resources) == 4
    deleted = cloud.tpu("vm", "delete", "tpf-1", "--zone", "us-south1-a", "--yes")
    assert "slice of a server\n  next: tpu cancel j-1" in deleted.stderr
    cloud.tpu.ok("deploy", "server", "--delete", "--state", "--yes")
    assert not cloud.emulator.project.compute.state.resources


def test_the_state_of_a_server_whose_vm_is_gone_stays_while_its_slices_live(cloud, server):
    cloud.create("tpf-1", {"tpufleet-fleet": "f00"}, server, zone="us-south1-a")
    del cloud.emulator.project.compute.state.resources[
        f"zones/{ZONE}", "instances", "tpufleet-server"
    ]
    answer = cloud.tpu("deploy", "server", "--delete", "--state", "--yes")
    assert answer.exit_code == 1 and "may manage 1 slice (about $1.92 per hour)" in answer.stderr
    assert "next: tpu vm delete tpf-1 --zone us-south1-a" in answer.stderr
    assert "disk tpufleet-server-state stays" in cloud.tpu.ok(
        "deploy", "server", "--delete", "--yes"
    )


def test_a_list_shows_nodes_in_zones_that_are_not_configured(cloud):
    cloud.tpu.ok("vm", "apply", "dev", "--zone", "us-south1-a", "--type", "v5e-4")
    listed = cloud.tpu.json("vm", "fleet", "list")["nodes"]
    assert [node["name"] for node in listed] == ["dev"]
    assert "dev" not in cloud.tpu.ok("vm", "fleet", "list", "--zones", ZONE)


@pytest.mark.parametrize(
    ("options", "ends"),
    [((), True), (("--autostop", "none"), False)],
    ids=["by default", "on request"],
)
def test_a_tpu_vm_that_nobody_looks_at_ends(cloud, options, ends):
    cloud.tpu.ok("vm", "apply", "dev", "--zone", ZONE, "--type", "v5e-4", *options)
    [node] = cloud.tpu.json("vm", "fleet", "list")["nodes"]
    assert ("tpufleet-expires" in node["labels"]) is ends


def test_gkes_client_reads_the_clusters_of_the_emulator(cloud):
    """https://cloud.google.com/kubernetes-engine/docs/reference/rest/v1/projects.locations.clusters"""
    container = pytest.importorskip("google.cloud.container_v1", reason="google-cloud-container")
    cluster = {"name": "c", "location": "us-central1", "nodePools": [{"name": "tpus"}]}
    cloud.emulator.project.state.clusters.append(cluster)
    rest = GoogleRest(cloud.emulator.project.url)
    answer: server_vm.Answer = rest.get("container", "v1/projects/p/locations/-/clusters")
    read = container.ListClustersResponse.from_json(json.dumps(answer.body))
    assert read.clusters[0].node_pools[0].name == "tpus"
