"""The servers that use one store: each says every few seconds that it runs, for `tpu status`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from datetime import datetime, timedelta

import tpufleet
from tpufleet.clocks import Clock
from tpufleet.errors import FleetError
from tpufleet.model.fleet.server_status import SERVERS_PREFIX, SeenServer
from tpufleet.policy.recovery import liveness
from tpufleet.service.operations.background import log_failure
from tpufleet.stores.base import Store

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = liveness.SERVER_PRESENT_FOR.total_seconds() / 4
# A server that was killed or is suspended is shown for this long.
FORGET_AFTER = timedelta(hours=1)


def announce_until(stopping: threading.Event, store: Store, name: str, clock: Clock) -> None:
    """Until `stopping` is set; the server is then no longer listed. Runs in its own thread."""
    while True:
        try:
            announce(store, name, store.time() or clock.now())
        except Exception as error:
            log_failure(logger, "announce this server", error)
        if stopping.wait(INTERVAL_SECONDS):
            break
    try:
        store.delete_objects([SERVERS_PREFIX + name])
    except FleetError as error:
        logger.debug("cannot withdraw this server: %s", error)


def announce(store: Store, name: str, now: datetime) -> None:
    store.put_object(SERVERS_PREFIX + name, tpufleet.__version__.encode(), now, replace=True)
    old = [each.name for each in store.objects(SERVERS_PREFIX) if now - each.at > FORGET_AFTER]
    if old:
        store.delete_objects(old)


def servers(store: Store, now: datetime) -> Sequence[SeenServer]:
    """By name."""
    seen = [each for each in store.objects(SERVERS_PREFIX) if now - each.at <= FORGET_AFTER]
    versions = store.read_objects([each.name for each in seen]) if seen else {}
    return [
        SeenServer(
            name=each.name.removeprefix(SERVERS_PREFIX),
            version=versions[each.name].decode(),
            seen_at=each.at,
        )
        for each in seen
        if each.name in versions
    ]
