"""The outbox: queues a notification once for each event and channel, and sends it with retries.

Every server runs one; a lease lets one of them work at a time. The position in the events and the
state of each delivery are in the store, so another server continues where one stopped.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable
from datetime import datetime, timedelta

from tpufleet.clocks import Clock
from tpufleet.errors import BadInput, Conflict, FleetError, Temporary
from tpufleet.model.events import Event
from tpufleet.model.people.notifications import (
    ChannelKind,
    Delivery,
    DeliveryState,
    NotificationRules,
    NotificationSettings,
)
from tpufleet.policy import notifications as policy
from tpufleet.service.notifications import senders
from tpufleet.service.notifications.channels import ChannelSecrets
from tpufleet.service.operations.background import log_failure
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
        *,
        send_seconds: float = senders.SEND_SECONDS,
    ) -> None:
        self._store = store
        self._clock = clock
        self._secrets = secrets_of_channels
        self._rules = rules
        self._newest_event = newest_event
        self._send_seconds = send_seconds
        self._emails: dict[str, deque[datetime]] = {}  # of the last hour, by user
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
            except Exception as error:
                log_failure(logger, "send notifications", error)

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
        position, waiting = self.begin(), None
        while events := self._store.events(EventQuery(after=position, limit=BATCH_SIZE)):
            settings = {each.owner: each for each in self._store.documents(NotificationSettings)}
            for event in filter(policy.may_matter, events) if settings else ():
                for delivery in self._deliveries(event, settings):
                    waiting = self._count_pending() if waiting is None else waiting
                    self._queue(delivery, waiting)
            position = events[-1].seq
            self._store.put_metadata(POSITION, str(position))
        self._looked_at = position

    def _count_pending(self) -> Counter[str]:
        known = self._store.documents(Delivery)
        return Counter(each.owner for each in known if each.state is DeliveryState.PENDING)

    def _queue(self, delivery: Delivery, waiting: Counter[str]) -> None:
        """Unless an earlier run did so, and stopped before it moved on. Of those that are too many,
        the first is kept, as a sign."""
        waiting[delivery.owner] += 1
        excess = waiting[delivery.owner] - policy.MAX_PENDING
        if excess > 1:
            return
        if excess == 1:
            now = self._clock.now()
            delivery = policy.after_failure(delivery, "too many are waiting", now, retry=False)
        with contextlib.suppress(Conflict):  # the user was deleted meanwhile
            self._store.update_document(
                Delivery,
                delivery.id,
                lambda known: known or delivery,
                required_user=delivery.owner,
            )

    def _deliveries(
        self, event: Event, settings: dict[str, NotificationSettings]
    ) -> list[Delivery]:
        job = self._store.job(event.job_id) if event.job_id is not None else None
        attempts = self._store.attempts(job.id) if job is not None else []
        users = self._store.users() if job is None else []
        return policy.deliveries(event, job, attempts, users, settings, self._clock.now())

    def _send_due(self, lease: Lease) -> int:
        """A receiver that does not respond is waited for once: its other messages fail with the
        first one, and those to other receivers of the same user are left for the next round."""
        sent = 0
        known = self._store.documents(Delivery)
        for old in policy.to_delete(known, self._clock.now(), KEPT_FOR):
            self._store.update_document(Delivery, old.id, lambda _: None)
        pending = [each for each in known if each.state is DeliveryState.PENDING]
        failing: dict[str, tuple[str, str]] = {}  # channel and error, by user
        for delivery in policy.in_turns(pending):
            now = self._clock.now()
            if delivery.due_at > now:
                continue
            channel, error = failing.get(delivery.owner, ("", ""))
            if error:
                if channel == delivery.channel:
                    self._save(policy.after_failure(delivery, error, now, retry=True))
                continue
            if now >= lease.expires_at - LEASE_TIME / 2:
                renewed = self._store.acquire_lease(LEASE, self._holder, LEASE_TIME, now)
                if renewed is None:
                    return sent
                lease = renewed
            tried = self._send(delivery)
            self._save(tried)
            sent += tried.state is DeliveryState.SENT
            if tried.state is DeliveryState.PENDING:
                failing[delivery.owner] = (delivery.channel, tried.error)
        left = [
            each.due_at
            for each in self._store.documents(Delivery)
            if each.state is DeliveryState.PENDING
        ]
        self._wake_at = min(left, default=None)
        return sent

    def _send(self, delivery: Delivery) -> Delivery:
        """As it is after this try."""
        now = self._clock.now()
        settings = self._store.document(NotificationSettings, delivery.owner)
        channel = settings.channels.get(delivery.channel) if settings is not None else None
        try:
            if channel is None:
                raise BadInput("the channel was deleted")
            emails = self._recent_emails(delivery.owner, now)
            if channel.kind is ChannelKind.EMAIL and len(emails) >= policy.MAX_EMAILS_PER_HOUR:
                raise BadInput(f"more than {policy.MAX_EMAILS_PER_HOUR} e-mails in an hour")
            secret = self._secrets.open(delivery.owner, channel)
            senders.send(channel, secret, delivery, self._rules, now, self._send_seconds)
        except FleetError as error:
            retry = isinstance(error, Temporary)
            logger.info("notification %s: %s", delivery.id, error)
            message = str(error)[: policy.MAX_TEXT]
            return policy.after_failure(delivery, message, self._clock.now(), retry=retry)
        if channel.kind is ChannelKind.EMAIL:
            emails.append(now)
        return policy.after_success(delivery, self._clock.now())

    def _recent_emails(self, owner: str, now: datetime) -> deque[datetime]:
        recent = self._emails.setdefault(owner, deque())
        while recent and now - recent[0] > timedelta(hours=1):
            recent.popleft()
        return recent

    def _save(self, delivery: Delivery) -> None:
        """Unless it was deleted meanwhile, with its user."""
        self._store.update_document(
            Delivery, delivery.id, lambda known: None if known is None else delivery
        )
