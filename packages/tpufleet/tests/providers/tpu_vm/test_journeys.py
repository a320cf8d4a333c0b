"""Whole jobs from `tpu submit` on, through Google's client, an emulated cloud and real agents."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.providers.tpu_vm.emulated_fleet import Fleet
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit, CloudCapacity
from tpufleet_testbed.cloud_tpu.fault_plan import CloudFaultPlan, PreemptionStorm, ZoneOutage
from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE

SLEEP = "import time; time.sleep(600)"
ZONES = ("us-central1-a", "us-west4-a", "us-west1-c", "europe-west4-b")


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    opened: list[Fleet] = []

    def make(zones: tuple[str, ...] = ZONES[:2], **settings: Any) -> Fleet:
        latencies = replace(
            IMMEDIATE,
            boot=timedelta(seconds=1),
            deletion=timedelta(seconds=1),
            notice_period=timedelta(seconds=20),
        )
        opened.append(Fleet(tmp_path, zones, **{"latencies": latencies, **settings}))
        return opened[-1]

    yield make
    for fleet in opened:
        fleet.close()


def rotated(index: int, zones: tuple[str, ...]) -> list[str]:
    return [*zones[index % len(zones) :], *zones[: index % len(zones)]]


def all_succeed(fleet: Fleet, jobs: list[str], within: float) -> None:
    def done() -> bool:
        states = fleet.states()
        ended = [states[job] for job in jobs if states[job] in ("succeeded", "failed", "cancelled")]
        assert set(ended) <= {"succeeded"}, {job: states[job] for job in jobs}
        return len(ended) == len(jobs)

    fleet.until(done, "all jobs succeed", within)


def nothing_is_left(fleet: Fleet) -> None:
    fleet.until(lambda: not fleet.nodes(), "every node is deleted", 60)
    with fleet.emulator.cloud.lock:
        assert fleet.emulator.cloud.ledger.running() == []
        assert fleet.emulator.queue.records == {}


def accounts_agree(fleet: Fleet, slack_seconds: float) -> None:
    """Our cost against the cloud's billing; nodes may differ by the polling interval."""
    ours = sum(row["chip_hours"] for row in fleet.tpu.json("cost")["rows"])
    ledger = fleet.emulator.cloud.ledger
    theirs = ledger.chip_hours(datetime.now(UTC))
    slack = sum(entry.chips for entry in ledger.entries) * slack_seconds / 3600
    assert abs(ours - theirs) <= slack, (ours, theirs, slack)


def test_a_job_checkpoints_on_notice_and_resumes_on_another_node(fleets):
    fleet = fleets()
    # There is time to interrupt the first attempt.
    [job] = fleet.submit({"command": ["python", "count.py", "60", "0.5", "0.05"]})
    fleet.until(lambda: fleet.steps(job) > 3, "it counts")
    [node] = fleet.nodes()
    fleet.tpu.ok("doctor", "fault", node, "preempt-notice")
    all_succeed(fleet, [job], 120)
    shown = fleet.tpu.json("show", job)
    reasons = [attempt["end_reason"] for attempt in shown["attempts"]]
    assert reasons == ["preempted", "finished"]
    first = shown["attempts"][0]
    assert first["checkpoint_step"] and first["checkpoint_step"] >= first["last_step"]
    nothing_is_left(fleet)
    accounts_agree(fleet, slack_seconds=20)
    [spent] = fleet.tpu.json("cost", "--by", "job")["rows"]
    assert "wasted_progress_from_disruption" not in spent["badput"]
    assert 0 < spent["useful"] < spent["chip_hours"]


@pytest.mark.slow
def test_a_gang_of_two_slices_is_one_queued_resource_and_runs(fleets):
    fleet = fleets()
    [job] = fleet.submit({"slices": 2, "command": ["python", "-c", "print('both')"]})
    all_succeed(fleet, [job], 120)
    assert "CreateQueuedResource" in {method for method, _ in fleet.emulator.service.calls}
    nothing_is_left(fleet)


