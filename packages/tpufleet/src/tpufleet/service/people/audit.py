"""Writes the audit log: an entry before each audited request is carried out, and one if it is
refused. When the entry cannot be written, the request fails."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from datetime import datetime

from tpufleet.errors import FleetError, Permanent
from tpufleet.model.people.audit import AuditAction, AuditEntry, AuditOutcome
from tpufleet.policy.accounting import rate_limits
from tpufleet.policy.accounting.rate_limits import TokenBucket
from tpufleet.service.transport.auth import Caller
from tpufleet.service.transport.limits import TooManyRequests, monotonic_now
from tpufleet.stores.base import Store

MAX_DETAIL = 1000  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditSubject:
    """What a request does, to what."""

    action: AuditAction
    target: str
    detail: str = ""


def entry(subject: AuditSubject, caller: Caller, address: str, now: datetime) -> AuditEntry:
    return AuditEntry(
        at=now,
        actor=caller.name,
        token_id=caller.token_id,
        address=address,
        action=subject.action,
        target=_one_line(subject.target),
        detail=_one_line(subject.detail),
    )


class AuditLog:
    """Entries are kept forever, so each user causes a limited number of them: beyond that, requests
    that would be entered are refused. What admins do to others is always entered."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._buckets: dict[str, TokenBucket] = {}

    def check_limit(self, user: str) -> None:
        """Before something is done or refused that a user can repeat at will."""
        with self._lock:
            bucket, wait = rate_limits.take(
                self._buckets.get(user), rate_limits.AUDITED_PER_USER, monotonic_now()
            )
            self._buckets[user] = bucket
        if wait is not None:
            raise TooManyRequests(f"too many requests of {user} for the audit log", wait)

    def record(self, requested: AuditEntry) -> None:
        self._store.append_audit(requested)

    def record_refusal(self, requested: AuditEntry, error: FleetError) -> None:
        if isinstance(error, Permanent):
            refused = replace(requested, outcome=AuditOutcome.REFUSED, detail=_one_line(str(error)))
            self._store.append_audit(refused)


def _one_line(text: str) -> str:
    printable = "".join(sign if sign.isprintable() else " " for sign in text)
    return printable if len(printable) <= MAX_DETAIL else printable[: MAX_DETAIL - 1] + "…"
