"""Whole jobs from `tpu submit` on, through an emulated Compute Engine and real agents."""

from __future__ import annotations

import contextlib
import shlex
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.auth", reason="pip install 'tpufleet[compute]'")

from tests.journeys import paid_time
from tests.journeys.paid_time import Cause
from tests.providers.tpu_vm.emulated_fleet import Fleet
from tests.providers.tpu_vm.test_journeys import all_succeed
from tpufleet.clocks import SystemClock
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import JobId
from tpufleet.providers.compute.naming import SLICE
from tpufleet.stores.open_store import open_store
from tpufleet_testbed.cloud_tpu.fault_plan import CloudFaultPlan
from tpufleet_testbed.compute_engine.fault_plan import (
    IMMEDIATE,
    ComputeCallFault,
    ComputeFaultPlan,
    StockLimit,
)
from tpufleet_testbed.faults import PreemptionStorm

ZONES = ("us-central1-c", "us-central1-a", "us-east5-a")
LATENCIES = replace(
    IMMEDIATE, boot=timedelta(seconds=1), deletion=timedelta(seconds=1),
    notice_period=timedelta(seconds=20),
)  # fmt: skip


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    opened: list[Fleet] = []

    def make(zones: tuple[str, ...] = ZONES[:1], **plan: Any) -> Fleet:
        compute = ComputeFaultPlan(**{"latencies": LATENCIES, **plan})
        opened.append(
            Fleet(tmp_path, zones, provider="compute", plan=CloudFaultPlan(compute=compute))
        )
        return opened[-1]

    yield make
    for fleet in opened:
        fleet.close()


def machines(fleet: Fleet) -> list[str]:
    """Groups and VMs that exist."""
    engine = fleet.emulator.engine
    with engine.lock:
        engine.run_due()
        return [name for _, name in (*engine.groups, *engine.vms)]


def nothing_is_left(fleet: Fleet) -> None:
    """No group and no VM; and no more than one template and policy per configuration, which are
    deleted once nothing has used them for a while."""
    fleet.until(lambda: not machines(fleet), "every group and VM is deleted", 90)
    assert fleet.emulator.engine.ledger.running() == []


def test_a_multislice_job_runs_on_tpu7x_groups_and_nothing_is_left(fleets):
    fleet = fleets()
    program = (
        "import os; print('slice', os.environ['MEGASCALE_SLICE_ID'], 'of',"
        " os.environ['MEGASCALE_NUM_SLICES'], 'worker', os.environ['TPU_WORKER_ID'])"
    )
    [job] = fleet.submit(
        {"accelerator": "tpu7x-16", "slices": 2, "command": ["python", "-c", program]}
    )
    all_succeed(fleet, [job], 180)
    logs = fleet.tpu.ok("logs", job)
    for index in range(2):
        for worker in range(2):
            assert f"slice {index} of 2 worker {worker}" in logs
    requests = fleet.emulator.project.tpus.requests
    groups = [body for method, _, body in requests if method == "instanceGroupManagers.insert"]
    assert [body["targetSizePolicy"]["mode"] for body in groups] == ["BULK", "BULK"]
    nothing_is_left(fleet)


@pytest.mark.slow
def test_commands_reach_the_hosts_of_a_group(fleets):
    """Its VMs have names of their own: the hosts tell them."""
    fleet = fleets()
    [job] = fleet.submit({"accelerator": "tpu7x-16", "command": ["python", "count.py", "600", "1"]})
    fleet.until(lambda: fleet.steps(job) > 1, "it counts")
    echoed = fleet.tpu.ok("exec", job, "--", "echo", "hello")
    assert sorted(echoed.splitlines()) == ["[0] hello", "[1] hello"]
    shown = fleet.tpu.ok("ssh", job, "--host", "1", "--dry-run", "--", "ls")
    name = socket.gethostname().partition(".")[0]  # emulated hosts have that of this machine
    argv = f"gcloud compute ssh {name} --zone={ZONES[0]} --project=my-project --command=ls"
    assert shlex.split(shown) == argv.split()
    fleet.tpu.ok("cancel", job)
    nothing_is_left(fleet)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accelerator", "vms", "topology"), [("v5p-8", 0, ""), ("v5p-16", 2, "2x2x2")],
    ids=["an instance", "a group"],
)  # fmt: skip
def test_what_a_person_made_is_adopted_runs_a_job_and_is_given_back(
    fleets, accelerator, vms, topology
):
    pytest.importorskip("google.cloud.compute_v1", reason="pip install google-cloud-compute")
    from tests.providers.compute.person import Person

    fleet = fleets(zones=ZONES[1:2])
    person, tpu = Person(fleet.emulator, ZONES[1]), fleet.tpu
    if vms:
        person.make_group("mels", vms, topology=topology)
    else:
        person.make_instance("mels")
    tpu.ok("pool", "create", "lab", accelerator, "--provider", "compute", "--zone", ZONES[1])
    fleet.until(
        lambda: {vm.status for vm in person.instances().values()} == {"RUNNING"}, "they run"
    )
    before, made = person.metadata(), machines(fleet)
    adopted = tpu("adopt", "mels", "--pool", "lab")
    assert adopted.exit_code == 0, adopted.output
    assert "mels is ready in pool lab, as slice mels-" in adopted.stdout
    [job] = fleet.submit({"pool": "lab", "command": ["python", "count.py", "3", "0.1"],
                          "accelerator": accelerator})  # fmt: skip
    all_succeed(fleet, [job], 180)
    fleet.until(
        lambda: (
            [row["capacity"] for row in tpu.json("inventory")["rows"] if row["node"] == "mels"]
            == ["on-demand"]
        ),
        "its capacity kind is observed",
    )
    assert "gave mels back" in tpu.ok("adopt", "undo", "mels")
    fleet.until(lambda: tpu.json("inventory", "slices")["slices"] == [], "the slice is forgotten")
    assert machines(fleet) == made, "nothing was created or deleted"
    assert person.metadata() == before


