"""`tpu bridge firestore`: the bridge from its settings, until it is told to end."""

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

from tpufleet.bridges.firestore import collection, documents, jobs, large_results
from tpufleet.bridges.firestore.background_tasks import MISSED_HEARTBEATS, BridgeLimits
from tpufleet.bridges.firestore.bridge import Bridge
from tpufleet.bridges.firestore.cleanup import ResultCleanup
from tpufleet.bridges.firestore.collection import JobCollection
from tpufleet.bridges.firestore.document_state import DocumentDriver
from tpufleet.bridges.firestore.documents import CodeRequest
from tpufleet.bridges.firestore.jobs import FleetJobs, JobTemplate
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import BadInput
from tpufleet.kubernetes.probes import ProbeServer
from tpufleet.model import durations, job_file
from tpufleet.model.jobs import JobId


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeSettings:
    offer: JobTemplate
    project: str | None = None  # None: that of this machine's credentials
    database: str | None = None
    collection: str = documents.COLLECTION
    results_location: str | None = None  # where results go that a document cannot hold
    retention: timedelta | None = None  # results and code of ended documents; None: for ever
    probe_address: str | None = None  # address of /healthz and /readyz; None: nobody asks
    pace: BridgeLimits = field(default_factory=BridgeLimits)


def settings_from_options(options: dict[str, Any], program: Path) -> BridgeSettings:
    """From the options of the command line; what is missing or None is as usual."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if "keep" in given:
        given["keep"] = durations.parse(given["keep"])

    def of(kind: type) -> dict[str, Any]:
        return {each.name: given[each.name] for each in fields(kind) if each.name in given}

    offer = JobTemplate(**{**of(JobTemplate), "program": program})
    return BridgeSettings(**of(BridgeSettings), offer=offer, pace=BridgeLimits(**of(BridgeLimits)))


def run(settings: BridgeSettings, client: FleetClient) -> int:
    """The exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    bridge = build_bridge(settings, client)
    pages = serve_probes(bridge, settings.probe_address) if settings.probe_address else None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: bridge.stop())
    faulthandler.register(signal.SIGUSR1)  # says where every thread stands
    bridge.run()
    if pages is not None:
        pages.close()
    return 0


def serve_probes(bridge: Bridge, address: str) -> ProbeServer:
    """`/healthz` fails when the bridge should be started anew, `/readyz` while it does no work."""

    def page(trouble: Callable[[], str], status: int) -> Callable[[], tuple[int, str]]:
        return lambda: (status, f"{said}\n") if (said := trouble()) else (200, "ok\n")

    pages = {
        "/healthz": page(bridge.stuck_reason, 500),
        "/readyz": page(bridge.unready_reason, 503),
    }
    return ProbeServer(address, pages).start()


def build_bridge(settings: BridgeSettings, client: FleetClient) -> Bridge:
    check_template(settings.offer, client)
    work = FleetJobs(client, settings.offer)
    results = large_results.result_store(
        settings.results_location, lambda job_id: work.link(job_id, "result")
    )
    there = JobCollection(
        collection.connect(settings.project, settings.database),
        settings.collection,
        holder=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
        dead_after=timedelta(seconds=settings.pace.beat * MISSED_HEARTBEATS),
    )
    logging.getLogger("tpufleet.bridge").info(
        "%s drives %s on %s", there.holder, settings.collection, settings.offer.accelerator
    )
    tidier = (
        ResultCleanup(there, results, client, settings.retention) if settings.retention else None
    )
    return Bridge(there, DocumentDriver(there, work, results), client, settings.pace, tidier)


def check_template(offer: JobTemplate, client: FleetClient) -> None:
    """A mistake in our own settings must not end the documents of clients one by one."""
    sample = CodeRequest(code="pass", challenge_number=1, timeout=1)
    spec = job_file.parse_job(jobs.job_spec(offer, JobId("fs-sample"), "sample", sample))
    for name in jobs.PROGRAM_FILES:
        if not (offer.program_dir / name).is_file():
            raise BadInput(f"{offer.program_dir} does not hold {name}")
    if offer.pool is not None:
        pool = client.pool(offer.pool)
        if pool.accelerator != spec.accelerator:
            raise BadInput(f"pool: {pool.name} holds {pool.accelerator}, not {spec.accelerator}")
