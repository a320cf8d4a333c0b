"""A connection to one API server. Resources are plain dictionaries with the API's field names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tpufleet.errors import (
    BadRequest,
    Conflict,
    FleetError,
    NotFound,
    PermissionMissing,
    ProviderUnavailable,
    RateLimited,
    unreadable,
)
from tpufleet.kubernetes.watch_streams import WatchStreams

Json = dict[str, Any]
REQUEST_TIMEOUT = 20.0  # seconds
# The server ends each watch after this long; one that stays silent for longer is dead. This bounds
# how long a broken network can go unnoticed.
WATCH_SECONDS = 30
# lightkube builds its decoders on first use, and a second thread that uses the same type meanwhile
# crashes the process. So every decoder is built here first, under this lock.
_resource_types_lock = threading.Lock()


class ResourceKind(msgspec.Struct, frozen=True):
    group: str
    version: str
    name: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


POD = ResourceKind("", "v1", "Pod", "pods")
NODE = ResourceKind("", "v1", "Node", "nodes", namespaced=False)
NAMESPACE = ResourceKind("", "v1", "Namespace", "namespaces", namespaced=False)
SECRET = ResourceKind("", "v1", "Secret", "secrets")
EVENT = ResourceKind("", "v1", "Event", "events")
JOB = ResourceKind("batch", "v1", "Job", "jobs")
LEASE = ResourceKind("coordination.k8s.io", "v1", "Lease", "leases")
JOBSET = ResourceKind("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets")
LEADER_WORKER_SET = ResourceKind(
    "leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet", "leaderworkersets"
)
WORKLOAD = ResourceKind("kueue.x-k8s.io", "v1beta2", "Workload", "workloads")


_resources: dict[ResourceKind, Any] = {}


class Connection:
    """Thread-safe. Raises only FleetError, chained to the original error."""

    def __init__(
        self,
        kubeconfig: Path | None = None,
        *,
        manager: str = "tpufleet",
        timeout: float = REQUEST_TIMEOUT,
        watch_seconds: int = WATCH_SECONDS,
    ) -> None:
        """Without a kubeconfig: the pod's service account, or kubectl's default."""
        import httpx2
        from lightkube import Client, KubeConfig

        with _resource_types_lock, _kubeconfig_errors(kubeconfig):
            config = None if kubeconfig is None else KubeConfig.from_file(str(kubeconfig)).get()
            # Its overloads cannot express a resource that is chosen at run time.
            self._client: Any = Client(
                config,
                timeout=httpx2.Timeout(timeout),
                field_manager=manager,
                trust_env=kubeconfig is None,
            )
        self.manager = manager
        self._streams = WatchStreams()
        # lightkube has no public setting for these; without them it reads from a dead connection
        # for ever.
        inner = self._client._client
        inner._client.event_hooks = {"response": [self._streams.track]}
        inner._watch_timeout = httpx2.Timeout(timeout, read=watch_seconds + timeout)
        self._watch_seconds = watch_seconds
        # A working watch is never silent for longer: the server ends it and we reopen it.
        self.max_silence = watch_seconds + timeout / 2

    def close(self) -> None:
        """Only when no thread watches any more: a thread that reads from a closed socket could read
        from another one that reuses its file descriptor."""
        self._client.close()

    def interrupt(self, thread: threading.Thread) -> None:
        """End the watch that this thread is reading, if any."""
        self._streams.interrupt(thread)

    def get(self, kind: ResourceKind, name: str, namespace: str | None = None) -> Json:
        with _translate_errors(f"get {kind.name} {name}"):
            return self._client.get(_resource(kind), name, **_namespace_of(kind, namespace))

    def find(self, kind: ResourceKind, name: str, namespace: str | None = None) -> Json | None:
        try:
            return self.get(kind, name, namespace)
        except NotFound:
            return None

    def list(
        self,
        kind: ResourceKind,
        namespace: str | None = None,
        *,
        labels: Mapping[str, Any] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> tuple[list[Json], str]:
        """All items, and the resourceVersion to watch from."""
        with _translate_errors(f"list {kind.plural}"):
            response = self._client.list(
                _resource(kind), labels=labels, fields=fields, **_namespaces_of(kind, namespace)
            )
            return [*response], response.resourceVersion

    def watch(
        self,
        kind: ResourceKind,
        version: str,
        namespace: str | None = None,
        *,
        labels: Mapping[str, Any] | None = None,
        fields: Mapping[str, Any] | None = None,
        on_connected: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[str, Json]]:
        """Yields events until the watch fails or `interrupt` ends it. `on_connected` is called each
        time the server accepts the watch: at first, and after each timeout of the server."""
        with (
            self._streams.report_connected(on_connected),
            _translate_errors(f"watch {kind.plural}"),
        ):
            yield from self._client.watch(
                _resource(kind),
                labels=labels,
                fields=fields,
                resource_version=version,
                server_timeout=self._watch_seconds,
                **_namespaces_of(kind, namespace),
            )

    def create(self, kind: ResourceKind, resource: Json) -> Json:
        with _translate_errors(f"create {kind.name} {resource['metadata'].get('name', '')}"):
            return self._client.create(_resource(kind)(resource))

    def replace(self, kind: ResourceKind, resource: Json) -> Json:
        """Conflict if it changed since it was read."""
        with _translate_errors(f"replace {kind.name} {resource['metadata']['name']}"):
            return self._client.replace(_resource(kind)(resource))

    def patch(
        self, kind: ResourceKind, name: str, change: Json, namespace: str | None = None, *,
        status: bool = False,
    ) -> Json:  # fmt: skip
        """A merge patch."""
        from lightkube.types import PatchType

        with _translate_errors(f"patch {kind.name} {name}"):
            return self._client.patch(
                _resource(kind, status=status),
                name,
                change,
                patch_type=PatchType.MERGE,
                **_namespace_of(kind, namespace),
            )

    def apply(self, kind: ResourceKind, resource: Json) -> Json:
        """Server-side apply: create it, or change what differs."""
        manifest = {"apiVersion": kind.api_version, "kind": kind.name, **resource}
        with _translate_errors(f"apply {kind.name} {resource['metadata']['name']}"):
            return self._client.apply(_resource(kind)(manifest), force=True)

    def delete(self, kind: ResourceKind, name: str, namespace: str | None = None) -> None:
        """Cascading. Succeeds if it does not exist."""
        from lightkube.types import CascadeType

        try:
            with _translate_errors(f"delete {kind.name} {name}"):
                self._client.delete(
                    _resource(kind),
                    name,
                    cascade=CascadeType.BACKGROUND,
                    **_namespace_of(kind, namespace),
                )
        except NotFound:
            return


@contextmanager
def _kubeconfig_errors(kubeconfig: Path | None) -> Iterator[None]:
    """Turn everything that can be wrong with a kubeconfig into BadInput."""
    import yaml
    from lightkube.core.exceptions import ConfigError

    try:
        yield
    except (ConfigError, OSError, yaml.YAMLError, ValueError, LookupError, TypeError,
            AttributeError) as error:  # fmt: skip
        path = kubeconfig or "the default kubeconfig"
        raise unreadable(path, error, hint="check it with `kubectl cluster-info`") from error


def _resource(kind: ResourceKind, *, status: bool = False) -> Any:
    resource = _resources.get(kind)
    if resource is None:
        with _resource_types_lock:
            resource = _resources[kind] = _resources.get(kind) or _build_resource_type(kind)
    return resource.Status if status else resource


def _build_resource_type(kind: ResourceKind) -> Any:
    from lightkube import generic_resource
    from lightkube.core import decoders

    resource = generic_resource.get_generic_resource(kind.api_version, kind.name)
    if resource is None:
        create: Callable[..., Any] = (
            generic_resource.create_namespaced_resource
            if kind.namespaced
            else generic_resource.create_global_resource
        )
        resource = create(kind.group, kind.version, kind.name, kind.plural)
    decoders.decode_list(b'{"items": [], "metadata": {}}', resource)
    decoders.decode_watch_event(b'{"type": "ADDED", "object": {}}')
    decoders.decode_status(b"{}")
    resource({"metadata": {}}).metadata  # noqa: B018  # every call reads it
    return resource


def _namespace_of(kind: ResourceKind, namespace: str | None) -> dict[str, str]:
    if not kind.namespaced:
        return {}
    assert namespace is not None, f"{kind.name} is namespaced"
    return {"namespace": namespace}


def _namespaces_of(kind: ResourceKind, namespace: str | None) -> dict[str, str]:
    return {"namespace": namespace or "*"} if kind.namespaced else {}


_ERROR_BY_CODE: dict[int, type[FleetError]] = {
    400: BadRequest,
    401: PermissionMissing,
    403: PermissionMissing,
    404: NotFound,
    409: Conflict,
    410: Conflict,
    422: BadRequest,
    429: RateLimited,
}


@contextmanager
def _translate_errors(operation: str) -> Iterator[None]:
    import httpx2
    from lightkube.core.exceptions import ApiError

    try:
        yield
    except ApiError as error:
        code = error.status.code or 500
        kind = _ERROR_BY_CODE.get(code, ProviderUnavailable)
        raise kind(f"cannot {operation}: {error.status.message or error}") from error
    except httpx2.HTTPStatusError as error:
        kind = _ERROR_BY_CODE.get(error.response.status_code, ProviderUnavailable)
        raise kind(f"cannot {operation}: {error}") from error
    except httpx2.HTTPError as error:
        message = str(error) or type(error).__name__
        raise ProviderUnavailable(f"cannot {operation}: {message}") from error
    except (ValueError, KeyError) as error:
        # From lightkube and msgspec, on a response that is not an API server's, e.g. of a proxy.
        raise ProviderUnavailable(f"cannot {operation}: invalid response: {error!r}") from error
