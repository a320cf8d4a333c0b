"""Manual fleets: a number of workers in each zone, named after the zone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec

from tpufleet import schema
from tpufleet.errors import BadInput, must_be
from tpufleet.model.tpu import type_lookup

# AI zones have names such as us-south1-ai1b.
ZONE = re.compile(r"[a-z]+(-[a-z]+)+[0-9]+-(ai[0-9]+)?[a-z]")
NAME = re.compile(
    r"tpu-(?P<zone>[a-z]+(?:-[a-z]+)+[0-9]+-(?:ai[0-9]+)?[a-z])-(?P<worker>0|[1-9][0-9]*)"
)
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
    """The worker with this name; None when the name has another form."""
    match = NAME.fullmatch(name)
    return FleetMember(zone=match["zone"], worker=int(match["worker"])) if match else None


_zone = schema.text("zone", ZONE.pattern, example="us-central1-a")
_node = schema.text(
    "name of a TPU VM", NODE_ID.pattern, example="tpu-1", rule="a-z, 0-9 and -, at most 63"
)

PROJECT_ID = schema.text(
    "project id",
    r"([a-z][a-z0-9.-]{0,61}:)?[a-z][a-z0-9-]{4,28}[a-z0-9]",
    example="my-project",
    rule="`gcloud projects list` shows yours",
)


def check_project(project: str) -> str:
    return str(schema.check(PROJECT_ID, project))


def check_zone(zone: str) -> str:
    return str(schema.check(_zone, zone))


def check_name(name: str) -> str:
    return str(schema.check(_node, name))


class NamedProperties(msgspec.Struct, frozen=True):
    """What the name of a node says about it; None where it says nothing."""

    accelerator: str | None = None
    spot: bool | None = None


def described_by(name: str) -> NamedProperties:
    """`kmh-tpuvm-v6e-16-spot-4` is a spot v6e-16."""
    accelerator = None
    for match in re.finditer(r"(?<![a-z0-9])(?:v[0-9]+[a-z]*|tpu[0-9]+x)-[0-9]+(?![0-9])", name):
        try:
            accelerator = type_lookup.find(match[0]).name
        except BadInput:
            continue
    words = set(name.split("-"))
    spot = True if words & {"spot", "preemptible"} else False if words & {"norm"} else None
    return NamedProperties(accelerator, spot)


def fleet_members(zones: Sequence[str], workers_per_zone: int) -> list[FleetMember]:
    for zone in zones:
        check_zone(zone)
    if not 1 <= workers_per_zone <= MAX_WORKERS_PER_ZONE:
        expected = f"from 1 to {MAX_WORKERS_PER_ZONE}"
        raise must_be(expected, workers_per_zone, "workers per zone")
    return [
        FleetMember(zone=zone, worker=worker)
        for zone in dict.fromkeys(zones)
        for worker in range(workers_per_zone)
    ]


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a node to create."""

    accelerator: str
    spot: bool = True
    runtime: str = ""  # empty: by generation
    autostop: timedelta | None = None  # delete the node this long after its creation


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the Cloud TPU API reports it."""

    name: str
    zone: str
    state: str  # as in the API; NOT_FOUND when it does not exist
    health: str = ""
    accelerator: str = ""
    runtime: str = ""
    capacity: str = ""
    addresses: tuple[str, ...] = ()
    labels: dict[str, str] | None = None
    message: str = ""
    created_at: datetime | None = None

    def same_again(self) -> NodeRequest:
        """A request for the same TPU VM; its autostop time starts again."""
        end = expires_at(self.labels)
        return NodeRequest(
            accelerator=self.accelerator,
            spot=self.capacity == "spot",
            runtime=self.runtime,
            autostop=end - self.created_at if end and self.created_at else None,
        )


class CreatedNode(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a request to create a node."""

    node: NodeInfo
    already_existed: bool


# Label with the time (in Unix seconds) after which a manual node is deleted.
EXPIRES = "tpufleet-expires"


def expires_at(labels: Mapping[str, str] | None) -> datetime | None:
    """When a manual node is deleted; None: when its owner does it."""
    text = (labels or {}).get(EXPIRES, "")
    return datetime.fromtimestamp(int(text), UTC) if text.isdecimal() else None


# `recreate-preempted` re-creates nodes in these states only.
GONE_STATES = ("PREEMPTED", "TERMINATED", "NOT_FOUND")


def display_state(state: str) -> str:
    return state.lower().replace("_", " ")
