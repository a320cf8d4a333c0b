"""Users, their tokens, their secrets, and the audit log."""

from __future__ import annotations

from tpufleet.model.api_types import (
    AuditPage,
    CreatedToken,
    DeletedUser,
    NewToken,
    NewUser,
    RevokedTokens,
    SecretNames,
    SecretValue,
    TokenPage,
    TokenRotation,
    UserPage,
)
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role, User
from tpufleet.policy.events import count_of
from tpufleet.service.files.secrets import JobSecrets
from tpufleet.service.jobs import commands
from tpufleet.service.people import user_commands
from tpufleet.service.people.audit import AuditSubject
from tpufleet.service.transport.routing import ApiCall, Param, Router, TokensPerUser

MAX_ENTRIES_PER_PAGE = 10_000

_AUDIT_PARAMS = (
    Param("before", "number of the last entry of the previous page", number=True),
    Param("limit", "most entries to return, default 100", number=True),
)

router = Router()


def _audit_put_user(call: ApiCall, body: NewUser) -> AuditSubject:
    known = call.store.user(body.name)
    kind = "new service account" if body.service else "new user"
    before = kind if known is None else f"was {known.role}"
    jobs = "; takes over the jobs of a deleted user" if known is None and body.take_over else ""
    return AuditSubject(
        action=AuditAction.PUT_USER, target=body.name, detail=f"role {body.role} ({before}){jobs}"
    )


def _audit_delete_user(call: ApiCall, secrets: JobSecrets) -> AuditSubject:
    name = call.path_param("name")
    ends = user_commands.ends_with_user(call.context, secrets, name)
    counts = (
        count_of(ends.jobs, "job"),
        count_of(ends.tokens, "token"),
        count_of(ends.secrets, "secret"),
        count_of(ends.reservations, "reservation"),
    )
    pools = f"; member of {', '.join(ends.pools)}" if ends.pools else ""
    return AuditSubject(
        action=AuditAction.DELETE_USER, target=name, detail=f"with {', '.join(counts)}{pools}"
    )


def _audit_create_token(call: ApiCall, body: NewToken) -> AuditSubject:
    target = body.user or call.user.name
    span = body.expires_in
    if span is None:
        expires_at = user_commands.default_expiry(call.context, call.store.user(target))
        span = None if expires_at is None else expires_at - call.now
    lifetime = "does not expire" if span is None else f"expires in {span}"
    note = f"; note: {body.note}" if body.note else ""
    return AuditSubject(
        action=AuditAction.CREATE_TOKEN,
        target=target,
        detail=f"scope {body.scope}; {lifetime}{note}",
    )


def _owner(call: ApiCall) -> str:
    return call.query_text("user") or call.user.name


def _secret_scope(shared: bool) -> str:
    return "shared" if shared else "own"


@router.get("/users", Role.ADMIN)
def list_users(call: ApiCall) -> UserPage:
    """List users."""
    return UserPage(users=tuple(call.store.users()))


@router.post("/users", Role.ADMIN, audit=_audit_put_user)
def put_user(call: ApiCall, body: NewUser) -> User:
    """Create a user or change their role."""
    return user_commands.put_user(call.context, body)


@router.delete("/users/{name}", Role.ADMIN, audit=_audit_delete_user)
def delete_user(call: ApiCall, secrets: JobSecrets) -> DeletedUser:
    """Delete a user with their tokens and secrets, and cancel their jobs."""
    return user_commands.delete_user(call.context, secrets, call.path_param("name"))


@router.get("/tokens", Role.VIEWER, params=(Param("user", "owner of the tokens; admins only"),))
def list_tokens(call: ApiCall) -> TokenPage:
    """List your tokens; an admin sees the tokens of all users."""
    user = call.query_text("user") if call.user.is_admin else call.user.name
    return TokenPage(tokens=user_commands.token_rows(call.store.tokens(user)))


@router.post("/tokens", Role.VIEWER, audit=_audit_create_token)
def create_token(call: ApiCall, limit: TokensPerUser, body: NewToken) -> CreatedToken:
    """Create a token."""
    return user_commands.create_token(call.context, body, limit=limit)


@router.post("/tokens/{id}/rotate", Role.VIEWER, audit=AuditAction.ROTATE_TOKEN)
def rotate_token(call: ApiCall, limit: TokensPerUser, body: TokenRotation) -> CreatedToken:
    """Replace a token by a new one with the same rights; the old one expires soon."""
    return user_commands.rotate_token(call.context, call.path_param("id"), body, limit)


@router.delete("/tokens/{id}", Role.VIEWER, audit=AuditAction.REVOKE_TOKEN)
def revoke_token(call: ApiCall) -> RevokedTokens:
    """Revoke a token, with those that its user created with it."""
    return user_commands.revoke_token(call.context, call.path_param("id"))


@router.delete(
    "/tokens",
    Role.VIEWER,
    params=(Param("user", "owner of the tokens; another one: admins only"),),
    audit=lambda call: AuditSubject(action=AuditAction.REVOKE_TOKEN, target=_owner(call)),
)
def revoke_tokens(call: ApiCall) -> RevokedTokens:
    """Revoke all tokens of a user but the one in use."""
    return user_commands.revoke_tokens_of(call.context, _owner(call))


@router.get("/tokens/{id}/audit", Role.VIEWER, params=_AUDIT_PARAMS)
def list_token_audit_entries(call: ApiCall) -> AuditPage:
    """List audit entries of your token: made with it, or about it; newest first."""
    token = call.path_param("id")
    if not call.user.is_admin:  # who sees those of tokens that were revoked, too
        user_commands.find_token(call.context, token)
    return _audit_page(call, token=token)


@router.get("/secrets", Role.MEMBER)
def list_secrets(call: ApiCall, secrets: JobSecrets) -> SecretNames:
    """List the names of your secrets and of shared secrets."""
    return SecretNames(own=secrets.names(call.user.name), shared=secrets.names())


@router.put(
    "/secrets/{name}",
    Role.MEMBER,
    audit=AuditAction.PUT_SECRET,
    detail=lambda call: _secret_scope(call.parse_body(SecretValue).shared),
)
def put_secret(call: ApiCall, secrets: JobSecrets, body: SecretValue) -> None:
    """Set one of your secrets, or as an admin a shared secret."""
    commands.put_secret(call.context, secrets, call.path_param("name"), body)


@router.delete(
    "/secrets/{name}",
    Role.MEMBER,
    params=(Param("shared", "any value: the shared secret of that name"),),
    audit=AuditAction.DELETE_SECRET,
    detail=lambda call: _secret_scope(call.query_text("shared") is not None),
)
def delete_secret(call: ApiCall, secrets: JobSecrets) -> None:
    """Delete a secret that no live job uses."""
    shared = call.query_text("shared") is not None
    commands.delete_secret(call.context, secrets, call.path_param("name"), shared=shared)


@router.get("/audit", Role.ADMIN, params=(Param("user", "who made the request"), *_AUDIT_PARAMS))
def list_audit_entries(call: ApiCall) -> AuditPage:
    """List the audit log, newest first."""
    return _audit_page(call, actor=call.query_text("user"))


def _audit_page(call: ApiCall, *, actor: str | None = None, token: str | None = None) -> AuditPage:
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
