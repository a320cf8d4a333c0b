"""Cloud TPU API calls: short deadlines, no waiting for operations, errors translated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from google.api_core import exceptions as google
from google.auth import exceptions as auth
from google.cloud import tpu_v2
from google.longrunning import operations_pb2

from tpufleet.errors import BadRequest, ProviderUnavailable
from tpufleet.providers.tpu_vm import error_mapping

DEADLINE = 10.0  # seconds; a create is usually accepted within two
GUEST_DEADLINE = 3.0  # an explanation must not delay a listing
PAGE_SIZE = 500


def connect(endpoint: str = "") -> tpu_v2.TpuClient:
    """Google's client, or one for an emulator if an endpoint is given."""
    if not endpoint:
        return tpu_v2.TpuClient()
    import grpc
    from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

    return tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=grpc.insecure_channel(endpoint)))


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
        with self._translate_errors(f"create {node_id} in {_zone(parent)}", exists_ok=True):
            return self._open.create_node(
                parent=parent, node_id=node_id, node=node, **self._options
            ).operation
        return None

    def create_queued_resource(
        self, parent: str, queued_id: str, queued: tpu_v2.QueuedResource
    ) -> Any:
        with self._translate_errors(
            f"create queued resource {queued_id} in {_zone(parent)}", exists_ok=True
        ):
            return self._open.create_queued_resource(
                parent=parent, queued_resource_id=queued_id, queued_resource=queued,
                **self._options,
            ).operation  # fmt: skip
        return None

    def delete_node(self, name: str) -> bool:
        """False if it did not exist."""
        with self._translate_errors(f"delete {_short(name)}", gone_ok=True):
            self._open.delete_node(name=name, **self._options)
            return True
        return False

    def delete_queued_resource(self, name: str) -> None:
        with self._translate_errors(f"delete {_short(name)}", gone_ok=True):
            self._open.delete_queued_resource(
                request={"name": name, "force": True}, **self._options
            )

    def stop_node(self, name: str) -> None:
        with self._translate_errors(f"stop {_short(name)}"):
            self._open.stop_node(request={"name": name}, **self._options)

    def start_node(self, name: str) -> None:
        with self._translate_errors(f"start {_short(name)}"):
            self._open.start_node(request={"name": name}, **self._options)

    def update_node(self, node: tpu_v2.Node, *fields: str) -> Any:
        """The operation."""
        with self._translate_errors(f"update {_short(node.name)}"):
            return self._open.update_node(
                node=node, update_mask={"paths": fields}, **self._options
            ).operation

    def get_node(self, name: str) -> tpu_v2.Node | None:
        with self._translate_errors(f"get {_short(name)}", gone_ok=True):
            return self._open.get_node(name=name, **self._options)
        return None

    def guest_attributes(self, name: str, query_path: str) -> list[str]:
        """The values below a path, of all workers. Empty where guest attributes are disabled."""
        action = f"get guest attributes of {_short(name)}"
        try:
            with self._translate_errors(action, gone_ok=True):
                response = self._open.get_guest_attributes(
                    request={"name": name, "query_path": query_path},
                    timeout=min(self._deadline, GUEST_DEADLINE),
                    retry=None,
                )
                return [
                    item.value
                    for worker in response.guest_attributes
                    for item in worker.query_value.items
                ]
        except BadRequest as error:
            # `The "GuestAttributes" value "…" was not found`: no host has written one yet.
            if '"GuestAttributes"' not in str(error):
                raise
        return []

    def list_nodes(self, parent: str) -> list[tpu_v2.Node]:
        with self._translate_errors(f"list nodes in {_zone(parent)}"):
            request = {"parent": parent, "page_size": PAGE_SIZE}
            response = self._open.list_nodes(request=request, **self._options)
            return [node for page in _complete_pages(response.pages, parent) for node in page.nodes]

    def list_queued_resources(self, parent: str) -> list[tpu_v2.QueuedResource]:
        with self._translate_errors(f"list queued resources in {_zone(parent)}"):
            request = {"parent": parent, "page_size": PAGE_SIZE}
            response = self._open.list_queued_resources(request=request, **self._options)
            pages = _complete_pages(response.pages, parent)
            return [queued for page in pages for queued in page.queued_resources]

    def get_operation(self, name: str) -> operations_pb2.Operation | None:
        """None if the API no longer has it."""
        with self._translate_errors(f"get {_short(name)}", gone_ok=True):
            return self._open.get_operation({"name": name}, **self._options)
        return None

    @property
    def _open(self) -> tpu_v2.TpuClient:
        if self._client is None:
            self._client = self._connect()
        return self._client

    @property
    def _options(self) -> dict[str, Any]:
        return {"timeout": self._deadline, "retry": None}

    @contextmanager
    def _translate_errors(
        self, action: str, *, gone_ok: bool = False, exists_ok: bool = False
    ) -> Iterator[None]:
        try:
            yield
        except google.NotFound as error:
            if not gone_ok:
                raise error_mapping.translate(error, action, self._project) from error
        except google.AlreadyExists as error:
            if not exists_ok:
                raise error_mapping.translate(error, action, self._project) from error
        except (google.GoogleAPIError, auth.GoogleAuthError) as error:
            raise error_mapping.translate(error, action, self._project) from error


def _complete_pages(pages: Iterable[Any], parent: str) -> Iterator[Any]:
    """Pages of a listing. A listing that the API marks incomplete is an error: slices missing from
    it would be treated as lost."""
    for page in pages:
        if page.unreachable:
            where = ", ".join(map(_zone, page.unreachable))
            raise ProviderUnavailable(f"list {_zone(parent)}: the API cannot reach {where}")
        yield page


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _zone(parent: str) -> str:
    return _short(parent)
