"""TPU VM nodes managed by the CLI, one or many in parallel: create, wait, restart, delete.

Unlike the provider, this blocks: a user waits for it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from typing import Any

from google.cloud import tpu_v2

from tpufleet.clocks import Clock, SystemClock
from tpufleet.errors import BadRequest, FleetError, NoCapacity, ProviderError, Temporary, exists
from tpufleet.model.fleet import fleets
from tpufleet.model.fleet.fleets import GONE_STATES, CreatedNode, FleetMember, NodeInfo, NodeRequest
from tpufleet.model.tpu import type_lookup
from tpufleet.providers.tpu_vm import error_mapping, naming, requests, states
from tpufleet.providers.tpu_vm.api import TpuApi
from tpufleet.providers.tpu_vm.settings import DataDisk, TpuVmSettings

# Per zone: a zone without capacity does not block another.
MAX_PARALLEL = 32
POLL_SECONDS = 5.0
MANUAL_LABELS = {"tpufleet-operation": "by-hand"}
# A node in one of these states does not become ready without intervention.
STUCK_STATES = ("STOPPED", "HIDDEN", "UNKNOWN")


class WaitCancelled(FleetError):
    """The user interrupted the wait."""


class ManualNodes:
    def __init__(
        self,
        api: TpuApi,
        settings: TpuVmSettings,
        report: Callable[[str], None],
        sleep: Callable[[float], None] | None = None,
        zones: Sequence[str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self.zones = tuple(settings.zones if zones is None else zones)
        self.project = settings.project
        self._api = api
        self._settings = settings
        self._report = report  # progress for the user
        self._cancelled = threading.Event()
        self._sleep = sleep or self._wait

    # One node.
    def get(self, zone: str, name: str) -> NodeInfo:
        node = self._api.get_node(self._path(zone, name))
        if node is None:
            return NodeInfo(name=name, zone=zone, state="NOT_FOUND")
        return _node_info(node, zone)

    def warn_of_server(self, node: NodeInfo) -> None:
        """Before it is deleted: a server would miss it."""
        if command := naming.end_of_slice(node.labels or {}, node.name):
            self._report(f"warning: {node.name} is a slice of a server\n  next: {command}")

    def create(
        self, zone: str, name: str, request: NodeRequest, tries: int, delay: float
    ) -> CreatedNode:
        """Create it and wait until it is READY. Retries temporary errors."""
        left = tries
        while True:
            try:
                operation_name = self._begin(zone, name, request)
                node = self._await_ready(zone, name, operation_name)
                return CreatedNode(
                    node=node, already_existed=operation_name is None and left == tries
                )
            except ProviderError as error:
                if not isinstance(error, Temporary) or left == 1:
                    raise
                self._report_node(name, f"{error}; retrying in {delay:g} s")
                self._sleep(delay)
                left -= 1

    def delete(self, zone: str, name: str) -> bool:
        """Delete it and wait until it is gone. False if it did not exist."""
        if not self._api.delete_node(self._path(zone, name)):
            return False
        self._until(zone, name, lambda info: info.state == "NOT_FOUND")
        return True

    def restart(self, zone: str, name: str, tries: int, delay: float) -> NodeInfo:
        """Stop and start it; its disks are kept. The API cannot stop a node of several hosts: it is
        deleted and created again."""
        node_info = self.get(zone, name)
        if node_info.state in GONE_STATES:
            raise BadRequest(_unusable(node_info))
        if _has_several_hosts(node_info):
            kind = type_lookup.short_name(node_info.accelerator)
            self._report_node(
                name,
                f"{kind} has several hosts, which cannot be stopped; deleting the node and creating"
                " it again, without the data on its boot disks",
            )
            self.delete(zone, name)
            return self.create(zone, name, node_info.same_again(), tries, delay).node
        if node_info.state != "STOPPED":
            self._api.stop_node(self._path(zone, name))
            ends = ("STOPPED", *GONE_STATES)
            node_info = self._until(zone, name, lambda info: info.state in ends)
        if node_info.state != "STOPPED":
            raise NoCapacity(_unusable(node_info))
        self._api.start_node(self._path(zone, name))
        return self._await_ready(zone, name)

    def is_recreated_to_restart(self, zone: str, name: str) -> bool:
        node = self.get(zone, name)
        return node.state not in GONE_STATES and _has_several_hosts(node)

    @property
    def has_data_disks(self) -> bool:
        return bool(self._settings.data_disks)

    def attach_disks(
        self, zone: str, name: str, disks: Sequence[str], read_only: bool
    ) -> list[str]:
        """Attach these data disks, or those of the settings, if missing. Returns the new ones."""
        node = self._api.get_node(self._path(zone, name))
        if node is None:
            raise naming.no_such_node(name, zone)
        requested = [DataDisk(source=disk, read_only=read_only) for disk in disks]
        attached = {disk.source_disk for disk in node.data_disks}
        missing = [
            disk for disk in requested or self._settings.data_disks if disk.source not in attached
        ]
        if missing:
            node.data_disks = [*node.data_disks, *map(requests.attached_disk, missing)]
            self._api.update_node(node, "data_disks")
        return [disk.source for disk in missing]

    # Many nodes.
    def all_zones(self) -> list[str]:
        return self._api.list_zones(self.project)

    def expired(self, zones: Sequence[str]) -> list[NodeInfo]:
        """Manual nodes whose time is over."""
        now = self._clock.now()
        return [
            node
            for node in self.list_nodes(zones)
            if (end := fleets.expires_at(node.labels)) and end <= now and node.state != "DELETING"
        ]

    def run_parallel(
        self, members: Iterable[FleetMember], act: Callable[[FleetMember], Any]
    ) -> Iterable[tuple[FleetMember, Any]]:
        """Act on all members in parallel; yields results or errors as they complete."""
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
            self._cancelled.set()  # after Ctrl-C, do not keep retrying
            for pool in pools.values():
                pool.shutdown(cancel_futures=True)
            self._cancelled.clear()

    def list_nodes(self, zones: Sequence[str]) -> list[NodeInfo]:
        """A zone that fails is reported and left out; if all fail, the last error is raised."""
        with ThreadPoolExecutor(max(len(zones), 1)) as pool:
            answers = list(pool.map(self._list_zone, zones))
        errors = [answer for answer in answers if isinstance(answer, ProviderError)]
        if errors and len(errors) == len(answers):
            raise errors[-1]
        for error in errors:
            self._report(str(error))
        return [node for answer in answers if isinstance(answer, list) for node in answer]

    def _list_zone(self, zone: str) -> list[NodeInfo] | ProviderError:
        try:
            return [
                _node_info(node, zone) for node in self._api.list_nodes(self._location(zone).path)
            ]
        except ProviderError as error:
            return error

    def _begin(self, zone: str, name: str, request: NodeRequest) -> str | None:
        """The create operation; None if the node already exists."""
        operation = self._send_create(zone, name, request)
        if operation is None:
            node_info = self.get(zone, name)
            if node_info.state not in ("DELETING", *GONE_STATES):
                _check_same(node_info, request)
                return None
            # A preempted node keeps its name and counts against quota until it is deleted.
            self._report(f"{name} was {fleets.display_state(node_info.state)}; recreating it")
            self.delete(zone, name)
            operation = self._send_create(zone, name, request)
        return operation.name if operation is not None else None

    def _send_create(self, zone: str, name: str, request: NodeRequest) -> Any:
        parent = self._location(zone).path
        node = self._node(zone, request)
        operation = self._api.create_node(parent, fleets.check_name(name), node)
        error_mapping.raise_error(operation, f"create {name}")
        return operation

    def _node(self, zone: str, request: NodeRequest) -> tpu_v2.Node:
        kind = type_lookup.find(request.accelerator)
        runtime = request.runtime or requests.runtime_version(kind, self._settings)
        node = requests.base_node(kind, runtime, self._settings, zone)
        node.scheduling_config = tpu_v2.SchedulingConfig(spot=request.spot)
        node.labels, node.metadata = MANUAL_LABELS, self._settings.metadata
        if request.autostop is not None:
            ends = self._clock.now() + request.autostop
            node.labels = {**MANUAL_LABELS, fleets.EXPIRES: str(int(ends.timestamp()))}
        return node

    def _await_ready(self, zone: str, name: str, operation_name: str | None = None) -> NodeInfo:
        ends = ("READY", *GONE_STATES, *STUCK_STATES)
        node_info = self._until(zone, name, lambda info: info.state in ends)
        if node_info.state == "READY":
            return node_info
        if node_info.state in STUCK_STATES:
            raise BadRequest(_unusable(node_info))
        operation = self._api.get_operation(operation_name) if operation_name else None
        error_mapping.raise_error(operation, f"create {name}")
        raise NoCapacity(_unusable(node_info))

    def _until(self, zone: str, name: str, done: Callable[[NodeInfo], bool]) -> NodeInfo:
        """Poll until `done`. Temporary errors are reported and retried."""
        reported = ""
        while True:
            try:
                node_info = self.get(zone, name)
            except ProviderError as error:
                if not isinstance(error, Temporary):
                    raise
                self._report_node(name, str(error))
            else:
                if done(node_info):
                    return node_info
                if node_info.state != reported:
                    self._report_node(name, f"{fleets.display_state(node_info.state)} …")
                    reported = node_info.state
            self._sleep(POLL_SECONDS)

    def _report_node(self, name: str, message: str) -> None:
        self._report(message if name in message else f"{name}: {message}")

    def _wait(self, seconds: float) -> None:
        if self._cancelled.wait(seconds):
            raise WaitCancelled("interrupted")

    def _location(self, zone: str) -> naming.TpuLocation:
        return naming.TpuLocation(project=self._settings.project, zone=fleets.check_zone(zone))

    def _path(self, zone: str, name: str) -> str:
        return self._location(zone).node(fleets.check_name(name))


def _unusable(node: NodeInfo) -> str:
    command = "restart" if node.state in STUCK_STATES else "apply --replace"
    return f"{node.name} is {fleets.display_state(node.state)}; run `tpu vm {command}`"


def _check_same(node: NodeInfo, request: NodeRequest) -> None:
    """An existing node must match the request."""
    wanted = type_lookup.find(request.accelerator).name
    if node.accelerator != wanted or (node.capacity == "spot") != request.spot:
        kind = f"{type_lookup.short_name(node.accelerator)} ({node.capacity})"
        step = "`tpu vm apply --replace` recreates it"
        raise BadRequest(str(exists(f"{node.name}, a {kind},", step)))


def _node_info(node: tpu_v2.Node, zone: str) -> NodeInfo:
    return NodeInfo(
        name=naming.short_name(node.name),
        zone=zone,
        state=tpu_v2.Node.State(node.state).name,
        health=tpu_v2.Node.Health(node.health).name if node.health else "",
        accelerator=node.accelerator_type,
        runtime=node.runtime_version,
        capacity=states.capacity_of(node).value,
        addresses=tuple(
            endpoint.access_config.external_ip or endpoint.ip_address
            for endpoint in node.network_endpoints
        ),
        labels=dict(node.labels),
        message=node.health_description,
        created_at=datetime.fromtimestamp(node.create_time.timestamp(), UTC),
    )


def _has_several_hosts(node: NodeInfo) -> bool:
    return type_lookup.find(node.accelerator).hosts > 1
