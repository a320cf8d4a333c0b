"""Leader election by a Lease: one of several replicas acts, and another soon after it died."""

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
    """`leading` is true from the moment we hold the lease until we may no longer."""

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
        self._lease_for = lease_duration
        # A leader that cannot renew stops before its lease runs out.
        self.renew_deadline, self._retry_every = lease_duration * 2 / 3, lease_duration * 2 / 15
        self._connection, self._clock = connection, clock
        self._name, self._namespace, self._identity = name, namespace, identity
        self._changed = on_change
        self._renewed_at: datetime | None = None
        # The holder's renewals by our own clock: clocks of two machines need not agree.
        self._seen: tuple[tuple[str, str], datetime] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)

    @property
    def leading(self) -> bool:
        renewed = self._renewed_at
        return renewed is not None and self._clock.now() < renewed + self.renew_deadline

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Let the next one in at once."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        if self.leading:
            try:
                self.release()
            except FleetError as error:
                log.warning("the lease could not be given back: %s", error)

    def acquire_or_renew(self) -> None:
        """Take or renew the lease, if it is ours to take."""
        was = self.leading
        try:
            if self._try():
                self._renewed_at = self._clock.now()
        except Conflict:
            pass  # another was faster
        except FleetError as error:
            log.warning("cannot renew the lease: %s", error)
        except Exception:  # the others must not wait for one that cannot even ask
            log.exception("cannot renew the lease")
        if self.leading != was:
            log.info("%s the lease %s", "took" if self.leading else "lost", self._name)
            self._changed()

    def release(self) -> None:
        lease = self._connection.find(LEASE, self._name, self._namespace)
        if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
            self._connection.replace(LEASE, {**lease, "spec": self._spec(lease, "")})
        self._renewed_at = None

    def _try(self) -> bool:
        lease = self._connection.find(LEASE, self._name, self._namespace)
        if lease is None:
            metadata = {"name": self._name, "namespace": self._namespace}
            fresh = {"metadata": metadata, "spec": self._spec({}, self._identity)}
            self._connection.create(LEASE, fresh)
            return True
        holder = lease["spec"].get("holderIdentity") or ""
        if holder not in ("", self._identity) and not self._expired(lease):
            return False
        self._connection.replace(LEASE, {**lease, "spec": self._spec(lease, self._identity)})
        return True

    def _expired(self, lease: Json) -> bool:
        spec = lease["spec"]
        mark = (spec.get("holderIdentity", ""), spec.get("renewTime", ""))
        now = self._clock.now()
        if self._seen is None or self._seen[0] != mark:
            self._seen = (mark, now)
            return False
        said = spec.get("leaseDurationSeconds")
        held = timedelta(seconds=said) if said else self._lease_for
        return now >= self._seen[1] + held

    def _spec(self, lease: Json, holder: str) -> Json:
        now = self._clock.now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = lease.get("spec", {})
        moved = before.get("holderIdentity") != holder
        return {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, int(self._lease_for.total_seconds())),
            "acquireTime": now if moved else before.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": before.get("leaseTransitions", 0) + (1 if moved and lease else 0),
        }

    def _run(self) -> None:
        while not self._closed.is_set():
            self.acquire_or_renew()
            self._closed.wait(self._retry_every.total_seconds())
