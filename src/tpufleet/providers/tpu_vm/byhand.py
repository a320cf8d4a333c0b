"""Nodes made by hand, one at a time or a fleet side by side: created, waited for, deleted.

Unlike the provider, this waits: a person sits in front of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

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


class GivenUp(FleetError):
    """Nobody waits any more."""


class Nodes:
    def __init__(
        self,
        api: Api,
        settings: TpuVmSettings,
        tell: Callable[[str], None],
        pause: Callable[[float], None] | None = None,
    ) -> None:
        self.zones = settings.zones
        self._api = api
        self._settings = settings
        self._tell = tell  # what a person who waits should know
        self._given_up = threading.Event()
        self._pause = pause or self._wait

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
                asked = self._begin(zone, name, wish)
                return self._await_ready(zone, name, asked)
            except ProviderError as error:
                if not isinstance(error, Temporary) or left == 1:
                    raise
                self._tell(f"{name}: {error}; trying again in {delay:g} s")
                self._pause(delay)
        raise NoCapacity(f"{name} could not be had in {tries} tries")

    def delete(self, zone: str, name: str) -> None:
        """Until it is gone."""
        self._api.delete_node(self._place(zone).node(name))
        self._until(zone, name, lambda found: found.state == "NOT_FOUND")

    def restart(self, zone: str, name: str) -> NodeFacts:
        """Stop and start; its disk stays."""
        self._api.stop_node(self._place(zone).node(name))
        stopped = self._until(
            zone, name, lambda found: found.state in ("STOPPED", *GONE_STATES)
        )
        if stopped.state != "STOPPED":
            raise NoCapacity(f"{name} was {_words(stopped)} while it stopped; `tpu reapply` it")
        self._api.start_node(self._place(zone).node(name))
        return self._await_ready(zone, name)

    # A fleet.
    def together(
        self, members: Iterable[Member], act: Callable[[Member], NodeFacts]
    ) -> Iterable[tuple[Member, NodeFacts | FleetError]]:
        """Act on all of them side by side; answers as they come."""
        members = list(members)
        pool = ThreadPoolExecutor(min(SIDE_BY_SIDE, max(len(members), 1)))
        try:
            futures = {pool.submit(act, member): member for member in members}
            for future in as_completed(futures):
                error = future.exception()
                if error is not None and not isinstance(error, FleetError):
                    raise error
                yield futures[future], error if error is not None else future.result()
        finally:
            self._given_up.set()  # after Ctrl-C, nobody tries again for hours
            pool.shutdown(cancel_futures=True)
            self._given_up.clear()

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

    def _begin(self, zone: str, name: str, wish: NodeWish) -> str | None:
        """The operation that makes it; None when it is there already."""
        if not naming.ID.fullmatch(name):
            raise BadRequest(f"{name!r} cannot name a node: use lower case, digits and dashes")
        made = self._api.create_node(self._place(zone).path, name, self._node(wish))
        if made is not None and made.HasField("error"):
            raise _refused(made, name)
        return made.name if made is not None else None

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

    def _await_ready(self, zone: str, name: str, asked: str | None = None) -> NodeFacts:
        found = self._until(zone, name, lambda found: found.state in ("READY", *GONE_STATES))
        if found.state == "READY":
            return found
        operation = self._api.operation(asked) if asked else None
        if operation is not None and operation.HasField("error"):
            raise _refused(operation, name)
        raise NoCapacity(f"{name} was {_words(found)} before it was ready")

    def _until(self, zone: str, name: str, done: Callable[[NodeFacts], bool]) -> NodeFacts:
        """The node once it is as wanted. A cloud that does not answer is asked again."""
        while True:
            try:
                found = self.get(zone, name)
            except ProviderError as error:
                if not isinstance(error, Temporary):
                    raise
                self._tell(f"{name}: {error}")
            else:
                if done(found):
                    return found
            self._pause(LOOK_SECONDS)

    def _wait(self, seconds: float) -> None:
        if self._given_up.wait(seconds):
            raise GivenUp("given up")

    def _place(self, zone: str) -> naming.Place:
        return naming.Place(project=self._settings.project, zone=zone)


def _refused(operation: Any, name: str) -> ProviderError:
    error = operation.error
    return failures.of_status(error.code, error.message, f"create {name}")


def _words(found: NodeFacts) -> str:
    return found.state.lower().replace("_", " ")


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