@pytest.mark.slow
def test_a_preempted_gang_runs_again_while_its_queued_resource_is_still_deleted(fleets):
    """The preemption of one node suspends the request, so its sibling is deleted as well. Processes
    there wait for a collective, where no signal reaches them."""
    latencies = replace(IMMEDIATE, boot=timedelta(seconds=1), deletion=timedelta(seconds=150))
    fleet = fleets(latencies=latencies)
    blocked = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
    [job] = fleet.submit({"slices": 2, "command": ["python", "-c", blocked], "grace": "5m"})
    fleet.until(lambda: fleet.states()[job] == "running", "it runs")
    lost = fleet.nodes()
    fleet.tpu.ok("doctor", "fault", lost[0], "preempt")

    def runs_again() -> bool:
        attempts = fleet.tpu.json("show", job)["attempts"]
        return len(attempts) == 2 and fleet.states()[job] == "running"

    fleet.until(runs_again, "it runs again", 100)
    assert len(lost) == 2 and set(lost) < set(fleet.nodes()), "their deletion goes on"
    fleet.tpu.ok("cancel", job)


@pytest.mark.slow
def test_a_node_made_by_hand_is_adopted_runs_a_job_and_is_given_back(fleets):
    fleet = fleets()
    zone, tpu = ZONES[0], fleet.tpu
    tpu.ok("vm", "apply", "mels", "--zone", zone, "--type", "v5e-4", "--norm")
    tpu.ok("pool", "create", "lab", "v5e-4", "--provider", "tpu-vm", "--zone", zone)
    refused = tpu("adopt", "nobodys", "--pool", "lab")
    assert refused.exit_code == 1
    assert f"no TPU VM in {zone} named 'nobodys'" in refused.stderr

    adopted = tpu("adopt", "mels", "--pool", "lab")
    assert adopted.exit_code == 0, adopted.output
    assert "mels is ready in pool lab, as slice mels-" in adopted.stdout
    assert "tpu run v5e-4 --pool lab -- " in adopted.stdout
    assert "mels is ready" in tpu.ok("adopt", "mels", "--pool", "lab"), "again, without effect"

    def inventory() -> dict[str, Any]:
        [row] = [row for row in tpu.json("inventory")["rows"] if row["node"]]
        return row

    row = inventory()
    assert (row["alias"], row["state"]) == ("mels", "free")
    fleet.until(lambda: inventory()["capacity"] == "on-demand", "its capacity kind is observed")

    [job] = fleet.submit({"pool": "lab", "command": ["python", "count.py", "3", "0.1"]})
    all_succeed(fleet, [job], 120)
    assert fleet.nodes() == ["mels"], "no other node was created"
    assert "gave mels back" in tpu.ok("adopt", "undo", "mels")
    fleet.until(lambda: tpu.json("inventory", "slices")["slices"] == [], "the slice is forgotten")
    assert fleet.nodes() == ["mels"]
    assert tpu.ok("vm", "status", "mels", "--zone", zone) == "ready\n"
    again = tpu.json("adopt", "mels", "--pool", "lab")
    assert again["id"] != row["id"] and again["state"] == "ready"
    tpu.ok("adopt", "undo", again["id"])
    deletions = {"DeleteNode", "DeleteQueuedResource", "StopNode"}
    assert not deletions & {method for method, _ in fleet.emulator.service.calls}


@pytest.mark.slow
def test_a_zone_without_capacity_is_skipped(fleets):
    fleet = fleets(stock=CloudCapacity(nodes=(CapacityLimit(most=0, zone=ZONES[0]),)))
    [job] = fleet.submit({"zones": list(ZONES[:2])})
    all_succeed(fleet, [job], 120)
    refused, granted = fleet.tpu.json("types", "stock")["rows"]
    if refused["zone"] != ZONES[0]:
        refused, granted = granted, refused
    assert (refused["granted"], refused["refused"]) == (0, 1) and "no more capacity" in (
        refused["message"]
    )
    assert granted["granted"] == 1
    nothing_is_left(fleet)


