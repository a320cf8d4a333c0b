"""Out of stock on GKE, on a real control plane: a server, a provisioner and the real scheduler, and
an emulated GKE that has no machines where it is asked first. One job file throughout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.rigs import Rig, eventually
from tests.k8s.test_serving import Fleet
from tpufleet.kubernetes.connections import POD
from tpufleet.providers.gke import states

A, B, VM_ZONE = "us-central1-a", "us-central1-b", "us-west4-a"
MACHINE = "ct5lp-hightpu-4t"
JOB = {
    "name": "moves",
    "command": "echo on $TPUFLEET_ACCELERATOR",
    "accelerator": "v5e-4",
    "providers": ["gke", "tpu-vm"],
    "capacity": ["spot", "on-demand"],
}
WITHIN = 60.0  # seconds


@dataclass(frozen=True)
class Journey:
    fleet: Fleet
    rig: Rig

    def submit(self, **fields: Any) -> None:
        (self.fleet.code / "job.yaml").write_text(json.dumps(JOB | fields))
        self.fleet.tpu("submit", "job.yaml")

    def pod(self) -> dict[str, Any]:
        """The pod of the job, once it runs; within a minute of the call."""
        found = lambda: [
            pod for pod in self.rig.connection.list(POD, self.rig.namespace)[0]
            if states.is_running(pod)
        ]  # fmt: skip
        (pod,) = eventually(found, WITHIN, lambda: f"{self.why()}\n{self.rig.describe()}")
        return pod

    def why(self) -> str:
        return self.fleet.tpu("why", "moves")

    def events(self) -> str:
        return self.fleet.tpu("events", "moves")


@pytest.fixture
def journey(rig: Rig, tmp_path: Path) -> Iterator[Journey]:
    pytest.importorskip("google.cloud.tpu_v2", reason="needs the extra `tpu-vm`")
    from tpufleet_testbed.cloud_tpu.emulator import Emulator
    from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE

    emulator = Emulator(
        zones=(VM_ZONE,),
        agents_folder=tmp_path / "machines",
        latencies=replace(IMMEDIATE, boot=timedelta(seconds=0.5)),
    )
    emulator.start()
    vms = {"project": "my-project", "zones": [VM_ZONE], "endpoint": emulator.endpoint}
    rig.provision_here(GCP_ZONES=f"{A},{B}")
    fleet = Fleet(
        rig, tmp_path, TPUFLEET_GKE_ZONES=f"{A},{B}", TPUFLEET_PROVIDERS="gke,tpu-vm",
        TPUFLEET_TPU_VM=json.dumps(vms),
    )  # fmt: skip
    try:
        yield Journey(fleet, rig)
    finally:
        fleet.close()
        emulator.close()


def zone_of(pod: dict[str, Any]) -> str:
    return str(pod["spec"]["nodeSelector"]["topology.kubernetes.io/zone"])


def test_a_job_moves_to_the_next_zone(journey):
    journey.rig.gke.stock[A, MACHINE] = 0
    journey.submit(capacity=["on-demand"])
    assert zone_of(journey.pod()) == B
    reason = f"GCE_STOCKOUT: no capacity in {A}"
    assert reason in journey.events(), journey.events()


@pytest.mark.scale  # as the one above, and packages/tpufleet/tests/journeys/test_gke_capacity.py
def test_a_job_uses_on_demand_when_no_zone_has_spot(journey):
    journey.rig.gke.stock |= {(A, MACHINE, "spot"): 0, (B, MACHINE, "spot"): 0}
    journey.submit(providers=["gke"])
    pod = journey.pod()
    assert zone_of(pod) == A
    assert "cloud.google.com/gke-spot" not in pod["spec"]["nodeSelector"]


@pytest.mark.slow
def test_a_job_runs_on_tpu_vms_when_gke_has_nothing(journey):
    journey.rig.gke.stock |= {(A, MACHINE): 0, (B, MACHINE): 0}
    journey.submit()
    show = lambda: json.loads(journey.fleet.tpu("show", "moves", "--json"))
    eventually(lambda: show()["job"]["state"] == "succeeded", 180, journey.why)
    assert "on v5litepod-4" in journey.fleet.tpu("logs", "moves")
    # Nothing that was tried on the way is left, or billed.
    eventually(lambda: not journey.rig.gke.pools, 60, journey.rig.describe)
    eventually(lambda: not journey.rig.connection.list(POD, journey.rig.namespace)[0], 60)
