"""`tpu audit`: who changed users, tokens, secrets and pools, and who ran commands on hosts."""

from __future__ import annotations

import click

from tpufleet.errors import BadInput
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option


@click.command(
    epilog="\b\nExamples:\n  tpu audit\n  tpu audit --user ada --limit 20\n"
    "  tpu audit --token 5c1f0e9a2b7d\n"
)
@click.option("--user", metavar="NAME", help="Only requests of this user.")
@click.option("--token", metavar="ID", help="Only what was done with this token, or to it.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Most entries."
)
@json_option
def audit(user: str | None, token: str | None, limit: int, as_json: bool) -> None:
    """Print the audit log, newest first. Requires the admin role, except for --token with a token
    of yours.

    An entry is written before a request is carried out; a request that was refused has a second
    entry with the reason.
    """
    if user is not None and token is not None:
        raise BadInput("pass one of --user and --token")
    with connection.connect() as client:
        entries = client.audit(user=user, token=token, limit=limit)
    if as_json:
        output.print_json({"entries": entries})
        return
    output.print_table(
        ("TIME (UTC)", "USER", "FROM", "ACTION", "TARGET", "OUTCOME", "DETAIL"),
        (
            (f"{row.at:%Y-%m-%d %H:%M:%S}", row.actor, row.address, row.action.value, row.target,
             row.outcome.value, row.detail)
            for row in entries
        ),
        "no entries",
    )  # fmt: skip