@pytest.mark.slow
def test_a_preempted_job_checkpoints_on_notice_and_resumes_on_another_instance(fleets):
    fleet = fleets(zones=ZONES[1:])
    # There is time to interrupt the first attempt.
    command = ["python", "count.py", "60", "0.5", "0.05"]
    [job] = fleet.submit({"accelerator": "v5p-8", "command": command})
    fleet.until(lambda: fleet.steps(job) > 3, "it counts")
    [vm] = machines(fleet)
    shown = fleet.tpu.ok("ssh", vm, "--dry-run", "--", "ls")
    argv = f"gcloud compute ssh {vm} --zone={ZONES[1]} --project=my-project --command=ls"
    assert shlex.split(shown) == argv.split()
    fleet.tpu.ok("doctor", "fault", vm, "preempt-notice")
    all_succeed(fleet, [job], 180)
    shown = fleet.tpu.json("show", job)
    reasons = [attempt["end_reason"] for attempt in shown["attempts"]]
    assert reasons == ["preempted", "finished"]
    nothing_is_left(fleet)


@pytest.mark.slow
def test_a_job_without_spot_capacity_falls_to_flex_start_and_says_so(fleets):
    fleet = fleets(zones=ZONES[1:], stock=(StockLimit(most=0, model="SPOT"),))
    [job] = fleet.submit({"accelerator": "v5p-16", "capacity": ["spot", "queued"]})
    all_succeed(fleet, [job], 240)
    rows = fleet.tpu.json("types", "stock")["rows"]
    refused = {row["zone"]: row["message"] for row in rows if row["capacity"] == "spot"}
    assert set(refused) == set(ZONES[1:])
    assert all("does not have enough resources" in message for message in refused.values())
    [granted] = [row for row in rows if row["granted"]]
    assert granted["capacity"] == "queued"
    nothing_is_left(fleet)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(3, id="3 jobs", marks=pytest.mark.slow),
        pytest.param(8, id="8 jobs", marks=pytest.mark.chaos),
    ],
)
def test_jobs_finish_despite_stockouts_preemptions_and_a_killed_server(fleets, count: int):
    """With real agents and a real server. `tests/journeys/test_compute_storm.py` has more jobs and
    more faults, on a manual clock."""
    storm = PreemptionStorm(every=timedelta(seconds=25), share=0.4, until=timedelta(seconds=100))
    fleet = fleets(
        zones=ZONES[1:], seed=7, storms=(storm,),
        stock=tuple(StockLimit(most=max(3, count * 3 // 4), zone=zone) for zone in ZONES[1:]),
        calls=(
            ComputeCallFault(error="unavailable", probability=0.02),
            ComputeCallFault(error="too-many", probability=0.02),
            ComputeCallFault(error="lost-answer", method="*.insert", probability=0.1),
        ),
    )  # fmt: skip
    jobs = fleet.submit(
        *(
            {
                "name": f"count-{index}",
                "accelerator": ("v5p-8", "v5p-16")[index % 2],
                "command": ["python", "count.py", "60", "0.3"],
            }
            for index in range(count)
        )
    )
    for at in (10, 30):
        fleet.until(lambda at=at: sum(map(fleet.steps, jobs)) > at, "they count", 300)
        fleet.kill_server()
    all_succeed(fleet, jobs, 1200)
    nothing_is_left(fleet)
    every_second_is_accounted_for(fleet, jobs)


def every_second_is_accounted_for(fleet: Fleet, jobs: list[str]) -> None:
    """On a busy machine, what is not used may last long; it has to be known what it was for."""
    ledger = fleet.emulator.engine.ledger
    entries = [(SliceId(each.labels[SLICE]), each) for each in ledger.entries]
    database = fleet.folder / "state" / "fleet.db"
    with contextlib.closing(open_store(f"sqlite:///{database}")) as store:
        slices = {each.id: each for each in store.slices(live_only=False)}
        attempts = [attempt for job in jobs for attempt in store.attempts(JobId(job))]
    found = paid_time.spans(entries, slices, attempts, SystemClock().now())
    print(paid_time.report(found))  # with -s
    assert paid_time.totals(found)[Cause.RUN]
    assert paid_time.longest(found, Cause.UNKNOWN) == timedelta(0), paid_time.report(found)
    assert paid_time.longest(found, Cause.RELEASE) < timedelta(minutes=2)
