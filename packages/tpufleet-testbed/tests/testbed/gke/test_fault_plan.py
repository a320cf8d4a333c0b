"""Fault plans of the emulated GKE: read from YAML, changed while it runs."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="pip install 'tpufleet[gke]'")

from tpufleet.clocks import ManualClock
from tpufleet.errors import BadInput
from tpufleet_testbed.gke import fault_plan
from tpufleet_testbed.gke.fault_plan import GkeFaultPlan
from tpufleet_testbed.gke.main import PlanFile
from tpufleet_testbed.gke.node_pools import GkeEmulator

PLAN = """
zones: [us-central1-a, us-central1-b]
create: 1m
chips: 20s
operations: 5
stock:
  us-central1-a: {ct5p-hightpu-4t: 0}
  us-central1-b: {ct5p-hightpu-4t: {spot: 0, on-demand: 8}}
quota:
  us-central1: {tpu-v5p-slice: 64}
"""


def test_a_plan_is_read():
    gke = GkeEmulator(clock=ManualClock())
    fault_plan.apply(fault_plan.parse(PLAN), gke)
    assert gke.zones == ("us-central1-a", "us-central1-b")
    assert gke.creation_time == timedelta(minutes=1)
    assert gke.device_plugin_delay == timedelta(seconds=20)
    assert gke.max_operations == 5
    assert gke.stock == {
        ("us-central1-a", "ct5p-hightpu-4t"): 0,
        ("us-central1-b", "ct5p-hightpu-4t", "spot"): 0,
        ("us-central1-b", "ct5p-hightpu-4t", "on-demand"): 8,
    }
    assert gke.quotas == {("us-central1", "tpu-v5p-slice"): 64}
    assert fault_plan.parse("") == GkeFaultPlan()


INVALID = {
    "unknown field": ("stocks: {}", "stocks: unknown field; did you mean stock?"),
    "not a mapping": ("[1]", "must be a mapping"),
    "not YAML": ("a: [", "expected"),
    "duration": ("create: soon", "create: 'soon' is not a duration"),
    "zone": ("zones: [a]", "zones[0]: 'a' is not a zone"),
    "zone of stock": ("stock: {us-central1: {}}", "stock.us-central1: 'us-central1' is not a zone"),
    "machine": (
        "stock: {us-central1-a: {ct6e-standart-4t: 0}}",
        "unknown machine type 'ct6e-standart-4t'; did you mean ct6e-standard",
    ),
    "kind": (
        "stock: {us-central1-a: {ct5p-hightpu-4t: {spto: 0}}}",
        "stock.us-central1-a.ct5p-hightpu-4t.spto: unknown value 'spto'; did you mean spot",
    ),
    "number": ("quota: {us-central1: {tpu7x: -1}}", "quota.us-central1.tpu7x: must be an integer"),
    "operations": ("operations: many", "operations: must be an integer of at least 0, not 'many'"),
}


@pytest.mark.parametrize(("text", "message"), INVALID.values(), ids=INVALID)
def test_an_invalid_plan_names_the_path_and_what_is_known(text, message):
    with pytest.raises(BadInput) as caught:
        fault_plan.parse(text)
    assert message in str(caught.value)


def test_a_plan_can_be_changed_while_the_emulator_runs(tmp_path, caplog):
    gke, path = GkeEmulator(clock=ManualClock()), tmp_path / "gke.yaml"
    path.write_text("stock: {us-central1-a: {tpu7x-standard-4t: 0}}")
    plan = PlanFile(path, gke)
    assert plan.reload() and not plan.reload()
    assert gke.stock == {("us-central1-a", "tpu7x-standard-4t"): 0}
    path.write_text("stock: {us-central1-a: {tpu7x: 0}}")
    assert not plan.reload()
    assert "unknown machine type 'tpu7x'" in caplog.text and gke.stock, "the last valid one"
    path.write_text("")
    assert plan.reload() and gke.stock == {}
