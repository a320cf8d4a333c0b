"""`tpu provisioner`: assembles and runs the provisioner process."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from tpufleet.clocks import SystemClock
from tpufleet.errors import unreadable
from tpufleet.kubernetes.connections import Connection
from tpufleet.kubernetes.probes import ProbeServer, stale_caches
from tpufleet_gke.provisioner.gke import node_pools
from tpufleet_gke.provisioner.gke.calls import MAX_CONCURRENT_DELETES
from tpufleet_gke.provisioner.gke.node_pools import GkeNodePools, MockNodePools, NodePools
from tpufleet_gke.provisioner.kube.event_recorder import KubernetesEventRecorder
from tpufleet_gke.provisioner.kube.leader_election import LeaderElector
from tpufleet_gke.provisioner.kube.pool_events import BackgroundRecorder, EventReporter
from tpufleet_gke.provisioner.kube.watched_cluster import WatchedCluster
from tpufleet_gke.provisioner.loop import Provisioner
from tpufleet_gke.provisioner.metrics import ProvisionerMetrics
from tpufleet_gke.provisioner.model import label_keys
from tpufleet_gke.provisioner.settings import ProvisionerSettings, from_environ

log = logging.getLogger("tpufleet_gke.provisioner")

METADATA_URL = "http://metadata.google.internal/computeMetadata/v1/"
# Kubernetes restarts a leader that has not reconciled successfully for this long.
UNHEALTHY_AFTER = timedelta(minutes=5)
SHUTDOWN_TIMEOUT = 5.0  # seconds for calls and events in progress


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionerOptions:
    """The command-line options of these names."""

    metrics_address: str = "127.0.0.1:8080"
    probe_address: str = "127.0.0.1:8081"
    leader_elect: bool = False
    dry_run: bool = False
    kubeconfig: Path | None = None
    gke_endpoint: str = ""  # of an emulator; empty for Google's
    namespace: str = label_keys.NAMESPACE


class ProvisionerProgram:
    """Threads and servers of one provisioner process."""

    def __init__(self, settings: ProvisionerSettings, options: ProvisionerOptions) -> None:
        self._clock = SystemClock()
        self._connection = Connection(options.kubeconfig, manager=label_keys.EVENT_SOURCE)
        self._metrics = ProvisionerMetrics()
        self._cluster = WatchedCluster(
            self._connection,
            self._wake,
            settings.served_kinds,
            options.namespace,
            settings.dynamic_slices,
        )
        self._elector = self._make_elector(settings, options) if options.leader_elect else None
        self._create_executor = ThreadPoolExecutor(
            max(settings.concurrency, 1), thread_name_prefix="create"
        )
        self._delete_executor = ThreadPoolExecutor(
            MAX_CONCURRENT_DELETES, thread_name_prefix="delete"
        )
        recorder = KubernetesEventRecorder(
            self._connection, self._clock, source=label_keys.EVENT_SOURCE
        )
        self._recorder = BackgroundRecorder(recorder)
        self._provisioner = Provisioner(
            self._cluster,
            make_node_pools(settings, options.gke_endpoint),
            settings,
            clock=self._clock,
            reporter=EventReporter(self._recorder),
            create_executor=self._create_executor,
            delete_executor=self._delete_executor,
            metrics=self._metrics,
            is_leader=self._is_leader,
            dry_run=options.dry_run,
        )
        health = {"/healthz": self._healthz, "/readyz": self._readyz}
        self.probe_server = ProbeServer(options.probe_address, health)
        self.metrics_server = ProbeServer(
            options.metrics_address, {"/metrics": lambda: (200, self._metrics.text())}
        )

    def run(self, stop: threading.Event) -> None:
        self.probe_server.start()
        self.metrics_server.start()
        log.info(
            "metrics on %s, probes on %s", self.metrics_server.address, self.probe_server.address
        )
        self._cluster.start()
        if self._elector is not None:
            self._elector.start()
        loop = threading.Thread(target=self._loop, args=(stop,), name="provisioner", daemon=True)
        loop.start()
        stop.wait()
        self._provisioner.close()
        loop.join(timeout=10)
        if not loop.is_alive():
            self._provisioner.collect_results(SHUTDOWN_TIMEOUT)
        self._recorder.close(SHUTDOWN_TIMEOUT)
        self._cluster.close()
        if self._elector is not None:
            self._elector.close()
        for executor in (self._create_executor, self._delete_executor):
            executor.shutdown(wait=False, cancel_futures=True)
        self.probe_server.close()
        self.metrics_server.close()

    def _loop(self, stop: threading.Event) -> None:
        # Before the caches are filled, every pool would look like an orphan.
        while not self._cluster.wait_synced(1.0):
            if stop.is_set():
                return
        self._provisioner.run()

    def _wake(self) -> None:
        self._provisioner.wake()

    def _is_leader(self) -> bool:
        return self._elector is None or self._elector.leading

    def _healthz(self) -> tuple[int, str]:
        since = self._clock.uptime() - self._provisioner.last_success
        if self._is_leader() and since > UNHEALTHY_AFTER:
            return 500, f"no successful reconciliation for {since.total_seconds():.0f} s\n"
        stale = stale_caches(self._cluster.caches, after=UNHEALTHY_AFTER)
        return (200, "ok\n") if stale is None else (500, f"{stale}\n")

    def _readyz(self) -> tuple[int, str]:
        if not self._cluster.synced:
            return 503, "watch caches are not synced\n"
        stale = self._cluster.stale()
        return (200, "ok\n") if stale is None else (503, f"{stale}\n")

    def _make_elector(
        self, settings: ProvisionerSettings, options: ProvisionerOptions
    ) -> LeaderElector:
        return LeaderElector(
            self._connection,
            self._clock,
            name=label_keys.LEASE,
            namespace=options.namespace,
            identity=f"{socket.gethostname()}_{os.getpid()}",
            lease_duration=settings.lease_duration,
            on_change=self._wake,
        )


def run(environ: Mapping[str, str], options: ProvisionerOptions) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for name in ("httpx", "httpx2", "httpcore", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    settings = from_environ(environ)
    if settings.provider == "gke":
        settings = fill_from_metadata(settings)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    ProvisionerProgram(settings, options).run(stop)
    return 0


def fill_from_metadata(settings: ProvisionerSettings) -> ProvisionerSettings:
    """Look up unset values on the metadata server, as upstream does."""
    values: dict[str, Any] = {
        "project": settings.project or _metadata("project/project-id"),
        "cluster_location": settings.cluster_location
        or _metadata("instance/attributes/cluster-location"),
        "cluster": settings.cluster or _metadata("instance/attributes/cluster-name"),
        "zones": settings.zones or (_metadata("instance/zone").rpartition("/")[2],),
    }
    return msgspec.structs.replace(settings, **values)


def _metadata(path: str) -> str:
    request = urllib.request.Request(METADATA_URL + path, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return str(response.read().decode().strip())
    except (urllib.error.URLError, OSError) as error:
        hint = "set GCP_PROJECT_ID, GCP_CLUSTER_LOCATION, GCP_CLUSTER and GCP_ZONE"
        raise unreadable(f"{path} of the metadata server", error, hint=hint) from error


def make_node_pools(settings: ProvisionerSettings, endpoint: str = "") -> NodePools:
    if settings.provider == "mock":
        return MockNodePools()
    return GkeNodePools(_client(endpoint), settings.parent)


def _client(endpoint: str) -> Any:
    from google.cloud import container_v1

    if not endpoint:
        with node_pools.translate_errors():
            return container_v1.ClusterManagerClient()
    import grpc
    from google.cloud.container_v1.services.cluster_manager import transports

    channel = grpc.insecure_channel(endpoint)
    return container_v1.ClusterManagerClient(
        transport=transports.ClusterManagerGrpcTransport(channel=channel)
    )
