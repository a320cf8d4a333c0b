"""Every TPU type: its shape, hosts and machine. The one source of topology truth, as data."""

from __future__ import annotations

import math
from collections.abc import Iterator

TpuType = tuple[str, str, int, int, int, str | None]

# generation, API prefix, other spellings, what the number after the dash counts,
# dimensions of a topology, TPU VM runtime version, GKE accelerator label
GENERATIONS: tuple[tuple[str, str, tuple[str, ...], str, int, str | None, str | None], ...] = (
    ("v2", "v2", (), "cores", 2, "tpu-ubuntu2204-base", None),
    ("v3", "v3", (), "cores", 2, "tpu-ubuntu2204-base", None),
    ("v4", "v4", (), "cores", 3, "tpu-ubuntu2204-base", "tpu-v4-podslice"),
    ("v5e", "v5litepod", ("v5e",), "chips", 2, "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
    ("v5p", "v5p", (), "cores", 3, "v2-alpha-tpuv5", "tpu-v5p-slice"),
    ("v6e", "v6e", (), "chips", 2, "v2-alpha-tpuv6e", "tpu-v6e-slice"),
    ("tpu7x", "tpu7x", (), "cores", 3, None, "tpu7x"),
)

HOST_CHIPS = 4  # of a host of a slice with several; a single host may have 1 or 8
# GKE machine types by API prefix, without the number of chips at their end.
_MACHINES = {
    "v4": "ct4p-hightpu", "v5litepod": "ct5lp-hightpu", "v5p": "ct5p-hightpu",
    "v6e": "ct6e-standard", "tpu7x": "tpu7x-standard",
}  # fmt: skip
_SQUARES = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_V5P = """
    2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x4x12 4x8x8 4x4x20 4x8x12 4x4x28 8x8x8 4x12x12 4x8x20
    4x4x44 8x8x12 4x4x52 4x8x28 4x12x20 8x8x16 4x4x68 8x12x12 4x4x76 8x8x20 4x12x28 4x8x44
    4x4x92 8x12x16 4x20x20 4x8x52 12x12x12 8x8x28 4x4x116 8x12x20 4x4x124 8x16x16 4x12x44 4x8x68
    4x20x28 12x12x16 4x4x148 4x8x76 4x12x52 8x16x20 4x4x164 8x12x28 4x4x172 8x8x44 12x12x20
    4x8x92 4x4x188 12x16x16 4x28x28 8x20x20 4x12x68 8x8x52 4x4x212 12x12x24 4x20x44 8x16x28
    4x12x76 4x8x116 4x4x236 12x16x20 4x4x244 4x8x124 12x12x28 16x16x16 4x20x52 8x12x44 8x8x68
    4x12x92 8x20x28 12x16x24 4x8x148 12x20x20 8x8x76 4x28x44 8x12x52 16x16x20 12x12x36 4x8x164
    12x16x28 4x20x68 4x8x172 4x12x116 8x16x44 12x20x24 4x28x52 8x8x92 4x12x124 4x8x188 4x20x76
    16x16x24
"""
# A pod of v5p has 8,960 chips, and its largest slice 6,144 (cloud.google.com/tpu/docs/v5p).
_LARGER_THAN_V5P = "12x24x24 16x20x28 16x16x32 16x24x24"
# By API prefix; types are listed in this order, and by size.
_TOPOLOGIES = {
    "v5litepod": _SQUARES,
    "v4": "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16",
    "v5p": _V5P,
    "v6e": _SQUARES,
    "tpu7x": f"1x1x1 {_V5P} {_LARGER_THAN_V5P}",
    "v2": "2x2 4x4 8x8 8x16 16x16",
    "v3": "2x2 4x4 4x8 8x8 8x16 16x16 16x32 32x32",
}


def _types() -> Iterator[TpuType]:
    counted = {prefix: unit for _, prefix, _, unit, *_ in GENERATIONS}
    for prefix, topologies in _TOPOLOGIES.items():
        shapes = [(math.prod(map(int, each.split("x"))), each) for each in topologies.split()]
        for chips, topology in sorted(shapes, key=lambda shape: shape[0]):
            name = f"{prefix}-{chips * 2 if counted[prefix] == 'cores' else chips}"
            # Eight chips of the small generations are one host, as TPU VMs; GKE has two for v6e.
            sizes = [8] if topology == "2x4" else [min(chips, HOST_CHIPS)]
            if name == "v6e-8":
                sizes.append(HOST_CHIPS)
            for size in sizes:
                machine = f"{_MACHINES[prefix]}-{size}t" if prefix in _MACHINES else None
                yield name, topology, chips, chips // size, size, machine


# type, topology, chips, hosts, chips per host, GKE machine type
TYPES: tuple[TpuType, ...] = tuple(_types())
