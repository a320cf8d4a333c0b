"""`tpu config rules`: what follows when an attempt ends, by rule."""

from __future__ import annotations

import click

from tpufleet.model.job.jobs import Rule
from tpufleet.policy.recovery.retry_rules import GOVERNED_REASONS, rule_action
from tpufleet.views.cli import output
from tpufleet.views.cli.output import example, json_option

ACTIONS = {
    "reapply": "allocate new slices and resume from the last checkpoint",
    "resume": "keep the slices and resume from the last checkpoint",
    "rerun": "keep the slices and start from the beginning",
    "pass": "fail the job; `tpu resume` continues it",
}


@click.command(epilog=example("tpu config rules"))
@json_option
def rules() -> None:
    """Show what happens when an attempt ends, by rule. Choose one with --rule or `rule:`.

    The default, auto, retries all three on every capacity kind. Needs no server.
    """
    rows = [_row(rule) for rule in Rule]
    if output.printed_json({"rules": rows, "actions": ACTIONS}):
        return
    titles = [title.replace("_", " ").upper() for title in rows[0]]
    output.print_table(titles, (list(row.values()) for row in rows), "")
    click.echo()
    for action, meaning in ACTIONS.items():
        click.echo(f"{action:<8}  {meaning}")


def _row(rule: Rule) -> dict[str, str]:
    """The rule, and its action by reason."""
    actions = {reason.value: str(rule_action(rule, reason)) for reason in GOVERNED_REASONS}
    return {"rule": rule.value, **actions}
