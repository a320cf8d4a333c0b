"""`tpu version`."""

from __future__ import annotations

from importlib import metadata

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Print the version of tpufleet."""
    number = metadata.version("tpufleet")
    click.echo(f'{{"version":"{number}"}}' if as_json else f"tpufleet {number}")
