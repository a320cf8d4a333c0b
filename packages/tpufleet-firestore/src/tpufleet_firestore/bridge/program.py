"""`tpu bridge firestore`: builds the bridge from its options and runs it."""

from __future__ import annotations

import faulthandler
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpufleet.client.fleet import FleetClient
from tpufleet.errors import BadInput
from tpufleet.kubernetes.probes import ProbeServer
from tpufleet.model.job import job_file
from tpufleet.model.job.jobs import JobId
from tpufleet.model.values import durations
from tpufleet_firestore.bridge import collection, documents, jobs, large_results
from tpufleet_firestore.bridge.background_tasks import MISSED_HEARTBEATS, BridgeLimits
from tpufleet_firestore.bridge.bridge import Bridge
from tpufleet_firestore.bridge.cleanup import ResultCleanup
from tpufleet_firestore.bridge.collection import JobCollection
from tpufleet_firestore.bridge.document_driver import DocumentDriver
from tpufleet_firestore.bridge.documents import CodeRequest
from tpufleet_firestore.bridge.jobs import FleetJobs, JobTemplate, LinkSettings

log = logging.getLogger("tpufleet.bridge")

_DURATION_OPTIONS = {"retention", "adopt_after", "lifetime"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeSettings:
    template: JobTemplate
    project: str | None = None  # None: the project of the credentials
    database: str | None = None
    collection: str = documents.COLLECTION
    results_location: str | None = None  # of results too large for a document
    retention: timedelta | None = None  # of results and code; None keeps them
    # A document of the former worker is run after its timeout and this time without a change.
    adopt_after: timedelta = timedelta(minutes=10)
    probe_address: str | None = None  # of /healthz, /readyz and /metrics; None: not served
    links: LinkSettings = field(default_factory=LinkSettings)
    limits: BridgeLimits = field(default_factory=BridgeLimits)


def settings_from_options(options: dict[str, Any], program_dir: Path) -> BridgeSettings:
    """Options have the names of fields. Those that are None or empty keep their defaults."""
    chosen = {name: value for name, value in options.items() if value not in (None, ())}
    for name in _DURATION_OPTIONS & chosen.keys():
        chosen[name] = durations.parse(chosen[name])

    def own(settings: type[Any]) -> dict[str, Any]:
        return {one.name: chosen[one.name] for one in fields(settings) if one.name in chosen}

    return BridgeSettings(
        template=JobTemplate(**own(JobTemplate), program_dir=program_dir),
        limits=BridgeLimits(**own(BridgeLimits)),
        links=LinkSettings(**own(LinkSettings)),
        **own(BridgeSettings),
    )


def run(settings: BridgeSettings, client: FleetClient) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    bridge = build_bridge(settings, client)
    probes = serve_probes(bridge, settings.probe_address) if settings.probe_address else None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: bridge.stop())
    faulthandler.register(signal.SIGUSR1)  # dumps the traceback of every thread
    bridge.run()
    if probes is not None:
        probes.close()
    return 0


def serve_probes(bridge: Bridge, address: str) -> ProbeServer:
    """`/healthz` fails when the bridge should be restarted, `/readyz` while it does no work;
    `/metrics` is for Prometheus."""

    def page(problem: Callable[[], str], status: int) -> Callable[[], tuple[int, str]]:
        return lambda: (status, f"{message}\n") if (message := problem()) else (200, "ok\n")

    pages = {
        "/healthz": page(bridge.stuck_reason, 500),
        "/readyz": page(bridge.unready_reason, 503),
        "/metrics": lambda: (200, bridge.metrics()),
    }
    return ProbeServer(address, pages).start()


def build_bridge(settings: BridgeSettings, client: FleetClient) -> Bridge:
    check_template(settings.template, client)
    fleet_jobs = FleetJobs(client, settings.template, settings.links)
    results = large_results.result_store(
        settings.results_location, lambda job_id: fleet_jobs.link(job_id, "result")
    )
    dead_after = timedelta(seconds=settings.limits.heartbeat_seconds * MISSED_HEARTBEATS)
    job_collection = JobCollection(
        collection.connect(settings.project, settings.database),
        settings.collection,
        holder=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
        dead_after=dead_after,
        adopt_after=settings.adopt_after,
    )
    log.info(
        "bridge %s serves collection %s on %s",
        job_collection.holder,
        settings.collection,
        settings.template.accelerator,
    )
    cleanup = (
        ResultCleanup(job_collection, results, client, settings.retention)
        if settings.retention
        else None
    )
    driver = DocumentDriver(job_collection, fleet_jobs, results)
    return Bridge(job_collection, driver, client, settings.limits, cleanup)


def check_template(template: JobTemplate, client: FleetClient) -> None:
    """Reject invalid options at the start, so that they do not fail the clients' documents."""
    if template.user == "root" and not template.allow_root:
        raise BadInput(
            "--user root: submitted code would run as root; add --allow-root to permit it"
        )
    sample = CodeRequest(code="pass", challenge_number=1, timeout=1)
    spec = job_file.parse_job(jobs.job_spec(template, JobId("fs-sample"), "sample", sample))
    if template.pool is not None:
        pool = client.pool(template.pool)
        if pool.accelerator != spec.accelerator:
            raise BadInput(
                f"pool {pool.name} has {pool.accelerator}, but --accelerator is "
                f"{template.accelerator}"
            )
