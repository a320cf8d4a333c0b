"""What GKE leaves to pods of a node.

Examples by hand from the percentages in
https://cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes
"""

from __future__ import annotations

import pytest

from tpufleet.model.tpu import machine_types, tpu_types


@pytest.mark.parametrize(
    ("machine", "cpus", "gibibytes"),
    [
        # 0.06 + 0.01 + 0.01 + 20 * 0.0025; 1 + 0.8 + 0.8 + 32 * 0.06 + 0.0977
        ("ct5lp-hightpu-1t", 24 - 0.13, 48 - 4.6177),
        # 0.08 + 108 * 0.0025; 1 + 0.8 + 0.8 + 6.72 + 64 * 0.02 + 0.0977
        ("ct5lp-hightpu-4t", 112 - 0.35, 192 - 10.6977),
        # 0.08 + 40 * 0.0025; 1 + 0.8 + 0.8 + 6.72 + 48 * 0.02 + 0.0977
        ("ct6e-standard-1t", 44 - 0.18, 176 - 10.3777),
    ],
)
def test_some_of_each_node_is_reserved(machine, cpus, gibibytes):
    assert machine_types.allocatable(machine) == pytest.approx((cpus, gibibytes), abs=1e-3)


def test_every_machine_type_has_its_resources():
    machines = {row[5] for row in tpu_types.TYPES if row[5] is not None}
    assert machines == set(machine_types.MACHINE_RESOURCES)
