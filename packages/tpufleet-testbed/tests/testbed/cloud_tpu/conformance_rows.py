"""What Google documents about the Cloud TPU API, as a table of calls and expected answers.

Written from the reference of `google.cloud.tpu.v2` (comments of its protocol buffers, rendered at
cloud.google.com/tpu/docs/reference/rpc/google.cloud.tpu.v2), the guides under
cloud.google.com/tpu/docs, the limits of Compute Engine's metadata, labels and tags, and AIP-193 for
the shape of errors; not from our client. `source` names the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from google.api_core import exceptions
from google.cloud import tpu_v2, tpu_v2alpha1
from google.type import interval_pb2

from tests.testbed.cloud_tpu.clients import PARENT, ZONE, node, queued
from tests.testbed.cloud_tpu.emulated_cloud import EmulatedCloud

PROTO = "rpc/google.cloud.tpu.v2"
ZONES_PAGE = "tpu/docs/regions-zones"
RUNTIMES_PAGE = "tpu/docs/runtimes"
DISKS_PAGE = "tpu/docs/attach-durable-block-storage"
QUEUE_PAGE = "tpu/docs/queued-resources"
UNSTATED = "no page; the stricter answer"
METADATA_PAGE = "compute/docs/metadata/setting-custom-metadata#limitations"
LABELS_PAGE = "compute/docs/labeling-resources#requirements"
TAGS_PAGE = "vpc/docs/add-remove-network-tags#restrictions"
GUEST_PAGE = "compute/docs/metadata/manage-guest-attributes"
ALPHA_PROTO = "rpc/google.cloud.tpu.v2alpha1"
MAINTENANCE_PAGE = "tpu/docs/view-maintenance-notifications"
ERRORS_PAGE = "AIP-193"
OPERATIONS_PAGE = "AIP-151"

Invalid, Precondition = exceptions.InvalidArgument, exceptions.FailedPrecondition
LONG = 900.0  # seconds; longer than any operation


@dataclass(frozen=True)
class Row:
    id: str
    source: str
    call: Callable[[EmulatedCloud], Any]
    refused: type[Exception] | tuple[type[Exception], ...] | None = None
    text: str = ""  # in the message of the error
    check: Callable[[Any], object] = field(default=lambda answer: True)


def create(world: EmulatedCloud, node_id: str = "a", parent: str = PARENT, **fields: Any) -> Any:
    request = fields.pop("node", None) or node(**fields)
    return world.client.create_node(parent=parent, node_id=node_id, node=request, timeout=900)


def created(world: EmulatedCloud, **fields: Any) -> Any:
    """A node that has become READY."""
    operation = create(world, **fields)
    world.advance(LONG)
    return operation.result(timeout=900)


def name(node_id: str = "a") -> str:
    return f"{PARENT}/nodes/{node_id}"


def disk(name: str = "d", zone: str = ZONE, read_only: bool = False) -> tpu_v2.AttachedDisk:
    mode = tpu_v2.AttachedDisk.DiskMode
    return tpu_v2.AttachedDisk(
        source_disk=f"projects/p/zones/{zone}/disks/{name}",
        mode=mode.READ_ONLY if read_only else mode.READ_WRITE,
    )


def enqueue(
    world: EmulatedCloud,
    request: tpu_v2.QueuedResource | None = None,
    queued_id: str = "q",
    **more: Any,
) -> Any:
    call = {
        "parent": PARENT,
        "queued_resource_id": queued_id,
        "queued_resource": queued("a") if request is None else request,
        **more,
    }
    return world.client.create_queued_resource(request=call, timeout=900)


def queue_state(world: EmulatedCloud, queued_id: str = "q") -> str:
    return world.queue_state(queued_id)


def after(world: EmulatedCloud, seconds: float, *calls: Callable[[EmulatedCloud], Any]) -> Any:
    """The answer of the last call, with time passing after each of the others."""
    for call in calls[:-1]:
        call(world)
        world.advance(seconds)
    return calls[-1](world)


def gang(count: int = 3, prefix: str = "np") -> tpu_v2.QueuedResource:
    kind = tpu_v2.QueuedResource.Tpu.NodeSpec
    params = kind.MultisliceParams(node_count=count, node_id_prefix=prefix)
    spec = kind(parent=PARENT, multislice_params=params, node=node("v5litepod-16", spot=False))
    return tpu_v2.QueuedResource(
        tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]), spot=tpu_v2.QueuedResource.Spot()
    )


def policy(**timing: Any) -> tpu_v2.QueuedResource:
    return queued("a", queueing_policy=tpu_v2.QueuedResource.QueueingPolicy(**timing))


def interval(world: EmulatedCloud, start: float, end: float) -> interval_pb2.Interval:
    now = world.clock.now()
    result = interval_pb2.Interval()
    result.start_time.FromDatetime(now + timedelta(seconds=start))
    result.end_time.FromDatetime(now + timedelta(seconds=end))
    return result


def names(world: EmulatedCloud) -> list[str]:
    return sorted(item.name.rpartition("/")[2] for item in world.client.list_nodes(parent=PARENT))


def delete_queued(world: EmulatedCloud, **more: Any) -> Any:
    return world.client.delete_queued_resource(
        request={"name": f"{PARENT}/queuedResources/q", **more}, timeout=900
    )


def update(world: EmulatedCloud, *paths: str, **fields: Any) -> Any:
    changed = tpu_v2.Node(name=name(), **fields)
    return world.client.update_node(node=changed, update_mask={"paths": list(paths)}, timeout=900)


def refusal(
    world: EmulatedCloud, error: str, method: str = "ListNodes"
) -> exceptions.GoogleAPICallError:
    """The error of a call for which the plan has this fault."""
    try:
        if method == "CreateNode":
            create(world)
        else:
            world.client.list_nodes(parent=PARENT, timeout=900, retry=None)
    except exceptions.GoogleAPICallError as raised:
        return raised
    raise AssertionError(f"{error}: no error")


def type_names(world: EmulatedCloud, zone: str) -> set[str]:
    parent = f"projects/p/locations/{zone}"
    return {item.type_ for item in world.client.list_accelerator_types(parent=parent)}


def alpha(world: EmulatedCloud) -> tpu_v2alpha1.TpuClient:
    return world.alpha_client


def guest(world: EmulatedCloud, path: str, *workers: str) -> Any:
    request = {"name": name(), "query_path": path, "worker_ids": list(workers)}
    return world.client.get_guest_attributes(request=request, timeout=900).guest_attributes


NODE_ROWS = (
    # Names
    Row("node id: upper case", PROTO, lambda w: create(w, "Upper"), Invalid),
    Row("node id: starts with a digit", PROTO, lambda w: create(w, "1a"), Invalid),
    Row("node id: ends with a dash", PROTO, lambda w: create(w, "a-"), Invalid),
    Row("node id: 64 characters", PROTO, lambda w: create(w, "a" * 64), Invalid),
    Row("node id: 63 characters", PROTO, lambda w: create(w, "a" * 63)),
    Row("node id: taken", PROTO, lambda w: (create(w), create(w)), exceptions.AlreadyExists),
    Row("parent: not a location", PROTO, lambda w: create(w, parent="projects/p"), Invalid),
    Row("parent: unknown zone", PROTO,
        lambda w: create(w, parent="projects/p/locations/us-nowhere1-a"),
        exceptions.PermissionDenied, "locations/us-nowhere1-a' (or it may not exist)"),
    # Required fields and values
    Row("runtime version: missing", PROTO,
        lambda w: create(w, node=tpu_v2.Node(accelerator_type="v5litepod-4")), Invalid),
    Row("runtime version: unknown", RUNTIMES_PAGE,
        lambda w: create(w, node=tpu_v2.Node(accelerator_type="v5litepod-4",
                                             runtime_version="v9-beta")), Invalid, "v9-beta"),
    *(
        Row(f"runtime version: {version}", RUNTIMES_PAGE,
            lambda w, v=version: w.client.get_runtime_version(
                name=f"{PARENT}/runtimeVersions/{v}").version,
            check=lambda answer, v=version: answer == v)
        for version in ("v2-alpha-tpuv6e", "v2-alpha-tpuv5", "v2-alpha-tpuv5-lite",
                        "tpu-ubuntu2204-base", "tpu-vm-tf-2.18.0-pjrt",
                        "tpu-vm-tf-2.18.0-pod-pjrt")
    ),
    Row("accelerator: missing", PROTO,
        lambda w: create(w, node=tpu_v2.Node(runtime_version="tpu-ubuntu2204-base")), Invalid),
    Row("accelerator: unknown type", ZONES_PAGE, lambda w: create(w, accelerator="v5litepod-5"),
        Invalid, "the accelerator v5litepod-5 was not found in zone us-central1-a"),
    Row("accelerator: marketing name", PROTO, lambda w: create(w, accelerator="v5e-4"), Invalid),
    Row("accelerator: not in this zone", ZONES_PAGE, lambda w: create(w, accelerator="v4-8"),
        Invalid, "the accelerator v4-8 was not found in zone us-central1-a"),
    Row("accelerator: by type and topology", PROTO,
        lambda w: created(w, node=tpu_v2.Node(
            runtime_version="v2-alpha-tpuv5-lite",
            accelerator_config={"type_": "V5LITE_POD", "topology": "4x4"})),
        check=lambda node: node.accelerator_type == "v5litepod-16"),
    Row("accelerator: unknown topology", PROTO,
        lambda w: create(w, node=tpu_v2.Node(
            runtime_version="v2-alpha-tpuv5-lite",
            accelerator_config={"type_": "V5LITE_POD", "topology": "3x3"})), Invalid),
    Row("description: 513 characters", PROTO, lambda w: create(w, description="x" * 513), Invalid),
    Row("description: 512 characters", PROTO, lambda w: create(w, description="x" * 512)),
    Row("network_config and network_configs", PROTO,
        lambda w: create(w, network_config={"network": "a"}, network_configs=[{"network": "b"}]),
        Invalid),
    Row("cidr block: not a /29", PROTO, lambda w: create(w, cidr_block="10.2.0.0/24"), Invalid),
    Row("spot and reserved", PROTO,
        lambda w: create(w, node=tpu_v2.Node(
            accelerator_type="v5litepod-4", runtime_version="v2-alpha-tpuv5-lite",
            scheduling_config={"spot": True, "reserved": True})), Invalid),
    Row("spot and preemptible", UNSTATED,
        lambda w: create(w, node=tpu_v2.Node(
            accelerator_type="v5litepod-4", runtime_version="v2-alpha-tpuv5-lite",
            scheduling_config={"spot": True, "preemptible": True})), Invalid, "both spot and"),
    *(
        Row(f"network: {kind}", PROTO,
            lambda w, url=url: create(w, network_config={"network": url}),
            refused, text)
        for kind, url, refused, text in (
            ("a name", "default", None, ""),
            ("a partial URL", "global/networks/default", None, ""),
            ("a full URL", "https://www.googleapis.com/compute/v1/projects/h/global/networks/n",
             None, ""),
            ("a malformed URL", "networks/default", Invalid, "malformed"),
            ("of another kind", "projects/p/global/firewalls/default", Invalid, "malformed"),
        )
    ),
    # Labels, tags, metadata
    Row("label: upper-case value", LABELS_PAGE, lambda w: create(w, labels={"a": "B"}), Invalid),
    Row("label: 64-character key", LABELS_PAGE,
        lambda w: create(w, labels={"a" * 64: ""}), Invalid),
    Row("labels: 65", LABELS_PAGE,
        lambda w: create(w, labels={f"k{n}": "" for n in range(65)}), Invalid),
    Row("labels: 64", LABELS_PAGE, lambda w: create(w, labels={f"k{n}": "" for n in range(64)})),
    Row("tag: upper case", TAGS_PAGE, lambda w: create(w, tags=["Web"]), Invalid),
    Row("tags: 65", TAGS_PAGE, lambda w: create(w, tags=[f"t{n}" for n in range(65)]), Invalid),
    Row("metadata: key with a dot", METADATA_PAGE, lambda w: create(w, metadata={"a.b": ""}),
        Invalid),
    Row("metadata: 129-byte key", METADATA_PAGE, lambda w: create(w, metadata={"a" * 129: ""}),
        Invalid),
    Row("metadata: 128-byte key", METADATA_PAGE, lambda w: create(w, metadata={"a" * 128: ""})),
    Row("metadata: value over 256 KiB", METADATA_PAGE,
        lambda w: create(w, metadata={"a": "x" * (256 * 1024 + 1)}), Invalid),
    Row("metadata: value of 256 KiB", METADATA_PAGE,
        lambda w: create(w, metadata={"a": "x" * 256 * 1024})),
    Row("metadata: over 512 KiB together", METADATA_PAGE,
        lambda w: create(w, metadata={key: "x" * 200 * 1024 for key in "abc"}), Invalid),
    # Disks
    Row("disk: not a full path", PROTO,
        lambda w: create(w, data_disks=[{"source_disk": "my-disk"}]), Invalid),
    Row("disk: of another zone", DISKS_PAGE,
        lambda w: create(w, data_disks=[disk(zone="us-east1-d")]), Invalid),
    Row("disk: read-write on one host", DISKS_PAGE, lambda w: created(w, data_disks=[disk()]),
        check=lambda node: node.data_disks[0].mode.name == "READ_WRITE"),
    Row("disk: the default mode is read-write", PROTO,
        lambda w: created(w, data_disks=[{"source_disk": disk().source_disk}]),
        check=lambda node: node.data_disks[0].mode.name == "READ_WRITE"),
    Row("disk: read-write on several hosts", DISKS_PAGE,
        lambda w: create(w, accelerator="v5litepod-16", data_disks=[disk()]), Invalid,
        "read-only"),
    Row("disk: read-only on several hosts", DISKS_PAGE,
        lambda w: create(w, accelerator="v5litepod-16", data_disks=[disk(read_only=True)])),
    Row("disk: read-write on a second node", PROTO,
        lambda w: (create(w, data_disks=[disk()]), create(w, "b", data_disks=[disk()])), Invalid),
    Row("disk: read-only on a second node", PROTO,
        lambda w: (create(w, data_disks=[disk(read_only=True)]),
                   create(w, "b", data_disks=[disk(read_only=True)]))),
)  # fmt: skip

FILLED_ROWS = (
    Row("default network", PROTO, created,
        check=lambda node: node.network_config.network == "projects/p/global/networks/default"),
    Row("default subnetwork", PROTO, created,
        check=lambda node: node.network_config.subnetwork
        == "projects/p/regions/us-central1/subnetworks/default"),
    Row("default service account", PROTO, created,
        check=lambda node: node.service_account.email.endswith(
            "-compute@developer.gserviceaccount.com")),
    Row("default scope", PROTO, created,
        check=lambda node: list(node.service_account.scope)
        == ["https://www.googleapis.com/auth/cloud-platform"]),
    Row("a service account is kept", PROTO,
        lambda w: created(w, service_account={"email": "x@p.iam.gserviceaccount.com"}),
        check=lambda node: node.service_account.email == "x@p.iam.gserviceaccount.com"),
    Row("external addresses on request", PROTO,
        lambda w: created(w, network_config={"enable_external_ips": True}),
        check=lambda node: node.network_endpoints[0].access_config.external_ip),
    Row("no external address by default", PROTO, created,
        check=lambda node: not node.network_endpoints[0].access_config.external_ip),
    Row("one endpoint per host", PROTO, lambda w: created(w, accelerator="v5litepod-32"),
        check=lambda node: len({end.ip_address for end in node.network_endpoints}) == 8),
    Row("no endpoints while creating", PROTO,
        lambda w: (create(w), w.client.get_node(name=name()))[1],
        check=lambda node: not node.network_endpoints and node.state.name == "CREATING"),
    Row("accelerator config", PROTO, lambda w: created(w, accelerator="v5litepod-16"),
        check=lambda node: (node.accelerator_config.type_.name, node.accelerator_config.topology)
        == ("V5LITE_POD", "4x4")),
    Row("api version", PROTO, created, check=lambda node: node.api_version.name == "V2"),
    Row("unique ids", PROTO, lambda w: (created(w, node_id="x"), created(w, node_id="y")),
        check=lambda pair: pair[0].id != pair[1].id and all(each.id > 0 for each in pair)),
    Row("output-only fields are ignored", PROTO,
        lambda w: created(w, health_description="mine", queued_resource="q", multislice_node=True),
        check=lambda node: not node.multislice_node and not node.queued_resource
        and not node.health_description),
    Row("not a multislice node", PROTO, created, check=lambda node: not node.multislice_node),
    Row("creation time", PROTO, created, check=lambda node: node.create_time),
    Row("several networks are kept in order", PROTO,
        lambda w: created(w, network_configs=[{"network": "a"}, {"network": "b"}]),
        check=lambda node: [each.network.rpartition("/")[2] for each in node.network_configs]
        == ["a", "b"]),
    Row("options of the network are kept", PROTO,
        lambda w: created(w, network_config={"can_ip_forward": True, "queue_count": 8}),
        check=lambda node: node.network_config.can_ip_forward
        and node.network_config.queue_count == 8),
    Row("secure boot is kept", PROTO,
        lambda w: created(w, shielded_instance_config={"enable_secure_boot": True}),
        check=lambda node: node.shielded_instance_config.enable_secure_boot),
    Row("scopes of a service account are kept", PROTO,
        lambda w: created(w, service_account={"email": "x@p.iam.gserviceaccount.com",
                                              "scope": ["https://a/b"]}),
        check=lambda node: list(node.service_account.scope) == ["https://a/b"]),
    Row("without scopes an account has all", PROTO,
        lambda w: created(w, service_account={"email": "x@p.iam.gserviceaccount.com"}),
        check=lambda node: list(node.service_account.scope)
        == ["https://www.googleapis.com/auth/cloud-platform"]),
    Row("healthy when ready", PROTO, created, check=lambda node: node.health.name == "HEALTHY"),
)  # fmt: skip

V6E = "projects/p/locations/us-east5-b"


def v6e() -> tpu_v2.Node:
    return tpu_v2.Node(accelerator_type="v6e-8", runtime_version="v2-alpha-tpuv6e")


def queued_v6e(world: EmulatedCloud) -> None:
    """A queued resource `q` whose node `a` is READY."""
    spec = tpu_v2.QueuedResource.Tpu.NodeSpec(parent=V6E, node_id="a", node=v6e())
    request = tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]))
    world.client.create_queued_resource(
        parent=V6E, queued_resource_id="q", queued_resource=request, timeout=900
    )
    world.advance(LONG)


def start_queued(world: EmulatedCloud, node_id: str) -> Any:
    request = {"name": f"{V6E}/queuedResources/q", "node_names": [node_id]}
    return alpha(world).perform_maintenance_queued_resource(request, timeout=900).result(900)


LIFECYCLE_ROWS = (
    Row("get: not found", PROTO, lambda w: w.client.get_node(name=name("no")), exceptions.NotFound,
        "projects/p/locations/us-central1-a/nodes/no"),
    Row("delete: not found", PROTO, lambda w: w.client.delete_node(name=name("no")),
        exceptions.NotFound),
    Row("stop: one host", PROTO,
        lambda w: after(w, LONG, created, lambda w: w.client.stop_node(request={"name": name()}),
                        lambda w: w.state("a")), check=lambda state: state == "STOPPED"),
    Row("stop: passes through STOPPING", PROTO,
        lambda w: after(w, 0, created, lambda w: w.client.stop_node(request={"name": name()}),
                        lambda w: w.state("a")), check=lambda state: state == "STOPPING"),
    Row("stop: several hosts", PROTO,
        lambda w: (created(w, accelerator="v5litepod-16"),
                   w.client.stop_node(request={"name": name()})), Precondition, "single TPU node"),
    Row("stop: of a queued resource", UNSTATED,
        lambda w: (enqueue(w, queued("a", accelerator="v5litepod-4")), w.advance(LONG),
                   w.client.stop_node(request={"name": name()})), Precondition, "queued resource"),
    Row("stop: while creating", PROTO,
        lambda w: (create(w), w.client.stop_node(request={"name": name()})), Precondition),
    Row("start: a stopped node", PROTO,
        lambda w: after(w, LONG, created, lambda w: w.client.stop_node(request={"name": name()}),
                        lambda w: w.client.start_node(request={"name": name()}),
                        lambda w: w.state("a")), check=lambda state: state == "READY"),
    Row("start: a running node", PROTO,
        lambda w: (created(w), w.client.start_node(request={"name": name()})), Precondition),
    Row("update: labels", PROTO,
        lambda w: after(w, LONG, created, lambda w: update(w, "labels", labels={"a": "b"}),
                        lambda w: dict(w.client.get_node(name=name()).labels)),
        check=lambda labels: labels == {"a": "b"}),
    Row("update: external addresses", PROTO,
        lambda w: after(w, LONG, created,
                        lambda w: update(w, "network_config.enable_external_ips",
                                         network_config={"enable_external_ips": True}),
                        lambda w: w.client.get_node(name=name())),
        check=lambda node: node.network_endpoints[0].access_config.external_ip),
    Row("update: only the fields of the mask", PROTO,
        lambda w: after(w, LONG, created,
                        lambda w: update(w, "description", description="new", tags=["ignored"]),
                        lambda w: w.client.get_node(name=name())),
        check=lambda node: node.description == "new" and not node.tags),
    Row("update: metadata", PROTO,
        lambda w: after(w, LONG, created, lambda w: update(w, "metadata", metadata={"a": "b"}),
                        lambda w: dict(w.client.get_node(name=name()).metadata)),
        check=lambda metadata: metadata == {"a": "b"}),
    Row("update: tags", PROTO,
        lambda w: after(w, LONG, created, lambda w: update(w, "tags", tags=["web"]),
                        lambda w: list(w.client.get_node(name=name()).tags)),
        check=lambda tags: tags == ["web"]),
    Row("update: accelerator type", PROTO,
        lambda w: (created(w), update(w, "accelerator_type", accelerator_type="v5litepod-8")),
        Invalid),
    Row("update: not found", PROTO, lambda w: update(w, "labels", labels={"a": "b"}),
        exceptions.NotFound),
    Row("update: runtime version", PROTO,
        lambda w: (created(w), update(w, "runtime_version", runtime_version="tpu-vm-base")),
        Invalid),
    Row("update: empty mask", PROTO, lambda w: (created(w), update(w)), Invalid),
    Row("update: invalid label", LABELS_PAGE,
        lambda w: (created(w), update(w, "labels", labels={"A": ""})), Invalid),
    Row("update: a preempted node", PROTO,
        lambda w: (created(w), w.preempt("a"), update(w, "labels", labels={"a": "b"})), Invalid,
        "not supported while in state PREEMPTED"),
    Row("a preempted node stays listed", "tpu/docs/preemptible",
        lambda w: (created(w), w.preempt("a"), w.state("a"))[-1],
        check=lambda state: state == "PREEMPTED"),
    Row("an on-demand node is not preempted by a storm", "tpu/docs/preemptible",
        lambda w: (created(w, spot=False), w.advance(24 * 3600), w.state("a"))[-1],
        check=lambda state: state == "READY"),
    Row("operation: name", OPERATIONS_PAGE, create,
        check=lambda operation: operation.operation.name.startswith(
            f"{PARENT}/operations/operation-")),
    Row("operation: metadata of a creation", PROTO, lambda w: create(w).metadata,
        check=lambda metadata: (metadata.verb, metadata.target, metadata.api_version)
        == ("create", name(), "v2")),
    Row("operation: end time", PROTO,
        lambda w: (operation := create(w), w.advance(LONG), operation.result(timeout=900),
                   operation.metadata)[-1],
        check=lambda metadata: metadata.end_time > metadata.create_time),
    Row("operation: not found", OPERATIONS_PAGE,
        lambda w: w.client.get_operation({"name": f"{PARENT}/operations/no"}), exceptions.NotFound),
    Row("operation: listed under its location", OPERATIONS_PAGE,
        lambda w: (create(w), w.client.list_operations({"name": PARENT}).operations)[1],
        check=lambda operations: len(operations) == 1),
    Row("list: every zone", PROTO,
        lambda w: (create(w), list(w.client.list_nodes(parent="projects/p/locations/-")))[1],
        check=lambda nodes: [each.name for each in nodes] == [name()]),
    Row("list: another project", PROTO,
        lambda w: (create(w),
                   list(w.client.list_nodes(parent=f"projects/other/locations/{ZONE}")))[1],
        check=lambda nodes: nodes == []),
    Row("list: invalid page token", "AIP-158",
        lambda w: list(w.client.list_nodes(request={"parent": PARENT, "page_token": "?"})),
        Invalid),
    Row("list: negative page size", "AIP-158",
        lambda w: list(w.client.list_nodes(request={"parent": PARENT, "page_size": -1})), Invalid),
)  # fmt: skip

CATALOG_ROWS = (
    Row("types of a zone", ZONES_PAGE, lambda w: type_names(w, "us-central2-b"),
        check=lambda types: {each.split("-")[0] for each in types} == {"v4"}),
    Row("types of another zone", ZONES_PAGE, lambda w: type_names(w, "us-east5-b"),
        check=lambda types: "v6e-8" in types and "v4-8" not in types),
    Row("only small v3 in us-central1-a", ZONES_PAGE, lambda w: type_names(w, ZONE),
        check=lambda types: {each for each in types if each.startswith("v3")} == {"v3-8"}),
    Row("type: configs", PROTO,
        lambda w: w.client.get_accelerator_type(
            name=f"{PARENT}/acceleratorTypes/v5litepod-16").accelerator_configs,
        check=lambda configs: [each.topology for each in configs] == ["4x4"]),
    Row("type: not in this zone", ZONES_PAGE,
        lambda w: w.client.get_accelerator_type(name=f"{PARENT}/acceleratorTypes/v4-8"),
        exceptions.NotFound),
    Row("runtime versions", RUNTIMES_PAGE,
        lambda w: {each.version for each in w.client.list_runtime_versions(parent=PARENT)},
        check=lambda versions: {"tpu-ubuntu2204-base", "v2-alpha-tpuv6e"} <= versions),
    Row("runtime version: not found", RUNTIMES_PAGE,
        lambda w: w.client.get_runtime_version(name=f"{PARENT}/runtimeVersions/v9-beta"),
        exceptions.NotFound),
    Row("locations", PROTO,
        lambda w: w.client.list_locations({"name": "projects/p"}).locations,
        check=lambda found: {"us-central1-a", "us-central2-b", "us-south1-ai1b"}
        <= {each.location_id for each in found}),
    Row("API: not enabled in the project", "service-usage/docs/enabled-service",
        lambda w: (w.disable_api(), w.client.list_nodes(parent=PARENT, retry=None)),
        exceptions.PermissionDenied, "has not been used in project"),
    Row("API: enabled", "service-usage/docs/enabled-service",
        lambda w: (w.disable_api(), w.enable_api(), list(w.client.list_nodes(parent=PARENT)))[-1],
        check=lambda nodes: nodes == []),
    Row("location", PROTO, lambda w: w.client.get_location({"name": PARENT}),
        check=lambda found: (found.name, found.location_id) == (PARENT, ZONE)),
    Row("location: not found", PROTO,
        lambda w: w.client.get_location({"name": "projects/p/locations/us-nowhere1-a"}),
        exceptions.PermissionDenied),
    Row("service identity", PROTO,
        lambda w: w.client.generate_service_identity(request={"parent": PARENT}).identity.email,
        check=lambda email: email.endswith("@cloud-tpu.iam.gserviceaccount.com")),
    Row("guest attributes: of every worker", PROTO,
        lambda w: (created(w, accelerator="v5litepod-16"),
                   w.write_guest_attribute("a", "tpufleet/stage", "ready"),
                   guest(w, "tpufleet/"))[-1],
        check=lambda found: [
            (entry.namespace, entry.key, entry.value)
            for worker in found for entry in worker.query_value.items
        ] == [("tpufleet", "stage", "ready")] * 4),
    Row("guest attributes: of one worker", PROTO,
        lambda w: (created(w, accelerator="v5litepod-16"),
                   w.write_guest_attribute("a", "tpufleet/stage", "ready"),
                   guest(w, "tpufleet/stage", "2"))[-1],
        check=lambda found: len(found) == 1 and found[0].query_path == "tpufleet/stage"),
    Row("guest attributes: none", GUEST_PAGE, lambda w: (created(w), guest(w, "tpufleet/")),
        Invalid, '"GuestAttributes"'),
    Row("guest attributes: no such worker", PROTO,
        lambda w: (created(w), w.write_guest_attribute("a", "tpufleet/stage", "ready"),
                   guest(w, "tpufleet/", "7")), Invalid),
    Row("guest attributes: no such node", PROTO, lambda w: guest(w, "tpufleet/"),
        exceptions.NotFound),
)  # fmt: skip

QUEUE_ROWS = (
    Row("queue: one node becomes active", QUEUE_PAGE,
        lambda w: after(w, LONG, enqueue, queue_state), check=lambda state: state == "ACTIVE"),
    Row("queue: first accepted", QUEUE_PAGE, lambda w: (enqueue(w), queue_state(w))[1],
        check=lambda state: state in ("CREATING", "ACCEPTED")),
    Row("queue: its node names it", PROTO,
        lambda w: after(w, LONG, enqueue, lambda w: w.client.get_node(name=name())),
        check=lambda node: node.queued_resource == f"{PARENT}/queuedResources/q"),
    Row("queue: id with other characters", PROTO, lambda w: enqueue(w, queued_id="Q_1.a~b+c%d")),
    Row("queue: id with a slash", PROTO, lambda w: enqueue(w, queued_id="a b"), Invalid),
    Row("queue: id chosen by the service", PROTO, lambda w: enqueue(w, queued_id=""),
        check=lambda operation: operation.metadata.target.rpartition("/")[2]),
    Row("queue: id taken", PROTO,
        lambda w: (enqueue(w), enqueue(w, queued("b"))), exceptions.AlreadyExists),
    Row("queue: the same request id", PROTO,
        lambda w: (enqueue(w, request_id="7c1f3a52-0000-4000-8000-000000000001"),
                   enqueue(w, request_id="7c1f3a52-0000-4000-8000-000000000001")),
        check=lambda pair: pair[0].operation.name == pair[1].operation.name),
    Row("queue: no node", PROTO,
        lambda w: enqueue(w, tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu())), Invalid),
    Row("queue: node in another zone", PROTO,
        lambda w: w.client.create_queued_resource(
            parent="projects/p/locations/us-west4-a", queued_resource_id="q",
            queued_resource=queued("a")), Invalid),
    Row("multislice: node_count 1", PROTO, lambda w: enqueue(w, gang(1)), Invalid, "node_count"),
    Row("multislice: node_count 0", PROTO, lambda w: enqueue(w, gang(0)), Invalid),
    Row("multislice: names from the prefix", PROTO,
        lambda w: after(w, LONG, lambda w: enqueue(w, gang()), names),
        check=lambda found: found == ["np-0", "np-1", "np-2"]),
    Row("multislice: default prefix", PROTO,
        lambda w: after(w, LONG, lambda w: enqueue(w, gang(2, "")), names),
        check=lambda found: found == ["q-0", "q-1"]),
    Row("multislice: multislice_node", PROTO,
        lambda w: after(w, LONG, lambda w: enqueue(w, gang()),
                        lambda w: w.client.get_node(name=name("np-1"))),
        check=lambda node: node.multislice_node),
    Row("multislice: a single queued node is none", PROTO,
        lambda w: after(w, LONG, enqueue, lambda w: w.client.get_node(name=name())),
        check=lambda node: not node.multislice_node),
    Row("valid_after_duration: not before", PROTO,
        lambda w: after(w, 3000, lambda w: enqueue(w, policy(
            valid_after_duration=timedelta(hours=1))), lambda w: (queue_state(w), names(w))),
        check=lambda found: found[0] in ("ACCEPTED", "WAITING_FOR_RESOURCES") and not found[1]),
    Row("valid_after_duration: then provisioned", PROTO,
        lambda w: after(w, 3600 + LONG, lambda w: enqueue(w, policy(
            valid_after_duration=timedelta(hours=1))), queue_state),
        check=lambda state: state == "ACTIVE"),
    Row("valid_after_time", PROTO,
        lambda w: after(w, 3000, lambda w: enqueue(w, policy(
            valid_after_time=w.clock.now() + timedelta(hours=1))), names),
        check=lambda found: found == []),
    Row("valid_until_duration: fails", PROTO,
        lambda w: (w.empty(), after(w, 700, lambda w: enqueue(w, policy(
            valid_until_duration=timedelta(minutes=10))),
            lambda w: w.client.get_queued_resource(name=f"{PARENT}/queuedResources/q")))[1],
        check=lambda found: found.state.state.name == "FAILED" and found.state.failed_data.error),
    Row("valid_until_time: fails", PROTO,
        lambda w: (w.empty(), after(w, 700, lambda w: enqueue(w, policy(
            valid_until_time=w.clock.now() + timedelta(minutes=10))), queue_state))[1],
        check=lambda state: state == "FAILED"),
    Row("valid_interval: waits for its start", PROTO,
        lambda w: after(w, 1000, lambda w: enqueue(w, policy(
            valid_interval=interval(w, 1800, 3600))), names), check=lambda found: found == []),
    Row("valid_interval: fails after its end", PROTO,
        lambda w: (w.empty(), after(w, 4000, lambda w: enqueue(w, policy(
            valid_interval=interval(w, 1800, 3600))), queue_state))[1],
        check=lambda state: state == "FAILED"),
    Row("queue: waits without stock", QUEUE_PAGE,
        lambda w: (w.empty(), after(w, LONG, enqueue, queue_state))[1],
        check=lambda state: state == "WAITING_FOR_RESOURCES"),
    Row("queue: delete an active one without force", PROTO,
        lambda w: after(w, LONG, enqueue, delete_queued), Precondition),
    Row("queue: delete an active one with force", PROTO,
        lambda w: after(w, LONG, enqueue, lambda w: delete_queued(w, force=True), names),
        check=lambda found: found == []),
    Row("queue: delete a waiting one", PROTO,
        lambda w: (w.empty(), after(w, LONG, enqueue, delete_queued))[1]),
    Row("queue: delete a failed one", PROTO,
        lambda w: (w.empty(), after(w, LONG, lambda w: enqueue(w, policy(
            valid_until_duration=timedelta(minutes=5))), delete_queued))[1]),
    Row("queue: a preempted node suspends it", QUEUE_PAGE,
        lambda w: after(w, LONG, enqueue, lambda w: w.preempt("a"), queue_state),
        check=lambda state: state == "SUSPENDED"),
    Row("queue: suspended by the service", PROTO,
        lambda w: after(w, LONG, enqueue, lambda w: w.preempt("a"),
                        lambda w: w.client.get_queued_resource(
                            name=f"{PARENT}/queuedResources/q").state.state_initiator.name),
        check=lambda initiator: initiator == "SERVICE"),
    Row("queue: reset returns it to the queue", PROTO,
        lambda w: after(w, LONG, enqueue, lambda w: w.preempt("a"),
                        lambda w: w.client.reset_queued_resource(
                            name=f"{PARENT}/queuedResources/q"), queue_state),
        check=lambda state: state == "ACTIVE"),
    Row("queue: creation time", PROTO,
        lambda w: (enqueue(w), w.client.get_queued_resource(
            name=f"{PARENT}/queuedResources/q"))[1], check=lambda found: found.create_time),
    Row("queue: listed", PROTO,
        lambda w: (enqueue(w), list(w.client.list_queued_resources(parent=PARENT)))[1],
        check=lambda found: [each.name for each in found] == [f"{PARENT}/queuedResources/q"]),
    Row("queue: listed over every zone", PROTO,
        lambda w: (enqueue(w), list(w.client.list_queued_resources(
            parent="projects/p/locations/-")))[1], check=lambda found: len(found) == 1),
    Row("queue: a reservation by its full name", PROTO,
        lambda w: enqueue(w, queued("a", spot=False, guaranteed={}, reservation_name=(
            f"{PARENT}/reservations/r")))),
    Row("queue: a reservation by its short name", PROTO,
        lambda w: enqueue(w, queued("a", spot=False, guaranteed={}, reservation_name="r")),
        Invalid, "ReservationName"),
    Row("queue: an invalid node is refused at once", PROTO,
        lambda w: enqueue(w, queued("a", accelerator="v5litepod-5")), Invalid),
    Row("queue: reset an active one", PROTO,
        lambda w: after(w, LONG, enqueue, lambda w: w.client.reset_queued_resource(
            name=f"{PARENT}/queuedResources/q")), Precondition),
    Row("queue: delete not found", PROTO, delete_queued, exceptions.NotFound),
    Row("queue: not found", PROTO, lambda w: queue_state(w, "no"), exceptions.NotFound),
    Row("queue: reserved needs a reservation or guaranteed", PROTO,
        lambda w: enqueue(w, queued("a", spot=False, guaranteed={}))),
)  # fmt: skip

ALPHA_ROWS = (
    Row("alpha: no maintenance", MAINTENANCE_PAGE,
        lambda w: (created(w), alpha(w).get_node(name=name()))[1],
        check=lambda node: not node.upcoming_maintenance.window_start_time),
    Row("alpha: scheduled maintenance", MAINTENANCE_PAGE,
        lambda w: (created(w), w.plan_maintenance("a", days=7),
                   alpha(w).get_node(name=name()))[2].upcoming_maintenance,
        check=lambda found: found.type_.name == "SCHEDULED"
        and found.maintenance_status.name == "PENDING"),
    Row("alpha: a window in RFC 3339", PROTO,
        lambda w: (created(w), w.plan_maintenance("a", days=7),
                   next(iter(alpha(w).list_nodes(parent=PARENT))))[2].upcoming_maintenance,
        check=lambda found: found.window_start_time < found.window_end_time
        and found.window_start_time.endswith("Z")),
    Row("alpha: a simulated event reaches the hosts", ALPHA_PROTO,
        lambda w: (created(w), alpha(w).simulate_maintenance_event({"name": name()}, timeout=900)
                   .result(timeout=900))[1],
        check=lambda node: node.health.name == "UNHEALTHY_MAINTENANCE"),
    Row("alpha: a simulated event of an unknown worker", ALPHA_PROTO,
        lambda w: (created(w), alpha(w).simulate_maintenance_event(
            {"name": name(), "worker_ids": ["1"]}, timeout=900)), Invalid, "worker"),
    Row("alpha: maintenance of nodes of a queued resource", ALPHA_PROTO,
        lambda w: (queued_v6e(w), w.plan_maintenance("a", days=7, parent=V6E),
                   start_queued(w, "a"), alpha(w).get_node(name=f"{V6E}/nodes/a"))[-1],
        check=lambda node: node.upcoming_maintenance.maintenance_status.name == "ONGOING"),
    Row("alpha: maintenance of a node of another queued resource", ALPHA_PROTO,
        lambda w: (queued_v6e(w), create(w, "b", V6E, node=v6e()), start_queued(w, "b")), Invalid,
        "not part of"),
    Row("alpha: maintenance of a queued resource that is not found", ALPHA_PROTO,
        lambda w: start_queued(w, "a"), exceptions.NotFound),
    Row("alpha: no reservations", ALPHA_PROTO,
        lambda w: list(alpha(w).list_reservations({"parent": PARENT})),
        check=lambda found: not found),
    Row("alpha: reservations of a location that does not exist", ALPHA_PROTO,
        lambda w: alpha(w).list_reservations({"parent": "projects/p/locations/nowhere"}),
        (exceptions.NotFound, Invalid, exceptions.PermissionDenied)),
    Row("alpha: the same nodes", PROTO,
        lambda w: (created(w, labels={"a": "b"}), alpha(w).get_node(name=name()))[1],
        check=lambda node: node.state.name == "READY" and node.labels["a"] == "b"),
)  # fmt: skip

# Fault of the plan, method, class, code and reason of ErrorInfo, text of the message.
ERROR_ROWS = (
    ("unauthenticated", "ListNodes", exceptions.Unauthenticated, "ACCESS_TOKEN_EXPIRED",
     "invalid authentication credentials"),
    ("permission", "ListNodes", exceptions.PermissionDenied, "IAM_PERMISSION_DENIED",
     "tpu.nodes.list"),
    ("permission", "CreateNode", exceptions.PermissionDenied, "IAM_PERMISSION_DENIED",
     "tpu.nodes.create"),
    ("disabled", "ListNodes", exceptions.PermissionDenied, "SERVICE_DISABLED",
     "console.developers.google.com/apis/api/tpu.googleapis.com"),
    ("rate", "ListNodes", exceptions.ResourceExhausted, "RATE_LIMIT_EXCEEDED",
     "Quota exceeded for quota metric"),
    ("quota", "CreateNode", exceptions.ResourceExhausted, "", "PerProjectPerZoneForTPUAPI"),
    ("stockout", "CreateNode", exceptions.ResourceExhausted, "", "no more capacity in the zone"),
    ("reservation", "CreateNode", exceptions.FailedPrecondition, "",
     "Insufficient reserved capacity"),
    ("unavailable", "CreateNode", exceptions.ServiceUnavailable, "", ""),
    ("internal", "ListNodes", exceptions.InternalServerError, "", "internal error"),
)  # fmt: skip
ROWS = (
    *NODE_ROWS, *FILLED_ROWS, *LIFECYCLE_ROWS, *CATALOG_ROWS, *QUEUE_ROWS, *ALPHA_ROWS,
)  # fmt: skip
