"""Nodes made by hand, one at a time or a fleet side by side: created, waited for, deleted.

Unlike the provider, this waits: a person sits in front of it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from google.cloud import tpu_v2

from tpufleet.errors import BadRequest, FleetError, NoCapacity, ProviderError, Temporary
from tpufleet.model import fleets, topology
from tpufleet.model.fleets import GONE_STATES, CreatedNode, FleetMember, NodeInfo, NodeRequest
from tpufleet.providers.tpu_vm import error_mapping, naming, requests
from tpufleet.providers.tpu_vm.api import TpuApi
from tpufleet.providers.tpu_vm.settings import DataDisk, TpuVmSettings

# In one zone: a zone that has nothing to give holds no thread of another.
MAX_PARALLEL = 32
POLL_SECONDS = 5.0
MANUAL_LABELS = {"tpufleet-made": "by-hand"}
# In these a node waits for somebody, and never becomes ready by itself.
STUCK_STATES = ("STOPPED", "HIDDEN", "UNKNOWN")


class WaitCancelled(FleetError):
    """Nobody waits any more."""


class ManualNodes:
    def __init__(
        self,
        api: TpuApi,
        settings: TpuVmSettings,
        report: Callable[[str], None],
        sleep: Callable[[float], None] | None = None,
        zones: Sequence[str] | None = None,
    ) -> None:
        self.zones = tuple(settings.zones if zones is None else zones)
        self.project = settings.project
        self._api = api
        self._settings = settings
        self._tell = report  # what a person who waits should know
        self._given_up = threading.Event()
        self._pause = sleep or self._wait

    # One node.
    def get(self, zone: str, name: str) -> NodeInfo:
        node = self._api.get_node(self._path(zone, name))
        if node is None:
            return NodeInfo(name=name, zone=zone, state="NOT_FOUND")
        return _facts(node, zone)

    def create(
        self, zone: str, name: str, wish: NodeRequest, tries: int, delay: float
    ) -> CreatedNode:
        """Until it is READY. Tries again while that may help."""
        for left in range(tries, 0, -1):
            try:
                asked = self._begin(zone, name, wish)
                node = self._await_ready(zone, name, asked)
                return CreatedNode(node=node, already_existed=asked is None and left == tries)
            except ProviderError as error:
                if not isinstance(error, Temporary) or left == 1:
                    raise
                self._tell_of(name, f"{error}; trying again in {delay:g} s")
                self._pause(delay)
        raise NoCapacity(f"{name} could not be had in {tries} tries")

    def delete(self, zone: str, name: str) -> bool:
        """Until it is gone. False when it was not there."""
        if not self._api.delete_node(self._path(zone, name)):
            return False
        self._until(zone, name, lambda found: found.state == "NOT_FOUND")
        return True

    def restart(self, zone: str, name: str) -> NodeInfo:
        """Stop and start; its disk stays."""
        found = self.get(zone, name)
        if found.state in GONE_STATES:
            raise BadRequest(
                f"{name} is {fleets.display_state(found.state)}; `tpu reapply` makes it"
            )
        if found.state != "STOPPED":
            self._api.stop_node(self._path(zone, name))
            ends = ("STOPPED", *GONE_STATES)
            found = self._until(zone, name, lambda found: found.state in ends)
        if found.state != "STOPPED":
            raise NoCapacity(
                f"{name} was {fleets.display_state(found.state)} while it stopped; `tpu reapply` it"
            )
        self._api.start_node(self._path(zone, name))
        return self._await_ready(zone, name)

    def attach_disks(
        self, zone: str, name: str, disks: Sequence[str], read_only: bool
    ) -> list[str]:
        """Data disks that the node lacks: these, or those of the settings. What was attached."""
        node = self._api.get_node(self._path(zone, name))
        if node is None:
            raise BadRequest(f"there is no {name} in {zone}")
        given = [DataDisk(source=disk, read_only=read_only) for disk in disks]
        there = {disk.source_disk for disk in node.data_disks}
        missing = [disk for disk in given or self._settings.data_disks if disk.source not in there]
        if missing:
            node.data_disks = [*node.data_disks, *map(requests.attached_disk, missing)]
            self._api.update_node(node, "data_disks")
        return [disk.source for disk in missing]

    # A fleet.
    def run_parallel(
        self, members: Iterable[FleetMember], act: Callable[[FleetMember], Any]
    ) -> Iterable[tuple[FleetMember, Any]]:
        """Act on all of them side by side; answers, or errors of ours, as they come."""
        members = list(members)
        pools = {
            zone: ThreadPoolExecutor(min(MAX_PARALLEL, count))
            for zone, count in Counter(member.zone for member in members).items()
        }
        try:
            futures = {pools[member.zone].submit(act, member): member for member in members}
            for future in as_completed(futures):
                error = future.exception()
                if error is not None and not isinstance(error, FleetError):
                    raise error
                yield futures[future], error if error is not None else future.result()
        finally:
            self._given_up.set()  # after Ctrl-C, nobody tries again for hours
            for pool in pools.values():
                pool.shutdown(cancel_futures=True)
            self._given_up.clear()

    def recreate_if_gone(
        self, member: FleetMember, wish: NodeRequest, tries: int, delay: float
    ) -> CreatedNode | None:
        """Make it again if it was taken or is missing; None when it was left alone."""
        found = self.get(member.zone, member.name)
        if found.state not in GONE_STATES:
            return None
        return self.create(member.zone, member.name, wish, tries, delay)

    def list_nodes(self, zones: Sequence[str]) -> list[NodeInfo]:
        """A zone that cannot be asked is told of, and left out; the last one's error is raised."""
        with ThreadPoolExecutor(max(len(zones), 1)) as pool:
            answers = list(pool.map(self._listed, zones))
        if all(isinstance(answer, FleetError) for answer in answers):
            raise answers[-1]
        found = []
        for answer in answers:
            if isinstance(answer, FleetError):
                self._tell(str(answer))
            else:
                found += answer
        return found

    def _listed(self, zone: str) -> list[NodeInfo] | ProviderError:
        try:
            return [_facts(node, zone) for node in self._api.list_nodes(self._place(zone).path)]
        except ProviderError as error:
            return error

    def _begin(self, zone: str, name: str, wish: NodeRequest) -> str | None:
        """The operation that makes it; None when it is there already."""
        made = self._ask(zone, name, wish)
        if made is None:
            found = self.get(zone, name)
            if found.state not in ("DELETING", *GONE_STATES):
                _check_same(found, wish)
                return None
            # The name of a node that was taken stays, and counts against quota.
            self._tell(f"{name} was {fleets.display_state(found.state)}; making it again")
            self.delete(zone, name)
            made = self._ask(zone, name, wish)
        return made.name if made is not None else None

    def _ask(self, zone: str, name: str, wish: NodeRequest) -> Any:
        parent = self._place(zone).path
        node = self._node(wish)
        made = self._api.create_node(parent, fleets.check_name(name), node)
        if made is not None and made.HasField("error"):
            raise _refused(made, name)
        return made

    def _node(self, wish: NodeRequest) -> tpu_v2.Node:
        kind = topology.find(wish.accelerator)
        runtime = wish.runtime or requests.runtime_version(kind, self._settings)
        if not runtime:
            raise BadRequest(f"{kind.name} cannot be had as a TPU VM; use GKE")
        node = requests.base_node(kind, runtime, self._settings)
        node.scheduling_config = tpu_v2.SchedulingConfig(spot=wish.spot)
        node.labels, node.metadata = MANUAL_LABELS, self._settings.metadata
        return node

    def _await_ready(self, zone: str, name: str, asked: str | None = None) -> NodeInfo:
        ends = ("READY", *GONE_STATES, *STUCK_STATES)
        found = self._until(zone, name, lambda found: found.state in ends)
        if found.state == "READY":
            return found
        words = fleets.display_state(found.state)
        if found.state in STUCK_STATES:
            raise BadRequest(f"{name} is {words}; `tpu restart` or `tpu reapply` it")
        operation = self._api.get_operation(asked) if asked else None
        if operation is not None and operation.HasField("error"):
            raise _refused(operation, name)
        raise NoCapacity(f"{name} was {words} before it was ready")

    def _until(self, zone: str, name: str, done: Callable[[NodeInfo], bool]) -> NodeInfo:
        """The node once it is as wanted. A cloud that does not answer is asked again."""
        told = ""
        while True:
            try:
                found = self.get(zone, name)
            except ProviderError as error:
                if not isinstance(error, Temporary):
                    raise
                self._tell_of(name, str(error))
            else:
                if done(found):
                    return found
                if found.state != told:
                    self._tell_of(name, f"{fleets.display_state(found.state)} …")
                    told = found.state
            self._pause(POLL_SECONDS)

    def _tell_of(self, name: str, words: str) -> None:
        self._tell(words if name in words else f"{name}: {words}")

    def _wait(self, seconds: float) -> None:
        if self._given_up.wait(seconds):
            raise WaitCancelled("given up")

    def _place(self, zone: str) -> naming.TpuLocation:
        return naming.TpuLocation(project=self._settings.project, zone=fleets.check_zone(zone))

    def _path(self, zone: str, name: str) -> str:
        return self._place(zone).node(fleets.check_name(name))


def _check_same(found: NodeInfo, wish: NodeRequest) -> None:
    """Somebody who asks for another kind must not take this one for it."""
    wanted = topology.find(wish.accelerator).name
    if found.accelerator != wanted or (found.capacity == "spot") != wish.spot:
        raise BadRequest(
            f"{found.name} is there already, as {found.accelerator} ({found.capacity}); "
            "`tpu reapply` makes it anew"
        )


def _refused(operation: Any, name: str) -> ProviderError:
    error = operation.error
    return error_mapping.translate_status(error.code, error.message, f"create {name}")


def _facts(node: tpu_v2.Node, zone: str) -> NodeInfo:
    scheduling = node.scheduling_config
    spot = scheduling.spot or scheduling.preemptible
    return NodeInfo(
        name=naming.short_name(node.name),
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
        message=node.health_description,
    )
