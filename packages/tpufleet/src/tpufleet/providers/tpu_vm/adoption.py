"""Adopting a node that a person made, and giving it back: only labels and metadata change.

The server adds what it puts on its own nodes: its labels, the bootstrap token and the startup
script. An update may change these fields of a node that runs:
https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes/patch
"""

from __future__ import annotations

import json

from google.cloud import tpu_v2

from tpufleet.errors import BadRequest, ProviderUnavailable
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu.type_lookup import find, short_name
from tpufleet.providers.base import Order
from tpufleet.providers.tpu_vm import naming, startup_script
from tpufleet.providers.tpu_vm.settings import TpuVmSettings

UPDATED_FIELDS = ("labels", "metadata")
# In other states the API refuses an update: the node keeps our labels, and is left alone.
UPDATABLE_STATES = (tpu_v2.Node.State.READY, tpu_v2.Node.State.STOPPED)
_LABELS = (naming.FLEET, naming.ORDER, naming.SLICE, naming.POOL, naming.ADOPTED)
_SOON_READY = (
    tpu_v2.Node.State.CREATING, tpu_v2.Node.State.STARTING, tpu_v2.Node.State.RESTARTING,
)  # fmt: skip


def adopted_as(node: tpu_v2.Node) -> SliceId | None:
    """The slice that this node was adopted as; None: it was not."""
    slice_id = node.labels.get(naming.ADOPTED)
    return SliceId(slice_id) if slice_id else None


def check(node: tpu_v2.Node | None, order: Order) -> tpu_v2.Node:
    """BadRequest if this node cannot become the slice of the order."""
    if node is None:
        raise naming.no_such_node(order.node, order.zone)
    fleet, known = node.labels.get(naming.FLEET), adopted_as(node)
    if fleet is not None and fleet != naming.label_value(order.fleet):
        raise naming.of_another_fleet(order.node, order.zone)
    if fleet is not None and known is None:
        raise BadRequest(f"TPU VM {order.node} was created by this server; it is a slice already")
    if known is not None and known != order.slices[0]:
        raise ProviderUnavailable(f"TPU VM {order.node} is still being given back, as {known}")
    wanted, state = find(order.accelerator).name, tpu_v2.Node.State(node.state)
    if node.accelerator_type != wanted:
        raise BadRequest(
            f"TPU VM {order.node} is a {short_name(node.accelerator_type)}, and pool {order.pool} "
            f"has {short_name(wanted)}; choose another pool"
        )
    problem = f"TPU VM {order.node} is {state.name.lower()}"
    if state in _SOON_READY:
        raise ProviderUnavailable(problem)
    if state is not tpu_v2.Node.State.READY:
        raise BadRequest(f"{problem}; run `tpu vm repair {order.node}` first")
    return node


def adopted(node: tpu_v2.Node, order: Order, settings: TpuVmSettings) -> tpu_v2.Node:
    """The update that makes it a slice. What it replaces is kept in the metadata."""
    labels = {
        naming.FLEET: order.fleet,
        naming.ORDER: order.id,
        naming.SLICE: order.slices[0],
        naming.POOL: order.pool or "",
    }
    values = {naming.ADOPTED: order.slices[0], **naming.metadata(order)}
    values |= startup_script.metadata(find(order.accelerator), settings)
    values.pop(naming.FORMAT_DISKS, None)  # its disks are those of the person who made it
    before = _given_back_metadata(node)
    former = {key: before[key] for key in values if key in before}
    return tpu_v2.Node(
        name=node.name,
        labels={
            **node.labels,
            **{key: naming.label_value(value) for key, value in labels.items() if value},
            naming.ADOPTED: order.slices[0],
        },
        metadata={**before, **values, naming.FORMER_METADATA: json.dumps(former)},
    )


def given_back(node: tpu_v2.Node) -> tpu_v2.Node:
    """The update that makes it what it was."""
    return tpu_v2.Node(
        name=node.name,
        labels={key: value for key, value in node.labels.items() if key not in _LABELS},
        metadata=_given_back_metadata(node),
    )


def capacity_of(node: tpu_v2.Node) -> Capacity:
    scheduling = node.scheduling_config
    if scheduling.spot or scheduling.preemptible:
        return Capacity.SPOT
    return Capacity.RESERVED if scheduling.reserved else Capacity.ON_DEMAND


def _given_back_metadata(node: tpu_v2.Node) -> dict[str, str]:
    if naming.ADOPTED not in node.metadata:
        return dict(node.metadata)
    try:
        former = json.loads(node.metadata.get(naming.FORMER_METADATA, "{}"))
    except ValueError:
        former = {}
    replaced = ("startup-script", naming.GUEST_ATTRIBUTES)
    kept = {
        key: value
        for key, value in node.metadata.items()
        if not key.startswith("tpufleet-") and key not in replaced
    }
    return {**kept, **{str(key): str(value) for key, value in former.items()}}
