"""`tpu provisioner`: the program, put together from its parts."""

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

from tpufleet.clocks import Clock, SystemClock
from tpufleet.errors import BadInput
from tpufleet.kubernetes.connections import Connection
from tpufleet.kubernetes.event_recorder import KubernetesEventRecorder
from tpufleet.kubernetes.leader_election import LeaderElector
from tpufleet.kubernetes.probes import ProbeServer
from tpufleet.provisioner import settings
from tpufleet.provisioner.gke_api import node_pools
from tpufleet.provisioner.gke_api.calls import MAX_CONCURRENT_DELETES
from tpufleet.provisioner.gke_api.node_pools import GkeNodePools, MockNodePools, NodePools
from tpufleet.provisioner.kube import label_keys
from tpufleet.provisioner.kube.pool_events import BackgroundRecorder, EventReporter
from tpufleet.provisioner.kube.watched_cluster import WatchedCluster
from tpufleet.provisioner.loop import Provisioner
from tpufleet.provisioner.metrics import Metrics
from tpufleet.provisioner.settings import ProvisionerSettings

log = logging.getLogger("tpufleet.provisioner")

METADATA_URL = "http://metadata.google.internal/computeMetadata/v1/"
# A leader whose rounds fail for this long is restarted by Kubernetes.
UNHEALTHY_AFTER = timedelta(minutes=5)
SHUTDOWN_TIMEOUT = 5.0  # seconds that calls and events which are under way get when we are to end


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionerOptions:
    """What is said on the command line."""

    metrics_address: str = "127.0.0.1:8080"
    probe_address: str = "127.0.0.1:8081"
    leader_elect: bool = False
    dry_run: bool = False
    kubeconfig: Path | None = None
    gke_endpoint: str = ""  # of an emulator
    namespace: str = label_keys.NAMESPACE


class ProvisionerProgram:
    """Everything that runs in one process."""

    def __init__(
        self, given: ProvisionerSettings, options: ProvisionerOptions, clock: Clock | None = None
    ) -> None:
        self._clock = clock or SystemClock()
        self._connection = Connection(options.kubeconfig, manager=label_keys.EVENT_SOURCE)
        self._metrics = Metrics()
        self._cluster = WatchedCluster(self._connection, self._changed, given.served_kinds)
        self._leadership = self._make_leadership(given, options) if options.leader_elect else None
        self._creator = ThreadPoolExecutor(given.concurrency, thread_name_prefix="creations")
        self._deleter = ThreadPoolExecutor(MAX_CONCURRENT_DELETES, thread_name_prefix="deletions")
        recorder = KubernetesEventRecorder(
            self._connection, self._clock, source=label_keys.EVENT_SOURCE
        )
        self._records = BackgroundRecorder(recorder)
        self._provisioner = Provisioner(
            self._cluster,
            make_node_pools(given, options.gke_endpoint),
            given,
            clock=self._clock,
            reporter=EventReporter(self._records),
            create_executor=self._creator,
            delete_executor=self._deleter,
            metrics=self._metrics,
            is_leader=self._leading,
        )
        self._started_at = self._clock.now()
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
        if self._leadership is not None:
            self._leadership.start()
        loop = threading.Thread(target=self._loop, args=(stop,), name="provisioner", daemon=True)
        loop.start()
        stop.wait()
        self._provisioner.close()
        loop.join(timeout=10)
        if not loop.is_alive():
            self._provisioner.collect_results(SHUTDOWN_TIMEOUT)
        self._records.close(SHUTDOWN_TIMEOUT)
        self._cluster.close()
        if self._leadership is not None:
            self._leadership.close()
        for executor in (self._creator, self._deleter):
            executor.shutdown(wait=False, cancel_futures=True)
        self.probe_server.close()
        self.metrics_server.close()

    def _loop(self, stop: threading.Event) -> None:
        # Without having seen every JobSet, each pool would look like an orphan.
        while not self._cluster.wait_synced(1.0):
            if stop.is_set():
                return
        log.info("synced; watching for pods that wait for a node pool")
        self._provisioner.run()

    def _changed(self) -> None:
        self._provisioner.wake()

    def _leading(self) -> bool:
        return self._leadership is None or self._leadership.leading

    def _healthz(self) -> tuple[int, str]:
        last = self._provisioner.last_success or self._started_at
        if self._leading() and self._clock.now() - last > UNHEALTHY_AFTER:
            return 500, f"no round has ended well since {last:%H:%M:%S}\n"
        return 200, "ok\n"

    def _readyz(self) -> tuple[int, str]:
        return (200, "ok\n") if self._cluster.synced else (503, "not synced yet\n")

    def _make_leadership(
        self, given: ProvisionerSettings, options: ProvisionerOptions
    ) -> LeaderElector:
        return LeaderElector(
            self._connection,
            self._clock,
            name=label_keys.LEASE,
            namespace=options.namespace,
            identity=f"{socket.gethostname()}_{os.getpid()}",
            lease_duration=given.lease_duration,
            on_change=self._changed,
        )


def run(environ: Mapping[str, str], options: ProvisionerOptions) -> int:
    """Until told to end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for chatty in ("httpx", "httpx2", "httpcore", "httpcore2"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    given = settings.from_environ(environ)
    given = dataclasses.replace(given, dry_run=given.dry_run or options.dry_run)
    if given.provider == "gke":
        given = fill_from_metadata(given)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    ProvisionerProgram(given, options).run(stop)
    return 0


def fill_from_metadata(given: ProvisionerSettings) -> ProvisionerSettings:
    """What was not set is asked of the metadata server, as of old."""
    found = {
        "project": given.project or _metadata("project/project-id"),
        "cluster_location": given.cluster_location
        or _metadata("instance/attributes/cluster-location"),
        "cluster": given.cluster or _metadata("instance/attributes/cluster-name"),
        "zones": given.zones or (_metadata("instance/zone").rpartition("/")[2],),
    }
    return dataclasses.replace(given, **found)


def _metadata(path: str) -> str:
    request = urllib.request.Request(METADATA_URL + path, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return str(answer.read().decode().strip())
    except (urllib.error.URLError, OSError) as error:
        raise BadInput(
            "set GCP_PROJECT_ID, GCP_CLUSTER_LOCATION, GCP_CLUSTER and GCP_ZONE: there is no "
            f"metadata server to ask for {path} ({error})"
        ) from error


def make_node_pools(given: ProvisionerSettings, endpoint: str = "") -> NodePools:
    if given.provider == "mock":
        return MockNodePools()
    return GkeNodePools(_client(endpoint), given.parent)


def _client(endpoint: str) -> Any:
    try:
        from google.cloud import container_v1
    except ImportError as error:
        raise BadInput("GKE needs the extra: pip install 'tpufleet[gke]'") from error
    if not endpoint:
        with node_pools.translate_errors():
            return container_v1.ClusterManagerClient()
    import grpc
    from google.cloud.container_v1.services.cluster_manager import transports

    channel = grpc.insecure_channel(endpoint)
    return container_v1.ClusterManagerClient(
        transport=transports.ClusterManagerGrpcTransport(channel=channel)
    )
