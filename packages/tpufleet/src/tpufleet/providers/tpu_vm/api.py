"""Cloud TPU API calls: short deadlines, no waiting for operations, errors translated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from google.api_core import exceptions as google
from google.auth import exceptions as auth
from google.cloud import tpu_v2
from google.longrunning import operations_pb2

from tpufleet.errors import ProviderUnavailable
from tpufleet.providers.tpu_vm import error_mapping, fault_injection
from tpufleet.providers.tpu_vm.google_rest import GoogleRest

DEADLINE = 10.0  # seconds; a create is usually accepted within two
GUEST_DEADLINE = 3.0  # an explanation must not delay a listing
PAGE_SIZE = 500


def connect(endpoint: str = "", version: Any = tpu_v2) -> Any:
    """Google's client, or one for an emulator if an endpoint is given."""
    if not endpoint:
        return version.TpuClient()
    import grpc

    transport = version.TpuClient.get_transport_class("grpc")
    return version.TpuClient(transport=transport(channel=grpc.insecure_channel(endpoint)))


def connect_rest(endpoint: str, project: str) -> GoogleRest:
    return GoogleRest(fault_injection.project_api(endpoint) if endpoint else "", project)


class TpuApi:
    """Connects on first use: credentials may become available after the server starts."""

    def __init__(
        self,
        connect: Callable[[], tpu_v2.TpuClient],
        deadline: float = DEADLINE,
        project: str = "",
    ) -> None:
        self._connect = connect
        self._project = project  # in the commands of messages
        self._client: tpu_v2.TpuClient | None = None
        self._deadline = deadline

    def create_node(self, parent: str, node_id: str, node: tpu_v2.Node) -> Any:
        """The operation; None if the node already exists."""
        action = f"create {node_id} in {_short(parent)}"
        request = {"parent": parent, "node_id": node_id, "node": node}
        created = self._call("create_node", action, request, exists_ok=True)
        return created.operation if created is not None else None

    def create_queued_resource(
        self, parent: str, queued_id: str, queued: tpu_v2.QueuedResource
    ) -> Any:
        action = f"create queued resource {queued_id} in {_short(parent)}"
        request = {"parent": parent, "queued_resource_id": queued_id, "queued_resource": queued}
        created = self._call("create_queued_resource", action, request, exists_ok=True)
        return created.operation if created is not None else None

    def delete_node(self, name: str) -> bool:
        """False if it did not exist."""
        action = f"delete {_short(name)}"
        return self._call("delete_node", action, {"name": name}, gone_ok=True) is not None

    def delete_queued_resource(self, name: str) -> None:
        request = {"name": name, "force": True}
        self._call("delete_queued_resource", f"delete {_short(name)}", request, gone_ok=True)

    def stop_node(self, name: str) -> None:
        self._call("stop_node", f"stop {_short(name)}", {"name": name})

    def start_node(self, name: str) -> None:
        self._call("start_node", f"start {_short(name)}", {"name": name})

    def update_node(self, node: tpu_v2.Node, *fields: str) -> Any:
        """The operation."""
        request = {"node": node, "update_mask": {"paths": fields}}
        return self._call("update_node", f"update {_short(node.name)}", request).operation

    def get_node(self, name: str) -> tpu_v2.Node | None:
        return self._call("get_node", f"get {_short(name)}", {"name": name}, gone_ok=True)

    def guest_attributes(self, name: str, query_path: str) -> list[str]:
        """The values below a path, of all workers. Empty where guest attributes are disabled."""
        try:
            response = self._call(
                "get_guest_attributes",
                f"get guest attributes of {_short(name)}",
                {"name": name, "query_path": query_path},
                gone_ok=True,
                deadline=min(self._deadline, GUEST_DEADLINE),
            )
        except error_mapping.NoGuestAttributes:
            return []
        workers = response.guest_attributes if response is not None else ()
        return [item.value for worker in workers for item in worker.query_value.items]

    def list_zones(self, project: str) -> list[str]:
        """Where the project can have TPUs."""
        zones, token = [], ""
        while True:
            request = {"name": f"projects/{project}", "page_size": PAGE_SIZE, "page_token": token}
            answer = self._call("list_locations", "list zones", request)
            zones += [each.location_id for each in answer.locations]
            token = answer.next_page_token
            if not token:
                return zones

    def list_nodes(self, parent: str) -> list[tpu_v2.Node]:
        pages = self._pages("list_nodes", "nodes", parent)
        return [node for page in pages for node in page.nodes]

    def list_queued_resources(self, parent: str) -> list[tpu_v2.QueuedResource]:
        pages = self._pages("list_queued_resources", "queued resources", parent)
        return [queued for page in pages for queued in page.queued_resources]

    def get_operation(self, name: str) -> operations_pb2.Operation | None:
        """None if the API no longer has it."""
        return self._call("get_operation", f"get {_short(name)}", {"name": name}, gone_ok=True)

    def _pages(self, method: str, what: str, parent: str) -> list[Any]:
        """Of a listing. One that the API marks incomplete is an error: slices missing from it would
        be treated as lost."""
        action = f"list {what} in {_short(parent)}"
        response = self._call(method, action, {"parent": parent, "page_size": PAGE_SIZE})
        with self._translate_errors(action):  # each page is requested when it is used
            pages = list(response.pages)
        if missing := [zone for page in pages for zone in page.unreachable]:
            raise ProviderUnavailable(f"{action}: incomplete: {', '.join(map(_short, missing))}")
        return pages

    def _call(
        self,
        method: str,
        action: str,
        request: Mapping[str, Any],
        *,
        gone_ok: bool = False,
        exists_ok: bool = False,
        deadline: float | None = None,
    ) -> Any:
        """None where the resource is gone, or exists, and that is fine."""
        with self._translate_errors(action, gone_ok=gone_ok, exists_ok=exists_ok):
            if self._client is None:
                self._client = self._connect()
            call = getattr(self._client, method)
            return call(request, timeout=deadline or self._deadline, retry=None)
        return None

    @contextmanager
    def _translate_errors(
        self, action: str, *, gone_ok: bool = False, exists_ok: bool = False
    ) -> Iterator[None]:
        try:
            yield
        except (google.GoogleAPIError, auth.GoogleAuthError) as error:
            fine = (gone_ok and isinstance(error, google.NotFound)) or (
                exists_ok and isinstance(error, google.AlreadyExists)
            )
            if not fine:
                raise error_mapping.translate(error, action, self._project) from error


def _short(name: str) -> str:
    return name.rpartition("/")[2]
