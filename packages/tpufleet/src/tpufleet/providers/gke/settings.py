"""Operator settings for GKE: image, namespace, zones, queue, pod resources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tpufleet import schema
from tpufleet.kubernetes import quantities
from tpufleet.model.fleet import compute_reservations, fleets
from tpufleet.model.job.pod_settings import OBJECT_NAME, Quantity, VolumeSource
from tpufleet.model.tpu.type_lookup import TypeName
from tpufleet.schema import about

# Of a section that does not have them yet.
REQUIRED_EXAMPLE: Mapping[str, Any] = {"image": "registry/tpufleet:1", "zones": ["us-central1-a"]}


def _parse_reservation(value: Any) -> str:
    compute_reservations.parse(str(value))
    return str(value)


# Of Kubernetes objects; empty: none.
_Name = Annotated[
    str, schema.text("name", r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?", example="tpu-training")
]
_Zone = Annotated[str, schema.text("zone", fleets.ZONE.pattern, example="us-central1-a")]
_Path = Annotated[str, schema.text("absolute path", r"(/[A-Za-z0-9._-]+)+", example="/data")]
_Reservation = Annotated[str, schema.custom("reservation", _parse_reservation)]


_Account = Annotated[
    str, schema.text("name", f"({OBJECT_NAME.pattern})?", example="trainer")
]  # of Kubernetes; empty: `default` of the namespace


class GkeTeam(msgspec.Struct, frozen=True, kw_only=True):
    """Where the jobs of a team run. `tpu cluster install` creates it."""

    namespace: _Name = ""  # empty: the name of the team
    queue: _Name = ""
    service_account: _Account = ""
    users: tuple[str, ...] = ()  # whose jobs may run here; empty: everybody's


class GkeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The section `gke` of a config file."""

    image: Annotated[
        str,
        schema.text(
            "image", r"[a-z0-9]([a-zA-Z0-9._:/@-]*[a-zA-Z0-9])?", example="registry/name:tag"
        ),
        about("What pods run: tpufleet and JAX.", example="registry/name:tag"),
    ]
    teams: dict[_Name, GkeTeam] = {}  # instead of namespace, queue and service_account
    namespace: _Name = "tpu-training"  # where jobs run
    zones: tuple[_Zone, ...] = ()  # that slices may be in
    queue: _Name = ""  # Kueue's LocalQueue; empty: without Kueue
    topology_aware: tuple[TypeName, ...] = ()  # accelerators whose Kueue flavor has a topology
    reservations: dict[TypeName, _Reservation] = {}
    compute_classes: dict[TypeName, _Name] = {}  # GKE's, that bring the slices of a type
    dynamic_slices: tuple[TypeName, ...] = ()  # types that GKE forms of sub-blocks
    cpu: Quantity = "4"  # of one host's pod
    memory: Quantity = "16Gi"
    scratch: Quantity = "100Gi"  # disk
    most_slices: Annotated[int, Meta(ge=1)] | None = None  # that this fleet holds at a time
    user: Annotated[int, Meta(ge=1)] = 65532  # UID; pods never run as root
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    platform: Literal["", "cpu"] = ""  # `cpu` where chips are simulated
    extra_selector: dict[str, str] = {}
    volumes: dict[_Path, VolumeSource] = {}  # where in pods → its claim
    https_proxy: str = ""  # egress proxy of pods
    no_proxy: str = ""  # what they reach without it, comma-separated
    service_account: _Account = ""  # of pods
    service_accounts: tuple[str, ...] = ()  # that jobs may name; empty: any
    kubeconfig: str = ""  # empty: the pod's own service account

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Where jobs run."""
        found = dict.fromkeys(team.namespace or name for name, team in self.teams.items())
        return tuple(found) or (self.namespace,)

    @property
    def has_queues(self) -> bool:
        return any(team.queue for team in self.teams.values()) or bool(self.queue)

    def check(self) -> Iterator[tuple[str, str]]:
        if not self.zones:
            yield "zones", "required; at least one, such as us-central1-a"


def parse(config: Mapping[str, Any]) -> GkeSettings:
    """From a config file or environment variables, where lists are comma-separated and mappings are
    NAME=VALUE pairs."""
    return schema.parse(GkeSettings, config, path="gke", lax=True)


def parse_quantity(quantity: str) -> int:
    """Bytes of a Kubernetes quantity such as 16Gi."""
    return int(quantities.parse(quantity))
