"""`tpu top`."""

from __future__ import annotations

import sys

import click

from tpufleet.errors import BadInput, optional_packages
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.settings.preferences import use_time_zone


@click.command(
    epilog="\b\nExamples:\n  tpu top\n  tpu top 'tag:sweep-* since:7d'\n  tpu top 'owner:*'\n"
)
@click.argument("query", metavar="[QUERY]…", nargs=-1)
def top(query: tuple[str, ...]) -> None:
    """Show jobs, slices, the queue and events on one screen, live.

    QUERY is a query of `tpu jobs`. The keys are on the screen: `/` filters, `a` shows all users,
    `l` shows logs, `w` explains, `r` resumes, `R` reruns with edits, `c` cancels, `t` tags, `n`
    writes a note, `q` quits.
    """
    with optional_packages("tpu top", "top"):
        from tpufleet.views.top.app import TopApp
    if not (output.is_terminal() and sys.stdin.isatty()):
        raise BadInput("tpu top needs a terminal\n  next: tpu jobs, or tpu jobs --json")
    with connection.connect() as client:
        use_time_zone(client)
        TopApp(client, connection.connect, query=" ".join(query)).run()
