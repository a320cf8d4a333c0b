"""The outbox: queues a notification once for each event and channel, and sends it with retries.

Every server runs one; a lease lets one of them work at a time. The position in the events and the
state of each delivery are in the store, so another server continues where one stopped.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from datetime import datetime, timedelta

from tpufleet.clocks import Clock
from tpufleet.errors import BadInput, FleetError, Temporary
from tpufleet.model.events import Event
from tpufleet.model.notifications import (
    Delivery,
    DeliveryState,
    NotificationRules,
    NotificationSettings,
)
from tpufleet.policy import notifications as policy
from tpufleet.service.notifications import senders
from tpufleet.service.notifications.channels import ChannelSecrets
from tpufleet.stores.base import EventQuery, Lease, Store

logger = logging.getLogger(__name__)

LEASE = "notifications"
LEASE_TIME = timedelta(seconds=60)
POLL_SECONDS = 1.0
POSITION = "notified_until"  # metadata: number of the last event that was looked at
KEPT_FOR = timedelta(days=7)  # so that `tpu notify history` shows what was sent
BATCH_SIZE = 500


class NotificationOutbox:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        secrets_of_channels: ChannelSecrets,
        rules: NotificationRules,
        newest_event: Callable[[], int],
    ) -> None:
        self._store = store
        self._clock = clock
        self._secrets = secrets_of_channels
        self._rules = rules
        self._newest_event = newest_event
        self._holder = secrets.token_hex(8)
        self._looked_at = -1
        self._wake_at: datetime | None = None
        self._woken = threading.Event()

    def wake(self) -> None:
        """There is a delivery that no event announces. Safe from any thread."""
        self._woken.set()

    def run_until(self, stopping: threading.Event) -> None:
        """In a thread of its own."""
        while not stopping.wait(POLL_SECONDS):
            try:
                if self._is_due():
                    self.run_once()
            except Exception:
                logger.exception("unexpected error in the notification outbox; continuing")

    def _is_due(self) -> bool:
        if self._woken.is_set() or self._newest_event() > self._looked_at:
            return True
        return self._wake_at is not None and self._clock.now() >= self._wake_at

    def run_once(self) -> int:
        """Queue what new events cause, and send what is due. Returns how many were sent."""
        self._woken.clear()
        now = self._clock.now()
        lease = self._store.acquire_lease(LEASE, self._holder, LEASE_TIME, now)
        if lease is None:  # another server works; it may stop, so look again later
            self._wake_at = now + LEASE_TIME
            return 0
        self._queue_new()
        return self._send_due(lease)

    def begin(self) -> int:
        """The position in the events. Those from before the first channel are not announced."""
        written = self._store.metadata(POSITION)
        if written is not None:
            return int(written)
        position = self._store.last_event()
        self._store.put_metadata(POSITION, str(position))
        return position

    def _queue_new(self) -> None:
        position = self.begin()
        while events := self._store.events(EventQuery(after=position, limit=BATCH_SIZE)):
            settings = {each.owner: each for each in self._store.documents(NotificationSettings)}
            for event in filter(policy.may_matter, events) if settings else ():
                for delivery in self._deliveries(event, settings):
                    # An earlier run may have queued it and stopped before it moved on.
                    self._store.update_document(
                        Delivery, delivery.id, lambda known, new=delivery: known or new
                    )
            position = events[-1].seq
            self._store.put_metadata(POSITION, str(position))
        self._looked_at = position

    def _deliveries(
        self, event: Event, settings: dict[str, NotificationSettings]
    ) -> list[Delivery]:
        job = self._store.job(event.job_id) if event.job_id is not None else None
        attempts = self._store.attempts(job.id) if job is not None else []
        users = self._store.users() if job is None else []
        return policy.deliveries(event, job, attempts, users, settings, self._clock.now())

    def _send_due(self, lease: Lease) -> int:
        sent = 0
        known = self._store.documents(Delivery)
        self._delete_old(known)
        pending = [each for each in known if each.state is DeliveryState.PENDING]
        by_owner: dict[str, int] = {}
        for delivery in pending:
            by_owner[delivery.owner] = by_owner.get(delivery.owner, 0) + 1
            now = self._clock.now()
            if by_owner[delivery.owner] > policy.MAX_PENDING:
                self._save(policy.after_failure(delivery, "too many are waiting", now, retry=False))
            elif delivery.due_at <= now:
                if now >= lease.expires_at - LEASE_TIME / 2:
                    renewed = self._store.acquire_lease(LEASE, self._holder, LEASE_TIME, now)
                    if renewed is None:
                        return sent
                    lease = renewed
                sent += self._send(delivery)
        left = [
            each.due_at
            for each in self._store.documents(Delivery)
            if each.state is DeliveryState.PENDING
        ]
        self._wake_at = min(left, default=None)
        return sent

    def _send(self, delivery: Delivery) -> bool:
        now = self._clock.now()
        settings = self._store.document(NotificationSettings, delivery.owner)
        channel = settings.channels.get(delivery.channel) if settings is not None else None
        try:
            if channel is None:
                raise BadInput("the channel was deleted")
            secret = self._secrets.open(delivery.owner, channel)
            senders.send(channel, secret, delivery, self._rules, now)
        except FleetError as error:
            retry = isinstance(error, Temporary)
            logger.info("notification %s: %s", delivery.id, error)
            message = str(error)[: policy.MAX_TEXT]
            self._save(policy.after_failure(delivery, message, self._clock.now(), retry=retry))
            return False
        self._save(policy.after_success(delivery, self._clock.now()))
        return True

    def _save(self, delivery: Delivery) -> None:
        self._store.update_document(Delivery, delivery.id, lambda _: delivery)

    def _delete_old(self, known: list[Delivery]) -> None:
        now = self._clock.now()
        for delivery in known:
            ended = delivery.state is not DeliveryState.PENDING
            if ended and now - delivery.created_at > KEPT_FOR:
                self._store.update_document(Delivery, delivery.id, lambda _: None)
