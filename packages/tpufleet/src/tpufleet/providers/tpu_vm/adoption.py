"""Adopting what a person made, and giving it back: only labels and metadata change.

The server adds what it puts on its own nodes and instances: its labels, the bootstrap token and the
startup script. These fields may change while a node runs:
https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes/patch
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from tpufleet.errors import BadRequest, ProviderUnavailable
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.tpu.type_lookup import find, short_name
from tpufleet.providers.base import Order
from tpufleet.providers.tpu_vm import naming, startup_script
from tpufleet.providers.tpu_vm.settings import GoogleSettings

_LABELS = (naming.FLEET, naming.ORDER, naming.SLICE, naming.POOL, naming.ADOPTED, naming.NODE)


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """What changes of a node or an instance."""

    labels: Mapping[str, str]
    metadata: Mapping[str, str]


def adopted_as(labels: Mapping[str, str]) -> SliceId | None:
    """The slice that a node with these labels was adopted as; None: it was not."""
    slice_id = labels.get(naming.ADOPTED)
    return SliceId(slice_id) if slice_id else None


def check_owner(labels: Mapping[str, str], order: Order) -> None:
    """BadRequest if it is somebody else's; ProviderUnavailable if not free yet."""
    fleet, known = labels.get(naming.FLEET), adopted_as(labels)
    if fleet is not None and fleet != naming.label_value(order.fleet):
        raise naming.of_another_fleet(order.node, order.zone)
    if fleet is not None and known is None:
        raise BadRequest(f"TPU VM {order.node} was created by this server; it is a slice already")
    if known is not None and known != order.slices[0]:
        raise ProviderUnavailable(f"TPU VM {order.node} is still being given back, as {known}")


def wrong_type(order: Order, found: str) -> BadRequest:
    return BadRequest(
        f"TPU VM {order.node} is a {found}, and pool {order.pool} has "
        f"{short_name(find(order.accelerator).name)}; choose another pool"
    )


def not_ready(order: Order, state: str, repair: str) -> BadRequest | ProviderUnavailable:
    """`repair`: the command that makes it ready; empty: it will be ready by itself."""
    problem = f"TPU VM {order.node} is {state}"
    if not repair:
        return ProviderUnavailable(problem)
    return BadRequest(f"{problem}; run `{repair}` first")


def adopted(found: Marks, order: Order, settings: GoogleSettings) -> Marks:
    """What makes it a slice, or a host of it. What is replaced is kept in the metadata."""
    labels = {
        naming.FLEET: order.fleet,
        naming.ORDER: order.id,
        naming.SLICE: order.slices[0],
        naming.POOL: order.pool or "",
        naming.NODE: order.node,
    }
    values = {naming.ADOPTED: order.slices[0], **naming.metadata(order)}
    values |= startup_script.metadata(find(order.accelerator), settings)
    values.pop(naming.FORMAT_DISKS, None)  # its disks are those of the person who made it
    before = _given_back_metadata(found.metadata)
    former = {key: before[key] for key in values if key in before}
    return Marks(
        labels={
            **found.labels,
            **{key: naming.label_value(value) for key, value in labels.items() if value},
            naming.ADOPTED: order.slices[0],
        },
        metadata={**before, **values, naming.FORMER_METADATA: json.dumps(former)},
    )


def given_back(found: Marks) -> Marks:
    """What makes it what it was."""
    return Marks(
        labels={key: value for key, value in found.labels.items() if key not in _LABELS},
        metadata=_given_back_metadata(found.metadata),
    )


def _given_back_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    if naming.ADOPTED not in metadata:
        return dict(metadata)
    try:
        former = json.loads(metadata.get(naming.FORMER_METADATA, "{}"))
    except ValueError:
        former = {}
    replaced = ("startup-script", naming.GUEST_ATTRIBUTES)
    kept = {
        key: value
        for key, value in metadata.items()
        if not key.startswith("tpufleet-") and key not in replaced
    }
    return {**kept, **{str(key): str(value) for key, value in former.items()}}
