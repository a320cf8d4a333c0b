"""Machine types, zones, images and quotas of the emulated Compute Engine. Shapes and zones are
those of `tpufleet.model.tpu`; the rest is in catalog.yaml."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tpufleet.model.tpu import machine_types, tpu_types, tpu_zones, type_lookup

DATA: Mapping[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
LIMITS: Mapping[str, Any] = DATA["limits"]
IMAGES: Mapping[str, Any] = DATA["images"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    name: str
    accelerator_type: str  # its prefix in the metadata
    environment_type: str  # and in tpu-env
    name_counts: str  # cores or chips, in the accelerator type
    image_family: str
    tpu_family: str
    preemptible_quota: str
    preemptible_metric: str
    disk_types: tuple[str, ...]
    standard_quota: str = DATA["family_quota"]["id"]
    standard_metric: str = DATA["family_quota"]["metric"]
    refused: bool = False  # machine types are listed, but instances are refused


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    name: str
    generation: Generation
    chips: int
    cpus: int
    memory_gib: int
    topologies: frozenset[str]  # of slices of it
    zones: tuple[str, ...]
    host_type: str  # a TPU type of one such host


GENERATIONS = {
    name: Generation(name=name, **{**fields, "disk_types": tuple(fields["disk_types"])})
    for name, fields in DATA["generations"].items()
}


@cache
def machines() -> Mapping[str, Machine]:
    found: dict[str, Machine] = {}
    names = {row[5] for row in tpu_types.TYPES if row[5]}
    for name in sorted(names):
        rows = [row for row in tpu_types.TYPES if row[5] == name]
        kinds = [type_lookup.all_types()[row[0]] for row in rows]
        generation = GENERATIONS.get(kinds[0].generation)
        single = next((row[0] for row in rows if row[3] == 1), rows[0][0])
        if generation is None:
            continue
        cpus, memory = machine_types.MACHINE_RESOURCES[name]
        found[name] = Machine(
            name=name,
            generation=generation,
            chips=rows[0][4],
            cpus=cpus,
            memory_gib=memory,
            topologies=frozenset(row[1] for row in rows),
            zones=tpu_zones.zones_of(rows[0][0]),
            host_type=single,
        )
    return found


def zones() -> tuple[str, ...]:
    return tpu_zones.zones()


def region_of(zone: str) -> str:
    return zone.rpartition("-")[0]


@cache
def regions() -> tuple[str, ...]:
    return tuple(dict.fromkeys(region_of(zone) for zone in zones()))


def chips_of(topology: str) -> int:
    """0: not a topology."""
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}", topology):
        return 0
    return math.prod(int(side) for side in topology.split("x"))


def counted(machine: Machine, chips: int) -> int:
    """The number in the name of an accelerator type: `v7x-16` for 8 chips, `v6e-8`."""
    return chips * (2 if machine.generation.name_counts == "cores" else 1)
