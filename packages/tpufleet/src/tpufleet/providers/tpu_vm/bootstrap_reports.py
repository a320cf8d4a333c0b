"""Reads how far the hosts of new nodes came, from their guest attributes.

Hosts write them through the metadata server, so this works where they cannot reach our server:
https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes/getGuestAttributes
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Protocol

import msgspec

from tpufleet.errors import ProviderError
from tpufleet.model.fleet import bootstrap
from tpufleet.model.fleet.bootstrap import BootstrapReport, BootstrapStage

log = logging.getLogger(__name__)

QUERY_PATH = f"{bootstrap.GUEST_NAMESPACE}/{bootstrap.GUEST_KEY}"
# Compute Engine limits queries of guest attributes to 10 a minute for each VM:
# https://cloud.google.com/compute/docs/metadata/manage-guest-attributes
READ_INTERVAL = timedelta(seconds=20)
# A slice boots for 20 minutes at most; a node that works is not asked for ever.
READ_FOR = timedelta(minutes=30)
# Of one zone in one observation, which others wait for. After a failure none for a while.
MAX_READS = 10
RETRY_AFTER = timedelta(minutes=1)


class _Read(msgspec.Struct, frozen=True, kw_only=True):
    first_at: datetime
    at: datetime
    reports: tuple[BootstrapReport, ...] = ()
    connected: bool = False  # all hosts: nothing more to read


class GuestAttributes(Protocol):
    def guest_attributes(self, name: str, query_path: str) -> list[str]:
        """The values below a path, of all hosts of a slice."""
        ...


class BootstrapReports:
    """Of the nodes of one zone. A failed read keeps the last reports."""

    def __init__(self, api: GuestAttributes) -> None:
        self._api = api
        self._reads: dict[str, _Read] = {}  # by node, and slice if adopted
        self._lock = threading.Lock()
        self._reads_left = 0
        self._retry_at: datetime | None = None

    def start_observation(self, nodes: Collection[str], now: datetime) -> None:
        """Forget all other nodes."""
        with self._lock:
            failing = self._retry_at is not None and now < self._retry_at
            self._reads_left = 0 if failing else MAX_READS
            self._reads = {
                key: read for key, read in self._reads.items() if key.partition(" ")[0] in nodes
            }

    def of_node(
        self, name: str, hosts: int, now: datetime, adopted_as: str | None = None
    ) -> tuple[BootstrapReport, ...]:
        """Of a node that runs; empty once all of its hosts have connected. Of an adopted node, only
        reports of that slice."""
        with self._lock:
            key = f"{name} {adopted_as or ''}".rstrip()
            known = self._reads.get(key)
            if known is not None and (
                known.connected
                or now - known.at < READ_INTERVAL
                or now - known.first_at > READ_FOR
                or not self._reads_left
            ):
                return known.reports
            if not self._reads_left:
                return ()
            self._reads_left -= 1
        read = self._read(name, hosts, known, now, adopted_as)
        with self._lock:
            self._reads[key] = read
        return read.reports

    def _read(
        self, name: str, hosts: int, known: _Read | None, now: datetime, adopted_as: str | None
    ) -> _Read:
        first_at = known.first_at if known is not None else now
        try:
            values = self._api.guest_attributes(name, QUERY_PATH)
        except ProviderError as error:
            log.warning("cannot read the bootstrap reports of %s: %s", name, error)
            with self._lock:
                self._reads_left, self._retry_at = 0, now + RETRY_AFTER
            return _Read(first_at=first_at, at=now, reports=known.reports if known else ())
        parsed = (bootstrap.parse_report(value) for value in values)
        by_host = {
            report.host: report
            for report in parsed
            if report is not None and adopted_as in (None, report.slice_id)
        }
        done = [r for r in by_host.values() if r.stage is BootstrapStage.CONNECTED]
        if len(done) >= hosts:
            return _Read(first_at=first_at, at=now, connected=True)
        reports = tuple(by_host[host] for host in sorted(by_host))
        return _Read(first_at=first_at, at=now, reports=reports)
