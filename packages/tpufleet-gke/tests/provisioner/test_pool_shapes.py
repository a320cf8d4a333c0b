"""From accelerator, topology and chips per pod to machines: upstream's table, corrected."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpufleet.errors import BadInput
from tpufleet.model.tpu import tpu_types
from tpufleet_gke.provisioner.model import pool_shapes

V4, V5E, V5P, V6E, V7 = (
    "tpu-v4-podslice",
    "tpu-v5-lite-podslice",
    "tpu-v5p-slice",
    "tpu-v6e-slice",
    "tpu7x",
)

NODES = [
    (V4, "2x2x1", 4, 1),
    (V4, "2x2x2", 4, 2),
    (V4, "2x2x4", 4, 4),
    (V4, "2x4x4", 4, 8),
    (V5P, "2x2x2", 4, 2),
    (V5P, "2x2x4", 4, 4),
    (V5P, "8x16x16", 4, 512),
    (V5E, "1x1", 1, 1),
    (V5E, "2x4", 4, 2),
    (V6E, "1x1", 1, 1),
    (V6E, "2x2", 4, 1),
    (V6E, "2x4", 4, 2),
    (V6E, "4x4", 4, 4),
    (V6E, "16x16", 4, 64),
    (V7, "1x2x2", 4, 1),
    (V7, "2x2x2", 4, 2),
    (V7, "2x2x4", 4, 4),
    (V7, "2x4x4", 4, 8),
    (V7, "4x4x4", 4, 16),
    (V7, "4x4x8", 4, 32),
    (V7, "8x8x8", 4, 128),
    (V7, "8x8x16", 4, 256),
    # Wrong upstream: two machines for a single-host slice.
    (V6E, "2x4", 8, 1),
    (V5E, "2x4", 8, 1),
]


@pytest.mark.parametrize(
    ("accelerator", "topology", "chips", "nodes"),
    [pytest.param(*row, id=f"{row[0]}-{row[1]}-{row[2]}t") for row in NODES],
)
def test_node_count_of_a_topology(accelerator, topology, chips, nodes):
    assert pool_shapes.find_shape(accelerator, topology, chips).nodes == nodes


# In no table of accelerator types, and allowed by the rule.
BY_RULE = [
    (V4, "4x16x16", 256),
    (V4, "12x12x24", 864),
    (V4, "12x16x16", 768),
    (V4, "16x16x16", 1024),
    (V4, "4x4x256", 1024),
    (V5P, "16x16x24", 1536),
    (V7, "4x8x40", 320),
]


@pytest.mark.parametrize(("accelerator", "topology", "nodes"), BY_RULE)
def test_larger_slices_are_built_of_cubes_of_four(accelerator, topology, nodes):
    assert pool_shapes.find_shape(accelerator, topology, 4).nodes == nodes


# Machine type, and the topologies that Google lists it with, in
# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus,
# https://github.com/google/pathways-job/blob/main/internal/controller/pathwaysjob_controller.go and
# https://github.com/AI-Hypercomputer/xpk/blob/main/src/xpk/core/system_characteristics.py.
# v5p and tpu7x have these in common:
CUBES = """
    2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x4x12 4x8x8 4x4x20 4x8x12 4x4x28 8x8x8 4x12x12 4x8x20
    4x4x44 8x8x12 4x4x52 4x8x28 4x12x20 8x8x16 4x4x68 8x12x12 4x4x76 8x8x20 4x12x28 4x8x44 4x4x92
    8x12x16 4x20x20 4x8x52 12x12x12 8x8x28 4x4x116 8x12x20 4x4x124 8x16x16 4x12x44 4x8x68 4x20x28
    12x12x16 4x4x148 4x8x76 4x12x52 8x16x20 4x4x164 8x12x28 4x4x172 8x8x44 12x12x20 4x8x92 4x4x188
    12x16x16 4x28x28 8x20x20 4x12x68 8x8x52 4x4x212 12x12x24 4x20x44 8x16x28 4x12x76 4x8x116
    4x4x236 12x16x20 4x4x244 4x8x124 12x12x28 16x16x16 4x20x52 8x12x44 8x8x68 4x12x92 8x20x28
    12x16x24 4x8x148 12x20x20 8x8x76 4x28x44 8x12x52 16x16x20 12x12x36 4x8x164 12x16x28 4x20x68
    4x8x172 4x12x116 8x16x44 12x20x24 4x28x52 8x8x92 4x12x124 4x8x188 4x20x76 16x16x24 12x24x24
    16x20x28
