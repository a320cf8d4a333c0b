"""Writes the audit log: an entry before each audited request is carried out, and one if it is
refused. When the entry cannot be written, the request fails."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from tpufleet.errors import FleetError, Permanent
from tpufleet.model.audit import AuditAction, AuditEntry, AuditOutcome
from tpufleet.service.auth import Caller
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


def record(store: Store, requested: AuditEntry) -> None:
    store.append_audit(requested)


def record_refusal(store: Store, requested: AuditEntry, error: FleetError) -> None:
    if isinstance(error, Permanent):
        refused = replace(requested, outcome=AuditOutcome.REFUSED, detail=_one_line(str(error)))
        store.append_audit(refused)


def _one_line(text: str) -> str:
    printable = "".join(sign if sign.isprintable() else " " for sign in text)
    return printable if len(printable) <= MAX_DETAIL else printable[: MAX_DETAIL - 1] + "…"
