"""Fleets by hand: the command line, Google's client and an emulated cloud."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.agent.planes import wait_until
from tests.views.programs import Tpu
from tpufleet.clocks import ManualClock
from tpufleet.emulator.cloud import Pace
from tpufleet.emulator.plans import CallFault, Plan
from tpufleet.emulator.running import Emulator
from tpufleet.emulator.stock import Limit, Stock
from tpufleet.errors import BadInput, BadRequest, NoCapacity, PermissionMissing
from tpufleet.model import fleets
from tpufleet.model.fleets import Member, NodeWish
from tpufleet.providers.tpu_vm import api, byhand
from tpufleet.providers.tpu_vm.settings import TpuVmSettings

ZONES = "us-central1-a,europe-west4-b"
MINE = ("--zones", ZONES, "--workers-per-zone", "2")
AT_ONCE = Pace(boot=timedelta(0), deletion=timedelta(0))


class Cloud:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.emulator = Emulator(**{"pace": AT_ONCE, **settings})
        self.emulator.start()
        self.tpu = Tpu(
            HOME=str(folder),
            TPUFLEET_HOME=str(folder / "state"),
            TPUFLEET_TPU_VM=json.dumps(
                {"project": "my-project", "zones": ZONES.split(","),
                 "endpoint": self.emulator.endpoint}
            ),
        )  # fmt: skip

    def states(self) -> dict[str, str]:
        with self.emulator.cloud.lock:
            self.emulator.cloud.settle()
            return {node.id: node.state.name for node in self.emulator.cloud.nodes.values()}

    def take(self, name: str, state: str = "PREEMPTED") -> None:
        from tpufleet.emulator.nodes import State

        with self.emulator.cloud.lock:
            [node] = [node for node in self.emulator.cloud.nodes.values() if node.id == name]
            self.emulator.cloud.take(node, self.emulator.cloud.clock.now(), State[state])


@pytest.fixture
def clouds(tmp_path: Path) -> Iterator[Callable[..., Cloud]]:
    opened: list[Cloud] = []

    def make(**settings: Any) -> Cloud:
        opened.append(Cloud(tmp_path, **settings))
        return opened[-1]

    yield make
    for cloud in opened:
        cloud.emulator.close()


@pytest.fixture
def cloud(clouds: Callable[..., Cloud]) -> Cloud:
    return clouds()


@pytest.mark.parametrize(
    ("zone", "worker", "name"),
    [
        ("us-central1-a", 0, "tpu-us-central1-a-0"),
        ("europe-west4-a", 1, "tpu-europe-west4-a-1"),
        ("us-central1-f", 12, "tpu-us-central1-f-12"),
        ("northamerica-northeast1-b", 3, "tpu-northamerica-northeast1-b-3"),
    ],
)
def test_a_worker_s_name_says_where_it_is_and_back(zone, worker, name):
    member = Member(zone=zone, worker=worker)
    assert member.name == name
    assert fleets.parse(name) == member


@pytest.mark.parametrize("name", ["tpu-us-central1-a", "tpu-us-central1-a-01", "v2-32-p2", ""])
def test_other_names_are_no_workers(name):
    assert fleets.parse(name) is None


@pytest.mark.parametrize(("zones", "count"), [(["us central"], 1), (["us-central1-a"], 0)])
def test_a_fleet_that_cannot_be_is_refused(zones, count):
    with pytest.raises(BadInput):
        fleets.members(zones, count)


def test_a_fleet_is_created_over_zones_and_workers_and_its_status_shown(cloud):
    answer = cloud.tpu.json("fleet", "create", *MINE, "--type", "v5e-8")
    assert {row["result"] for row in answer["nodes"]} == {"created"}
    assert set(cloud.states()) == {
        "tpu-us-central1-a-0", "tpu-us-central1-a-1", "tpu-europe-west4-b-0",
        "tpu-europe-west4-b-1",
    }  # fmt: skip
    rows = cloud.tpu.json("fleet", "status", "--zones", ZONES)["nodes"]
    assert {(row["state"], row["accelerator"], row["capacity"]) for row in rows} == {
        ("READY", "v5litepod-8", "spot")
    }
    table = cloud.tpu.ok("fleet", "status").splitlines()
    assert table[0].split() == ["NAME", "STATE", "HEALTH", "TYPE", "CAPACITY", "ZONE"]


def test_a_dry_run_does_nothing(cloud):
    answer = cloud.tpu.json("fleet", "create", *MINE, "--dry-run")
    assert {row["result"] for row in answer["nodes"]} == {"would be created"}
    assert cloud.states() == {}


def test_delete_wants_to_be_asked_and_deletes_only_its_own(cloud):
    cloud.tpu.ok("fleet", "create", *MINE)
    cloud.tpu.ok("apply", "tpu-us-central1-a-7")
    refused = cloud.tpu("fleet", "delete", *MINE)
    assert refused.exit_code == 2 and "--yes" in refused.stderr
    cloud.tpu.ok("fleet", "delete", *MINE, "--yes")
    assert list(cloud.states()) == ["tpu-us-central1-a-7"]
    listed = cloud.tpu.json("fleet", "list", "--zones", ZONES)["nodes"]
    assert [row["name"] for row in listed] == ["tpu-us-central1-a-7"]


def test_recreate_preempted_touches_only_what_is_gone(cloud):
    cloud.tpu.ok("fleet", "create", *MINE)
    cloud.take("tpu-us-central1-a-0")
    cloud.take("tpu-us-central1-a-1", "TERMINATED")
    cloud.tpu.ok("delete", "tpu-europe-west4-b-0", "--yes")
    before = {node.id: node.number for node in cloud.emulator.cloud.nodes.values()}
    dry = cloud.tpu.json("fleet", "recreate-preempted", *MINE, "--dry-run")["nodes"]
    assert len(dry) == 3
    rows = cloud.tpu.json("fleet", "recreate-preempted", *MINE)["nodes"]
    assert {row["name"]: row["result"] for row in rows} == {
        "tpu-us-central1-a-0": "recreated", "tpu-us-central1-a-1": "recreated",
        "tpu-europe-west4-b-0": "recreated", "tpu-europe-west4-b-1": "left alone",
    }  # fmt: skip
    assert set(cloud.states().values()) == {"READY"}
    after = {node.id: node.number for node in cloud.emulator.cloud.nodes.values()}
    assert after["tpu-europe-west4-b-1"] == before["tpu-europe-west4-b-1"]


def test_one_zone_without_stock_fails_alone_and_in_words(clouds):
    cloud = clouds(stock=Stock(nodes=(Limit(most=1, zone="us-central1-a"),)))
    answer = cloud.tpu("fleet", "create", *MINE, "--max-retries", "2", "--retry-delay", "0",
                       "--json")  # fmt: skip
    assert answer.exit_code == 1
    rows = {row["name"]: row for row in json.loads(answer.stdout)["nodes"]}
    assert sorted(row["result"] for row in rows.values()) == [
        "created", "created", "created", "failed",
    ]  # fmt: skip
    [failed] = [row for row in rows.values() if row["result"] == "failed"]
    assert failed["zone"] == "us-central1-a" and "no more capacity" in failed["words"]


def test_one_node_is_applied_described_restarted_reapplied_and_deleted(cloud):
    name = "tpu-us-central1-a-0"
    assert cloud.tpu.ok("check-status", name) == "not found\n"
    [row] = cloud.tpu.json("apply", name, "--type", "v4-8", "--norm")["nodes"]
    assert (row["state"], row["capacity"]) == ("READY", "on-demand")
    assert "v4-8" in cloud.tpu.ok("describe", name)
    [row] = cloud.tpu.json("restart", name)["nodes"]
    assert row["state"] == "READY"
    cloud.take(name)
    assert cloud.tpu.ok("check-status", name) == "preempted\n"
    cloud.tpu.ok("reapply", name, "--yes")
    assert cloud.states() == {name: "READY"}
    cloud.tpu.ok("delete", name, "--yes")
    assert cloud.states() == {}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("apply", "my-node"), "--zone"),
        (("apply", "tpu-us-central1-a-0", "--type", "v5e-17"), "v5e-17"),
        (("apply", "Bad_Name", "--zone", "us-central1-a"), "Bad_Name"),
        (("fleet", "create", "--zones", "mars", "--workers-per-zone", "1"), "mars"),
    ],
)
def test_what_cannot_be_is_refused_in_words_and_no_call_is_sent(cloud, args, words):
    answer = cloud.tpu(*args)
    assert answer.exit_code != 0 and words in answer.stderr
    assert "CreateNode" not in {method for method, _ in cloud.emulator.service.calls}


def test_without_a_project_the_command_says_how_to_name_one(tmp_path):
    answer = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path), GOOGLE_CLOUD_PROJECT="")(
        "describe", "tpu-us-central1-a-0"
    )
    assert answer.exit_code == 2 and "--project" in answer.stderr


def by_hand(emulator: Emulator, clock: ManualClock) -> byhand.Nodes:
    settings = TpuVmSettings(
        project="my-project", zones=("us-central1-a",), endpoint=emulator.endpoint
    )
    return byhand.Nodes(
        api.Api(lambda: api.connect(emulator.endpoint)),
        settings,
        tell=print,
        pause=lambda seconds: clock.advance(timedelta(seconds=seconds)),
    )


def test_a_node_is_tried_again_until_there_is_stock_and_a_bad_one_never_is():
    clock = ManualClock()
    with Emulator(clock=clock, stock=Stock(nodes=(Limit(most=0),))) as emulator:
        nodes = by_hand(emulator, clock)
        with pytest.raises(NoCapacity):
            nodes.create("us-central1-a", "a", NodeWish(accelerator="v4-8"), tries=4, delay=30)
        assert emulator.service.calls.count(("CreateNode", "us-central1-a")) == 4
        emulator.cloud.stock = Stock()
        made = nodes.create("us-central1-a", "a", NodeWish(accelerator="v4-8"), tries=4, delay=30)
        assert made.state == "READY" and len(made.addresses) == 1
        with pytest.raises(BadRequest):
            nodes.create("us-central1-a", "b", NodeWish(accelerator="tpu7x-8"), 4, 30)


def test_a_creation_that_the_cloud_refuses_later_says_why():
    clock = ManualClock()
    plan = Plan(calls=(CallFault(error="permission", method="CreateNode", late=True),))
    with Emulator(clock=clock, plan=plan) as emulator:
        nodes = by_hand(emulator, clock)
        with pytest.raises(PermissionMissing):
            nodes.create("us-central1-a", "a", NodeWish(accelerator="v4-8"), tries=4, delay=30)


def test_other_names_and_spellings_of_apply_and_reapply(clouds):
    cloud = clouds(stock=Stock(nodes=(Limit(most=0),)))
    name = "tpu-us-central1-a-0"
    answer = cloud.tpu("applyy", name, "t=0", "m=3", "-norm")
    assert answer.exit_code == 1 and "no more capacity" in answer.stderr
    assert answer.stderr.count("trying again in 0 s") == 2
    assert cloud.emulator.service.calls.count(("CreateNode", "us-central1-a")) == 3
    refused = cloud.tpu("applyy", name, "x=3")
    assert refused.exit_code == 2 and "'x=3' is not understood" in refused.stderr
    cloud.emulator.cloud.stock = Stock()
    [row] = cloud.tpu.json("apply-norm", name, "--type", "v4-16")["nodes"]
    assert (row["capacity"], row["accelerator"]) == ("on-demand", "v4-16")
    [row] = cloud.tpu.json("reapplyy", name, "--yes")["nodes"]
    assert (row["capacity"], row["accelerator"]) == ("on-demand", "v4-16"), "as it was"
    [row] = cloud.tpu.json("reapply", name, "--yes", "--spot", "--type", "v5e-8")["nodes"]
    assert (row["capacity"], row["accelerator"]) == ("spot", "v5litepod-8")


def test_ctrl_c_ends_a_fleet_that_is_being_created_at_once_and_says_what_may_be_left(clouds):
    cloud = clouds(stock=Stock(nodes=(Limit(most=0),)))
    command = [sys.executable, "-m", "tpufleet", "fleet", "create", *MINE]
    with subprocess.Popen(
        command, env={**os.environ, **cloud.tpu.environ}, stderr=subprocess.PIPE
    ) as running:
        wait_until(lambda: len(cloud.emulator.service.calls) >= 4, 60)
        running.send_signal(signal.SIGINT)
        said = running.communicate(timeout=20)[1].decode()
    assert running.returncode == 130
    assert "trying again in 30 s" in said and "`tpu fleet delete`" in said


# A person's shell on every host, as far as this machine goes: gcloud is the edge.
GCLOUD = """#!/usr/bin/env python3
import os, pathlib, sys
here = pathlib.Path(os.environ["FAKE_GCLOUD"])
with (here / "calls").open("a") as file:
    print(*sys.argv[1:], sep="\\x1f", file=file)
