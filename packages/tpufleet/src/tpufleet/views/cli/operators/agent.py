"""`tpu agent`: the agent of one host."""

from __future__ import annotations

import os

import click


@click.command()
@click.pass_context
def agent(context: click.Context) -> None:
    """Run the agent of one host. Providers start it; its settings are environment variables."""
    from tpufleet.agent.main import run

    context.exit(run(os.environ))
