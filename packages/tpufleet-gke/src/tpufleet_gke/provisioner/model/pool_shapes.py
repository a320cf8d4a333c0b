"""From accelerator, topology and chips per pod to machine type and node count."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache

from tpufleet.errors import BadInput, suggest, unknown
from tpufleet.model.tpu import tpu_types

# Its slices are placed by workload policies, which are created beforehand.
WORKLOAD_POLICY_ACCELERATOR = "tpu7x"
# Three-dimensional slices of more than 64 chips are AxBxC of multiples of 4 with A <= B <= C:
# https://cloud.google.com/kubernetes-engine/docs/concepts/tpus#topology. The largest slice is a
# whole pod: 64 cubes of v4, 140 of v5p, 144 of tpu7x, as in Google's tables of GKE topologies,
# https://github.com/AI-Hypercomputer/xpk/blob/main/src/xpk/core/system_characteristics.py.
# https://cloud.google.com/tpu/docs/v5p names 16x16x24 as the largest slice of v5p, but those tables
# have 12x24x24 and 16x20x28: so it goes up to its pod, and GKE has the last word.
CUBE_SIDE = 4
HOST_CHIPS = 4  # of a host of a slice in three dimensions
MAX_SLICE_CHIPS = {"tpu-v4-podslice": 4096, "tpu-v5p-slice": 8960, "tpu7x": 9216}
_TOPOLOGY = re.compile(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolShape:
    """Machine type and number of the nodes of one pool."""

    accelerator: str  # value of GKE's accelerator label
    topology: str
    machine_type: str
    nodes: int
    chips_per_node: int

    @property
    def chips(self) -> int:
        return self.nodes * self.chips_per_node

    @property
    def placement(self) -> dict[str, str] | None:
        if self.nodes == 1:
            # GKE rejects a topology for a single host, and that of a workload policy too:
            # https://github.com/AI-Hypercomputer/xpk/pull/825
            return None
        if self.accelerator == WORKLOAD_POLICY_ACCELERATOR:
            return {"policyName": policy_name(self.topology)}
        return {"type": "COMPACT", "tpuTopology": self.topology}


def policy_name(topology: str) -> str:
    return f"tpu-provisioner-{topology}"


def find_shape(accelerator: str, topology: str, chips_per_pod: int) -> PoolShape:
    """The nodes for pods that request `chips_per_pod` each. BadInput when no such slice exists."""
    generations = _generations()
    if accelerator not in generations:
        raise unknown("accelerator", accelerator, sorted(generations))
    generation = generations[accelerator]
    machines, chips = generation.machines, math.prod(_sizes(topology, accelerator, generation))
    # Machines of other sizes than 4 chips are single-host slices.
    possible = [size for size in sorted(machines) if size == chips or (size == 4 and not chips % 4)]
    if chips_per_pod not in possible:
        raise BadInput(
            f"{accelerator} {topology} has {chips} chips; request "
            f"{' or '.join(map(str, possible))} per pod, not {chips_per_pod}"
        )
    return PoolShape(
        accelerator=accelerator,
        topology=topology,
        machine_type=machines[chips_per_pod],
        nodes=chips // chips_per_pod,
        chips_per_node=chips_per_pod,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Generation:
    dimensions: int
    topologies: frozenset[tuple[int, ...]]  # sorted: 1x2x2 equals 2x2x1
    machines: dict[int, str]  # by chips


@cache
def _generations() -> dict[str, _Generation]:
    generations = {}
    for _, prefix, _, _, dimensions, _, label in tpu_types.GENERATIONS:
        if label is None:
            continue
        rows = [row for row in tpu_types.TYPES if row[0].rpartition("-")[0] == prefix]
        generations[label] = _Generation(
            dimensions=dimensions,
            topologies=frozenset(_sorted(topology) for _, topology, *_ in rows),
            machines={chips: machine for *_, chips, machine in rows if machine is not None},
        )
    return generations


def _sizes(topology: str, accelerator: str, generation: _Generation) -> tuple[int, ...]:
    """In ascending order. Single hosts are written in any order: 1x2x2 or 2x2x1."""
    sizes = _sorted(topology) if _TOPOLOGY.fullmatch(topology) else ()
    most = MAX_SLICE_CHIPS.get(accelerator, 0)
    cubes = len(sizes) == generation.dimensions and not any(size % CUBE_SIDE for size in sizes)
    ascending = "x".join(map(str, sizes))
    if sizes not in generation.topologies and not (cubes and math.prod(sizes) <= most):
        known = ["x".join(map(str, each)) for each in sorted(generation.topologies)]
        hint = suggest(topology, known)
        if most and len(sizes) == generation.dimensions:
            hint = f"; above 64 chips all sizes are multiples of 4, up to {most} chips"
    elif math.prod(sizes) > HOST_CHIPS and topology != ascending:
        hint = f"; write {ascending}"
    else:
        return sizes
    raise BadInput(f"{accelerator} has no topology {topology!r}{hint}")


def _sorted(topology: str) -> tuple[int, ...]:
    return tuple(sorted(int(size) for size in topology.split("x")))
