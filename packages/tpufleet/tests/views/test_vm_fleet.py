"""Fleets by hand: the command line, Google's client and an emulated cloud."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.polling import wait_until
from tests.views.cli_runner import Tpu
from tests.views.emulated_cloud import ZONES
from tpufleet.clocks import ManualClock, SystemClock
from tpufleet.errors import BadInput, BadRequest, NoCapacity, PermissionMissing
from tpufleet.model.fleet import fleets
from tpufleet.model.fleet.fleets import FleetMember, NodeRequest
from tpufleet.providers.tpu_vm import api, manual_nodes
from tpufleet.providers.tpu_vm.settings import DataDisk, TpuVmSettings
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit, CloudCapacity
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.fault_plan import CallFault, CloudFaultPlan
from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE

MINE = ("--zones", ZONES, "--workers-per-zone", "2")


@pytest.mark.parametrize(
    ("zone", "worker", "name"),
    [
        ("us-central1-a", 0, "tpu-us-central1-a-0"),
        ("europe-west4-a", 1, "tpu-europe-west4-a-1"),
        ("us-central1-f", 12, "tpu-us-central1-f-12"),
        ("northamerica-northeast1-b", 3, "tpu-northamerica-northeast1-b-3"),
    ],
)
def test_a_worker_name_contains_its_zone_and_number(zone, worker, name):
    member = FleetMember(zone=zone, worker=worker)
    assert member.name == name
    assert fleets.parse_member(name) == member


@pytest.mark.parametrize("name", ["tpu-us-central1-a", "tpu-us-central1-a-01", "v2-32-p2", ""])
def test_other_names_are_not_workers(name):
    assert fleets.parse_member(name) is None


@pytest.mark.parametrize(("zones", "count"), [(["us central"], 1), (["us-central1-a"], 0)])
def test_an_invalid_fleet_is_rejected(zones, count):
    with pytest.raises(BadInput):
        fleets.fleet_members(zones, count)


def test_create_makes_all_workers_and_status_lists_them(cloud):
    answer = cloud.tpu.json("vm", "fleet", "create", *MINE, "--type", "v3-8")
    assert {row["result"] for row in answer["nodes"]} == {"created"}
    assert set(cloud.states()) == {
        "tpu-us-central1-a-0", "tpu-us-central1-a-1", "tpu-europe-west4-a-0",
        "tpu-europe-west4-a-1",
    }  # fmt: skip
    rows = cloud.tpu.json("vm", "fleet", "list", "--zones", ZONES)["nodes"]
    assert {(row["state"], row["accelerator"], row["capacity"]) for row in rows} == {
        ("READY", "v3-8", "spot")
    }
    table = cloud.tpu.ok("vm", "fleet", "list").splitlines()
    assert table[0].split() == ["NAME", "STATE", "HEALTH", "TYPE", "CAPACITY", "ZONE",
                                "AUTOSTOP"]  # fmt: skip


def test_a_second_create_makes_only_missing_workers(cloud):
    cloud.tpu.ok("vm", "apply", "--autostop", "none", "tpu-us-central1-a-1", "--type", "v3-8")
    answer = cloud.tpu("vm", "fleet", "create", *MINE, "--json")
    rows = {row["name"]: row["result"] for row in json.loads(answer.stdout)["nodes"]}
    assert rows.pop("tpu-us-central1-a-1") == "already exists"
    assert set(rows.values()) == {"created"}
    last = answer.stderr.splitlines()[-1]
    assert "3 created" in last and "1 already exists" in last


def test_a_dry_run_creates_nothing(cloud):
    answer = cloud.tpu.json("vm", "fleet", "create", *MINE, "--dry-run")
    assert {row["result"] for row in answer["nodes"]} == {"would be created"}
    assert cloud.states() == {}


def test_delete_requires_confirmation_and_deletes_only_its_workers(cloud):
    cloud.tpu.ok("vm", "fleet", "create", *MINE)
    cloud.tpu.ok("vm", "apply", "--autostop", "none", "tpu-us-central1-a-7", "--type", "v3-8")
    refused = cloud.tpu("vm", "fleet", "delete", *MINE)
    assert refused.exit_code == 2 and "--yes" in refused.stderr
    cloud.tpu.ok("vm", "fleet", "delete", *MINE, "--yes")
    assert list(cloud.states()) == ["tpu-us-central1-a-7"]
    listed = cloud.tpu.json("vm", "fleet", "list", "--zones", ZONES)["nodes"]
    assert [row["name"] for row in listed] == ["tpu-us-central1-a-7"]


@pytest.mark.parametrize("verb", ["create", "recreate-preempted"])
def test_create_replaces_only_workers_that_are_gone(cloud, verb):
    cloud.tpu.ok("vm", "fleet", "create", *MINE)
    cloud.preempt("tpu-us-central1-a-0")
    cloud.preempt("tpu-us-central1-a-1", "TERMINATED")
    cloud.tpu.ok("vm", "delete", "tpu-europe-west4-a-0", "--yes")
    before = {node.id: node.number for node in cloud.emulator.cloud.nodes.values()}
    dry = cloud.tpu.json("vm", "fleet", verb, *MINE, "--dry-run")["nodes"]
    assert len(dry) == 3
    rows = cloud.tpu.json("vm", "fleet", verb, *MINE)["nodes"]
    assert {row["name"]: row["result"] for row in rows} == {
        "tpu-us-central1-a-0": "created", "tpu-us-central1-a-1": "created",
        "tpu-europe-west4-a-0": "created", "tpu-europe-west4-a-1": "already exists",
    }  # fmt: skip
    assert set(cloud.states().values()) == {"READY"}
    after = {node.id: node.number for node in cloud.emulator.cloud.nodes.values()}
    assert after["tpu-europe-west4-a-1"] == before["tpu-europe-west4-a-1"]


def test_a_stockout_in_one_zone_fails_only_its_worker(clouds):
    cloud = clouds(stock=CloudCapacity(nodes=(CapacityLimit(most=1, zone="us-central1-a"),)))
    answer = cloud.tpu("vm", "fleet", "create", *MINE, "--max-retries", "2", "--retry-delay", "0",
                       "--json")  # fmt: skip
    assert answer.exit_code == 1
    rows = {row["name"]: row for row in json.loads(answer.stdout)["nodes"]}
    assert sorted(row["result"] for row in rows.values()) == [
        "created", "created", "created", "failed",
    ]  # fmt: skip
    [failed] = [row for row in rows.values() if row["result"] == "failed"]
    assert failed["zone"] == "us-central1-a" and failed["message"]


def test_life_cycle_of_one_node(cloud):
    name = "tpu-us-central1-a-0"
    assert cloud.tpu.ok("vm", "status", name) == "not found\n"
    [row] = cloud.tpu.json("vm", "apply", "--autostop", "none", name, "--type", "v5p-8", "--norm")[
        "nodes"
    ]
    assert (row["state"], row["capacity"]) == ("READY", "on-demand")
    assert "v5p-8" in cloud.tpu.ok("vm", "describe", name)
    [row] = cloud.tpu.json("vm", "restart", name)["nodes"]
    assert row["state"] == "READY"
    cloud.preempt(name)
    assert cloud.tpu.ok("vm", "status", name) == "preempted\n"
    cloud.tpu.ok("vm", "apply", "--replace", "--autostop", "none", name, "--yes")
    assert cloud.states() == {name: "READY"}
    cloud.tpu.ok("vm", "delete", name, "--yes")
    assert cloud.states() == {}


APPLY = [("vm", "apply"), ("vm", "apply", "--replace", "--yes")]


@pytest.mark.parametrize("verb", APPLY, ids=" ".join)
def test_type_and_capacity_come_from_the_name_of_a_node(cloud, verb):
    for name, options, bought in (
        ("kmh-tpuvm-v5p-16-spot-1", (), ("v5p-16", "spot")),
        ("kmh-tpuvm-v5e-8-9", ("--norm",), ("v5litepod-8", "on-demand")),
    ):
        [row] = cloud.tpu.json(*verb, name, "--zone", "us-central1-a", *options)["nodes"]
        assert (row["accelerator"], row["capacity"]) == bought


def test_the_only_zone_of_the_configuration_need_not_be_written(cloud):
    cloud.configure(zones=["us-central1-a"])
    [row] = cloud.tpu.json("vm", "apply", "kmh-tpuvm-v5e-8-spot-9")["nodes"]
    assert (row["zone"], row["accelerator"]) == ("us-central1-a", "v5litepod-8")
    cloud.tpu.ok("vm", "delete", "kmh-tpuvm-v5e-8-spot-9", "--yes")
    assert cloud.states() == {}


@pytest.mark.parametrize("verb", APPLY, ids=" ".join)
@pytest.mark.parametrize(
    ("name", "missing"), [("mine", "--type"), ("kmh-tpuvm-v4-8-9", "--spot or --norm")]
)
def test_nothing_is_bought_by_default(cloud, verb, name, missing):
    refused = cloud.tpu(*verb, name, "--zone", "us-central1-a")
    assert refused.exit_code == 2 and missing in refused.stderr
    assert cloud.states() == {}


def test_deleting_a_missing_node_reports_not_found(cloud):
    cloud.tpu.ok("vm", "apply", "--autostop", "none", "tpu-us-central1-a-0", "--type", "v3-8")
    rows = cloud.tpu.json("vm", "fleet", "delete", *MINE, "--yes")["nodes"]
    results = {row["name"]: row["result"] for row in rows}
    assert results.pop("tpu-us-central1-a-0") == "deleted"
    assert set(results.values()) == {"not found"}
    [row] = cloud.tpu.json("vm", "delete", "tpu-us-central1-a-0", "--yes")["nodes"]
    assert row["result"] == "not found"
    answer = cloud.tpu("vm", "describe", "tpu-us-central1-a-0")
    assert answer.exit_code == 1 and "'tpu-us-central1-a-0'; list them with" in answer.stderr


def test_a_dry_run_of_delete_lists_only_existing_nodes(cloud):
    cloud.tpu.ok("vm", "apply", "--autostop", "none", "tpu-europe-west4-a-1", "--type", "v3-8")
    rows = cloud.tpu.json("vm", "fleet", "delete", *MINE, "--dry-run")["nodes"]
    assert [row["name"] for row in rows] == ["tpu-europe-west4-a-1"]
    assert list(cloud.states()) == ["tpu-europe-west4-a-1"]


def test_apply_recreates_a_preempted_node_and_rejects_one_of_another_type(cloud):
    name = "tpu-us-central1-a-0"
    cloud.tpu.ok("vm", "apply", "--autostop", "none", name, "--type", "v5e-8")
    again = cloud.tpu("vm", "apply", "--autostop", "none", name, "--type", "v5e-8")
    assert again.exit_code == 0 and "already exists" in again.stderr
    for other in (("--type", "v5p-8"), ("--type", "v5e-8", "--norm")):
        refused = cloud.tpu("vm", "apply", "--autostop", "none", name, *other)
        assert refused.exit_code == 1 and "`tpu vm apply --replace`" in refused.stderr
    cloud.preempt(name)
    answer = cloud.tpu("vm", "apply", "--autostop", "none", name, "--type", "v5e-8")
    assert answer.exit_code == 0
    assert cloud.states() == {name: "READY"}


def test_a_node_of_several_hosts_is_restarted_by_creating_it_again(cloud):
    name = "tpu-us-central1-a-0"
    cloud.tpu.ok("vm", "apply", "--autostop", "none", name, "--type", "v5e-16")
    refused = cloud.tpu("vm", "restart", name)
    assert refused.exit_code == 2 and "pass --yes to confirm" in refused.stderr
    result = cloud.tpu("vm", "restart", name, "--yes", "--json")
    assert result.exit_code == 0, result.stderr
    assert "several hosts" in result.stderr and "creating it again" in result.stderr
    assert cloud.states() == {name: "READY"}


@pytest.mark.parametrize("autostop", ["8h", "none"])
@pytest.mark.parametrize("again", [("vm", "restart"), ("vm", "apply", "--replace")], ids=" ".join)
def test_a_node_that_is_created_again_keeps_its_autostop_time(cloud, again, autostop):
    name = "tpu-us-central1-a-0"
    cloud.tpu.ok("vm", "apply", name, "--type", "v5e-16", "--autostop", autostop)
    [row] = cloud.tpu.json(*again, name, "--yes")["nodes"]
    end = fleets.expires_at(row["labels"])
    kept = end is not None and end - SystemClock().now() > timedelta(hours=7.9)
    assert kept if autostop == "8h" else end is None


def test_a_restart_tries_again_after_a_stockout():
    clock = ManualClock()
    with Emulator(clock=clock) as emulator:

        def pause(seconds: float) -> None:
            clock.advance(timedelta(seconds=seconds))
            if emulator.service.calls.count(("CreateNode", "us-central1-a")) == 4:
                emulator.cloud.stock = CloudCapacity()

        nodes = nodes_of(emulator, pause)
        nodes.create("us-central1-a", "a", NodeRequest(accelerator="v5e-16"), tries=1, delay=0)
        emulator.cloud.stock = CloudCapacity(nodes=(CapacityLimit(most=0),))
        assert nodes.restart("us-central1-a", "a", tries=9, delay=30).state == "READY"


def test_apply_rejects_a_stopped_node_and_restart_starts_it(cloud):
    name = "tpu-us-central1-a-0"
    cloud.tpu.ok("vm", "apply", "--autostop", "none", name, "--type", "v3-8")
    with cloud.emulator.cloud.lock:
        [node] = cloud.emulator.cloud.nodes.values()
        cloud.emulator.cloud.stop(node.name, cloud.emulator.cloud.clock.now())
    refused = cloud.tpu("vm", "apply", "--autostop", "none", name, "--type", "v3-8")
    assert refused.exit_code == 1 and "`tpu vm restart`" in refused.stderr
    [row] = cloud.tpu.json("vm", "restart", name)["nodes"]
    assert row["state"] == "READY"
    cloud.preempt(name)
    gone = cloud.tpu("vm", "restart", name)
    assert gone.exit_code == 1 and "`tpu vm apply --replace`" in gone.stderr


@pytest.mark.parametrize("error", ["unavailable", "unreachable"])
def test_status_lists_reachable_zones_and_names_the_others(clouds, error):
    fault = CallFault(error=error, method="ListNodes", zone="europe-west4-a")
    cloud = clouds(plan=CloudFaultPlan(calls=(fault,)))
    cloud.tpu.ok("vm", "fleet", "create", *MINE)
    answer = cloud.tpu("vm", "fleet", "list", "--json")
    assert {row["zone"] for row in json.loads(answer.stdout)["nodes"]} == {"us-central1-a"}
    assert "europe-west4-a" in answer.stderr
    alone = cloud.tpu("vm", "fleet", "list", "--zones", "europe-west4-a")
    assert alone.exit_code == 1 and "europe-west4-a" in alone.stderr


def test_a_fleet_without_zones_is_rejected_without_a_call(cloud):
    cloud.tpu.environ["TPUFLEET_TPU_VM"] = json.dumps(
        {"project": "my-project", "endpoint": cloud.emulator.endpoint}
    )
    answer = cloud.tpu("vm", "fleet", "create", "--workers-per-zone", "1")
    assert answer.exit_code == 2 and "--zones" in answer.stderr
    assert cloud.emulator.service.calls == []


@pytest.mark.parametrize(
    "args",
    [
        ("vm", "describe", "a/../../b", "--zone", "us-central1-a"),
        ("vm", "status", "tpu-us-central1-a-0", "--zone", "us-central1-a/nodes/x"),
        ("vm", "delete", "--yes", "--zone", "us-central1-a", "--", "--quiet"),
        ("vm", "restart", "x" * 64, "--zone", "us-central1-a"),
        ("vm", "check-env", "--zone", "us-central1-a", "--", "--flags-file=x"),
        ("vm", "ssh", "--zone", "us-central1-a", "--", "--flags-file=x"),
        ("vm", "fleet", "list", "--zones", "us-central1-a,,"),
        ("vm", "fleet", "list", "--zones", "$(id)"),
        ("vm", "fleet", "create", *MINE, "--max-retries", "0"),
        ("vm", "fleet", "create", *MINE, "--retry-delay", "-1"),
    ],
)
def test_invalid_names_and_zones_are_rejected_without_a_call(cloud, args):
    answer = cloud.tpu(*args)
    assert answer.exit_code == 2 and answer.stderr.splitlines()[-1].startswith("error: ")
    assert cloud.emulator.service.calls == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("vm", "apply", "my-node"), "--zone"),
        (("vm", "apply", "tpu-us-central1-a-0", "--type", "v5e-17"), "v5e-17"),
        (("vm", "apply", "Bad_Name", "--zone", "us-central1-a"), "Bad_Name"),
        (("vm", "fleet", "create", "--zones", "mars", "--workers-per-zone", "1"), "mars"),
    ],
)
def test_invalid_requests_are_rejected_without_a_create_call(cloud, args, message):
    answer = cloud.tpu(*args)
    assert answer.exit_code != 0 and message in answer.stderr
    assert "CreateNode" not in {method for method, _ in cloud.emulator.service.calls}


def test_a_missing_project_is_reported_with_the_option(tmp_path):
    answer = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path), GOOGLE_CLOUD_PROJECT="")(
        "vm", "describe", "tpu-us-central1-a-0"
    )
    assert answer.exit_code == 2 and "--project" in answer.stderr


def nodes_of(
    emulator: Emulator, pause: Callable[[float], None] | None = None, **settings: Any
) -> manual_nodes.ManualNodes:
    read = TpuVmSettings(
        project="my-project", zones=("us-central1-a",), endpoint=emulator.endpoint, **settings
    )
    return manual_nodes.ManualNodes(
        api.TpuApi(lambda: api.connect(emulator.endpoint)), read, report=print, sleep=pause
    )


def passing(clock: ManualClock) -> Callable[[float], None]:
    return lambda seconds: clock.advance(timedelta(seconds=seconds))


def test_create_retries_a_stockout_but_not_an_invalid_request():
    clock = ManualClock()
    with Emulator(clock=clock, stock=CloudCapacity(nodes=(CapacityLimit(most=0),))) as emulator:
        nodes = nodes_of(emulator, passing(clock))
        with pytest.raises(NoCapacity):
            nodes.create("us-central1-a", "a", NodeRequest(accelerator="v5p-8"), tries=4, delay=30)
        assert emulator.service.calls.count(("CreateNode", "us-central1-a")) == 4
        emulator.cloud.stock = CloudCapacity()
        created = nodes.create(
            "us-central1-a", "a", NodeRequest(accelerator="v5p-8"), tries=4, delay=30
        ).node
        assert created.state == "READY" and len(created.addresses) == 1
        with pytest.raises(BadRequest):
            nodes.create("us-central1-a", "b", NodeRequest(accelerator="tpu7x-8"), 4, 30)


def test_a_node_preempted_while_booting_is_recreated():
    clock = ManualClock()
    with Emulator(clock=clock) as emulator:

        def pause(seconds: float) -> None:
            clock.advance(timedelta(seconds=seconds))
            with emulator.cloud.lock:
                now = emulator.cloud.run_due()
                for node in list(emulator.cloud.nodes.values()):
                    if node.number == first:
                        emulator.cloud.reclaim(node, now)

        first = 1
        created = nodes_of(emulator, pause).create(
            "us-central1-a", "a", NodeRequest(accelerator="v5p-8"), tries=3, delay=30
        )
        assert created.node.state == "READY" and not created.already_existed
        [node] = emulator.cloud.nodes.values()
        assert node.number != first, "the one that was taken is gone, with its quota"


def test_a_stockout_in_one_zone_does_not_delay_another():
    count = manual_nodes.MAX_PARALLEL + 8
    empty, full = "us-central1-a", "europe-west4-a"
    wish = NodeRequest(accelerator="v3-8")
    with Emulator(
        latencies=IMMEDIATE, stock=CloudCapacity(nodes=(CapacityLimit(most=0, zone=empty),))
    ) as emulator:
        nodes = nodes_of(emulator)
        answers = nodes.run_parallel(
            fleets.fleet_members([empty, full], count),
            lambda member: nodes.create(member.zone, member.name, wish, 1_000_000, 30),
        )
        came = [next(answers) for _ in range(count)]
        answers.close()  # stop waiting
        assert {(member.zone, created.node.state) for member, created in came} == {(full, "READY")}


def test_nodes_get_the_disks_and_service_account_of_the_settings():
    with Emulator(latencies=IMMEDIATE) as emulator:
        disk = DataDisk(source="projects/p/zones/us-central1-a/disks/d")
        nodes = nodes_of(emulator, data_disks=(disk,), service_account="tpu@p.example.com")
        nodes.create("us-central1-a", "a", NodeRequest(accelerator="v5p-8"), 1, 0)
        [node] = emulator.cloud.nodes.values()
        assert node.template.data_disks[0].source_disk == disk.source
        assert node.template.service_account.email == "tpu@p.example.com"


def test_a_create_operation_that_fails_later_raises_its_error():
    clock = ManualClock()
    plan = CloudFaultPlan(calls=(CallFault(error="permission", method="CreateNode", late=True),))
    with Emulator(clock=clock, plan=plan) as emulator:
        nodes = nodes_of(emulator, passing(clock))
        with pytest.raises(PermissionMissing):
            nodes.create("us-central1-a", "a", NodeRequest(accelerator="v5p-8"), tries=4, delay=30)


@pytest.mark.parametrize("zone", ["us-west4-a", "asia-future9-z"])
def test_a_node_is_applied_for_in_any_zone_of_the_cloud(clouds, zone):
    """No table of regions has to know it: the account of the settings serves all of them."""
    cloud = clouds(zones=("us-central1-a", zone))
    cloud.tpu.ok("vm", "apply", "--autostop", "none", "a", "--zone", zone, "--type", "v5e-8")
    assert cloud.states() == {"a": "READY"}


def test_a_zone_that_the_cloud_does_not_have_is_named(cloud):
    answer = cloud.tpu(
        "vm", "apply", "--autostop", "none", "a", "--zone", "us-east7-a", "--type", "v5e-8"
    )
    assert answer.exit_code == 1 and cloud.states() == {}
    error = answer.stderr.splitlines()[-1]
    assert error.startswith("error: create a in us-east7-a: ") and "the zone exists" in error


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("permission", "grant roles/tpu.admin"),
        ("quota", "`tpu init check` prints the request for it"),
        ("internal", "an internal error has occurred"),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["refused", "failed later"])
def test_an_apply_that_fails_says_why_and_leaves_no_node(clouds, fault, message, late):
    failing = CallFault(error=fault, method="CreateNode", late=late)
    cloud = clouds(plan=CloudFaultPlan(calls=(failing,)))
    options = ("--zone", "us-central1-a", "--type", "v5p-8", "--autostop", "none")
    tries = ("--retry-delay", "0", "--max-retries", "2")
    answer = cloud.tpu("vm", "apply", "a", *options, *tries)
    assert answer.exit_code == 1 and cloud.states() == {}
    error = answer.stderr.splitlines()[-1]
    assert error.startswith("error: create a") and message in error


def test_ctrl_c_during_create_exits_at_once_and_prints_how_to_clean_up(clouds):
    cloud = clouds(stock=CloudCapacity(nodes=(CapacityLimit(most=0),)))
    command = [sys.executable, "-m", "tpufleet", "vm", "fleet", "create", *MINE]
    with subprocess.Popen(
        command, env={**os.environ, **cloud.tpu.environ}, stderr=subprocess.PIPE
    ) as running:
        wait_until(lambda: len(cloud.emulator.service.calls) >= 4, 60)
        running.send_signal(signal.SIGINT)
        stderr = running.communicate(timeout=900)[1].decode()
    assert running.returncode == 130
    assert "`tpu vm fleet delete`" in stderr
