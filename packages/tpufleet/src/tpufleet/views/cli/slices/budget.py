"""`tpu budget`: what users and pools have spent of their budgets."""

from __future__ import annotations

import click

from tpufleet.model.people.budgets import BudgetPeriod, BudgetUse
from tpufleet.model.tpu.prices import amount
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option


@click.command(epilog="\b\nExamples:\n  tpu budget\n  tpu budget --json\n")
@json_option
def budget(as_json: bool) -> None:
    """Show what users and pools have spent of their budgets.

    Budgets are set as `budgets` in the config file of the server; docs/server.md, "Budgets", has
    the syntax. At 80 % and 100 % an event is recorded; at 100 % running jobs are stopped, and
    queued ones wait for the next period.
    """
    with connection.connect() as client:
        report = client.budgets()
    if as_json:
        output.print_json({"budgets": report.budgets, "now": report.now})
        return
    output.print_table(
        ("SCOPE", "NAME", "SPENT", "BUDGET", "USED", "PERIOD"),
        (
            (use.scope.value, use.name, f"${amount(use.spent)}", f"${amount(use.usd)}",
             f"{use.share:.0%}", _period(use))
            for use in sorted(report.budgets, key=lambda use: -use.share)
        ),
        "no budgets; set `budgets` in the server's config file",
    )  # fmt: skip


def _period(use: BudgetUse) -> str:
    if use.period is BudgetPeriod.TOTAL or use.since is None:
        return "total"
    return f"{use.period} since {use.since:%Y-%m-%d}"