@pytest.mark.slow
def test_commands_and_diagnostics_reach_every_host_during_a_job(fleets):
    fleet = fleets()
    [job] = fleet.submit({"accelerator": "v5e-16", "command": ["python", "-c", SLEEP]})
    fleet.until(lambda: fleet.states()[job] == "running", "it runs")
    [node] = fleet.nodes()
    output = fleet.tpu.ok("exec", node, "--", "sh", "-c", 'echo "$0 $((6 * 7))"', "hello")
    assert output == "".join(f"[{host}] hello 42\n" for host in range(4))
    assert fleet.tpu.ok("exec", node, "--host", "2", "--", "echo", "$(id); `id`") == "$(id); `id`\n"
    failed = fleet.tpu("exec", node, "--host", "1", "--", "sh", "-c", "env; exit 3")
    assert failed.exit_code == 3 and "exit status 3" in failed.stderr
    assert "TPUFLEET_" not in failed.stdout, "nothing of the server"
    slow = fleet.tpu("exec", node, "--host", "0", "--timeout", "1s", "--", "sleep", "60")
    assert slow.exit_code == 1 and "timed out after 1 s" in slow.stderr
    answer = fleet.tpu.json("doctor", node)
    assert set(answer["findings"]) == {node, *(f"{node}/{host}" for host in range(4))}
    checks = {item["check"]: item for item in answer["findings"][f"{node}/3"]}
    assert checks["devices"]["message"] == "4 simulated chips"
    assert {"holders", "lock", "disk", "mounts", "clock", "credentials", "versions"} <= set(checks)
    table = [line.split()[:3] for line in fleet.tpu.ok("doctor", node).splitlines()]
    assert table[1:3] == [[node, "state", "good"], [node, "hosts", "good"]]
    assert {tuple(row) for row in table[3:]} >= {("hosts", "0-3", "devices")}
    # The space on the disk of this machine may differ from host to host.
    space = {"disk", "tmp"}
    rows = [row for row in table[3:] if not space & set(row)]
    assert len(rows) == len(checks) - 2, "checks that pass on all hosts are shown once"
    result = fleet.tpu("doctor", "no-such-slice")
    assert result.exit_code == 1 and "tpu inventory slices" in result.stderr
    shown = fleet.tpu.ok("ssh", node, "--host", "2", "--dry-run", "--", "echo", "a b")
    gcloud = f"gcloud compute tpus tpu-vm ssh {node} --zone={ZONES[0]} --worker=2".split()
    assert shlex.split(shown) == [*gcloud, "--project=my-project", "--command=echo 'a b'"]
    tunnelled = fleet.tpu.ok("ssh", node, "--tunnel-through-iap", "--dry-run")
    assert shlex.split(tunnelled)[-1] == "--tunnel-through-iap"
    emulated = fleet.tpu("ssh", node)
    assert emulated.exit_code == 2 and "tpu exec" in emulated.stderr
    assert fleet.tpu("exec", node, "--timeout", "0s", "--", "ls").exit_code == 2
    fleet.tpu.ok("cancel", job)
    nothing_is_left(fleet)
    fleet.until(lambda: fleet.tpu.json("inventory", "slices")["slices"] == [], "the slice is gone")
    gone = fleet.tpu("doctor", node)
    assert gone.exit_code == 1 and "deleted" in gone.stdout


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [32])
def test_32_jobs_finish_despite_preemptions_and_a_zone_outage(fleets, count):
    storm = PreemptionStorm(every=timedelta(seconds=20), share=0.5, until=timedelta(seconds=130))
    closing = ZoneOutage(zone=ZONES[3], after=timedelta(seconds=30), until=timedelta(seconds=110))
    fleet = fleets(
        zones=ZONES,
        plan=CloudFaultPlan(seed=11, storms=(storm,), closings=(closing,)),
        stock=CloudCapacity(nodes=tuple(CapacityLimit(most=12, zone=zone) for zone in ZONES)),
    )
    jobs = fleet.submit(
        *(
            {
                "name": f"count-{index}",
                "zones": rotated(index, ZONES),
                "command": ["python", "count.py", "140", "0.5"],
            }
            for index in range(count)
        )
    )
    all_succeed(fleet, jobs, 1500)
    nothing_is_left(fleet)
    ledger = fleet.emulator.cloud.ledger
    taken = [entry for entry in ledger.entries if entry.ended_by == "preempted"]
    assert len(taken) >= count, "over and over, half of them"
    accounts_agree(fleet, slack_seconds=20)
    rows = fleet.tpu.json("cost", "--by", "job")["rows"]
    assert len(rows) == count and all(row["useful"] > 0 for row in rows)
