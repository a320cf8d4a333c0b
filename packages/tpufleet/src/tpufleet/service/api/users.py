"""Users, their tokens and their secrets."""

from __future__ import annotations

from tpufleet.model.api_types import (
    Acknowledgement,
    AuditPage,
    CreatedToken,
    DeletedUser,
    NewToken,
    NewUser,
    SecretNames,
    SecretValue,
    TokenPage,
    TokenRotation,
    UserPage,
)
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role, User
from tpufleet.policy.events import count_of
from tpufleet.service.api import audit_log
from tpufleet.service.files.secrets import SecretFiles
from tpufleet.service.jobs import commands, queries
from tpufleet.service.people import user_commands
from tpufleet.service.people.audit import AuditSubject
from tpufleet.service.transport.routing import ApiCall, Param, Router, TokensPerUser

router = Router()


def _audit_put_user(call: ApiCall) -> AuditSubject:
    new = call.parse_body(NewUser)
    known = call.store.user(new.name)
    kind = "new service account" if new.service else "new user"
    before = kind if known is None else f"was {known.role}"
    jobs = "; takes over the jobs of a deleted user" if known is None and new.take_over else ""
    return AuditSubject(
        action=AuditAction.PUT_USER, target=new.name, detail=f"role {new.role} ({before}){jobs}"
    )


def _audit_delete_user(call: ApiCall, secrets: SecretFiles) -> AuditSubject:
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


def _audit_create_token(call: ApiCall) -> AuditSubject:
    new = call.parse_body(NewToken)
    target = new.user or call.user.name
    span = new.expires_in
    if span is None:
        expires_at = user_commands.default_expiry(call.context, call.store.user(target))
        span = None if expires_at is None else expires_at - call.now
    lifetime = "does not expire" if span is None else f"expires in {span}"
    note = f"; note: {new.note}" if new.note else ""
    pool = f"; pool {new.pool}" if new.pool else ""
    return AuditSubject(
        action=AuditAction.CREATE_TOKEN,
        target=target,
        detail=f"scope {new.scope}{pool}; {lifetime}{note}",
    )


def _audit_put_secret(call: ApiCall) -> AuditSubject:
    return AuditSubject(
        action=AuditAction.PUT_SECRET,
        target=call.path_param("name"),
        detail=_secret_scope(call.parse_body(SecretValue).shared),
    )


def _secret_scope(shared: bool) -> str:
    return "shared" if shared else "own"


@router.route("GET", "/users", role=Role.ADMIN, response=UserPage)
def list_users(call: ApiCall) -> UserPage:
    """List users."""
    return UserPage(users=tuple(call.store.users()))


@router.route("POST", "/users", role=Role.ADMIN, body=NewUser, response=User, audit=_audit_put_user)
def put_user(call: ApiCall) -> User:
    """Create a user or change their role."""
    return user_commands.put_user(call.context, call.parse_body(NewUser))


@router.route(
    "DELETE", "/users/{name}", role=Role.ADMIN, response=DeletedUser, audit=_audit_delete_user
)
def delete_user(call: ApiCall, secrets: SecretFiles) -> DeletedUser:
    """Delete a user with their tokens and secrets, and cancel their jobs."""
    deleted = user_commands.delete_user(call.context, secrets, call.path_param("name"))
    call.notify()
    return deleted


@router.route(
    "GET",
    "/tokens",
    role=Role.VIEWER,
    response=TokenPage,
    params=(Param("user", "owner of the tokens; admins only"),),
)
def list_tokens(call: ApiCall) -> TokenPage:
    """List your tokens; an admin sees the tokens of all users."""
    return TokenPage(tokens=queries.token_rows(call.store, call.user, call.query_text("user")))


@router.route(
    "POST",
    "/tokens",
    role=Role.VIEWER,
    body=NewToken,
    response=CreatedToken,
    audit=_audit_create_token,
)
def create_token(call: ApiCall, limit: TokensPerUser) -> CreatedToken:
    """Create a token."""
    return user_commands.create_token(call.context, call.parse_body(NewToken), limit=limit)


@router.route(
    "POST",
    "/tokens/{id}/rotate",
    role=Role.VIEWER,
    body=TokenRotation,
    response=CreatedToken,
    audit=lambda call: AuditSubject(action=AuditAction.ROTATE_TOKEN, target=call.path_param("id")),
)
def rotate_token(call: ApiCall, limit: TokensPerUser) -> CreatedToken:
    """Replace a token by a new one with the same rights; the old one expires soon."""
    return user_commands.rotate_token(
        call.context, call.path_param("id"), call.parse_body(TokenRotation), limit
    )


@router.route(
    "DELETE",
    "/tokens/{id}",
    role=Role.VIEWER,
    response=Acknowledgement,
    audit=lambda call: AuditSubject(action=AuditAction.REVOKE_TOKEN, target=call.path_param("id")),
)
def revoke_token(call: ApiCall) -> Acknowledgement:
    """Revoke a token."""
    user_commands.revoke_token(call.context, call.path_param("id"))
    return Acknowledgement()


@router.route(
    "GET", "/tokens/{id}/audit", role=Role.VIEWER, response=AuditPage, params=audit_log.PAGE_PARAMS
)
def list_token_audit_entries(call: ApiCall) -> AuditPage:
    """List audit entries of your token: made with it, or about it; newest first."""
    token = call.path_param("id")
    if not call.user.is_admin:  # who sees those of tokens that were revoked, too
        user_commands.find_token(call.context, token)
    return audit_log.page(call, token=token)


@router.route("GET", "/secrets", role=Role.MEMBER, response=SecretNames)
def list_secrets(call: ApiCall, secrets: SecretFiles) -> SecretNames:
    """List the names of your secrets and of shared secrets."""
    return SecretNames(own=secrets.names(call.user.name), shared=secrets.names())


@router.route(
    "PUT",
    "/secrets/{name}",
    role=Role.MEMBER,
    body=SecretValue,
    response=Acknowledgement,
    audit=_audit_put_secret,
)
def put_secret(call: ApiCall, secrets: SecretFiles) -> Acknowledgement:
    """Set one of your secrets, or as an admin a shared secret."""
    commands.put_secret(
        call.context,
        secrets,
        call.path_param("name"),
        call.parse_body(SecretValue),
    )
    return Acknowledgement()


@router.route(
    "DELETE",
    "/secrets/{name}",
    role=Role.MEMBER,
    response=Acknowledgement,
    params=(Param("shared", "any value: the shared secret of that name"),),
    audit=lambda call: AuditSubject(
        action=AuditAction.DELETE_SECRET,
        target=call.path_param("name"),
        detail=_secret_scope(call.query_text("shared") is not None),
    ),
)
def delete_secret(call: ApiCall, secrets: SecretFiles) -> Acknowledgement:
    """Delete a secret that no live job uses."""
    commands.delete_secret(
        call.context,
        secrets,
        call.path_param("name"),
        shared=call.query_text("shared") is not None,
    )
    return Acknowledgement()
