"""`tpu config user-dir`: what `tpu set-cur 1 USER` of the former job manager did for others."""

from __future__ import annotations

import click

from tpufleet.model.people.preferences import PreferenceChanges
from tpufleet.views.cli import connection


@click.command(
    "user-dir", hidden=True, epilog="\b\nExample:\n  tpu config user-dir ada 1 /home/ada/code\n"
)
@click.argument("user")
@click.argument("number", metavar="N")
@click.argument("path")
def user_dir(user: str, number: str, path: str) -> None:
    """Let N mean the folder PATH for USER. Requires the admin role."""
    with connection.connect() as client:
        client.change_preferences(PreferenceChanges(folders={number: path}), user=user)
    click.echo(f"folder {number} of {user} is {path}")
