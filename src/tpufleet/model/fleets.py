"""Fleets by hand: so many workers in each of some zones, each under the name that says where."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tpufleet.errors import BadInput

ZONE = re.compile(r"[a-z]+(-[a-z]+)+[0-9]+-[a-z]")
NAME = re.compile(r"tpu-(?P<zone>[a-z]+(?:-[a-z]+)+[0-9]+-[a-z])-(?P<worker>0|[1-9][0-9]*)")
NODE_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
MAX_WORKERS_PER_ZONE = 10_000


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class FleetMember:
    """One worker of a fleet."""

    zone: str
    worker: int

    @property
    def name(self) -> str:
        """`tpu-{region}-{zone letter}-{id}`; the id begins at 0 in each zone."""
        region, _, letter = self.zone.rpartition("-")
        return f"tpu-{region}-{letter}-{self.worker}"


def parse_member(name: str) -> FleetMember | None:
    """The worker that a name stands for; None when it is another kind of name."""
    found = NAME.fullmatch(name)
    return FleetMember(zone=found["zone"], worker=int(found["worker"])) if found else None


def check_zone(zone: str) -> str:
    if not ZONE.fullmatch(zone):
        raise BadInput(f"{zone!r} is no zone; zones look like us-central1-a")
    return zone


def check_name(name: str) -> str:
    if not NODE_ID.fullmatch(name):
        raise BadInput(
            f"{name!r} cannot name a node: use lower case letters, digits and dashes, a letter "
            "first, at most 63"
        )
    return name


def fleet_members(zones: Sequence[str], workers_per_zone: int) -> list[FleetMember]:
    for zone in zones:
        check_zone(zone)
    if not 1 <= workers_per_zone <= MAX_WORKERS_PER_ZONE:
        raise BadInput(
            f"workers per zone: {workers_per_zone} is not between 1 and {MAX_WORKERS_PER_ZONE}"
        )
    return [
        FleetMember(zone=zone, worker=worker)
        for zone in dict.fromkeys(zones)
        for worker in range(workers_per_zone)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRequest:
    """What a node made by hand is to be."""

    accelerator: str
    spot: bool = True
    runtime: str = ""  # empty: by generation


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """A node as the cloud shows it."""

    name: str
    zone: str
    state: str  # in the API's own words; NOT_FOUND when there is none
    health: str = ""
    accelerator: str = ""
    runtime: str = ""
    capacity: str = ""
    addresses: tuple[str, ...] = ()
    labels: dict[str, str] | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CreatedNode:
    """A node that somebody asked for, and whether it was there before."""

    node: NodeInfo
    already_existed: bool


# What `recreate-preempted` makes again; everything else it leaves alone.
GONE_STATES = ("PREEMPTED", "TERMINATED", "NOT_FOUND")


def display_state(state: str) -> str:
    return state.lower().replace("_", " ")
