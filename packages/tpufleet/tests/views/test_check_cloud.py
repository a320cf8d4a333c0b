"""`tpu init check` on the emulated project: every problem with the command that fixes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.views.cli_runner import Tpu
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import tpu_zones, type_lookup
from tpufleet.providers.tpu_vm import preflight_server
from tpufleet.providers.tpu_vm.google_rest import GoogleRest
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.project_api import nat_router

SETTINGS = {"project": "my-project", "zones": ["us-central1-a", "europe-west4-b"]}


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with Emulator() as running:
        yield running


def tpu(folder: Path, emulator: Emulator, bucket: str = "gs://my-bucket/fleet", **more) -> Tpu:
    settings = {**SETTINGS, "endpoint": emulator.endpoint, **more}
    return Tpu(
        HOME=str(folder),
        TPUFLEET_HOME=str(folder / "state"),
        TPUFLEET_TPU_VM=json.dumps(settings),
        TPUFLEET_BUCKET=bucket,
    )


def test_a_project_that_is_set_up_passes(tmp_path, emulator):
    answer = tpu(tmp_path, emulator).json("init", "check", "--type", "v5e-16")
    assert answer["passed"] and not [each for each in answer["checks"] if each["fix"]]
    names = {each["name"] for each in answer["checks"]}
    assert {"credentials", "project", "Cloud TPU API", "roles/tpu.admin", "network", "bucket",
            "quota v5e-16 us-central1-a", "quota v5e-16 europe-west4-b",
            "runtime v5e us-central1-a", "runtime v5e europe-west4-b",
            "subnetwork us-central1", "bundle", "public_url"} <= names  # fmt: skip


def break_quota(state):
    quota = tpu_zones.quota_id(type_lookup.find("v5e-16"), Capacity.SPOT)
    state.quota[quota, "us-central1-a"] = 8


def break_region_quota(state):
    """As in projects whose zones have quota, but not their region."""
    quota = tpu_zones.quota_id(type_lookup.find("v5e-16"), Capacity.SPOT, "Region")
    state.quota[quota, "us-central1"] = 0


TYPO = {"zones": ["us-centrall1-a"]}
PRIVATE = {"external_ips": False}
ACCOUNT = {"service_account": "tpu@my-project.iam.gserviceaccount.com"}


@pytest.mark.parametrize(
    ("spoil", "settings", "name", "fix"),
    [
        (lambda s: setattr(s, "exists", False), {}, "project", "gcloud projects list"),
        (lambda s: None, TYPO, "zone us-centrall1-a", "correct `zones` of `tpu_vm`"),
        (lambda s: None, {"zones": ["us-central2-b"]}, "zones of v5e-16",
         "add one of its zones to `zones` of `tpu_vm`: us-central1-a, us-south1-a,"),
        (lambda s: None, {"runtimes": {"v5e": "v2-alpha-tpuv5-light"}}, "runtime v5e us-central1-a",
         "gcloud compute tpus tpu-vm versions list --zone us-central1-a --project my-project"),
        (lambda s: s.disabled_apis.add("tpu.googleapis.com"), {}, "Cloud TPU API",
         "gcloud services enable tpu.googleapis.com --project my-project"),
        (lambda s: s.disabled_apis.add("compute.googleapis.com"), {}, "Compute Engine API",
         "gcloud services enable compute.googleapis.com --project my-project"),
        (lambda s: s.account_roles.clear(), {}, "hosts' account",
         "gcloud storage buckets add-iam-policy-binding gs://my-bucket "
         "--member=serviceAccount:1-compute@developer.gserviceaccount.com "
         "--role=roles/storage.objectUser"),
        (lambda s: s.denied_permissions.add("tpu.nodes.create"), {}, "roles/tpu.admin",
         "gcloud projects add-iam-policy-binding my-project --member="),
        (lambda s: s.denied_permissions.add("iam.serviceAccounts.actAs"), ACCOUNT,
         "service account", "--role=roles/iam.serviceAccountUser"),
        (lambda s: s.missing.add(ACCOUNT["service_account"]), ACCOUNT, "service account",
         "gcloud iam service-accounts create tpu "),
        (break_quota, {}, "quota v5e-16 us-central1-a",
         "--quota-id=TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI "
         "--dimensions=zone=us-central1-a --preferred-value=16 "
         '--email="$(gcloud config get account)"'),
        (break_region_quota, {}, "quota v5e-16 us-central1-a",
         "--quota-id=TPUV5sPreemptibleLitepodPerProjectPerRegionForTPUAPI "
         "--dimensions=region=us-central1 --preferred-value=16"),
        (lambda s: s.denied_permissions.add("iam.serviceAccounts.actAs"), {}, "service account",
         "add-iam-policy-binding 1-compute@developer.gserviceaccount.com "),
        (lambda s: s.missing.add("net"), {"network": "projects/my-project/global/networks/net"},
         "network", "gcloud compute networks create net "),
        (lambda s: s.routers.clear(),
         {"network": "projects/my-project/global/networks/net", **PRIVATE},
         "NAT us-central1", "gcloud compute routers create tpufleet-us-central1 --network net "),
        (lambda s: s.missing.add("sub"),
         {"subnetwork": "sub"},
         "subnetwork us-central1", "gcloud compute networks subnets create sub "),
        (lambda s: setattr(s, "private_access", False), PRIVATE, "subnetwork us-central1",
         "--enable-private-ip-google-access"),
        (lambda s: s.routers.clear(), PRIVATE, "NAT us-central1",
         "gcloud compute routers nats create"),
        (lambda s: s.missing.add("my-bucket"), {}, "bucket",
         "gcloud storage buckets create gs://my-bucket --location us-central1"),
        (lambda s: s.denied_permissions.add("storage.objects.create"), {}, "bucket",
         "--role=roles/storage.objectUser"),
    ],
    ids=["project", "no such zone", "zones of a type", "runtime", "API", "compute API", "hosts",
         "role", "act as", "account", "quota", "quota of a region", "act as the default account",
         "network", "NAT of a network", "subnetwork", "private access", "NAT", "bucket",
         "bucket role"],
)  # fmt: skip
def test_each_problem_comes_with_the_command_that_fixes_it(
    tmp_path, emulator, spoil, settings, name, fix
):
    spoil(emulator.project.state)
    command = tpu(tmp_path, emulator, **settings)
    answer = command("check", "cloud", "--type", "v5e-16", "--json")
    failed = {
        each["name"]: each
        for each in json.loads(answer.stdout)["checks"]
        if each["status"] == "failed"
    }
    assert answer.exit_code == 1 and fix in failed[name]["fix"]
    printed = command("check", "cloud", "--type", "v5e-16")
    assert f"next: {failed[name]['fix']}" in printed.stdout and printed.exit_code == 1


@pytest.mark.parametrize(
    ("service", "name"),
    [
        ("cloudresourcemanager.googleapis.com", "project"),
        ("cloudquotas.googleapis.com", "quota v5e-16 us-central1-a"),
        ("compute.googleapis.com", "network"),
    ],
)
def test_an_api_that_the_checks_need_is_named_with_its_command(tmp_path, emulator, service, name):
    """In a new project most of them are not enabled."""
    emulator.project.state.disabled_apis.add(service)
    answer = json.loads(
        tpu(tmp_path, emulator)("check", "cloud", "--type", "v5e-16", "--json").stdout
    )
    [check] = [each for each in answer["checks"] if each["name"] == name]
    assert (check["status"], check["message"]) == (
        "warning", f"cannot be checked: {service} is not enabled",
    )  # fmt: skip
    assert check["fix"] == f"gcloud services enable {service} --project my-project"


NETWORK = "projects/my-project/global/networks/net"
RULE = {"name": "r", "network": NETWORK, "direction": "INGRESS", "sourceRanges": ["10.0.0.0/8"],
        "allowed": [{"IPProtocol": "tcp", "ports": ["22", "8000-9000"]}]}  # fmt: skip


@pytest.mark.parametrize(
    ("url", "network", "rule", "status"),
    [
        ("https://10.128.0.5:8470", "default", {}, "ok"),  # default-allow-internal
        ("https://10.128.0.5:8470", "net", {}, "ok"),
        ("https://10.128.0.5", "net", {}, "failed"),  # 443
        ("https://10.128.0.5:8470", "net", {"disabled": True}, "failed"),
        ("https://10.128.0.5:8470", "net", {"direction": "EGRESS"}, "failed"),
        ("https://10.128.0.5:8470", "net", {"sourceRanges": ["192.168.0.0/16"]}, "failed"),
        ("https://10.128.0.5:8470", "net", {"allowed": [{"IPProtocol": "all"}]}, "ok"),
        ("https://10.128.0.5:8470", "net", {"allowed": [{"IPProtocol": "udp"}]}, "failed"),
        ("https://203.0.113.9:8470", "net", {"disabled": True}, None),
        ("https://fleet.example.com", "net", {"disabled": True}, None),
    ],
)
def test_a_rule_must_let_hosts_connect_to_a_server_in_their_network(
    emulator, url, network, rule, status
):
    emulator.project.compute.state.default_firewalls.append({**RULE, **rule})
    rest = GoogleRest(emulator.project.url)
    check = preflight_server.check_firewall(rest, "my-project", network, url)
    assert (check and check.status) == status
    if status == "failed":
        port = "443" if url.endswith(".5") else "8470"
        assert (
            f"firewall-rules create tpufleet-server --network net --allow tcp:{port}" in check.fix
        )


@pytest.mark.parametrize(
    ("network", "rules", "status"),
    [
        ("default", [], "ok"),  # default-allow-internal
        ("net", [], "warning"),
        ("net", [RULE], "ok"),
        ("net", [{**RULE, "allowed": [{"IPProtocol": "tcp", "ports": ["8476"]}]}], "warning"),
        ("net", [{**RULE, "allowed": [{"IPProtocol": "all"}]}], "ok"),
    ],
    ids=["default network", "no rule", "a range", "one port", "all"],
)
def test_hosts_of_a_slice_must_reach_each_other(emulator, network, rules, status):
    emulator.project.compute.state.default_firewalls.extend(rules)
    rest = GoogleRest(emulator.project.url)
    check = preflight_server.check_gangs(rest, "my-project", network)
    assert check.status == status
    if status == "warning":
        assert "firewall-rules create tpufleet-hosts --network net" in check.fix


def test_without_a_bucket_the_user_is_warned(tmp_path, emulator):
    answer = tpu(tmp_path, emulator, bucket="").json("init", "check")
    [bucket] = [each for each in answer["checks"] if each["name"] == "bucket"]
    assert bucket["status"] == "warning" and "gcloud storage buckets create" in bucket["fix"]


def test_without_a_project_the_user_is_sent_to_init(tmp_path):
    answer = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path / "state"))("check", "cloud")
    assert answer.exit_code == 2 and "tpu init" in answer.stderr


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "not set"),
        ("http://127.0.0.1:8470", "this machine only"),
        ("http://localhost:8470", "this machine only"),
        ("http://no-such-host.invalid:8470", "no-such-host.invalid"),
    ],
)
def test_a_server_that_hosts_cannot_reach_is_named(url, message):
    check = preflight_server.check_server_url(url, server="", ca_file="", emulated=False)
    assert check.status == "failed" and message in check.message and "public_url" in check.fix


HOST = "https://www.googleapis.com/compute/v1/projects/host-project"


@pytest.mark.parametrize(
    "subnetwork",
    ["tpus", [f"{HOST}/regions/us-central1/subnetworks/tpus",
              "projects/host-project/regions/europe-west4/subnetworks/tpus"]],
    ids=["a name", "one per region"],
)  # fmt: skip
def test_a_shared_vpc_is_looked_up_in_its_host_project(tmp_path, emulator, subnetwork):
    emulator.project.state.host_project = "host-project"
    settings = {"network": f"{HOST}/global/networks/default", "subnetwork": subnetwork, **PRIVATE}
    command = tpu(tmp_path, emulator, **settings)
    found = {each["name"]: each for each in command.json("init", "check")["checks"]}
    for name in ("network", "firewall between hosts", "subnetwork us-central1",
                 "subnetwork europe-west4", "NAT europe-west4"):  # fmt: skip
        assert found[name]["status"] == "ok", found[name]
    emulator.project.state.routers.clear()
    checks = json.loads(command("init", "check", "--json").stdout)["checks"]
    [nat] = [each for each in checks if each["name"] == "NAT us-central1"]
    assert "--project host-project" in nat["fix"] and "my-project" not in nat["fix"]


LISTED = "LIST_OF_SUBNETWORKS"


@pytest.mark.parametrize(
    ("router", "status"),
    [
        (nat_router(), "ok"),
        (nat_router("other"), "failed"),
        (nat_router(type="PRIVATE"), "failed"),
        (nat_router(sourceSubnetworkIpRangesToNat=LISTED,
                    subnetworks=[{"name": "regions/us-central1/subnetworks/default"}]), "ok"),
        (nat_router(sourceSubnetworkIpRangesToNat=LISTED,
                    subnetworks=[{"name": "regions/us-central1/subnetworks/other"}]), "failed"),
    ],
    ids=["all", "of another network", "private", "of its subnetwork", "of another subnetwork"],
)  # fmt: skip
def test_only_a_nat_of_the_hosts_subnetwork_counts(tmp_path, emulator, router, status):
    emulator.project.state.routers = [router]
    answer = tpu(tmp_path, emulator, **PRIVATE)("init", "check", "--json")
    [nat] = [
        each for each in json.loads(answer.stdout)["checks"] if each["name"] == "NAT us-central1"
    ]
    assert nat["status"] == status


@pytest.mark.parametrize("host", ["", "host-project"], ids=["own", "of a shared VPC"])
def test_the_network_is_that_of_the_subnetwork_where_only_this_is_named(tmp_path, emulator, host):
    state = emulator.project.state
    state.host_project, state.subnetworks["tpus"] = host, "vpc"
    state.routers = [nat_router("vpc")]
    state.missing.add("default")
    subnetworks = [
        f"projects/{host or 'my-project'}/regions/{region}/subnetworks/tpus"
        for region in ("us-central1", "europe-west4")
    ]
    settings = {"subnetwork": subnetworks, **PRIVATE}
    checks = json.loads(tpu(tmp_path, emulator, **settings)("init", "check", "--json").stdout)
    found = {each["name"]: each for each in checks["checks"]}
    assert (found["network"]["status"], found["network"]["message"]) == ("ok", "vpc")
    assert found["NAT us-central1"]["status"] == "ok"


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("US-CENTRAL1", "hosts also in europe-west4: moving a checkpoint of 100 GB there costs "
         "about $5 each time"),
        ("EUROPE-WEST1", "hosts also in europe-west4, us-central1: moving a checkpoint of 100 GB "
         "there costs about $5"),
        ("US", "europe-west4, us-central1: moving"),
    ],
)  # fmt: skip
def test_a_bucket_far_from_the_hosts_is_told_with_its_price(tmp_path, emulator, location, message):
    emulator.project.state.bucket_location = location
    checks = tpu(tmp_path, emulator).json("init", "check")["checks"]
    [far] = [each for each in checks if each["name"] == "bucket region"]
    assert far["status"] == "warning" and message in far["message"]


def test_a_bucket_in_the_region_of_the_hosts_costs_nothing_to_read(tmp_path, emulator):
    near = tpu(tmp_path, emulator, zones=["us-central1-a", "us-central1-b"])
    checks = near.json("init", "check")["checks"]
    assert "bucket region" not in {each["name"] for each in checks}
