"""Verbs of nodes."""

from __future__ import annotations

from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit, CloudCapacity


def test_former_names_and_spellings_of_apply_and_reapply(clouds):
    cloud = clouds(stock=CloudCapacity(nodes=(CapacityLimit(most=0),)))
    name = "tpu-us-central1-a-0"
    answer = cloud.tpu("applyy", name, "t=0", "m=3", "-norm", "--type", "v5p-16")
    assert answer.exit_code == 1
    assert cloud.emulator.service.calls.count(("CreateNode", "us-central1-a")) == 3
    refused = cloud.tpu("applyy", name, "x=3")
    assert refused.exit_code == 2 and "unexpected extra argument (x=3)" in refused.stderr
    cloud.emulator.cloud.stock = CloudCapacity()
    [row] = cloud.tpu.json("apply-norm", name, "--type", "v5p-16")["nodes"]
    assert (row["capacity"], row["accelerator"]) == ("on-demand", "v5p-16")
    [row] = cloud.tpu.json("reapplyy", name, "--yes")["nodes"]
    assert (row["capacity"], row["accelerator"]) == ("on-demand", "v5p-16"), "as it was"
    [row] = cloud.tpu.json("reapply-norm", name, "--yes", "--type", "v5p-8")["nodes"]
    assert (row["capacity"], row["accelerator"]) == ("on-demand", "v5p-8")
    [row] = cloud.tpu.json("reapply", name, "--yes", "--spot", "--type", "v5e-8")["nodes"]
    assert (row["capacity"], row["accelerator"]) == ("spot", "v5litepod-8")


def test_an_alias_of_a_tpu_means_its_node(cloud, tpu):
    tpu.environ |= {"TPUFLEET_TPU_VM": cloud.tpu.environ["TPUFLEET_TPU_VM"]}
    node = "kmh-tpuvm-v5e-8-spot-1"
    tpu.ok("add-tpu-alias", "v5e-8-s1", node)
    zone = ("--zone", "us-central1-a")
    applied = tpu("apply", "v5e-8-s1", *zone)
    assert applied.exit_code == 0, applied.output
    assert f"hint: v5e-8-s1 is an alias of {node}" in applied.stderr
    assert cloud.states() == {node: "READY"}
    assert tpu("check-status", "v5e-8-s1", *zone).stdout == "ready\n"
    assert tpu("delete", "v5e-8-s1", *zone, "--yes").exit_code == 0
    assert cloud.states() == {}
    tpu.ok("add-tpu-alias", "big", "v5p-128")
    refused = tpu("apply", "big", *zone)
    assert refused.exit_code == 2 and "'big' does not contain a TPU type" in refused.stderr
