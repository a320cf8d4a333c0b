"""Google's own client, connected to an emulator."""

from __future__ import annotations

import grpc
from google.cloud import tpu_v2, tpu_v2alpha1
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport
from google.cloud.tpu_v2alpha1.services.tpu.transports import TpuGrpcTransport as AlphaTransport

ZONE = "us-central1-a"
PARENT = f"projects/p/locations/{ZONE}"


def client_of(endpoint: str) -> tpu_v2.TpuClient:
    channel = grpc.insecure_channel(endpoint)
    return tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=channel))


def alpha_client_of(endpoint: str) -> tpu_v2alpha1.TpuClient:
    channel = grpc.insecure_channel(endpoint)
    return tpu_v2alpha1.TpuClient(transport=AlphaTransport(channel=channel))


def node(accelerator: str = "v5litepod-4", *, spot: bool = True, **more: object) -> tpu_v2.Node:
    return tpu_v2.Node(
        accelerator_type=accelerator,
        runtime_version="v2-alpha-tpuv5-lite",
        scheduling_config=tpu_v2.SchedulingConfig(spot=spot),
        **more,
    )


def queued(
    *names: str, accelerator: str = "v5litepod-16", spot: bool = True, **more: object
) -> tpu_v2.QueuedResource:
    """One node by its name, or several by their prefix: `queued("gang", "gang")` is two."""
    kind = tpu_v2.QueuedResource.Tpu.NodeSpec
    template = node(accelerator, spot=False)
    if len(names) == 1:
        spec = kind(parent=PARENT, node_id=names[0], node=template)
    else:
        several = kind.MultisliceParams(node_count=len(names), node_id_prefix=names[0])
        spec = kind(parent=PARENT, multislice_params=several, node=template)
    tier = {"spot": tpu_v2.QueuedResource.Spot()} if spot else {}
    return tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]), **tier, **more)
