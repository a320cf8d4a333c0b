"""`tpu secret`, `tpu user` and `tpu token`. The value of a secret is never an argument."""

from __future__ import annotations

from datetime import timedelta

import click

from tpufleet import config
from tpufleet.errors import BadInput, one_of
from tpufleet.model.api_types import CreatedToken
from tpufleet.model.people.users import Role, TokenScope
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import example, json_option, yes_option
from tpufleet.views.cli.parameter_types import Duration


@click.group(epilog=example("tpu secret set wandb"))
def secret() -> None:
    """Values that jobs get by name as environment variables: `--secret WANDB_API_KEY=wandb`.

    Each user has their own, which other users' jobs cannot get. An admin can share one with all
    users; your own takes precedence when both have the same name.
    """


shared_option = click.option("--shared", is_flag=True, help="The secret of all users.")


@secret.command(
    "set",
    epilog="\b\nExamples:\n  tpu secret set wandb\n  tpu secret set wandb < key.txt\n"
    "  tpu secret set --shared hub < key.txt\n",
)
@click.argument("name")
@shared_option
@json_option
def set_secret(name: str, shared: bool) -> None:
    """Store a value under NAME. It is read from standard input or prompted for."""
    value = output.read_secret(f"Value of {name}")
    if not value:
        raise BadInput(f"{name}: empty value; pipe it in: tpu secret set {name} < FILE")
    with connection.connect(start=True) as client:  # users set secrets before their first job
        client.put_secret(name, value, shared=shared)
    users = "all users'" if shared else "your"
    message = f"stored {name}; {users} jobs get it with --secret ENV_NAME={name}"
    output.print_result({"set": name, "shared": shared}, message)


@secret.command("list", epilog=example("tpu secret list"))
@json_option
def list_secrets() -> None:
    """List the names of secrets. Values are never shown."""
    with connection.connect() as client:
        names = client.secrets()
    rows = [*((name, "you") for name in names.own), *((name, "shared") for name in names.shared)]
    output.print_table(
        ("SECRET", "OWNER"), rows, output.none_yet("secrets", "tpu secret set NAME"), value=names
    )


@secret.command("delete", epilog=example("tpu secret delete wandb"))
@click.argument("name")
@shared_option
@json_option
def delete_secret(name: str, shared: bool) -> None:
    """Delete the secret NAME."""
    with connection.connect() as client:
        client.delete_secret(name, shared=shared)
    output.print_deleted({"deleted": name, "shared": shared}, f"secret {name}")


@click.group(epilog=example("tpu user add ada"))
def user() -> None:
    """Manage users: viewers read, members run jobs, admins change anything."""


@user.command(
    epilog="\b\nExamples:\n  tpu user add ada --role member\n  tpu user add ci --service\n"
)
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice([role.value for role in Role]),
    default=Role.MEMBER.value,
    show_default=True,
)
@click.option(
    "--service",
    is_flag=True,
    help="A service account, for programs such as CI: admins create its tokens, which expire.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Let them own the jobs of a deleted user of this name: the same person is back.",
)
@json_option
def add(name: str, role: str, service: bool, take_over: bool) -> None:
    """Add user NAME, or change their role."""
    with connection.connect() as client:
        saved = client.put_user(name, Role(role), service=service or None, take_over=take_over)
    kind = ", service account" if saved.service else ""
    scope = " --scope submit" if saved.service else ""
    message = f"{saved.name}: {saved.role}{kind}\n  next: tpu token create --user {name}{scope}"
    output.print_result(saved, message)


@user.command("list", epilog=example("tpu user list"))
@json_option
def list_users() -> None:
    """List the users."""
    with connection.connect() as client:
        users = client.users()
    output.print_table(
        ("USER", "ROLE", "KIND", "CREATED"),
        (
            (row.name, row.role.value, "service" if row.service else "person",
             text.age(row.created_at))
            for row in users
        ),
        value={"users": users},
    )  # fmt: skip


@user.command("delete", epilog=example("tpu user delete ada"))
@click.argument("name")
@yes_option
@json_option
def delete_user(name: str, yes: bool) -> None:
    """Delete user NAME with all their tokens and secrets, and cancel their live jobs.

    Their reservations end; their preferences and notifications are deleted. Records, logs and
    checkpoints of their jobs are kept; an admin can resume one.
    """
    with connection.connect() as client:
        if name in {user.name for user in client.users()}:  # else the server says so
            what = f"{name} with all their tokens and secrets, and cancel their jobs"
            output.confirm_deletion(what, yes or output.as_json())
        ended = client.delete_user(name)
    pools = f"; removed from pool {', '.join(ended.pools)}" if ended.pools else ""
    message = (
        f"deleted user {name}: cancelled {text.counted(ended.jobs, 'job')}; deleted "
        f"{text.counted(ended.tokens, 'token')}, {text.counted(ended.secrets, 'secret')}; ended "
        f"{text.counted(ended.reservations, 'reservation')}{pools}"
    )
    output.print_result({"deleted": name, "ended": ended}, message)


@click.group(epilog=example("tpu token create --expires 30d"))
def token() -> None:
    """Manage API tokens, with which a user's programs authenticate."""


