"""Leases of the store that a request waits for, so that one changes something at a time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from tpufleet.errors import FleetError
from tpufleet.stores.base import Lease, Store

RETRY_SECONDS = 0.05


@contextmanager
def hold(
    store: Store, name: str, ttl: timedelta, now: datetime, deadline: float, busy: FleetError
) -> Iterator[Lease]:
    """Raises `busy` at the deadline, of the monotonic clock. Each request is a holder of its own: a
    lease is granted again to whoever holds it. Commit with the lease as fence, so that nothing is
    written after it has expired."""
    holder = secrets.token_hex(8)
    while (lease := store.acquire_lease(name, holder, ttl, store.time() or now)) is None:
        if time.monotonic() >= deadline:
            raise busy
        time.sleep(RETRY_SECONDS)
    try:
        yield lease
    finally:
        store.release_lease(lease)
