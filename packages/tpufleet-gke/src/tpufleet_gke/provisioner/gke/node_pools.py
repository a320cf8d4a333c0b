"""GKE's node pool API through Google's client (the extra `gke`). Operations are only started; their
results are read from later listings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from tpufleet.errors import (
    BadRequest,
    Conflict,
    NoCapacity,
    NotFound,
    PermissionMissing,
    ProviderUnavailable,
    QuotaExceeded,
    RateLimited,
    no_credentials,
    unreachable,
)
from tpufleet_gke.provisioner.gke import failures
from tpufleet_gke.provisioner.model import pool_shapes
from tpufleet_gke.provisioner.model.cluster_state import (
    ERROR_STATUSES,
    FailureCause,
    ObservedPool,
    PoolFailure,
    PoolStatus,
)
from tpufleet_gke.provisioner.model.pool_specs import PoolCapacity
from tpufleet_gke.provisioner.settings import NodeNetwork

CALL_TIMEOUT = 30.0  # seconds
# GKE upgrades the nodes of clusters in a release channel, and refuses pools that forbid it:
# https://cloud.google.com/kubernetes-engine/docs/concepts/release-channels
_RELEASE_CHANNEL = re.compile(r"auto_upgrade .*cannot be false when release_channel", re.IGNORECASE)
GRANT = (
    "grant the provisioner container.clusters.get, container.clusters.update, "
    "container.operations.get and container.operations.list on the project"
)


class AutoUpgradeRequired(BadRequest):
    """The release channel of the cluster does not allow pools without it."""


class NodePools(Protocol):
    def list_pools(self) -> Sequence[ObservedPool]: ...

    def failed_creates(self) -> Mapping[str, PoolFailure]:
        """By pool: its last create operation, if that failed."""
        ...

    def create(self, request: Mapping[str, Any]) -> None:
        """Start creating. Conflict when a pool of that name exists."""
        ...

    def delete(self, name: str) -> None:
        """Start deleting. Succeeds when the pool does not exist."""
        ...

    def relabel(self, name: str, labels: Mapping[str, str]) -> None:
        """Start replacing the labels of all nodes of a running pool."""
        ...

    def auto_provisioned(self) -> frozenset[str]:
        """Accelerators for which the cluster itself creates node pools."""
        ...


class MockNodePools:
    """PROVIDER=mock: lists the requested pools and creates no nodes. Pools stay RECONCILING, so
    that pods wait for them without a timeout."""

    def __init__(self) -> None:
        self._pools: dict[str, ObservedPool] = {}

    def list_pools(self) -> Sequence[ObservedPool]:
        return tuple(self._pools.values())

    def failed_creates(self) -> Mapping[str, PoolFailure]:
        return {}

    def create(self, request: Mapping[str, Any]) -> None:
        config = request.get("config", {})
        machine, nodes = config.get("machineType", ""), request.get("initialNodeCount", 0)
        self._pools[request["name"]] = ObservedPool(
            name=request["name"],
            status=PoolStatus.RECONCILING,
            labels=dict(config.get("labels", {})),
            machine_type=machine,
            nodes=nodes,
            chips=nodes * _chips(machine),
        )

    def delete(self, name: str) -> None:
        self._pools.pop(name, None)

    def relabel(self, name: str, labels: Mapping[str, str]) -> None:
        self._pools[name] = replace(self._pools[name], labels=dict(labels))

    def auto_provisioned(self) -> frozenset[str]:
        return frozenset()


class GkeNodePools:
    def __init__(self, client: Any, parent: str, call_timeout: float = CALL_TIMEOUT) -> None:
        """`client` is a google.cloud.container_v1.ClusterManagerClient."""
        self._client, self._parent = client, parent
        self._options: dict[str, Any] = {"timeout": call_timeout, "retry": None}
        self._location = parent.rpartition("/clusters/")[0]
        self._must_auto_upgrade = False  # the cluster is in a release channel

    def list_pools(self) -> Sequence[ObservedPool]:
        with translate_errors():
            response = self._client.list_node_pools(parent=self._parent, **self._options)
        return [_observed_pool(pool) for pool in response.node_pools]

    def failed_creates(self) -> Mapping[str, PoolFailure]:
        from google.cloud import container_v1

        with translate_errors():
            response = self._client.list_operations(parent=self._location, **self._options)
        # GKE lists those of twelve hours: as plain messages they take a tenth of the time.
        creates: Any = container_v1.Operation.Type.CREATE_NODE_POOL
        operations = container_v1.ListOperationsResponse.pb(response).operations
        separator = re.compile(
            rf"/clusters/{re.escape(self._parent.rpartition('/')[2])}/nodePools/"
        )
        latest: dict[str, tuple[str, PoolFailure | None]] = {}
        for operation in operations:
            if operation.operation_type != creates.value:
                continue
            parts = separator.split(operation.target_link)
            if len(parts) != 2:
                continue
            name, started_at = parts[1], operation.start_time
            if name in latest and latest[name][0] > started_at:
                continue
            done: Any = container_v1.Operation.Status.DONE
            failure = _operation_failure(operation) if operation.status == done.value else None
            latest[name] = (started_at, failure)
        return {name: failure for name, (_, failure) in latest.items() if failure is not None}

    def create(self, request: Mapping[str, Any]) -> None:
        from google.cloud import container_v1

        pool = container_v1.NodePool.from_json(json.dumps(request))
        pool.management.auto_upgrade |= self._must_auto_upgrade
        try:
            self._send(pool)
        except AutoUpgradeRequired:
            if pool.management.auto_upgrade:
                raise
            self._must_auto_upgrade = pool.management.auto_upgrade = True
            self._send(pool)

    def _send(self, pool: Any) -> None:
        with translate_errors():
            self._client.create_node_pool(parent=self._parent, node_pool=pool, **self._options)

    def delete(self, name: str) -> None:
        try:
            with translate_errors():
                self._client.delete_node_pool(
                    name=f"{self._parent}/nodePools/{name}", **self._options
                )
        except NotFound:
            return

    def relabel(self, name: str, labels: Mapping[str, str]) -> None:
        from google.cloud import container_v1

        request = container_v1.UpdateNodePoolRequest(
            name=f"{self._parent}/nodePools/{name}",
            labels=container_v1.NodeLabels(labels=dict(labels)),
        )
        with translate_errors():
            self._client.update_node_pool(request=request, **self._options)

    def auto_provisioned(self) -> frozenset[str]:
        """From the limits of node auto-provisioning, whose resource types for TPUs are the values
        of the accelerator label."""
        with translate_errors():
            cluster = self._client.get_cluster(name=self._parent, **self._options)
        autoscaling = cluster.autoscaling
        if not autoscaling.enable_node_autoprovisioning:
            return frozenset()
        return frozenset(
            limit.resource_type for limit in autoscaling.resource_limits if limit.maximum > 0
        )


def _operation_failure(operation: Any) -> PoolFailure | None:
    """Of one that is done."""
    code = operation.error.code
    message = str(operation.error.message or operation.status_message)
    if not code and not message:
        return None
    return failures.failure_of(failures.classify_operation(code, message), message)


def _pool_failure(pool: Any) -> PoolFailure:
    conditions = pool.conditions
    message = pool.status_message or "; ".join(filter(None, (one.message for one in conditions)))
    cause = failures.classify_pool([one.code.name for one in conditions], message)
    return failures.failure_of(cause, message)


def _observed_pool(pool: Any) -> ObservedPool:
    config = pool.config
    status = pool.status.name
    known = status in PoolStatus.__members__
    capacity = PoolCapacity.SPOT if config.spot else PoolCapacity.ON_DEMAND
    if config.reservation_affinity.consume_reservation_type.name == "SPECIFIC_RESERVATION":
        capacity = PoolCapacity.RESERVED
    nodes = pool.initial_node_count
    if config.flex_start:
        limits = pool.autoscaling
        capacity = PoolCapacity.FLEX_START
        nodes = limits.max_node_count or limits.total_max_node_count
    placement = pool.placement_policy
    return ObservedPool(
        name=pool.name,
        status=PoolStatus(status) if known else PoolStatus.UNKNOWN,
        labels=dict(config.labels),
        failure=_pool_failure(pool) if status in ERROR_STATUSES else None,
        zone=pool.locations[0] if pool.locations else "",
        capacity=capacity,
        machine_type=config.machine_type,
        topology=placement.tpu_topology
        or placement.policy_name.removeprefix(pool_shapes.policy_name("")),
        reservation=next(iter(config.reservation_affinity.values), ""),
        service_account=config.service_account,
        networks=tuple(
            NodeNetwork(network=one.network, subnetwork=one.subnetwork)
            for one in pool.network_config.additional_node_network_configs
        ),
        nodes=nodes,
        chips=nodes * _chips(config.machine_type),
    )


def _chips(machine_type: str) -> int:
    """Of one node: a `ct5lp-hightpu-4t` has 4."""
    match = re.search(r"-(\d+)t$", machine_type)
    return int(match[1]) if match else 0


@contextmanager
def translate_errors() -> Iterator[None]:
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth

    try:
        yield
    except api.NotFound as error:
        raise NotFound(_summary(error)) from error
    except api.AlreadyExists as error:
        raise Conflict(f"GKE: {error.message}") from error
    except (api.Forbidden, api.Unauthenticated, api.Unauthorized) as error:
        _raise_by_text(error)
        raise PermissionMissing(_summary(error, GRANT)) from error
    except (api.TooManyRequests, api.ResourceExhausted) as error:
        # One status code for three causes. Google's ErrorInfo tells them apart where it is set.
        if getattr(error, "reason", None) != "RATE_LIMIT_EXCEEDED":
            _raise_by_text(error)
        raise RateLimited(_summary(error)) from error
    except (api.FailedPrecondition, api.Aborted) as error:
        _raise_by_text(error)
        raise ProviderUnavailable(_summary(error)) from error
    except (api.BadRequest, api.MethodNotImplemented) as error:
        if _RELEASE_CHANNEL.search(error.message):
            raise AutoUpgradeRequired(_summary(error)) from error
        _raise_by_text(error)
        raise BadRequest(_summary(error)) from error
    except api.GoogleAPICallError as error:
        raise ProviderUnavailable(_summary(error)) from error
    except (api.RetryError, auth.TransportError) as error:
        raise ProviderUnavailable(unreachable("GKE", error)) from error
    except auth.GoogleAuthError as error:
        raise no_credentials("GKE", error) from error


def detail_of(error: BaseException) -> str:
    """Google's whole text, of which the message of a translated error is a summary."""
    return str(getattr(error.__cause__, "message", "") or "")


def _summary(error: Any, remedy: str = "") -> str:
    """With a remedy where the text itself is not known."""
    text = error.message or type(error).__name__
    known = failures.known(text)
    if known is not None:
        return f"GKE: {known}"
    return "; ".join(filter(None, (f"GKE: {failures.summarize(text)}", remedy)))


def _raise_by_text(error: Any) -> None:
    """The text is more specific than the status: GKE refuses for want of quota with
    PERMISSION_DENIED, for want of machines, of a reservation or of a service account with
    INVALID_ARGUMENT, and for a policy of the organisation with FAILED_PRECONDITION."""
    match failures.classify_operation(0, error.message):
        case FailureCause.OUT_OF_STOCK:
            raise NoCapacity(_summary(error)) from error
        case FailureCause.QUOTA:
            raise QuotaExceeded(_summary(error)) from error
        case FailureCause.PERMISSION:
            raise PermissionMissing(_summary(error, GRANT)) from error
