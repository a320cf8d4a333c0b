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
from tpufleet.bridges.firestore.bridge import Bridge
from tpufleet.bridges.firestore.collection import Collection
from tpufleet.bridges.firestore.documents import Request
from tpufleet.bridges.firestore.driving import Driver
from tpufleet.bridges.firestore.jobs import Jobs, Offer
from tpufleet.bridges.firestore.rounds import BEATS_MISSED, Pace
from tpufleet.bridges.firestore.tidying import Tidier
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import BadInput
from tpufleet.kubernetes.probes import Pages
from tpufleet.model import durations, specs
from tpufleet.model.jobs import JobId


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    offer: Offer
    project: str | None = None  # None: that of this machine's credentials
    database: str | None = None
    collection: str = documents.COLLECTION
    results: str | None = None  # where results go that a document cannot hold
    keep: timedelta | None = None  # results and code of ended documents; None: for ever
    probes: str | None = None  # address of /healthz and /readyz; None: nobody asks
    pace: Pace = field(default_factory=Pace)


def settings_of(options: dict[str, Any], program: Path) -> Settings:
    """From the options of the command line; what is missing or None is as usual."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if "keep" in given:
        given["keep"] = durations.parse(given["keep"])

    def of(kind: type) -> dict[str, Any]:
        return {each.name: given[each.name] for each in fields(kind) if each.name in given}

    offer = Offer(**{**of(Offer), "program": program})
    return Settings(**of(Settings), offer=offer, pace=Pace(**of(Pace)))


def run(settings: Settings, client: FleetClient) -> int:
    """The exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    bridge = build(settings, client)
    pages = health(bridge, settings.probes) if settings.probes else None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: bridge.stop())
    faulthandler.register(signal.SIGUSR1)  # says where every thread stands
    bridge.run()
    if pages is not None:
        pages.close()
    return 0


def health(bridge: Bridge, address: str) -> Pages:
    """`/healthz` fails when the bridge should be started anew, `/readyz` while it does no work."""

    def page(trouble: Callable[[], str], status: int) -> Callable[[], tuple[int, str]]:
        return lambda: (status, f"{said}\n") if (said := trouble()) else (200, "ok\n")

    pages = {"/healthz": page(bridge.stuck, 500), "/readyz": page(bridge.unready, 503)}
    return Pages(address, pages).start()


def build(settings: Settings, client: FleetClient) -> Bridge:
    check(settings.offer, client)
    work = Jobs(client, settings.offer)
    results = large_results.place(settings.results, lambda job_id: work.link(job_id, "result"))
    there = Collection(
        collection.connect(settings.project, settings.database),
        settings.collection,
        holder=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
        dead_after=timedelta(seconds=settings.pace.beat * BEATS_MISSED),
    )
    logging.getLogger("tpufleet.bridge").info(
        "%s drives %s on %s", there.holder, settings.collection, settings.offer.accelerator
    )
    tidier = Tidier(there, results, client, settings.keep) if settings.keep else None
    return Bridge(there, Driver(there, work, results), client, settings.pace, tidier)


def check(offer: Offer, client: FleetClient) -> None:
    """A mistake in our own settings must not end the documents of clients one by one."""
    sample = Request(code="pass", challenge_number=1, timeout=1)
    spec = specs.parse(jobs.spec(offer, JobId("fs-sample"), "sample", sample))
    for name in jobs.PROGRAM:
        if not (offer.program / name).is_file():
            raise BadInput(f"{offer.program} does not hold {name}")
    if offer.pool is not None:
        pool = client.pool(offer.pool)
        if pool.accelerator != spec.accelerator:
            raise BadInput(f"pool: {pool.name} holds {pool.accelerator}, not {spec.accelerator}")
