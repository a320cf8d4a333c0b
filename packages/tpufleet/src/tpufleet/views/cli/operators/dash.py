"""`tpu dash`: open the web page."""

from __future__ import annotations

import webbrowser

import click

from tpufleet.views.cli import connection


@click.command(epilog="\b\nExamples:\n  tpu dash\n  tpu dash --print\n")
@click.option("--print", "only_print", is_flag=True, help="Print the address; open no browser.")
def dash(only_print: bool) -> None:
    """Open the web page of the server, logged in as you.

    The address logs one browser in, once, within two minutes. Over ssh, forward the server's port
    and open the printed address on your machine. If no server is configured, one is started on this
    machine.
    """
    with connection.connect(start=True) as client:
        url = client.url + client.login_link().path
    if only_print or not webbrowser.open(url):
        click.echo(url)
    else:
        click.echo(f"opened {url.partition('#')[0]} in the browser")
