"""`tpu init`: the config file of a newcomer, and the checks."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.views.cli_runner import Tpu
from tpufleet import config
from tpufleet.providers.tpu_vm.google_rest import GoogleRest
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.fault_plan import CloudFaultPlan
from tpufleet_testbed.compute_engine import catalog
from tpufleet_testbed.compute_engine.fault_plan import (
    ComputeCallFault,
    ComputeFaultPlan,
    QuotaLimit,
)

PAGE = Path(__file__).parents[4] / "docs" / "compute-engine.md"


@pytest.fixture
def newcomer(tmp_path):
    with Emulator() as emulator:
        yield Tpu(
            HOME=str(tmp_path),
            PATH="/usr/bin:/bin",
            TPUFLEET_HOME=str(tmp_path / "state"),
            TPUFLEET_CONFIG=str(tmp_path / "config.yaml"),
            TPUFLEET_TPU_VM_ENDPOINT=emulator.endpoint,
            TPUFLEET_COMPUTE_ENDPOINT=emulator.project.url,
        )


def test_init_writes_a_private_config_checks_the_project_and_names_the_next_step(
    newcomer, tmp_path
):
    answer = newcomer("init", "--project", "my-project", "--type", "v6e-8", "--internal-ips")
    assert answer.exit_code == 0, answer.output
    file = tmp_path / "config.yaml"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    written = yaml.safe_load(file.read_text())
    assert written["bucket"] == "gs://my-project-tpufleet/fleet"
    assert written["tpu_vm"]["zones"] == ["us-central1-b", "us-east1-d", "us-east5-a"]
    assert written["tpu_vm"]["external_ips"] is False
    assert "roles/tpu.admin" in answer.stdout and "NAT us-central1" in answer.stdout
    assert "tpu run v6e-8 --spot --max-cost" in answer.stdout
    config.load({"TPUFLEET_CONFIG": str(file)}, tmp_path)


def test_init_puts_types_that_are_no_tpu_vms_into_a_section_of_their_own(newcomer, tmp_path):
    answer = newcomer("init", "--project", "my-project", "--type", "tpu7x-16", "--internal-ips")
    assert answer.exit_code == 0, answer.output
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written["compute"] == {
        "project": "my-project", "zones": ["us-central1-c"], "external_ips": False
    }  # fmt: skip
    assert "tpu_vm" not in written
    for check in ("roles/compute.instanceAdmin.v1", "machine type tpu7x-16 us-central1-c",
                  "image tpu7x", "quota tpu7x-16 us-central1-c", "NAT us-central1"):  # fmt: skip
        assert check in answer.stdout
    assert "roles/tpu.admin" not in answer.stdout


def shared(kind: str, *projects: str) -> dict[str, object]:
    return {"shareType": kind, "projectMap": {each: {"projectId": each} for each in projects}}


@pytest.mark.parametrize(
    ("name", "machine", "share", "status", "message"),
    [
        ("ours", "ct6e-standard-4t", {}, "ok", "ct6e-standard-4t"),
        ("projects/owner/reservations/ours", "ct6e-standard-4t",
         shared("SPECIFIC_PROJECTS", "my-project"), "ok", "ct6e-standard-4t"),
        ("projects/owner/reservations/ours", "ct6e-standard-4t",
         shared("ORGANIZATION"), "ok", "ct6e-standard-4t"),
        ("theirs", "ct6e-standard-4t", {}, "failed", "theirs not found"),
        ("ours", "ct5p-hightpu-4t", {}, "failed", "has ct5p-hightpu-4t"),
        ("projects/owner/reservations/ours", "ct6e-standard-4t",
         shared("SPECIFIC_PROJECTS", "other"), "failed", "my-project"),
        ("projects/owner/reservations/ours", "ct6e-standard-4t", {}, "failed", "my-project"),
    ],
    ids=["in the project", "shared with the project", "shared with all", "missing",
         "another machine type", "shared with others", "not shared"],
)  # fmt: skip
def test_a_reservation_exists_fits_the_type_and_is_shared_with_the_project(
    newcomer, tmp_path, name, machine, share, status, message
):
    rest = GoogleRest(newcomer.environ["TPUFLEET_COMPUTE_ENDPOINT"], "my-project")
    zone = "projects/my-project/zones/us-east5-a"
    properties = {"machineType": machine}
    body = {
        "name": "ours", "shareSettings": share,
        "specificReservation": {"count": "8", "instanceProperties": properties},
    }  # fmt: skip
    assert rest.post("compute", f"compute/v1/{zone}/reservations", body).status == 200
    config_file = tmp_path / "config.yaml"
    section = {"project": "my-project", "zones": ["us-east5-a"], "reservation": name}
    config_file.write_text(yaml.safe_dump({"compute": section, "bucket": "gs://my-bucket/fleet"}))
    answer = newcomer("init", "check", "--type", "v6e-16", "--json")
    short = name.rpartition("/")[2]
    [check] = [
        each for each in json.loads(answer.stdout)["checks"]
        if each["name"] == f"reservation {short}"
    ]  # fmt: skip
    assert (check["status"], bool(check["fix"])) == (status, status != "ok")
    assert message in f"{check['message']} {check['fix']}"


def test_a_reservation_of_calendar_mode_that_has_not_begun_is_known_with_its_start(
    newcomer, tmp_path
):
    rest = GoogleRest(newcomer.environ["TPUFLEET_COMPUTE_ENDPOINT"], "my-project")
    start = datetime.now(UTC) + timedelta(days=2)
    body = {
        "name": "cal", "reservationMode": "CALENDAR", "reservationName": "ours",
        "timeWindow": {"startTime": start.isoformat(), "duration": {"seconds": "259200"}},
        "specificSkuProperties": {
            "totalCount": "4", "instanceProperties": {"machineType": "ct6e-standard-4t"},
        },
    }  # fmt: skip
    zone = "projects/my-project/zones/us-east5-a"
    assert rest.post("compute", f"compute/v1/{zone}/futureReservations", body).status == 200
    section = {"project": "my-project", "zones": ["us-east5-a"], "reservation": "ours"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"compute": section}))
    checks = json.loads(newcomer("init", "check", "--type", "v6e-16", "--json").stdout)["checks"]
    [check] = [each for each in checks if each["name"] == "reservation ours"]
    assert check["status"] == "ok" and f"{start:%Y-%m-%d}" in check["message"]


@pytest.mark.parametrize(
    ("method", "fix"),
    [("disabled", "gcloud services enable cloudquotas.googleapis.com"),
     ("denied", "--role=roles/cloudquotas.viewer")],
)  # fmt: skip
def test_quota_that_cannot_be_read_comes_with_the_command_that_fixes_it(tmp_path, method, fix):
    with Emulator() as emulator:
        state = emulator.project.state
        if method == "disabled":
            state.disabled_apis.add("cloudquotas.googleapis.com")
        else:
            state.denied_permissions.add("cloudquotas.quotas.get")
        tpu = Tpu(
            HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path / "state"),
            TPUFLEET_CONFIG=str(tmp_path / "config.yaml"),
            TPUFLEET_COMPUTE_ENDPOINT=emulator.project.url,
        )  # fmt: skip
        section = {"project": "my-project", "zones": ["us-central1-c"]}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"compute": section}))
        checks = json.loads(tpu("init", "check", "--type", "tpu7x-16", "--json").stdout)["checks"]
    [check] = [each for each in checks if each["name"] == "quota tpu7x-16 us-central1-c"]
    assert check["status"] == "warning" and fix in check["fix"]


@pytest.mark.parametrize(
    ("spoil", "calls", "name", "message", "fix"),
    [
        (None, (ComputeCallFault(method="machineTypes.get", error="not-found"),),
         "machine type v6e-16 us-east5-a", "us-east5-a has no ct6e-standard-4t",
         "gcloud compute machine-types list --filter"),
        (lambda e: e.project.state.missing.add("ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"), (),
         "image v6e", "not found", "gcloud compute images list"),
        (lambda e: denied(e, "compute.resourcePolicies.use"), (), "roles/compute.instanceAdmin.v1",
         "missing compute.resourcePolicies.use", "--role=roles/compute.instanceAdmin.v1"),
        (lambda e: denied(e, "compute.futureReservations.list"), (), "roles/compute.viewer",
         "missing compute.futureReservations.list", "--role=roles/compute.viewer"),
        (lambda e: setattr(e.engine, "quota", (QuotaLimit(most=16),)), (),
         "quota v6e-16 us-east5-a", "16 chips, and 32 are needed",
         '--preferred-value=32 --email="$(gcloud config get account)"'),
    ],
    ids=["machine type", "image", "role", "reservations", "quota of two slices"],
)  # fmt: skip
def test_what_a_project_lacks_for_instances_comes_with_what_fixes_it(
    tmp_path, spoil, calls, name, message, fix
):
    with Emulator(plan=CloudFaultPlan(compute=ComputeFaultPlan(calls=calls))) as emulator:
        if spoil:
            spoil(emulator)
        checks = checked_instances(tmp_path, emulator)
    [check] = [each for each in checks if each["name"] == name]
    assert check["status"] == ("warning" if calls else "failed")
    assert message in check["message"] and fix in check["fix"]


def test_a_boot_disk_smaller_than_its_image_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(catalog.IMAGES, "disk_size_gb", 200)
    with Emulator() as emulator:
        checks = checked_instances(tmp_path, emulator)
    [check] = [each for each in checks if each["name"] == "image v6e"]
    assert (check["status"], check["message"]) == (
        "failed", "needs a boot disk of 200 GB, and disk_gb is 100"
    )  # fmt: skip
    assert "set `disk_gb: 200`" in check["fix"]


def denied(emulator: Emulator, permission: str) -> None:
    emulator.project.state.denied_permissions.add(permission)


def checked_instances(folder, emulator: Emulator) -> list[dict[str, str]]:
    """For a job of two slices."""
    section = {"project": "my-project", "zones": ["us-east5-a"], "reservation": "ours"}
    (folder / "config.yaml").write_text(yaml.safe_dump({"compute": section}))
    tpu = Tpu(
        HOME=str(folder), TPUFLEET_HOME=str(folder / "state"),
        TPUFLEET_CONFIG=str(folder / "config.yaml"),
        TPUFLEET_COMPUTE_ENDPOINT=emulator.project.url,
    )  # fmt: skip
    answer = tpu("init", "check", "--type", "v6e-16", "--type", "v6e-16", "--json")
    return json.loads(answer.stdout)["checks"]


def test_a_type_that_both_apis_offer_is_moved_to_instances_by_the_name_of_its_section(
    newcomer, tmp_path
):
    newcomer.ok("init", "--project", "my-project", "--type", "v6e-8")
    file = tmp_path / "config.yaml"
    assert "Rename its section `tpu_vm` to `compute`" in PAGE.read_text()
    file.write_text(file.read_text().replace("tpu_vm:", "compute:"))
    checks = json.loads(newcomer("init", "check", "--type", "v6e-8", "--json").stdout)["checks"]
    names = {each["name"] for each in checks}
    assert {"roles/compute.instanceAdmin.v1", "machine type v6e-8 us-east5-a"} <= names
    assert "roles/tpu.admin" not in names
    assert config.load({"TPUFLEET_CONFIG": str(file)}, tmp_path).enabled_providers == ("compute",)


def test_types_of_both_kinds_share_what_their_sections_have_in_common(newcomer, tmp_path):
    newcomer.ok("init", "--project", "my-project", "--type", "v6e-8", "--type", "tpu7x-16")
    file = tmp_path / "config.yaml"
    assert yaml.safe_load(file.read_text())["compute"] == {"zones": ["us-central1-c"]}
    loaded = config.load({"TPUFLEET_CONFIG": str(file)}, tmp_path)
    assert loaded.enabled_providers == ("tpu-vm", "compute")
    assert loaded.compute["project"] == "my-project"


TRC = ("--type", "v4-8:on-demand", "--type", "v5e-4", "--type", "v6e-4:spot")
TRC_ZONES = ["us-central2-b", "us-central1-a", "europe-west4-a"]


def test_init_takes_a_grant_of_several_types_and_zones(newcomer, tmp_path):
    zones = [word for zone in TRC_ZONES for word in ("--zone", zone)]
    answer = newcomer("init", "--project", "my-project", *TRC, *zones)
    assert answer.exit_code == 0, answer.output
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written["tpu_vm"]["zones"] == TRC_ZONES
    for quota in ("quota v4-8 us-central2-b", "quota v5e-4 us-central1-a",
                  "quota v6e-4 europe-west4-a"):  # fmt: skip
        [line] = [line for line in answer.stdout.splitlines() if quota in line]
        assert line.endswith("(on-demand)" if "v4-8" in quota else "(spot)")
    for words in ("v4-8 --on-demand", "v5e-4 --spot", "v6e-4 --spot"):
        assert f"  tpu run {words} --max-cost 5" in answer.stdout


def test_init_takes_zones_of_every_type_by_default(newcomer, tmp_path):
    newcomer.ok("init", "--project", "my-project", *TRC)
    zones = yaml.safe_load((tmp_path / "config.yaml").read_text())["tpu_vm"]["zones"]
    assert zones[:2] == ["us-central2-b", "us-central1-a"] and "us-central1-b" in zones


def test_init_replaces_no_config_file_without_permission(newcomer, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("prices: {v5e: {spot: 0.3}}\n")
    answer = newcomer("init", "--project", "my-project")
    assert answer.exit_code == 1 and "--yes" in answer.stderr and "0.3" in file.read_text()
    newcomer.ok("init", "--project", "my-project", "--yes")
    assert "my-project" in file.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--project", "My Project"), "--project: 'My Project' is not a project id"),
        (("--project", "my-project", "--bucket", "lab"), "--bucket: 'lab' is not a Cloud Storage"),
    ],
    ids=["project", "bucket"],
)
def test_init_keeps_the_config_file_if_an_option_is_invalid(newcomer, tmp_path, options, message):
    newcomer.ok("init", "--project", "my-project")
    before = (tmp_path / "config.yaml").read_text()
    answer = newcomer("init", *options, "--yes")
    assert answer.exit_code == 2 and message in answer.stderr
    assert (tmp_path / "config.yaml").read_text() == before


def test_init_replaces_a_config_file_with_errors(newcomer, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("bucket: lab\n")
    newcomer.ok("init", "--project", "my-project", "--yes")
    assert yaml.safe_load(file.read_text())["bucket"] == "gs://my-project-tpufleet/fleet"


def test_the_first_job_has_a_limit_on_its_cost_that_is_not_reached_at_once(newcomer):
    answer = newcomer("init", "--project", "my-project", "--type", "v6e-8", "--type", "tpu7x-16")
    assert "  tpu run v6e-8 --spot --max-cost 5 -- " in answer.stdout
    assert "  tpu run tpu7x-16 --spot --max-cost 13 -- " in answer.stdout, "8 chips, 4.80 dollars"


TLS = {"--tls-cert": "cert.pem", "--tls-key": "key.pem"}


@pytest.mark.parametrize(
    ("options", "written", "steps"),
    [
        ({}, {}, "tpu deploy server"),
        (
            {"--public-url": "https://fleet.example.com:8470", **TLS},
            {"listen": "0.0.0.0:8470", "tls_cert": "cert.pem", "tls_key": "key.pem"},
            "tpu deploy bundle\n  tpu serve",
        ),
        (
            {"--public-url": "https://fleet.example.com"},  # behind a proxy with TLS
            {"listen": "127.0.0.1:8470"},
            "tpu deploy bundle\n  tpu serve",
        ),
        (
            {"--public-url": "http://10.0.0.5:8470", "--insecure-http": None},
            {"listen": "0.0.0.0:8470", "insecure_http": True},
            "tpu deploy bundle\n  tpu serve",
        ),
    ],
    ids=["deployed", "TLS", "proxy", "plain"],
)
def test_the_server_listens_where_its_public_url_says(newcomer, tmp_path, options, written, steps):
    words = [word for pair in options.items() for word in pair if word is not None]
    answer = newcomer("init", "--project", "my-project", *words)
    assert answer.exit_code == 0 and f"  {steps}\n  tpu run v5e-4" in answer.stdout
    document = yaml.safe_load((tmp_path / "config.yaml").read_text())
    for key in ("public_url", "listen", "tls_cert", "tls_key", "insecure_http"):
        value = document.get(key)
        shown = value.rpartition("/")[2] if key.startswith("tls_") and value else value
        assert shown == {"public_url": options.get("--public-url"), **written}.get(key)
    settings = config.load({"TPUFLEET_CONFIG": str(tmp_path / "config.yaml")}, tmp_path)
    assert settings.enabled_providers == ("tpu-vm",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--project"),
        (("--project", "my-project", "--type", "v5e-5"), "nearest size"),
        (("--project", "my-project", "--public-url", "http://10.0.0.5:8470"), "tpu deploy server"),
        (("--project", "my-project", "--tls-cert", "c"), "require --public-url"),
        (
            ("--project", "my-project", "--public-url", "https://x", "--tls-cert", "c"),
            "set both --tls-cert and --tls-key",
        ),
        (("--project", "my-project", "--type", "v4-8", "--zone", "us-east1-d"), "us-central2-b"),
        (
            ("--project", "my-project", *TRC, "--zone", "us-central1-a"),
            "v4-8 is not documented in",
        ),
        (("--project", "my-project", "--type", "v4-8:demand"), "the capacity is one of"),
    ],
)
def test_init_rejects_what_cannot_work(newcomer, arguments, message):
    answer = newcomer("init", *arguments)
    assert answer.exit_code == 2 and message in answer.stderr
