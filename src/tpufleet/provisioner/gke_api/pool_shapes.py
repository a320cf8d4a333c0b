"""Which machines a TPU selector means: from the one source of topology truth, or a refusal."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache

from tpufleet.errors import BadInput
from tpufleet.model import tpu_types

WORKLOAD_POLICY_ACCELERATOR = (
    "tpu7x"  # the accelerator whose slices are placed by a policy made beforehand
)
_TOPOLOGY = re.compile(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolShape:
    """The nodes of one pool."""

    accelerator: str  # as GKE labels it
    topology: str
    machine_type: str
    nodes: int
    chips_per_node: int

    @property
    def chips(self) -> int:
        return self.nodes * self.chips_per_node

    @property
    def placement(self) -> dict[str, str] | None:
        if self.accelerator == WORKLOAD_POLICY_ACCELERATOR:
            return {"policyName": policy_name(self.topology)}
        if self.nodes == 1:
            return None  # GKE refuses a topology for a single host
        return {"type": "COMPACT", "tpuTopology": self.topology}


def policy_name(topology: str) -> str:
    return f"tpu-provisioner-{topology}"


def add_policy_hint(shape: PoolShape, words: str) -> str:
    """What GKE said about a pool of this shape, with the cure where we know one."""
    policy = (shape.placement or {}).get("policyName")
    if policy is None or "polic" not in words.lower():
        return words
    return f"{words}; `tpu provisioner --make-policies REGION` makes {policy} and its like"


def find_shape(accelerator: str, topology: str, chips_per_pod: int) -> PoolShape:
    """The pool for pods that ask for `chips_per_pod` each. BadInput says what does not fit."""
    known = _generations()
    if accelerator not in known:
        raise BadInput(f"no TPU is labelled {accelerator!r}; GKE knows {', '.join(sorted(known))}")
    generation = known[accelerator]
    sizes = _sizes(topology, accelerator, generation)
    product = math.prod(sizes)
    machines = generation.machines
    if chips_per_pod not in machines:
        raise BadInput(
            f"no machine of {accelerator} has {chips_per_pod} chips; a pod may ask for "
            f"{' or '.join(map(str, sorted(machines)))}"
        )
    if chips_per_pod != 4 and chips_per_pod != product:
        raise BadInput(
            f"a pod with {chips_per_pod} chips is a whole slice, but {topology} has {product}; "
            "ask for 4 chips a pod"
        )
    if product % chips_per_pod:
        raise BadInput(f"{topology} has {product} chips, fewer than a pod's {chips_per_pod}")
    return PoolShape(
        accelerator=accelerator,
        topology=topology,
        machine_type=machines[chips_per_pod],
        nodes=product // chips_per_pod,
        chips_per_node=chips_per_pod,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Generation:
    dimensions: int
    topologies: frozenset[tuple[int, ...]]  # sorted: 1x2x2 and 2x2x1 are one
    machines: dict[int, str]  # by chips


@cache
def _generations() -> dict[str, _Generation]:
    found = {}
    for _, prefix, _, _, dimensions, _, label in tpu_types.GENERATIONS:
        if label is None:
            continue
        rows = [row for row in tpu_types.TYPES if row[0].rpartition("-")[0] == prefix]
        found[label] = _Generation(
            dimensions=dimensions,
            topologies=frozenset(_sorted(topology) for _, topology, *_ in rows),
            machines={chips: machine for *_, chips, machine in rows if machine is not None},
        )
    return found


def _sizes(topology: str, accelerator: str, generation: _Generation) -> tuple[int, ...]:
    if not _TOPOLOGY.fullmatch(topology):
        raise BadInput(f"{topology!r} is no topology; one looks like 4x4 or 2x2x4")
    sizes = _sorted(topology)
    if len(sizes) != generation.dimensions:
        raise BadInput(
            f"{accelerator} has topologies of {generation.dimensions} dimensions, not {topology}"
        )
    if sizes not in generation.topologies:
        raise BadInput(f"{accelerator} has no topology {topology}")
    return sizes


def _sorted(topology: str) -> tuple[int, ...]:
    return tuple(sorted(int(size) for size in topology.split("x")))
