"""Nodes made by hand, one at a time or a fleet side by side: created, waited for, deleted.

Unlike the provider, this waits: a person sits in front of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from google.cloud import tpu_v2

from tpufleet.errors import BadRequest, FleetError, NoCapacity, ProviderError, Temporary
from tpufleet.model import topology
from tpufleet.model.fleets import GONE_STATES, Member, NodeFacts, NodeWish
from tpufleet.providers.tpu_vm import failures, naming
from tpufleet.providers.tpu_vm.api import Api
from tpufleet.providers.tpu_vm.settings import CLOUD_PLATFORM, TpuVmSettings

SIDE_BY_SIDE = 32
LOOK_SECONDS = 5.0
BY_HAND = {"tpufleet-made": "by-hand"}


class Nodes:
    def __init__(
        self, api: Api, settings: TpuVmSettings, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.zones = settings.zones
        self._api = api
        self._settings = settings
        self._sleep = sleep

    # One node.
    def get(self, zone: str, name: str) -> NodeFacts:
        node = self._api.node(self._place(zone).node(name))
        if node is None:
            return NodeFacts(name=name, zone=zone, state="NOT_FOUND")
        return _facts(node, zone)

    def create(
        self, zone: str, name: str, wish: NodeWish, tries: int, delay: float
    ) -> NodeFacts:
        """Until it is READY. Tries again while that may help."""
        for left in range(tries, 0, -1):
            try:
                self._begin(zone, name, wish)
                return self._await_ready(zone, name)
            except ProviderError as error:
                if not isinstance(error, Temporary) or left == 1:
                    raise
                self._sleep(delay)
        raise NoCapacity(f"{name} could not be had in {tries} tries")

    def delete(self, zone: str, name: str) -> None:
        """Until it is gone."""
        full = self._place(zone).node(name)
        self._api.delete_node(full)
        while self._api.node(full) is not None:
            self._sleep(LOOK_SECONDS)

    def restart(self, zone: str, name: str) -> NodeFacts:
        """Stop and start; its disk stays."""
        self._api.stop_node(self._place(zone).node(name))
        self._await_state(zone, name, "STOPPED")
        self._api.start_node(self._place(zone).node(name))
        return self._await_ready(zone, name)

    # A fleet.
    def together(
        self, members: Iterable[Member], act: Callable[[Member], NodeFacts]
    ) -> Iterable[tuple[Member, NodeFacts | FleetError]]:
        """Act on all of them side by side; answers as they come."""
        members = list(members)
        with ThreadPoolExecutor(min(SIDE_BY_SIDE, max(len(members), 1))) as pool:
            futures = {pool.submit(act, member): member for member in members}
            for future in as_completed(futures):
                error = future.exception()
                if error is not None and not isinstance(error, FleetError):
                    raise error
                yield futures[future], error if error is not None else future.result()

    def mend(
        self, member: Member, wish: NodeWish, tries: int, delay: float
    ) -> NodeFacts | None:
        """Make it again if it was taken or is missing; None when it was left alone."""
        found = self.get(member.zone, member.name)
        if found.state not in GONE_STATES:
            return None
        self.delete(member.zone, member.name)
        return self.create(member.zone, member.name, wish, tries, delay)

    def listing(self, zones: Sequence[str]) -> list[NodeFacts]:
        with ThreadPoolExecutor(max(len(zones), 1)) as pool:
            found = pool.map(lambda zone: (zone, self._api.nodes(self._place(zone).path)), zones)
            return [_facts(node, zone) for zone, nodes in found for node in nodes]

    def _begin(self, zone: str, name: str, wish: NodeWish) -> None:
        if not naming.ID.fullmatch(name):
            raise BadRequest(f"{name!r} cannot name a node: use lower case, digits and dashes")
        made = self._api.create_node(self._place(zone).path, name, self._node(wish))
        if made is not None and made.HasField("error"):
            raise failures.of_status(made.error.code, made.error.message, f"create {name}")

    def _node(self, wish: NodeWish) -> tpu_v2.Node:
        kind = topology.find(wish.accelerator)
        runtime = wish.runtime or self._settings.runtimes.get(kind.generation) or kind.runtime
        if not runtime:
            raise BadRequest(f"{kind.name} cannot be had as a TPU VM; use GKE")
        node = tpu_v2.Node(
            accelerator_type=kind.name,
            runtime_version=runtime,
            scheduling_config=tpu_v2.SchedulingConfig(spot=wish.spot),
            labels=BY_HAND,
            metadata=self._settings.metadata,
            tags=list(self._settings.tags),
            network_config=tpu_v2.NetworkConfig(
                network=self._settings.network,
                subnetwork=self._settings.subnetwork,
                enable_external_ips=self._settings.external_ips,
            ),
        )
        if self._settings.service_account:
            node.service_account = tpu_v2.ServiceAccount(
                email=self._settings.service_account, scope=[CLOUD_PLATFORM]
            )
        return node

    def _await_ready(self, zone: str, name: str) -> NodeFacts:
        while True:
            found = self.get(zone, name)
            if found.state == "READY":
                return found
            if found.state in GONE_STATES:
                raise NoCapacity(f"{name} was {found.state.lower()} before it was ready")
            self._sleep(LOOK_SECONDS)

    def _await_state(self, zone: str, name: str, state: str) -> None:
        while self.get(zone, name).state != state:
            self._sleep(LOOK_SECONDS)

    def _place(self, zone: str) -> naming.Place:
        return naming.Place(project=self._settings.project, zone=zone)


def _facts(node: tpu_v2.Node, zone: str) -> NodeFacts:
    scheduling = node.scheduling_config
    spot = scheduling.spot or scheduling.preemptible
    return NodeFacts(
        name=naming.short(node.name),
        zone=zone,
        state=tpu_v2.Node.State(node.state).name,
        health=tpu_v2.Node.Health(node.health).name if node.health else "",
        accelerator=node.accelerator_type,
        runtime=node.runtime_version,
        capacity="spot" if spot else "reserved" if scheduling.reserved else "on-demand",
        addresses=tuple(
            endpoint.access_config.external_ip or endpoint.ip_address
            for endpoint in node.network_endpoints
        ),
        labels=dict(node.labels),
        words=node.health_description,
    )
