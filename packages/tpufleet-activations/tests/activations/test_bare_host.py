"""`tpu extract deploy` on hosts that have nothing: Ubuntu 22.04, the startup script, real bundles
and agents."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.activations.test_fleet import plan
from tests.providers.tpu_vm.bare_hosts import BareHosts
from tests.providers.tpu_vm.emulated_fleet import Fleet
from tests.providers.tpu_vm.ubuntu_host import build_bundle
from tpufleet_activations.io import verification
from tpufleet_activations.io.storage import LocalFolder
from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ZONES = ("us-central1-a", "europe-west4-b", "us-west4-a")


@pytest.fixture
def lab(tmp_path, model_folder):
    """A folder on a disk that all hosts share, with a model."""
    lab = tmp_path / "lab"
    shutil.copytree(model_folder, lab / "model")
    return lab


@pytest.fixture
def fleet(tmp_path, lab):
    bundle = build_bundle(tmp_path / "bundle")
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
    fleet = Fleet(
        tmp_path / "fleet",
        ZONES,
        settings={"bundle": f"gs://{bundle.name}", "bundle_sha256": digest},
        latencies=replace(IMMEDIATE, boot=timedelta(seconds=1), deletion=timedelta(seconds=1)),
    )
    fleet.hosts = BareHosts(tmp_path / "hosts", fleet.emulator, bundle=bundle, shared=lab)
    yield fleet
    fleet.close()
    fleet.hosts.close()


def test_three_workers_of_which_one_is_preempted_store_every_sample_once(fleet, lab):
    out = plan(lab, lab / "model")
    for path in (lab, *lab.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)  # the user of the agents writes there
    deployed = fleet.tpu(
        "extract", "deploy", out, "--zones", ",".join(ZONES), "--tpu-type", "v5e-4"
    )
    assert deployed.exit_code == 0, deployed.output

    def state(name: str) -> str:
        return fleet.tpu.json("show", name)["row"]["state"]

    def logs() -> str:
        jobs = fleet.states()
        return "".join(fleet.tpu("logs", job).output for job in jobs) + fleet.hosts.logs()

    victim = f"tpu-{ZONES[0]}-0"
    fleet.until(lambda: state(victim) in ("running", "succeeded", "failed"), "it runs", 600)
    assert state(victim) == "running", logs()
    [tpu_slice] = fleet.tpu.json("show", victim)["attempts"][0]["slices"]
    fleet.tpu.ok("doctor", "fault", tpu_slice, "preempt")
    ended = ("succeeded", "failed", "cancelled")
    fleet.until(lambda: set(fleet.states().values()) <= {*ended}, "all workers end", 900)
    assert set(fleet.states().values()) == {"succeeded"}, logs()
    reasons = [attempt["end_reason"] for attempt in fleet.tpu.json("show", victim)["attempts"]]
    assert reasons == ["preempted", "finished"]
    report = verification.verify(LocalFolder(lab / "out"))
    assert report.intact and report.samples == 32, report.problems
    board = fleet.tpu.json("extract", "board", out)
    assert board["done"] and [row["status"] for row in board["workers"]] == ["DONE"] * 3
    fleet.until(lambda: not fleet.nodes(), "every node is deleted", 120)
