"""Preferences of users: settings, aliases, folders, saved views."""

from __future__ import annotations

from tpufleet.errors import Forbidden
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.preferences import PreferenceChanges, Preferences, apply_changes
from tpufleet.model.people.users import Role
from tpufleet.service.lookups import require_user
from tpufleet.service.transport.routing import ApiCall, Param, Router

router = Router()

_USER = Param("user", "another user; requires the admin role")


@router.get("/preferences", Role.VIEWER, params=(_USER,), foreign=AuditAction.READ_PREFERENCES)
def get_preferences(call: ApiCall) -> Preferences:
    """Settings, aliases, folders and views of the caller."""
    owner = _owner(call)
    return call.store.document(Preferences, owner) or Preferences(owner=owner)


@router.patch(
    "/preferences",
    Role.VIEWER,  # only their own
    params=(_USER,),
    foreign=AuditAction.CHANGE_PREFERENCES,
)
def change_preferences(call: ApiCall, body: PreferenceChanges) -> Preferences:
    """Set or remove preferences; entries that are missing stay as they are."""
    owner = _owner(call)
    changed = call.store.update_document(
        Preferences,
        owner,
        lambda before: apply_changes(before or Preferences(owner=owner), body),
        required_user=owner,
    )
    return changed or Preferences(owner=owner)


def _owner(call: ApiCall) -> str:
    user = call.query_text("user")
    if user is None or user == call.user.name:
        return call.user.name
    call.user.require_admin(f"reading or changing preferences of {user}")
    if call.user.limited:
        raise Forbidden(f"preferences of {user}: requires a token without limits")
    require_user(call.store, user)
    call.user.record_foreign_access(user, f"preferences of {user}")
    return user