@token.command(
    "create",
    epilog="\b\nExamples:\n  (umask 077; tpu token create --expires 30d > ~/.tpu-token)\n"
    "  tpu token create --user ci --scope submit\n",
)
@click.option("--user", "name", help="Owner of the token (default: you).")
@click.option("--note", default="", help="What it is for.")
@click.option(
    "--expires",
    type=Duration(),
    help="Lifetime, such as 30d (default: no limit; 90d for a service account).",
)
@click.option(
    "--scope",
    type=click.Choice([scope.value for scope in TokenScope]),
    default=TokenScope.FULL.value,
    show_default=True,
    help="full: all that its user may do. read: only read. submit: only submit jobs, and follow "
    "and cancel those of its user.",
)
@json_option
def create_token(name: str | None, note: str, expires: timedelta | None, scope: str) -> None:
    """Create a token and print it. It is shown only once; the server keeps its hash."""
    with connection.connect() as client:
        created = client.create_token(
            user=name, note=note, expires_in=expires, scope=TokenScope(scope)
        )
    if not output.as_json():
        output.print_status(
            f"created token {created.id} for {created.user}{_limits(created)}\n"
            "  next: save it in a file of mode 600 and set TPUFLEET_TOKEN_FILE to its path"
        )
    output.print_result(created, created.token)


def _limits(created: CreatedToken) -> str:
    parts = [
        f"scope {created.scope}" if created.scope is not TokenScope.FULL else "",
        f"expires on {created.expires_at:%Y-%m-%d}" if created.expires_at else "",
    ]
    shown = ", ".join(part for part in parts if part)
    return f" ({shown})" if shown else ""


@token.command("rotate", epilog=example("tpu token rotate --overlap 1d"))
@click.argument("token_id", metavar="[TOKEN]", required=False)
@click.option(
    "--overlap",
    type=Duration(),
    default="1h",
    show_default=True,
    help="For how long the old token stays valid.",
)
@json_option
def rotate_token(token_id: str | None, overlap: timedelta) -> None:
    """Replace TOKEN (its id) by a new one with the same rights and lifetime, and print that.

    Without TOKEN, replace the token in use and write the new one to your token file.
    """
    settings = connection.settings()
    with connection.connect() as client:
        chosen = token_id or client.me().token_id
        created = client.rotate_token(chosen, overlap)
    old = f"{chosen} is valid for another {text.duration(overlap)}"
    if token_id is not None:
        if not output.as_json():
            output.print_status(f"created token {created.id}{_limits(created)}; {old}")
        output.print_result(created, created.token)
        return
    path = settings.token_file or settings.home / "token"
    try:
        config.write_token(path, created.token)
    except OSError as error:
        output.print_status(f"error: cannot write {path}: {error.strerror}; the new token follows")
        output.print_result(created, created.token)
        return
    message = f"wrote token {created.id} to {path}{_limits(created)}; {old}"
    output.print_result({"id": created.id, "file": str(path)}, message)


@token.command("list", epilog=example("tpu token list"))
@json_option
def list_tokens() -> None:
    """List tokens with their owner, scope, last use and expiry."""
    with connection.connect() as client:
        tokens = client.tokens()
    output.print_table(
        ("TOKEN", "USER", "SCOPE", "CREATED", "LAST USED", "EXPIRES", "NOTE"),
        (
            (row.id, row.user, row.scope.value, text.age(row.created_at),
             text.age(row.last_used_at), text.age(row.expires_at), row.note)
            for row in tokens
        ),
        value={"tokens": tokens},
    )  # fmt: skip


@token.command(
    "revoke",
    epilog="\b\nExamples:\n  tpu token revoke 5c1f0e9a2b7d\n  tpu token revoke --all ada\n",
)
@click.argument("token_id", metavar="[TOKEN]", required=False)
@click.option("--all", "user", metavar="USER", help="All tokens and browser sessions of USER.")
@json_option
def revoke_token(token_id: str | None, user: str | None) -> None:
    """Revoke TOKEN (its id, not its value) immediately, with the tokens and browser sessions that
    its user created with it.

    The token that you use stays valid unless you name it.
    """
    output.require_one({"TOKEN": token_id is not None, "--all USER": user is not None})
    with connection.connect() as client:
        ended = client.revoke_token(token_id) if token_id else client.revoke_tokens(user or "")
    ids = ", ".join(row.id for row in ended.revoked)
    message = f"revoked {text.counted(len(ended.revoked), 'token')}{': ' if ids else ''}{ids}"
    if ended.remaining:
        left = ", ".join(f"{row.id} ({row.user})" for row in ended.remaining)
        message += f"\n  still valid, created with it for others: {left}"
    output.print_result(ended, message)


@user.command(
    epilog="\b\nExamples:\n  tpu user audit\n  tpu user audit --user ada --limit 20\n"
    "  tpu user audit --token 5c1f0e9a2b7d\n"
)
@click.option("--user", metavar="NAME", help="Only requests of this user.")
@click.option("--token", metavar="ID", help="Only what was done with this token, or to it.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Most entries."
)
@json_option
def audit(user: str | None, token: str | None, limit: int) -> None:
    """Print the audit log, newest first. Requires the admin role, except for --token with a token
    of yours.

    An entry is written before a request is carried out; a request that was refused has a second
    entry with the reason.
    """
    if user is not None and token is not None:
        raise one_of("--user", "--token")
    with connection.connect() as client:
        entries = client.audit(user=user, token=token, limit=limit)
    output.print_table(
        ("TIME (UTC)", "USER", "FROM", "ACTION", "TARGET", "OUTCOME", "DETAIL"),
        (
            (f"{row.at:%Y-%m-%d %H:%M:%S}", row.actor, row.address, row.action.value, row.target,
             row.outcome.value, row.detail)
            for row in entries
        ),
        value={"entries": entries},
    )  # fmt: skip
