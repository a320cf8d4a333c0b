"""Every TPU type by every spelling, held against the rules that shapes obey."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tpufleet.errors import BadInput
from tpufleet.model.tpu import tpu_types, type_lookup
from tpufleet.model.tpu.type_lookup import Accelerator

TYPES = sorted(type_lookup.all_types().values(), key=lambda item: item.name)
each_type = pytest.mark.parametrize("accelerator", TYPES, ids=lambda item: item.name)

CORES_A_CHIP = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2, "tpu7x": 2, "v5e": 1, "v6e": 1}
LARGEST_POD = {
    "v2": 256, "v3": 1024, "v4": 2048, "v5e": 256, "v5p": 6144, "v6e": 256, "tpu7x": 9216,
}  # fmt: skip

# From the public documentation of Cloud TPU.
SAMPLE = [
    # name, topology, chips, hosts, chips a host, machine
    ("v2-8", "2x2", 4, 1, 4, None),
    ("v2-512", "16x16", 256, 64, 4, None),
    ("v3-8", "2x2", 4, 1, 4, None),
    ("v3-32", "4x4", 16, 4, 4, None),
    ("v3-64", "4x8", 32, 8, 4, None),
    ("v3-2048", "32x32", 1024, 256, 4, None),
    ("v4-8", "2x2x1", 4, 1, 4, "ct4p-hightpu-4t"),
    ("v4-16", "2x2x2", 8, 2, 4, "ct4p-hightpu-4t"),
    ("v4-128", "4x4x4", 64, 16, 4, "ct4p-hightpu-4t"),
    ("v4-4096", "8x16x16", 2048, 512, 4, "ct4p-hightpu-4t"),
    ("v5litepod-1", "1x1", 1, 1, 1, "ct5lp-hightpu-1t"),
    ("v5litepod-4", "2x2", 4, 1, 4, "ct5lp-hightpu-4t"),
    ("v5litepod-8", "2x4", 8, 1, 8, "ct5lp-hightpu-8t"),
    ("v5litepod-16", "4x4", 16, 4, 4, "ct5lp-hightpu-4t"),
    ("v5litepod-32", "4x8", 32, 8, 4, "ct5lp-hightpu-4t"),
    ("v5litepod-256", "16x16", 256, 64, 4, "ct5lp-hightpu-4t"),
    ("v5p-8", "2x2x1", 4, 1, 4, "ct5p-hightpu-4t"),
    ("v5p-32", "2x2x4", 16, 4, 4, "ct5p-hightpu-4t"),
    ("v5p-384", "4x4x12", 192, 48, 4, "ct5p-hightpu-4t"),
    ("v5p-2048", "8x8x16", 1024, 256, 4, "ct5p-hightpu-4t"),
    ("v5p-12288", "16x16x24", 6144, 1536, 4, "ct5p-hightpu-4t"),
    ("v6e-1", "1x1", 1, 1, 1, "ct6e-standard-1t"),
    ("v6e-8", "2x4", 8, 1, 8, "ct6e-standard-8t"),
    ("v6e-16", "4x4", 16, 4, 4, "ct6e-standard-4t"),
    ("v6e-256", "16x16", 256, 64, 4, "ct6e-standard-4t"),
    ("tpu7x-8", "2x2x1", 4, 1, 4, "tpu7x-standard-4t"),
    ("tpu7x-128", "4x4x4", 64, 16, 4, "tpu7x-standard-4t"),
    ("tpu7x-18432", "16x24x24", 9216, 2304, 4, "tpu7x-standard-4t"),
]


@each_type
def test_the_shape_holds_all_chips_and_the_hosts_share_them(accelerator: Accelerator):
    sides = [int(side) for side in accelerator.topology.split("x")]
    assert math.prod(sides) == accelerator.chips
    assert accelerator.hosts * accelerator.chips_per_host == accelerator.chips


@each_type
def test_the_number_in_the_name_counts_chips_or_cores(accelerator: Accelerator):
    number = int(accelerator.name.rpartition("-")[2])
    assert number == accelerator.chips * CORES_A_CHIP[accelerator.generation]


@each_type
def test_a_type_fits_its_generation(accelerator: Accelerator):
    dimensions = {row[0]: row[4] for row in tpu_types.GENERATIONS}[accelerator.generation]
    assert accelerator.topology.count("x") + 1 == dimensions
    assert accelerator.chips <= LARGEST_POD[accelerator.generation]
    if accelerator.hosts > 1:
        assert accelerator.chips_per_host == 4, "only a single host has one or eight chips"


@each_type
def test_the_machine_has_the_chips_of_a_host(accelerator: Accelerator):
    if accelerator.generation in ("v2", "v3"):
        assert accelerator.machine_type is accelerator.gke_accelerator is None
    else:
        assert accelerator.machine_type.endswith(f"-{accelerator.chips_per_host}t")
        assert accelerator.gke_accelerator
    assert (accelerator.runtime is None) == (accelerator.generation == "tpu7x")


@each_type
def test_sizes_of_a_topology_are_written_smallest_first(accelerator: Accelerator):
    sides = [int(side) for side in accelerator.topology.split("x")]
    assert sides == sorted(sides) or accelerator.chips < 8, accelerator.topology


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row[0])
def test_known_types_are_as_documented(row):
    name, shape, chips, hosts, chips_per_host, machine = row
    accelerator = type_lookup.find(name)
    assert (accelerator.name, accelerator.topology, accelerator.chips) == (name, shape, chips)
    assert (accelerator.hosts, accelerator.chips_per_host) == (hosts, chips_per_host)
    assert accelerator.machine_type == machine


def test_every_generation_is_in_the_tables_and_each_has_its_largest_pod():
    largest = {}
    for item in TYPES:
        largest[item.generation] = max(item.chips, largest.get(item.generation, 0))
    assert largest == LARGEST_POD


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("v5litepod-16", "v5litepod-16"),
        ("v5e-16", "v5litepod-16"),
        ("V5E-16", "v5litepod-16"),
        ("  v5e-256\n", "v5litepod-256"),
        ("v6e-8", "v6e-8"),
        ("TPU7x-8", "tpu7x-8"),
    ],
)
def test_a_type_is_found_by_any_spelling(spelling, name):
    assert type_lookup.find(spelling).name == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("tpu7x-2x4x4", "tpu7x-64"), ("TPU7x-4x4x4", "tpu7x-128"), ("v5e-4x4", "v5litepod-16"),
     ("v6e-2x4", "v6e-8"), ("v5p-2x2x1", "v5p-8")],
)  # fmt: skip
def test_a_topology_names_a_type_whatever_its_number_counts(spelling, name):
    assert type_lookup.is_known(spelling) and type_lookup.find(spelling).name == name


@pytest.mark.parametrize(
    "spelling", ["tpu7x-4x4", "tpu8t-ring", "v6e-boardfly-64", "v6e-2x4x", "-"]
)
def test_other_shapes_are_unknown_types(spelling):
    with pytest.raises(BadInput):
        type_lookup.find(spelling)


def test_every_spelling_stands_for_one_type_and_a_size_keeps_its_number():
    for spelling, name in type_lookup.spellings().items():
        assert type_lookup.find(spelling).name == type_lookup.find(spelling.upper()).name == name
        assert spelling.rpartition("-")[2] == name.rpartition("-")[2]


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("v5e-17", "the nearest size is v5e-16"),
        ("v5litepod-300", "the largest slice has 256 chips: v5litepod-256"),
        ("v4-9", "the nearest size is v4-8"),
        ("v6e-3", "the nearest size is v6e-4"),
        ("v5p-17920", "the largest slice has 6,144 chips: v5p-12288"),
        ("v5e16", "did you mean v5e-16?"),
        ("v5lite-pod-16", "did you mean v5litepod-16?"),
        ("tpu7-8", "did you mean tpu7x-8?"),
        ("v7x-16", "did you mean tpu7x-16?"),
        ("v7-128", "did you mean tpu7x-128?"),
        ("v6-8", "did you mean v6e-8?"),
    ],
)
def test_an_unknown_type_is_answered_with_the_nearest_one(spelling, message):
    with pytest.raises(BadInput) as error:
        type_lookup.find(spelling)
    assert message in str(error.value) and repr(spelling) in str(error.value)


@given(st.text(max_size=30) | st.from_regex(r"(v5e|v4|tpu7x)-\S{0,8}", fullmatch=True))
@example("v5e-²")
@example("v5e-" + "9" * 5000)
@example("")
@example("-")
def test_any_text_is_a_type_or_a_clear_error(text):
    try:
        assert type_lookup.find(text).name == type_lookup.spellings()[text.strip().lower()]
    except BadInput as error:
        assert "unknown TPU type" in str(error)
