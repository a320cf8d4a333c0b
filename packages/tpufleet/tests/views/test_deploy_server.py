"""`tpu deploy server`: against an emulated project, whose VM runs the real startup script and
server on this machine. Only what changes a machine (mounts, users, services) is a stand-in."""

from __future__ import annotations

import hashlib
import stat

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.polling import wait_until
from tests.ports import free_port
from tests.views.emulated_cloud import Cloud
from tests.views.server_machine import ServerMachine
from tpufleet.model.fleet import bootstrap


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path / "laptop")
    yield cloud
    cloud.emulator.close()


@pytest.fixture
def machine(tmp_path, cloud):
    machine = ServerMachine(tmp_path / "machine")
    compute = cloud.emulator.project.compute
    compute.state.address = "127.0.0.1"
    compute.boot, compute.guest_attribute = machine.boot, machine.guest_attribute
    yield machine
    machine.close()


def resources(cloud: Cloud) -> set[tuple[str, str]]:
    known = cloud.emulator.project.compute.state.resources
    return {(kind, name) for _, kind, name in known}


ALL = {
    ("addresses", "tpufleet-server"), ("disks", "tpufleet-server-state"),
    ("firewalls", "tpufleet-server"), ("instances", "tpufleet-server"),
}  # fmt: skip


def test_the_plan_names_every_resource_and_the_price_and_changes_nothing(cloud):
    printed = cloud.tpu.ok("deploy", "server", "--dry-run", "--allow", "198.51.100.0/24")
    assert "In project my-project, us-central1-a:" in printed
    for _, name in ALL:
        assert name in printed
    assert "TCP 8470 from 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 198.51.100.0/24" in printed
    assert "Price: about $0.024 per hour, $18 per month" in printed
    plan = cloud.tpu.json("deploy", "server", "--dry-run", "--machine-type", "n2-standard-8")
    assert plan["usd_per_hour"] > 0.3 and len(plan["resources"]) == 4
    assert not resources(cloud)


def deployed(cloud: Cloud) -> tuple[str, str]:
    """Both addresses of the VM."""
    known = cloud.emulator.project.compute.state.resources
    [interface] = known["zones/us-central1-a", "instances", "tpufleet-server"]["networkInterfaces"]
    return interface["networkIP"], interface["accessConfigs"][0]["natIP"]


@pytest.mark.slow
def test_a_server_is_deployed_used_repeated_and_deleted(cloud, machine, tmp_path):
    port, checksum = str(free_port()), hashlib.sha256(machine.bundle.read_bytes()).hexdigest()
    options = (
        "--yes",
        "--port",
        port,
        "--bundle",
        "gs://bundle.tar.gz",
        "--bundle-sha256",
        checksum,
    )
    printed = cloud.tpu.ok("deploy", "server", *options)
    assert f"server ready: https://127.0.0.1:{port}" in printed, machine.log()
    assert resources(cloud) == ALL
    folder = tmp_path / "laptop/state/deployed/tpufleet-server"
    token = (folder / "token").read_text().strip()
    assert printed.count(token) == 1
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    body = str(machine.instance)
    assert token not in body and "PRIVATE KEY" not in body, "metadata holds no secret"
    assert machine.guest_attribute("", f"tpufleet/{bootstrap.CA_KEY}") == (
        folder / "ca.pem"
    ).read_text().rstrip("\n")

    # The config file of this machine names the server.
    laptop = cloud.tpu
    config_file = tmp_path / "laptop/.config/tpufleet/config.yaml"
    assert f"token_file to {config_file}" in printed
    assert "server: https://127.0.0.1:" in config_file.read_text()
    assert laptop.json("jobs")["jobs"] == [], "the token is valid"
    assert "provider   tpu-vm" in laptop("status").stdout

    # Repeated without a change: nothing restarts, and --port need not be written again.
    # What an earlier server left is told.
    cloud.create("left", {"tpufleet-fleet": "0ld"}, "10.128.9.9")
    again = cloud.tpu("deploy", "server", "--yes", *options[3:])
    assert again.exit_code == 0 and "updated" not in again.stderr, again.stderr
    assert "1 slice (about $1.92 per hour)" in again.stderr
    cloud.tpu.ok("vm", "delete", "left", "--zone", "us-central1-a", "--yes")
    assert machine.calls.read_text().count("systemctl restart") == 1

    # Updated: a reboot with the new configuration keeps addresses, certificates, state and token.
    before = deployed(cloud)
    machine.instance["metadata"]["items"].append({"key": "ssh-keys", "value": "ann:ssh-ed25519"})
    config_file.write_text(config_file.read_text() + "slices_per_user: 3\n")
    updated = cloud.tpu("deploy", "server", "--allow", "198.51.100.0/24", *options)
    assert updated.exit_code == 0, updated.stderr + machine.log()
    assert "TCP " in updated.stdout and "0.0.0.0/0" not in updated.stdout
    assert updated.stderr.count("tpufleet-server updated") == 2, "firewall rule and VM"
    assert machine.calls.read_text().count("systemctl restart") == 2
    assert (
        (machine.root / "var/lib/tpufleet-server/config.yaml")
        .read_text()
        .count("slices_per_user: 3")
    )
    assert deployed(cloud) == before
    assert {"key": "ssh-keys", "value": "ann:ssh-ed25519"} in machine.instance["metadata"]["items"]
    wait_until(lambda: laptop("jobs").exit_code == 0, describe=machine.log)
    assert laptop.json("jobs")["jobs"] == []
    assert machine.calls.read_text().count("mkfs") == 1
    rule = cloud.tpu.ok("deploy", "server", "--dry-run")
    assert "198.51.100.0/24 (exists)" in rule and "0.0.0.0/0" not in rule, "the one in force"

    kept = cloud.tpu.ok("deploy", "server", "--delete", "--yes")
    assert kept == "deleted tpufleet-server; disk tpufleet-server-state stays, with the state\n"
    assert resources(cloud) == {("disks", "tpufleet-server-state")}
    assert config_file.read_text() == "slices_per_user: 3\n", "it no longer names the server"
    cloud.tpu.ok("deploy", "server", "--delete", "--state", "--yes")
    assert not resources(cloud)


