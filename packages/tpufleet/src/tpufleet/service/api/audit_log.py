"""The audit log."""

from __future__ import annotations

from tpufleet.model.api_types import AuditPage
from tpufleet.model.people.users import Role
from tpufleet.service.transport.routing import ApiCall, Param, Router

MAX_ENTRIES_PER_PAGE = 10_000

PAGE_PARAMS = (
    Param("before", "number of the last entry of the previous page", number=True),
    Param("limit", "most entries to return, default 100", number=True),
)

router = Router()


@router.get("/audit", Role.ADMIN, params=(Param("user", "who made the request"), *PAGE_PARAMS))
def list_audit_entries(call: ApiCall) -> AuditPage:
    """List the audit log, newest first."""
    return page(call, actor=call.query_text("user"))


def page(call: ApiCall, *, actor: str | None = None, token: str | None = None) -> AuditPage:
    return AuditPage(
        entries=tuple(
            call.store.audit(
                actor=actor,
                token=token,
                before=call.query_int("before", None),
                limit=call.query_int("limit", 100, least=1, most=MAX_ENTRIES_PER_PAGE),
            )
        )
    )
