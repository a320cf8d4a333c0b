"""Lists what a Google Cloud project contains and pays for: TPU VMs, queued resources, VMs and
groups of them, GKE node pools, disks and addresses. Nothing is changed.

https://cloud.google.com/compute/docs/reference/rest/v1,
https://cloud.google.com/kubernetes-engine/docs/reference/rest/v1/projects.locations.clusters"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from google.cloud import tpu_v2

from tpufleet.errors import ProviderError, ProviderUnavailable
from tpufleet.model.fleet.paid_resources import Belongs, PaidResource
from tpufleet.model.tpu import prices, server_vm_prices, type_lookup
from tpufleet.providers.tpu_vm import adoption, naming, states
from tpufleet.providers.tpu_vm.api import TpuApi
from tpufleet.providers.tpu_vm.google_rest import Answer, GoogleRest
from tpufleet.providers.tpu_vm.manual_nodes import MANUAL_LABELS
from tpufleet.providers.tpu_vm.server_vm import addresses_of

Prices = Mapping[tuple[str, str], prices.Price]

SERVER_LABEL = ("tpufleet", "server")  # of the VM of `tpu deploy server`
# Labels that GKE gives the VMs of its node pools.
GKE_CLUSTER, GKE_POOL = "goog-k8s-cluster-name", "goog-k8s-node-pool-name"
# Of node pools that the provisioner makes, and deletes.
MANAGER = ("google.com/nodepool-manager", "tpu-provisioner")
GROUPS = "instance-groups managed"  # as gcloud calls them
CLUSTER_USD_PER_HOUR = 0.10  # https://cloud.google.com/kubernetes-engine/pricing
_NOT_BILLED = frozenset({"TERMINATED", "STOPPED", "PREEMPTED", "SUSPENDED", "DELETING"})


class ProjectResources:
    """`own`: hosts in URLs of the server that this machine uses."""

    def __init__(
        self,
        rest: GoogleRest,
        api: TpuApi | None,  # None: the project has no TPU VMs
        project: str,
        table: Prices,
        own: Collection[str],
        report: Callable[[str], None],
    ) -> None:
        self._rest = rest
        self._api = api
        self._project = project
        self._table = table
        self._own = set(own)
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._used: set[str] = set()  # internal addresses in these networks
        self._report = report  # what cannot be read

    def all(self) -> list[PaidResource]:
        """A part that cannot be read is reported and left out."""
        self._rest.connect()
        vms = self._readable(self._instances)
        return [
            *self._readable(self.tpus),
            *self._readable(lambda: list(self._vms(vms))),
            *self._readable(lambda: list(self._clusters(vms))),
            *self._readable(lambda: list(self._disks(vms))),
            *self._readable(lambda: list(self._addresses())),
        ]

    def tpus(self) -> list[PaidResource]:
        """TPU VMs of all zones, and queued resources without one."""
        api = self._api
        if api is None:
            return []
        with ThreadPoolExecutor(16) as pool:
            zones = api.list_zones(self._project)
            listed = list(pool.map(lambda zone: self._zone(api, zone), zones))
        return [each for zone in listed for each in zone]

    def of_server(self, hosts: Collection[str]) -> list[PaidResource]:
        """What slices of the server at these addresses consist of."""
        self._own = set(hosts)
        of_it = (Belongs.OURS, Belongs.ADOPTED)
        found = self._of_slices(list(self._aggregated("instances")))
        return [each for each in found if each.belongs in of_it and each.state != "DELETING"]

    def orphans(self) -> list[PaidResource]:
        """What slices of servers that are gone consist of."""
        vms = self._instances()
        return [each for each in self._of_slices(vms) if each.belongs is Belongs.ORPHANED]

    def _of_slices(self, vms: list[tuple[str, dict[str, Any]]]) -> list[PaidResource]:
        own = [(zone, vm) for zone, vm in vms if naming.FLEET in vm.get("labels", {})]
        return [*self.tpus(), *(self._vm(zone, vm) for zone, vm in own), *self._waiting(own)]

    def _readable(self, read: Callable[[], list[Any]]) -> list[Any]:
        try:
            return read()
        except ProviderError as error:
            self._report(f"warning: not listed: {error}")
            return []

    # Cloud TPU
    def _zone(self, api: TpuApi, zone: str) -> Iterable[PaidResource]:
        location = naming.TpuLocation(project=self._project, zone=zone)
        queued = api.list_queued_resources(location.path)
        nodes = api.list_nodes(location.path)
        found = [self._tpu_vm(node, zone) for node in nodes]
        with_node = {node.queued_resource for node in nodes}
        for item in queued:
            specs = item.tpu.node_spec
            if item.name not in with_node and specs:
                found.append(self._queued(item, specs[0].node, zone))
        return found

    def _tpu_vm(self, node: tpu_v2.Node, zone: str) -> PaidResource:
        name, state = naming.short_name(node.name), tpu_v2.Node.State(node.state).name
        belongs = self._owner(node)
        usd = None
        if type_lookup.is_known(kind := node.accelerator_type):
            price = prices.chip_hour_price(kind, states.capacity_of(node), self._table)
            usd = None if price is None else price * type_lookup.find(kind).chips
        end = f"tpu vm delete {name} --zone {zone}"
        if node.queued_resource:
            end = _delete_queued(naming.short_name(node.queued_resource), zone)
        return PaidResource(
            kind="TPU VM", name=name, location=zone,
            type=f"{type_lookup.short_name(kind)} {states.capacity_of(node)}", state=state,
            belongs=belongs, usd_per_hour=0.0 if state in _NOT_BILLED else usd,
            next=_next(belongs, node.labels, name, end),
        )  # fmt: skip

    def _queued(self, queued: tpu_v2.QueuedResource, node: tpu_v2.Node, zone: str) -> PaidResource:
        name, belongs = naming.short_name(queued.name), self._owner(node)
        return PaidResource(
            kind="queued resource", name=name, location=zone,
            type=type_lookup.short_name(node.accelerator_type),
            state=states.QueuedState(queued.state.state).name, belongs=belongs, usd_per_hour=0.0,
            next=_next(belongs, node.labels, name, _delete_queued(name, zone)),
        )  # fmt: skip

    def _owner(self, node: tpu_v2.Node) -> Belongs:
        if naming.FLEET not in node.labels:
            by_hand = MANUAL_LABELS.items() <= dict(node.labels).items()
            return Belongs.BY_HAND if by_hand else Belongs.OTHERS
        return self._fleet_of(node.metadata, node.labels)

    def _fleet_of(self, metadata: Mapping[str, str], labels: Mapping[str, str]) -> Belongs:
        """Whose slice it is, by the server that its hosts connect to."""
        host = urlsplit(metadata.get(naming.SERVER, "")).hostname or ""
        if host in self._own:
            return Belongs.ADOPTED if adoption.adopted_as(labels) else Belongs.OURS
        return Belongs.ORPHANED if self._is_free(host) else Belongs.OTHERS

    def _is_free(self, host: str) -> bool:
        """An address of this project that nothing has. Somebody's server elsewhere, also at the end
        of a VPN or in a shared VPC, cannot be seen."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return host not in self._used and any(address in each for each in self._networks)

    # Compute Engine
    def _aggregated(self, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Location and body of each resource of this kind."""
        path = f"compute/v1/projects/{self._project}/aggregated/{kind}"
        for answer in self._rest.pages("compute", path):
            _check(kind, answer)
            for scope, listed in answer.body.get("items", {}).items():
                for each in listed.get(kind, ()):
                    yield scope.rpartition("/")[2], each

    def _instances(self) -> list[tuple[str, dict[str, Any]]]:
        vms = list(self._aggregated("instances"))
        self._readable(lambda: self._find_servers(vms))
        return vms

    def _find_servers(self, vms: Iterable[tuple[str, dict[str, Any]]]) -> list[PaidResource]:
        """Where servers may be: VMs, and load balancers of GKE, say. They are no resource here."""
        for _, vm in vms:
            internal, external = addresses_of(vm)
            self._used.add(internal)
            if SERVER_LABEL in vm.get("labels", {}).items() and {internal, external} & self._own:
                self._own.add(internal)
        self._used |= {rule.get("IPAddress", "") for _, rule in self._aggregated("forwardingRules")}
        self._networks = [
            ipaddress.ip_network(each["ipCidrRange"])
            for _, each in self._aggregated("subnetworks")
            if "ipCidrRange" in each
        ]
        return []

    def _vms(self, vms: list[tuple[str, dict[str, Any]]]) -> Iterator[PaidResource]:
        """VMs of GKE are part of their node pools."""
        groups = {
            (zone, body["name"])
            for zone, body in self._aggregated("instanceGroupManagers")
            if naming.FLEET not in _config_of(body).get("labels", {})
        }
        grouped: Counter[tuple[str, str]] = Counter()
        for zone, vm in vms:
            if GKE_POOL in vm.get("labels", {}):
                groups.discard(_group_of(vm))
                continue
            grouped[_group_of(vm)] += 1
            yield self._vm(zone, vm)
        for zone, name in sorted(groups):
            yield PaidResource(
                kind="group", name=name, location=zone, type=f"{grouped[zone, name]} VMs", state="",
                belongs=Belongs.OTHERS, usd_per_hour=0.0,
            )  # fmt: skip
        yield from self._waiting(vms)

    def _vm(self, zone: str, vm: dict[str, Any]) -> PaidResource:
        name, labels = vm["name"], vm.get("labels", {})
        price = self._machine_price(zone, vm)
        external = server_vm_prices.ADDRESS_USD_PER_HOUR if addresses_of(vm)[1] else 0.0
        running = vm.get("status") not in _NOT_BILLED
        ours = SERVER_LABEL in labels.items() and addresses_of(vm)[0] in self._own
        belongs = Belongs.OURS if ours else Belongs.OTHERS
        end = f"tpu deploy server --delete --name {name}"
        if naming.FLEET in labels:
            items = vm.get("metadata", {}).get("items", ())
            metadata = {item["key"]: item.get("value", "") for item in items}
            belongs = self._fleet_of(metadata, labels)
            _, group = _group_of(vm)
            end = _delete(GROUPS, group, zone) if group else _delete("instances", name, zone)
        return PaidResource(
            kind="VM", name=name, location=zone, type=naming.short_name(vm["machineType"]),
            state=vm.get("status", ""), belongs=belongs,
            usd_per_hour=None if price is None else price + external if running else 0.0,
            next=_next(belongs, labels, name, end),
        )  # fmt: skip

    def _waiting(self, vms: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[PaidResource]:
        """Groups of slices that have no VM yet."""
        with_vms = {_group_of(vm) for _, vm in vms}
        for zone, group in self._aggregated("instanceGroupManagers"):
            config, name = _config_of(group), group["name"]
            labels = config.get("labels", {})
            if naming.FLEET in labels and (zone, name) not in with_vms:
                belongs = self._fleet_of(config.get("metadata", {}), labels)
                yield PaidResource(
                    kind="group", name=name, location=zone, type=f"{group['targetSize']} VMs",
                    state="WAITING", belongs=belongs, usd_per_hour=0.0,
                    next=_next(belongs, labels, name, _delete(GROUPS, name, zone)),
                )  # fmt: skip

    def _machine_price(self, zone: str, vm: dict[str, Any]) -> float | None:
        """Of one VM: a TPU machine, or one whose family has a known price."""
        machine = naming.short_name(vm["machineType"])
        scheduling = vm.get("scheduling", {})
        spot = scheduling.get("provisioningModel") == "SPOT" or scheduling.get("preemptible")
        for kind in type_lookup.all_types().values():
            if kind.machine_type == machine:
                capacity = "spot" if spot else "on-demand"
                chip = prices.chip_hour_price(kind.name, capacity, self._table)
                return None if chip is None else chip * kind.chips_per_host
        shape = self._rest.get(
            "compute", f"compute/v1/projects/{self._project}/zones/{zone}/machineTypes/{machine}"
        ).body
        if spot or "guestCpus" not in shape:
            return None
        return server_vm_prices.machine_usd_per_hour(machine, shape["guestCpus"], shape["memoryMb"])

    def _disks(self, vms: list[tuple[str, dict[str, Any]]]) -> Iterator[PaidResource]:
        server_disks = {
            naming.short_name(disk.get("source", ""))
            for _, vm in vms
            if addresses_of(vm)[0] in self._own
            for disk in vm.get("disks", ())
        }
        for zone, disk in self._aggregated("disks"):
            if GKE_POOL in disk.get("labels", {}):
                continue
            name, size = disk["name"], int(disk.get("sizeGb", 0))
            kind = naming.short_name(disk.get("type", ""))
            used, kept_state = bool(disk.get("users")), name.endswith("-state")
            state, belongs, end = "in use" if used else "unused", Belongs.OTHERS, ""
            if name in server_disks:
                state, belongs = "in use", Belongs.OURS
            elif not used and kept_state and "tpufleet" in disk.get("labels", {}):
                belongs = Belongs.ORPHANED
                end = f"tpu deploy server --delete --state --name {name.removesuffix('-state')}"
            yield PaidResource(
                kind="disk", name=name, location=zone, type=f"{kind} {size} GB", state=state,
                belongs=belongs, usd_per_hour=server_vm_prices.disk_usd_per_hour(kind, size),
                next=end,
            )  # fmt: skip

    def _addresses(self) -> Iterator[PaidResource]:
        """That are reserved and unused: the others are part of their VMs."""
        for region, address in self._aggregated("addresses"):
            external = address.get("addressType", "EXTERNAL") == "EXTERNAL"
            if address.get("status") == "RESERVED" and external:
                yield PaidResource(
                    kind="address", name=address["name"], location=region,
                    type=str(address.get("address", "")), state="unused", belongs=Belongs.OTHERS,
                    usd_per_hour=server_vm_prices.UNUSED_ADDRESS_USD_PER_HOUR,
                )  # fmt: skip

    # GKE
    def _clusters(self, vms: list[tuple[str, dict[str, Any]]]) -> Iterator[PaidResource]:
        path = f"v1/projects/{self._project}/locations/-/clusters"
        answer = self._rest.get("container", path)
        if answer.disabled_service:
            return
        _check("clusters", answer)
        for cluster in answer.body.get("clusters", ()):
            name, location = cluster["name"], cluster.get("location", "")
            yield PaidResource(
                kind="cluster", name=name, location=location, type="GKE",
                state=cluster.get("status", ""), belongs=Belongs.OTHERS,
                usd_per_hour=CLUSTER_USD_PER_HOUR,
            )  # fmt: skip
            for pool in cluster.get("nodePools", ()):
                nodes = [
                    (zone, vm)
                    for zone, vm in vms
                    if vm.get("labels", {}).get(GKE_CLUSTER) == name
                    and vm.get("labels", {}).get(GKE_POOL) == pool["name"]
                ]
                each = [self._machine_price(zone, vm) for zone, vm in nodes]
                config = pool.get("config", {})
                ours = MANAGER in config.get("labels", {}).items()
                yield PaidResource(
                    kind="node pool", name=f"{name}/{pool['name']}", location=location,
                    type=f"{len(nodes)} {config.get('machineType', '')}",
                    state=pool.get("status", ""), belongs=Belongs.OURS if ours else Belongs.OTHERS,
                    usd_per_hour=None if None in each else sum(filter(None, each)),
                )  # fmt: skip


def _check(kind: str, answer: Answer) -> None:
    if answer.status != 200:
        raise ProviderUnavailable(f"{kind}: {answer.message or answer.status}")


def _group_of(vm: Mapping[str, Any]) -> tuple[str, str]:
    """Zone or region, and name: projects/P/zones/Z/instanceGroupManagers/NAME.
    https://cloud.google.com/compute/docs/instance-groups/getting-info-about-migs"""
    items = vm.get("metadata", {}).get("items", ())
    created_by = [str(item.get("value")) for item in items if item.get("key") == "created-by"]
    words = created_by[0].split("/") if created_by else []
    return (words[-3], words[-1]) if len(words) > 3 else ("", "")


def _next(belongs: Belongs, labels: Mapping[str, str], name: str, end: str) -> str:
    if belongs in (Belongs.ADOPTED, Belongs.OURS):
        return naming.end_of_slice(labels, name) or end
    return "" if belongs is Belongs.OTHERS else end


def _config_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return (group.get("allInstancesConfig") or {}).get("properties") or {}


def _delete(kind: str, name: str, zone: str) -> str:
    return f"gcloud compute {kind} delete {name} --zone {zone}"


def _delete_queued(name: str, zone: str) -> str:
    return f"{_delete('tpus queued-resources', name, zone)} --force"