@pytest.mark.slow
def test_the_config_file_of_another_server_is_not_changed(cloud, machine, tmp_path):
    file = tmp_path / "laptop/.config/tpufleet/config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("server: https://fleet.example.org\n")
    port, checksum = str(free_port()), hashlib.sha256(machine.bundle.read_bytes()).hexdigest()
    printed = cloud.tpu.ok("deploy", "server", "--yes", "--port", port, "--bundle",
                           "gs://bundle.tar.gz", "--bundle-sha256", checksum)  # fmt: skip
    assert file.read_text() == "server: https://fleet.example.org\n"
    assert f"  server: https://127.0.0.1:{port}\n  ca_file: " in printed


def test_what_fails_on_the_vm_is_told_and_repaired_by_a_repetition(cloud, machine):
    bundle = ("deploy", "server", "--yes", "--bundle", "gs://bundle.tar.gz", "--bundle-sha256")
    wrong = cloud.tpu(*bundle, "0" * 64, "--port", str(free_port()))
    assert wrong.exit_code == 1
    assert "checksum of gs://bundle.tar.gz " in wrong.stderr
    right = hashlib.sha256(machine.bundle.read_bytes()).hexdigest()
    assert "server ready" in cloud.tpu.ok(*bundle, right), machine.log()


def test_roles_that_the_account_of_the_vm_lacks_are_told_first(cloud, tmp_path):
    """As in a new project whose organisation grants default accounts nothing."""
    state = cloud.emulator.project.state
    state.account_roles.clear()
    answer = cloud.tpu("deploy", "server")
    for role in ("roles/tpu.admin", "roles/iam.serviceAccountUser", "roles/storage.objectUser"):
        assert (
            "next: gcloud projects add-iam-policy-binding my-project --member=serviceAccount:"
            f"1-compute@developer.gserviceaccount.com --role={role}\n"
        ) in answer.stderr
    state.account_roles |= {"roles/tpu.admin", "roles/storage.objectUser"}
    assert cloud.tpu("deploy", "server").stderr.count("next: gcloud") == 1


@pytest.mark.parametrize(
    ("of_hosts", "of_server", "shared"),
    [
        ("", (), True),
        ("default", (), True),
        ("a@b.c", ("--service-account", "a@b.c"), True),
        ("a@b.c", (), False),
        ("", ("--service-account", "a@b.c"), False),
    ],
)
def test_hosts_that_can_act_as_the_server_are_told(cloud, of_hosts, of_server, shared):
    cloud.configure(service_account=of_hosts)
    answer = cloud.tpu("deploy", "server", "--dry-run", *of_server)
    assert answer.exit_code == 0 and ("can act as the server" in answer.stderr) == shared


def test_without_the_compute_api_nothing_is_built(cloud):
    cloud.emulator.project.state.disabled_apis.add("compute.googleapis.com")
    answer = cloud.tpu("deploy", "server", "--yes")
    assert answer.exit_code == 1 and "packages for Python" not in answer.stderr
    assert "enable compute.googleapis.com --project my-" in answer.stderr


def test_a_missing_permission_is_told_with_the_role(cloud):
    cloud.emulator.project.compute.state.denied = True
    answer = cloud.tpu(
        "deploy", "server", "--yes", "--bundle", "gs://b", "--bundle-sha256", "0" * 64
    )
    assert answer.exit_code == 1 and "roles/compute.admin" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--allow", "198.51.100.1/24"), "--allow: '198.51.100.1/24' is not"),
        (("--name", "Fleet"), "--name: must be a name of"),
        (("--bundle", "gs://b"), "set both --bundle and --bundle-sha256"),
        ((), "not a terminal; pass --yes to confirm"),
    ],
    ids=["range", "name", "bundle", "confirmation"],
)
def test_wrong_options_are_told(cloud, arguments, message):
    answer = cloud.tpu("deploy", "server", *arguments)
    assert answer.exit_code != 0 and message in answer.stderr
