"""`tpu audit`: who changed users, tokens, secrets and pools, and who ran commands on hosts."""

from __future__ import annotations

import click

from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option


@click.command(epilog="\b\nExamples:\n  tpu audit\n  tpu audit --user ada --limit 20\n")
@click.option("--user", metavar="NAME", help="Only requests of this user.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Most entries."
)
@json_option
def audit(user: str | None, limit: int, as_json: bool) -> None:
    """Print the audit log, newest first. Requires the admin role.

    An entry is written before a request is carried out; a request that was refused has a second
    entry with the reason.
    """
    with connection.connect() as client:
        entries = client.audit(user=user, limit=limit)
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
