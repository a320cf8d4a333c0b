"""Leader election with a Lease: one of several replicas acts, another takes over if it dies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import datetime, timedelta

from tpufleet.clocks import Clock
from tpufleet.errors import Conflict, FleetError
from tpufleet.kubernetes.connections import LEASE, Connection, Json

log = logging.getLogger(__name__)

LEASE_DURATION = timedelta(seconds=15)


class LeaderElector:
    """`leading` is true while we hold the lease and can still rely on it."""

    def __init__(
        self,
        connection: Connection,
        clock: Clock,
        *,
        name: str,
        namespace: str,
        identity: str,
        lease_duration: timedelta = LEASE_DURATION,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._lease_duration = lease_duration
        # A leader that cannot renew stops before its lease expires.
        self.renew_deadline, self._retry_every = lease_duration * 2 / 3, lease_duration * 2 / 15
        self._connection, self._clock = connection, clock
        self._name, self._namespace, self._identity = name, namespace, identity
        self._on_change = on_change
        self._renewed_at: datetime | None = None
        # The holder's last renewal and when we saw it, by our clock: machines' clocks may differ.
        self._last_renewal: tuple[tuple[str, str], datetime] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)

    @property
    def leading(self) -> bool:
        renewed = self._renewed_at
        return renewed is not None and self._clock.now() < renewed + self.renew_deadline

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Release the lease, so that another replica can lead at once."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        if self.leading:
            try:
                self.release()
            except FleetError as error:
                log.warning("cannot %s the lease: %s", "release", error)

    def acquire_or_renew(self) -> None:
        """Acquire or renew the lease if it is free, expired or ours."""
        was_leading = self.leading
        try:
            if self._try_acquire():
                self._renewed_at = self._clock.now()
        except Conflict:
            pass  # another replica was faster
        except Exception as error:  # the loop must survive: renewing later may still work
            expected = isinstance(error, FleetError)
            unexpected = None if expected else error
            log.warning("cannot %s the lease: %s", "renew", error, exc_info=unexpected)
        if self.leading != was_leading:
            log.info("%s the lease %s", "acquired" if self.leading else "lost", self._name)
            self._on_change()

    def release(self) -> None:
        lease = self._connection.find(LEASE, self._name, self._namespace)
        if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
            self._connection.replace(LEASE, {**lease, "spec": self._spec(lease, "")})
        self._renewed_at = None

    def _try_acquire(self) -> bool:
        lease = self._connection.find(LEASE, self._name, self._namespace)
        if lease is None:
            metadata = {"name": self._name, "namespace": self._namespace}
            new_lease = {"metadata": metadata, "spec": self._spec({}, self._identity)}
            self._connection.create(LEASE, new_lease)
            return True
        holder = lease["spec"].get("holderIdentity") or ""
        if holder not in ("", self._identity) and not self._expired(lease):
            return False
        self._connection.replace(LEASE, {**lease, "spec": self._spec(lease, self._identity)})
        return True

    def _expired(self, lease: Json) -> bool:
        spec = lease["spec"]
        renewal = (spec.get("holderIdentity", ""), spec.get("renewTime", ""))
        now = self._clock.now()
        if self._last_renewal is None or self._last_renewal[0] != renewal:
            self._last_renewal = (renewal, now)
            return False
        seconds = spec.get("leaseDurationSeconds")
        duration = timedelta(seconds=seconds) if seconds else self._lease_duration
        return now >= self._last_renewal[1] + duration

    def _spec(self, lease: Json, holder: str) -> Json:
        now = self._clock.now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = lease.get("spec", {})
        changed_holder = before.get("holderIdentity") != holder
        return {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, int(self._lease_duration.total_seconds())),
            "acquireTime": now if changed_holder else before.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": before.get("leaseTransitions", 0)
            + (1 if changed_holder and lease else 0),
        }

    def _run(self) -> None:
        while not self._closed.is_set():
            self.acquire_or_renew()
            self._closed.wait(self._retry_every.total_seconds())
