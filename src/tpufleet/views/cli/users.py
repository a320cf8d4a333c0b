"""`tpu secret`, `tpu user`, `tpu token`. A secret's value is never an argument."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import click

from tpufleet.errors import BadInput
from tpufleet.model.users import Role
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option


@click.group()
def secret() -> None:
    """Values that jobs get as environment variables, by name: `--secret WANDB_API_KEY=wandb`.

    Each person has their own, which nobody else's jobs can get. Those that an admin shares are
    everybody's; your own comes first when both have the same name.
    """


shared_option = click.option("--shared", is_flag=True, help="The one that everybody's jobs get.")


@secret.command(
    "set",
    epilog="\b\nExamples:\n  tpu secret set wandb\n  tpu secret set wandb < key.txt\n"
    "  tpu secret set --shared hub < key.txt\n",
)
@click.argument("name")
@shared_option
@json_option
def set_secret(name: str, shared: bool, as_json: bool) -> None:
    """Keep a value under NAME. It is read from standard input, or asked for; never an argument."""
    if sys.stdin.isatty():
        value = click.prompt(f"value of {name}", hide_input=True, err=True)
    else:
        value = sys.stdin.read().removesuffix("\n")
    if not value:
        raise BadInput(f"{name}: no value; type one, or send it to standard input")
    with connection.connect(start=True) as client:  # before the first job is a good time for it
        client.put_secret(name, value, shared=shared)
    whose = "everybody's" if shared else "your"
    words = f"kept {name}; {whose} jobs get it with --secret ENV_NAME={name}"
    _done({"set": name, "shared": shared}, words, as_json)


@secret.command("list", epilog="\b\nExample:\n  tpu secret list\n")
@json_option
def list_secrets(as_json: bool) -> None:
    """List the names of the secrets. Values are never shown."""
    with connection.connect() as client:
        names = client.secrets()
    if as_json:
        output.print_json(names)
        return
    rows = [*((name, "yours") for name in names.own), *((name, "shared") for name in names.shared)]
    output.print_table(("SECRET", "WHOSE"), rows, "no secrets; `tpu secret set NAME` keeps one")


@secret.command("delete", epilog="\b\nExample:\n  tpu secret delete wandb\n")
@click.argument("name")
@shared_option
@json_option
def delete_secret(name: str, shared: bool, as_json: bool) -> None:
    """Forget the secret NAME."""
    with connection.connect() as client:
        client.delete_secret(name, shared=shared)
    _done({"deleted": name, "shared": shared}, f"forgot {name}", as_json)


@click.group()
def user() -> None:
    """Who may use this fleet: admins change anything, members run jobs, viewers look."""


@user.command(epilog="\b\nExample:\n  tpu user add ada --role member\n")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice([role.value for role in Role]),
    default=Role.MEMBER.value,
    show_default=True,
)
@json_option
def add(name: str, role: str, as_json: bool) -> None:
    """Add user NAME, or change their role."""
    with connection.connect() as client:
        made = client.put_user(name, Role(role))
    _done(made, f"{made.name}: {made.role}; `tpu token create --user {name}` lets them in",
          as_json)  # fmt: skip


@user.command("list", epilog="\b\nExample:\n  tpu user list\n")
@json_option
def list_users(as_json: bool) -> None:
    """List the users."""
    with connection.connect() as client:
        users = client.users()
    if as_json:
        output.print_json({"users": users})
        return
    now = datetime.now(UTC)
    output.print_table(
        ("USER", "ROLE", "SINCE"),
        ((found.name, found.role.value, text.age(found.created_at, now)) for found in users),
        "no users",
    )


@user.command("delete", epilog="\b\nExample:\n  tpu user delete ada --yes\n")
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
def delete_user(name: str, yes: bool, as_json: bool) -> None:
    """Delete user NAME, all their tokens and their secrets. Their jobs stay."""
    output.confirm(f"delete {name}, all their tokens and their secrets?", yes or as_json)
    with connection.connect() as client:
        client.delete_user(name)
    _done({"deleted": name}, f"deleted {name}", as_json)


@click.group()
def token() -> None:
    """Credentials: what a user's programs show to the server."""


@token.command("create", epilog="\b\nExample:\n  (umask 077; tpu token create > ~/.tpu-token)\n")
@click.option("--user", "name", help="Whose token (default: yours).")
@click.option("--note", default="", help="What it is for.")
@json_option
def create_token(name: str | None, note: str, as_json: bool) -> None:
    """Make a token and print it. It is shown this once; the server keeps only its hash."""
    with connection.connect() as client:
        made = client.create_token(user=name, note=note)
    if not as_json:
        output.print_status(f"token {made.id} of {made.user}; keep it in a file of mode 600 and point "
                   "TPUFLEET_TOKEN_FILE at it")  # fmt: skip
    _done(made, made.token, as_json)


@token.command("list", epilog="\b\nExample:\n  tpu token list\n")
@json_option
def list_tokens(as_json: bool) -> None:
    """List tokens: whose, what for, when last used."""
    with connection.connect() as client:
        tokens = client.tokens()
    if as_json:
        output.print_json({"tokens": tokens})
        return
    now = datetime.now(UTC)
    output.print_table(
        ("TOKEN", "USER", "MADE", "LAST USED", "NOTE"),
        (
            (row.id, row.user, text.age(row.created_at, now), text.age(row.last_used_at, now),
             row.note)
            for row in tokens
        ),
        "no tokens",
    )  # fmt: skip


@token.command("revoke", epilog="\b\nExample:\n  tpu token revoke 7f3a\n")
@click.argument("token_id", metavar="TOKEN")
@json_option
def revoke_token(token_id: str, as_json: bool) -> None:
    """Make TOKEN (its id, not its value) worthless at once."""
    with connection.connect() as client:
        client.revoke_token(token_id)
    _done({"revoked": token_id}, f"revoked {token_id}", as_json)


def _done(value: object, words: str, as_json: bool) -> None:
    if as_json:
        output.print_json(value)
    else:
        click.echo(words)