"""
DOCUMENTED = {
    (V7, "tpu7x-standard-4t"): f"{CUBES} 16x16x32 16x24x24",
    (V7, "tpu7x-standard-1t"): "1x1x1",
    (V6E, "ct6e-standard-1t"): "1x1",
    (V6E, "ct6e-standard-8t"): "2x4",
    (V6E, "ct6e-standard-4t"): "2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    (V5P, "ct5p-hightpu-4t"): CUBES,
    (V5E, "ct5lp-hightpu-1t"): "1x1",
    (V5E, "ct5lp-hightpu-8t"): "2x4",
    (V5E, "ct5lp-hightpu-4t"): "2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    (V4, "ct4p-hightpu-4t"): """
        2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 4x4x16 8x8x8 8x8x12 8x8x16 4x16x16 8x16x16
        12x16x16
    """,
}


@pytest.mark.parametrize(
    ("accelerator", "machine", "topology"),
    [(*key, topology) for key, listed in DOCUMENTED.items() for topology in listed.split()],
)
def test_every_documented_topology_has_its_machines(accelerator, machine, topology):
    chips = int(machine.rpartition("-")[2].removesuffix("t"))
    shape = pool_shapes.find_shape(accelerator, topology, chips)
    assert shape.machine_type == machine
    assert shape.nodes * chips == math.prod(map(int, topology.split("x")))


@given(st.lists(st.integers(1, 6), min_size=3, max_size=3), st.sampled_from([V4, V5P, V7]))
def test_every_shape_of_the_documented_rule_is_accepted(cubes, accelerator):
    """More than 64 chips: multiples of four, A <= B <= C, up to the chips of a pod."""
    sizes = sorted(4 * count for count in cubes)
    if math.prod(sizes) <= {V4: 4096, V5P: 8960, V7: 9216}[accelerator]:
        shape = pool_shapes.find_shape(accelerator, "x".join(map(str, sizes)), 4)
        assert shape.nodes == math.prod(sizes) // 4


MACHINES = [
    (V4, "2x2x2", 4, "ct4p-hightpu-4t"),
    (V5E, "1x1", 1, "ct5lp-hightpu-1t"),
    (V5E, "4x4", 4, "ct5lp-hightpu-4t"),
    (V5E, "2x4", 8, "ct5lp-hightpu-8t"),
    (V5P, "2x2x2", 4, "ct5p-hightpu-4t"),
    (V6E, "1x1", 1, "ct6e-standard-1t"),
    (V6E, "4x4", 4, "ct6e-standard-4t"),
    (V6E, "2x4", 8, "ct6e-standard-8t"),
    (V7, "2x2x2", 4, "tpu7x-standard-4t"),
]


@pytest.mark.parametrize(("accelerator", "topology", "chips", "machine"), MACHINES)
def test_machine_type_of_a_topology(accelerator, topology, chips, machine):
    assert pool_shapes.find_shape(accelerator, topology, chips).machine_type == machine


REFUSED = [
    pytest.param("no-such-tpu", "2x2", 4, "unknown accelerator", id="unknown accelerator"),
    pytest.param(V6E, "not-a-topo", 4, "no topology", id="not a topology"),
    pytest.param(V6E, "1x1x1", 1, "no topology", id="wrong dimensions"),
    pytest.param(V6E, "4x4", 16, "has 16 chips; request 4 per pod, not 16", id="no such machine"),
    pytest.param(V5E, "2x2", 2, "request 4 per pod, not 2", id="two chips"),
    pytest.param(V5E, "2x2", 3, "request 4 per pod, not 3", id="three chips"),
    pytest.param(V5E, "0x4", 4, "no topology", id="zero"),
    pytest.param(V5E, "-2x-2", 4, "no topology", id="negative"),
    pytest.param(
        V6E, "4x4", 8, "request 4 per pod, not 8", id="single-host machine for a multi-host slice"
    ),
    pytest.param(V5E, "1x1", 4, "request 1 per pod, not 4", id="more chips than the slice has"),
    pytest.param(V4, "16x16x20", 4, "up to 4096 chips", id="larger than a pod"),
    # A pod has 8960 chips: https://cloud.google.com/tpu/docs/v5p
    pytest.param(V5P, "16x16x36", 4, "up to 8960 chips", id="larger than the largest slice"),
    pytest.param(V4, "2x8x8", 4, "multiples of 4", id="not built of cubes"),
    pytest.param(V5P, "4x4x6", 4, "multiples of 4", id="not a multiple of four"),
    pytest.param(V5E, "3x5", 4, "no topology '3x5'", id="topology not offered"),
    pytest.param(V5P, "8x4x4", 4, "write 4x4x8", id="in another order"),
    pytest.param(V4, "24x12x12", 4, "write 12x12x24", id="a custom one in another order"),
    pytest.param(V6E, "8x4", 4, "write 4x8", id="two dimensions in another order"),
]


@pytest.mark.parametrize(("accelerator", "topology", "chips", "message"), REFUSED)
def test_an_impossible_slice_is_rejected(accelerator, topology, chips, message):
    with pytest.raises(BadInput, match=message):
        pool_shapes.find_shape(accelerator, topology, chips)


PLACEMENT = [
    pytest.param(V5E, "2x2", 4, None, id="v5e single host"),
    pytest.param(V4, "2x2x1", 4, None, id="v4 single host"),
    pytest.param(V5P, "2x2x1", 4, None, id="v5p single host"),
    pytest.param(V6E, "1x1", 1, None, id="one chip"),
    pytest.param(V6E, "2x4", 8, None, id="eight chips on one host"),
    pytest.param(V5E, "4x4", 4, {"type": "COMPACT", "tpuTopology": "4x4"}, id="multi-host"),
    pytest.param(V6E, "2x4", 4, {"type": "COMPACT", "tpuTopology": "2x4"}, id="v6e two hosts"),
    pytest.param(V7, "2x2x1", 4, None, id="tpu7x single host"),
    pytest.param(V7, "2x2x2", 4, {"policyName": "tpu-provisioner-2x2x2"}, id="tpu7x by policy"),
]


@pytest.mark.parametrize(("accelerator", "topology", "chips", "placement"), PLACEMENT)
def test_only_multi_host_slices_have_a_placement_policy(accelerator, topology, chips, placement):
    assert pool_shapes.find_shape(accelerator, topology, chips).placement == placement


LABELS = {row[1]: row[6] for row in tpu_types.GENERATIONS if row[6]}
OFFERED = [
    (LABELS[name.rpartition("-")[0]], topology, chips_per_host, hosts)
    for name, topology, _, hosts, chips_per_host, machine in tpu_types.TYPES
    if machine and name.rpartition("-")[0] in LABELS
]


@given(st.sampled_from(OFFERED))
def test_every_offered_type_has_its_chips_and_hosts(row):
    accelerator, topology, chips, hosts = row
    shape = pool_shapes.find_shape(accelerator, topology, chips)
    assert (shape.nodes, shape.chips) == (hosts, math.prod(map(int, topology.split("x"))))