if "libtpu_lockfile" in sys.argv[-1]:
    (here / "answer").write_text("devices 4 8\\ndevices 4 8\\n")
else:
    print((here / "answer").read_text())
    sys.exit(0 if "devices" in (here / "answer").read_text() else 1)
"""


@pytest.fixture
def shells(cloud: Cloud, tmp_path: Path) -> Path:
    program = tmp_path / "bin" / "gcloud"
    program.parent.mkdir()
    program.write_text(GCLOUD)
    program.chmod(0o755)
    cloud.tpu.environ |= {
        "FAKE_GCLOUD": str(tmp_path),
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
    }
    (tmp_path / "answer").write_text("devices 4 8\ndevices 4 8\n")
    return tmp_path


def calls_of(shells: Path) -> list[list[str]]:
    return [line.split("\x1f") for line in (shells / "calls").read_text().splitlines()]


def test_check_env_tells_how_many_hosts_and_chips_there_are(cloud, shells):
    [row] = cloud.tpu.json("check-env", "tpu-us-central1-a-0", "--project", "p")["nodes"]
    assert (row["result"], row["words"]) == ("good", "2 hosts see 8 chips")
    [call] = calls_of(shells)
    assert call[:5] == ["compute", "tpus", "tpu-vm", "ssh", "tpu-us-central1-a-0"]
    assert {"--zone=us-central1-a", "--worker=all", "--project=p"} <= set(call)


@pytest.mark.parametrize(
    ("said", "result"),
    [
        ("RuntimeError: The TPU is already in use by process 12", "chips in use"),
        ("ModuleNotFoundError: No module named 'jax'", "no JAX"),
        ("me@1.2.3.4: Permission denied (publickey).", "no ssh"),
        ("something else", "bad"),
    ],
)
def test_check_env_says_what_is_wrong(cloud, shells, said, result):
    (shells / "answer").write_text(said)
    answer = cloud.tpu("check-env", "tpu-us-central1-a-0", "--json")
    [row] = json.loads(answer.stdout)["nodes"]
    assert answer.exit_code == 1 and row["result"] == result


def test_solve_makes_a_preempted_node_again_and_looks_at_it(cloud, shells):
    name = "tpu-us-central1-a-0"
    cloud.tpu.ok("apply", name, "--type", "v5e-8")
    cloud.take(name)
    assert cloud.tpu("solve", name).exit_code == 2, "it asks first"
    [row] = cloud.tpu.json("solve", name, "--yes")["nodes"]
    assert row["result"] == "good" and cloud.states() == {name: "READY"}
    assert "v5litepod-8" in cloud.tpu.ok("describe", name)


def test_solve_takes_away_a_stale_lock_and_looks_again(cloud, shells):
    name = "tpu-us-central1-a-0"
    cloud.tpu.ok("apply", name)
    (shells / "answer").write_text("The TPU is already in use by process with pid 12")
    [row] = cloud.tpu.json("solve", name)["nodes"]
    assert row["result"] == "good"
    probe, cure, again = calls_of(shells)
    assert probe == again and "sudo fuser -s /tmp/libtpu_lockfile ||" in cure[-1]
