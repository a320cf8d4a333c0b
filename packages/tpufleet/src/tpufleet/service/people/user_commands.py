"""Commands of users on users and tokens."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import msgspec

from tpufleet.errors import (
    BadInput,
    Conflict,
    FleetError,
    Forbidden,
    NotFound,
    Unauthorized,
    not_found,
)
from tpufleet.model import identifiers
from tpufleet.model.api_types import (
    CreatedToken,
    DeletedUser,
    NewToken,
    NewUser,
    RevokedTokens,
    TokenRotation,
    TokenRow,
)
from tpufleet.model.job.jobs import LIVE_STATES, Job, JobId
from tpufleet.model.people.notifications import Delivery, NotificationSettings
from tpufleet.model.people.preferences import Preferences
from tpufleet.model.people.users import Role, Token, User
from tpufleet.model.values.durations import MAX_DURATION
from tpufleet.service.files.secrets import JobSecrets
from tpufleet.service.fleet import pool_commands, reservations
from tpufleet.service.jobs.commands import CommandContext, cancel
from tpufleet.service.lookups import require_user
from tpufleet.service.transport import auth
from tpufleet.stores.base import JobQuery

SERVICE_TOKEN_LIFETIME = timedelta(days=90)
MAX_SERVICE_TOKEN_LIFETIME = timedelta(days=366)
MAX_OVERLAP = timedelta(days=7)
MAX_SESSIONS = 50  # browsers of one user; the oldest session ends when another one begins
SESSION_NOTE = "browser session"


def put_user(context: CommandContext, new: NewUser) -> User:
    """Create a user or a service account, or change its role."""
    known = context.store.user(identifiers.check_user_name(new.name))
    service = new.service if new.service is not None else known is not None and known.service
    if known is not None and known.service != service:
        raise Conflict(f"{new.name} exists and is {_kind(known.service)}; choose another name")
    if service and new.role is Role.ADMIN:
        raise BadInput("role: a service account cannot have the admin role")
    if known is not None and known.role is Role.ADMIN and new.role is not Role.ADMIN:
        _require_another_admin(context, new.name)
    if known is None:
        _require_other_in_lower_case(context, new.name)
        if not new.take_over:
            _require_no_former_jobs(context, new.name)
    user = User(
        name=new.name,
        role=new.role,
        created_at=context.now if known is None else known.created_at,
        service=service,
    )
    context.store.put_user(user)
    return user


def _require_other_in_lower_case(context: CommandContext, name: str) -> None:
    same = [user.name for user in context.store.users() if user.name.lower() == name.lower()]
    if same:
        raise Conflict(f"{name} differs from user {same[0]} only in case; choose another name")


def _require_no_former_jobs(context: CommandContext, name: str) -> None:
    """Whoever owns them runs their code, and reads and overwrites their checkpoints."""
    if context.store.jobs(JobQuery(owner=name, archived=None, limit=1)):
        raise Conflict(
            f"a deleted user {name} has jobs here, which would belong to the new one\n"
            "  next: choose another name, or pass --take-over if it is the same person"
        )


def delete_user(context: CommandContext, files: JobSecrets, name: str) -> DeletedUser:
    require_user(context.store, name)
    _require_another_admin(context, name)
    deleted = ends_with_user(context, files, name)
    # Before the user, so that none is left if the server stops here.
    cancelled = _end_and_delete_all_of(context, files, name)
    context.store.delete_user(name)
    # What was written meanwhile can be read now, and nothing is added: see `Store.delete_user`.
    _end_and_delete_all_of(context, files, name, cancelled)
    return deleted


def ends_with_user(context: CommandContext, files: JobSecrets, name: str) -> DeletedUser:
    """What would end if this user were deleted now."""
    store = context.store
    lasting = reservations.listed(store, context.now)
    return DeletedUser(
        jobs=len(_live_jobs_of(context, name)),
        tokens=sum(token.session_of is None for token in store.tokens(name)),
        secrets=len(files.names(name)),
        reservations=sum(each.owner == name for each in lasting),
        pools=tuple(sorted(pool.name for pool in store.pools() if name in pool.members)),
    )


def _end_and_delete_all_of(
    context: CommandContext, files: JobSecrets, name: str, cancelled: Collection[JobId] = ()
) -> list[JobId]:
    """The jobs that it cancelled; `cancelled`: those that were before."""
    jobs = [job for job in _live_jobs_of(context, name) if job.id not in cancelled]
    for job in jobs:
        # It would go on with the rights and the secrets of a user who no longer exists.
        cancel(context, job, f"user {name} was deleted")
    files.delete_all(name)
    for kind in (NotificationSettings, Preferences):
        context.store.update_document(kind, name, lambda _: None)
    for delivery in context.store.documents(Delivery):
        if delivery.owner == name:
            context.store.update_document(Delivery, delivery.id, lambda _: None)
    reservations.end_of_user(context, name)
    pool_commands.remove_member(context, name)
    return [job.id for job in jobs]


def _live_jobs_of(context: CommandContext, owner: str) -> list[Job]:
    return context.store.jobs(JobQuery(owner=owner, states=LIVE_STATES, limit=1_000_000))


def create_token(context: CommandContext, new: NewToken, *, limit: int) -> CreatedToken:
    name = new.user or context.caller.name
    if name != context.caller.name:
        context.caller.require_admin(f"creating a token for {name}")
    identifiers.check_text("note", new.note, 200)
    user = require_user(context.store, name)
    if user.service and not context.caller.is_admin:
        raise Forbidden(
            "a service account cannot create tokens; it can replace its own with "
            "`tpu token rotate`, and an admin can create more"
        )
    return _put_token(
        context,
        Token(
            id=secrets.token_hex(6),
            user=name,
            hash="",
            created_at=context.now,
            note=new.note,
            expires_at=_expiry(context, new.expires_in, user),
            scope=new.scope,
            created_by=_ancestry(context),
        ),
        limit,
    )


def _expiry(context: CommandContext, expires_in: timedelta | None, user: User) -> datetime | None:
    now = context.now
    if expires_in is None:
        return default_expiry(context, user)
    longest = MAX_SERVICE_TOKEN_LIFETIME if user.service else MAX_DURATION
    identifiers.check_range("expires_in", expires_in, identifiers.SECOND, longest)
    _require_within_own_lifetime(context, now + expires_in)
    return now + expires_in


def default_expiry(context: CommandContext, user: User | None) -> datetime | None:
    """Of a token that is requested without one; None: never."""
    service = user is not None and user.service
    usual = context.now + SERVICE_TOKEN_LIFETIME if service else None
    moments = (usual, context.caller.expires_at)
    return min((each for each in moments if each is not None), default=None)


def _require_within_own_lifetime(context: CommandContext, expires_at: datetime | None) -> None:
    """Else whoever got hold of a token for a day would have one forever."""
    own = context.caller.expires_at
    if own is not None and (expires_at is None or expires_at > own):
        raise Forbidden(
            f"token {context.caller.token_id} expires on {own:%Y-%m-%d %H:%M} UTC and cannot "
            "create one that lasts longer; replace it first with `tpu token rotate`"
        )


def rotate_token(
    context: CommandContext, token_id: str, rotation: TokenRotation, limit: int
) -> CreatedToken:
    """Replace a token by a new one with the same rights and lifetime. The old one stays valid for
    a while, so that the programs that use it can change over. `limit`: of tokens per user; as many
    may be replaced and still valid."""
    identifiers.check_range("overlap", rotation.overlap, timedelta(0), MAX_OVERLAP)
    token = find_token(context, token_id)
    if token.session_of is not None:
        raise Conflict(
            f"{token.id} is a browser session and cannot be rotated; end it with "
            f"`tpu token revoke {token.id}`"
        )
    itself = token.id == context.caller.token_id
    if not itself and context.caller.limited:
        raise Forbidden(f"token {context.caller.token_id} can only replace itself")
    _require_not_replaced(token)
    lifetime = None if token.expires_at is None else token.expires_at - token.created_at
    if not itself:
        _require_within_own_lifetime(context, None if lifetime is None else context.now + lifetime)
    created = _put_token(
        context,
        replace(
            token,
            id=secrets.token_hex(6),
            created_at=context.now,
            last_used_at=None,
            expires_at=None if lifetime is None else context.now + lifetime,
            created_by=_ancestry(context),
        ),
        2 * limit,
    )
    ends = context.now + rotation.overlap

    def replaced(known: Token) -> Token:
        _require_not_replaced(known)  # by a request at the same time
        until = ends if known.expires_at is None else min(ends, known.expires_at)
        return replace(known, expires_at=until, replaced_by=created.id)

    try:
        if context.store.update_token(token.id, replaced) is None:
            raise NotFound(f"token {token.id} was revoked; create one with `tpu token create`")
    except FleetError:
        context.store.delete_token(created.id)
        raise
    return created


def _require_not_replaced(token: Token) -> None:
    if token.replaced_by is not None:
        raise Conflict(
            f"token {token.id} was replaced by {token.replaced_by} and expires on "
            f"{token.expires_at:%Y-%m-%d}; rotate that one"
        )


def _put_token(context: CommandContext, token: Token, limit: int) -> CreatedToken:
    """`limit`: of valid tokens of its user."""

    def require_fewer(tokens: Sequence[Token]) -> None:
        valid = [
            each for each in tokens if each.session_of is None and not each.expired(context.now)
        ]
        if len(valid) >= limit:
            raise Conflict(
                f"{token.user} has {len(valid)} tokens, the limit of this server\n"
                "  next: `tpu token list`, then `tpu token revoke ID`"
            )

    text = auth.new_token()
    context.store.put_token(replace(token, hash=auth.token_hash(text)), check=require_fewer)
    # After it can be found, see `_revoke`: one of them notices the other.
    if not {each.id for each in context.store.tokens(context.caller.name)}.issuperset(
        _credentials(context)
    ):
        context.store.delete_token(token.id)
        raise Unauthorized(auth.UNKNOWN_TOKEN)
    return CreatedToken(
        id=token.id,
        user=token.user,
        token=text,
        expires_at=token.expires_at,
        scope=token.scope,
    )


def _credentials(context: CommandContext) -> tuple[str, ...]:
    """Of the caller: ids of its token and of its browser session."""
    return tuple(each for each in (context.caller.token_id, context.caller.session_id) if each)


def _ancestry(context: CommandContext) -> tuple[str, ...]:
    """The credentials of the caller and what those were created with, also what no longer exists:
    revoking any of them reaches what the caller creates now."""
    own = _credentials(context)
    known = [each for each in context.store.tokens(context.caller.name) if each.id in own]
    return tuple(dict.fromkeys([*own, *(each for token in known for each in token.created_by)]))


def revoke_token(context: CommandContext, token_id: str) -> RevokedTokens:
    """A token or a browser session, with what was created with it."""
    return _revoke(context, [find_token(context, token_id)])


def revoke_tokens_of(context: CommandContext, user: str) -> RevokedTokens:
    """All of a user but the one that the caller uses."""
    if user != context.caller.name:
        context.caller.require_admin(f"revoking the tokens of {user}")
    require_user(context.store, user)
    used = _credentials(context)
    return _revoke(context, [each for each in context.store.tokens(user) if each.id not in used])


def _revoke(context: CommandContext, tokens: Sequence[Token]) -> RevokedTokens:
    """With the sessions that they logged in and the tokens that their user created with them: who
    stole a token has those too. Not the one that the caller uses."""
    used, users = _credentials(context), {token.user for token in tokens}
    family: dict[str, Token] = {}
    created = list(tokens)
    while created:
        family.update((each.id, each) for each in created)
        for each in created:
            if each.user in users:
                context.store.delete_token(each.id)
        # Read again: they may have created more until they were deleted.
        known = context.store.tokens(None if context.caller.is_admin else context.caller.name)
        others = [each for each in known if each.id not in used and each.id not in family]
        created = [each for each in others if _from(each, family)]
    revoked = [each for each in family.values() if each.user in users]
    remaining = [
        each
        for each in family.values()
        if each.user not in users and not each.expired(context.now) and each.session_of is None
    ]
    return RevokedTokens(revoked=token_rows(revoked), remaining=token_rows(remaining))


def _from(token: Token, family: Collection[str]) -> bool:
    """Whether it was created with one of them."""
    return token.session_of in family or any(each in family for each in token.created_by)


def token_rows(tokens: Iterable[Token]) -> tuple[TokenRow, ...]:
    """Never the hash."""
    return tuple(msgspec.convert(token, TokenRow, from_attributes=True) for token in tokens)


def create_session(context: CommandContext, lifetime: timedelta) -> str:
    """Record that a browser logs in with the caller's token. The id of the session."""
    caller = context.caller
    known = [token for token in context.store.tokens(caller.name) if token.session_of is not None]
    kept = [session for session in known if not session.expired(context.now)]
    surplus = sorted(kept, key=lambda session: session.created_at)[: 1 - MAX_SESSIONS]
    for session in (*(each for each in known if each not in kept), *surplus):
        context.store.delete_token(session.id)
    session_id = secrets.token_hex(6)
    context.store.put_token(
        Token(
            id=session_id,
            user=caller.name,
            hash=auth.session_hash(session_id),
            created_at=context.now,
            note=SESSION_NOTE,
            last_used_at=context.now,
            expires_at=context.now + lifetime,
            scope=caller.scope,
            session_of=caller.token_id,
        )
    )
    return session_id


def delete_session(context: CommandContext) -> None:
    """That of the caller; nothing if it sent a token and no cookie."""
    if context.caller.session_id:
        context.store.delete_token(context.caller.session_id)


def find_token(context: CommandContext, token_id: str) -> Token:
    """One of the caller's own; for an admin, any."""
    for token in context.store.tokens(None if context.caller.is_admin else context.caller.name):
        if token.id == token_id:
            return token
    raise not_found("token", token_id, "token list")


def _kind(service: bool) -> str:
    return "a service account" if service else "a person"


def _require_another_admin(context: CommandContext, name: str) -> None:
    admins = {user.name for user in context.store.users() if user.role is Role.ADMIN}
    if admins == {name}:
        raise Conflict(f"{name} is the only admin; create another one first")
